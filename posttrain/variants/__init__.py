"""Prompt variants: what rollouts of a prompt are sampled from in its place, and what the loss sees of it."""

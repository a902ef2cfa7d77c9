"""Prompt variants: alternative prompts that rollouts are sampled from, and how the loss treats them."""

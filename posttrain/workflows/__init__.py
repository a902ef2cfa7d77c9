"""Workflows: rollouts of several calls, each by a role of its own prompt, and each call a row of the trained batch."""

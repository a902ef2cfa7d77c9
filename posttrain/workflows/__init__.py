"""Workflows: rollouts of several calls, each by a role with its own prompt; every call is a row of the batch."""

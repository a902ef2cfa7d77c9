"""Rollout shapes: how one rollout is built from several engine requests, and which training rows it becomes."""

"""Shapes of rollouts: how one rollout is made of several requests to the engine, and which rows it is trained as."""

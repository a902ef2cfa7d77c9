"""Recipes of other tools: their words (tables/*.yaml, one file a tool), and how their files become recipes of ours."""

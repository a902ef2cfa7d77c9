"""The training loops: sft, preference and rl, each readable alone."""

"""The training loops: sft, preference and rl, each readable alone."""

import posttrain.models  # noqa: F401 (first: it silences a warning that TRL's imports set off)

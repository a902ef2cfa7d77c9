"""The training loops: sft, preference and rl, each readable alone."""

import logging

# On import, bitsandbytes warns of an optional kernel package for CPUs; 4-bit weights work without it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

"""Models and tokenizers: loading, adapters, saving."""

import logging

# On import, bitsandbytes warns about an optional kernel package for CPUs; 4-bit weights work without it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

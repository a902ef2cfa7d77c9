"""Training loops: sft, preference and rl, each readable alone. `posttrain.train()` runs the one of a recipe's stage."""

import posttrain.models  # noqa: F401 (first: it silences a warning that TRL's imports set off)
from posttrain.callable_module import make_callable

make_callable(__name__, "posttrain.api:train")

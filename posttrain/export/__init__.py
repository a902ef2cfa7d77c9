"""Export of a trained model: a plain folder, a GGUF file, Ollama or the hub. Every export is reloaded and checked.

`posttrain.export(model, to="merged")` creates one.
"""

from posttrain.callable_module import make_callable

make_callable(__name__, "posttrain.api:export")

"""A trained model for use elsewhere: a plain folder, a GGUF file, Ollama, the hub; each checked by loading it again.

`posttrain.export(model, to="merged")` makes one.
"""

from posttrain.callable_module import make_callable

make_callable(__name__, "posttrain.api:export")

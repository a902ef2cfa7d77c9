"""Model merging. `posttrain.merge(recipe)` runs a merge recipe."""

from posttrain.callable_module import make_callable

make_callable(__name__, "posttrain.api:merge")

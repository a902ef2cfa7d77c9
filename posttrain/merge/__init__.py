"""Merging of models. `posttrain.merge(recipe)` runs a recipe."""

from posttrain.callable_module import make_callable

make_callable(__name__, "posttrain.api:merge")

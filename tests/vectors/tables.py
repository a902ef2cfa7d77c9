"""Adapters as tables: adapters/*.yaml state which mode turns the cases of an id into which call of the product.

A tag names a mode of the modules below and its value holds that mode's arguments, by name or in order. `!f
loss.kl.k1` is a function or class of posttrain, `!reward length.cosine` a shipped reward script, `!here NAME` a
function of one of the modules. A map of names in which most are unchanged can be a list: `[a, b, {c: d}]` is `{a: a,
b: b, c: d}`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml
from mechanics import Adapter, reward

MODULES = (
    "mechanics",
    "step_modes",
    "model_modes",
    "pair_modes",
    "agent_modes",
    "hint_modes",
    "sampler_modes",
    "replay_modes",
    "shape_modes",
)
FUNCTIONS = [
    (name, function)
    for module in map(importlib.import_module, MODULES)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
]
MODES = {name: f for name, f in FUNCTIONS if inspect.signature(f).return_annotation in ("Adapter", "Scored")}


class Loader(yaml.SafeLoader):
    """SafeLoader with the tags above; a duplicate key in a mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        own = [self.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        if twice := {key for key in own if own.count(key) > 1}:
            raise ValueError(f"{node.start_mark.name}: {', '.join(map(str, twice))} stands twice")
        return super().construct_mapping(node, deep)


def read_table(path: Path) -> dict[str, Adapter]:
    """Read id -> adapter from one file. Raises for an unknown or duplicate mode, argument, function or key."""
    with path.open(encoding="utf-8") as stream:
        return yaml.load(stream, Loader)


def find_function(path: str) -> Callable[..., Any]:
    """`loss.kl.k1` -> posttrain.loss.kl.k1."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"posttrain.{module}"), name)


def build_adapter(loader: Loader, mode: str, node: yaml.Node) -> Any:
    """Call the mode with the arguments of the node."""
    if isinstance(node, yaml.MappingNode):
        arguments, named = [], loader.construct_mapping(node, deep=True)
    else:
        arguments, named = loader.construct_sequence(node, deep=True), {}
    bound = inspect.signature(MODES[mode]).bind(*arguments, **named)
    for name, value in bound.arguments.items():
        if isinstance(value, list) and bound.signature.parameters[name].annotation.startswith("Names"):
            bound.arguments[name] = _names(value)
    return MODES[mode](*bound.args, **bound.kwargs)


def _names(listed: list[Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for entry in listed:
        names |= entry if isinstance(entry, Mapping) else {entry: entry}
    return names


Loader.add_constructor("!f", lambda _, node: find_function(node.value))
Loader.add_constructor("!reward", lambda _, node: reward(node.value))
Loader.add_constructor("!here", lambda _, node: dict(FUNCTIONS)[node.value])
Loader.add_multi_constructor("!", build_adapter)

"""Instantiation of reward classes, splitting the recipe's parameters between constructor and call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any


def make_callable(function: Callable[..., Any], params: Mapping[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return (callable, parameters of a call).

    A class is instantiated with the parameters that its constructor takes.
    """
    if not inspect.isclass(function):
        return function, dict(params)
    arguments = inspect.signature(function).parameters
    called = inspect.signature(function.__call__).parameters if "__call__" in dir(function) else {}
    open_ended = any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    own = {key: value for key, value in params.items() if key in arguments or (open_ended and key not in called)}
    called_object: Any = function(**own)
    return called_object, {key: value for key, value in params.items() if key not in own}

"""The base of every recipe section, and sections that name a registered component."""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PrivateAttr, create_model, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from posttrain import registry
from posttrain.errors import nearest
from posttrain.places import split_function

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Section(BaseModel):
    """A block of a recipe. Strict (4.7 is no int, "3" is no number), frozen, unknown keys are errors."""

    model_config = STRICT


class ComponentSection(Section):
    """`use: NAME` plus the keyword arguments of the component that NAME registers.

    Arguments are checked against components.json, so torch is not imported. A user's `file.py:function` cannot be known
    here: its keys are taken as they are and checked when the function is loaded.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    kind: ClassVar[registry.Kind]
    use: str
    _params: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """The component's keyword arguments, defaults filled in."""
        return dict(self._params)

    @model_validator(mode="wrap")
    @classmethod
    def _check_component(cls, value: Any, handler: Any) -> Any:
        if isinstance(value, str):
            value = {"use": value}
        if not isinstance(value, Mapping) or not isinstance(value.get("use", cls.default_use()), str):
            return handler(value)
        own = set(cls.model_fields)
        use = value.get("use", cls.default_use())
        extra = {k: v for k, v in value.items() if k not in own}
        if use is None:
            return handler(value)
        params = component_params(cls.kind, use, extra, other_keys=own - {"use"})
        section = handler({k: v for k, v in value.items() if k in own})
        section._params.update(params)
        return section

    @classmethod
    def default_use(cls) -> str | None:
        default = cls.model_fields["use"].default
        return default if isinstance(default, str) else None

    def dump(self) -> dict[str, Any]:
        return {**self.model_dump(), **self._params}


def component_params(
    kind: registry.Kind,
    use: str,
    given: Mapping[str, Any],
    other_keys: set[str] = frozenset(),  # type: ignore[assignment]
) -> dict[str, Any]:
    """The checked keyword arguments of a component, with defaults. Raises pydantic's ValidationError with exact keys."""
    known = registry.index().get(kind, {})
    if split_function(use) is not None:
        return dict(given)
    if use not in known:
        near = nearest(use, known)
        message = f"unknown {kind} `{use}`; known: {', '.join(sorted(known))}"
        raise _one_error(("use",), "unknown_component", message, use, near)
    try:
        return params_model(kind, use).model_validate(dict(given)).model_dump()
    except ValidationError as error:
        raise _with_known_keys(error, [*known[use]["params"], *sorted(other_keys)]) from None


@functools.cache
def params_model(kind: str, name: str) -> type[BaseModel]:
    """The pydantic model of a component's keyword arguments, from the index."""
    space = {n: getattr(typing, n) for n in ("Literal", "Any", "Optional", "Union")}
    space |= {"Mapping": Mapping}
    fields: dict[str, Any] = {}
    for key, described in registry.index()[kind][name]["params"].items():
        annotation = eval(described[0], {"__builtins__": {}}, space | _BUILTINS)  # our own shipped index
        default = described[1] if len(described) > 1 else ...
        fields[key] = (
            annotation,
            tuple(default) if isinstance(default, list) and "tuple" in described[0] else default,
        )
    return create_model(f"{kind}_{name}", __config__=STRICT, **fields)


_BUILTINS = {t.__name__: t for t in (int, float, str, bool, list, dict, tuple)} | {"None": None}


def _one_error(loc: tuple[str | int, ...], kind: str, message: str, value: Any, near: str | None) -> ValidationError:
    context = {"near": near} if near else {}
    error = PydanticCustomError(typing.cast(Any, kind), typing.cast(Any, message.replace("{", "{{")), context)
    return ValidationError.from_exception_data("component", [InitErrorDetails(type=error, loc=loc, input=value)])


def _with_known_keys(error: ValidationError, known: list[str]) -> ValidationError:
    """Unknown keys are told with the keys that the component and its section know."""
    details: list[InitErrorDetails] = []
    for item in error.errors(include_url=False):
        kind: Any = item["type"]
        if kind == "extra_forbidden":
            context = {"known": ", ".join(known), "near": nearest(str(item["loc"][-1]), known) or ""}
            kind = PydanticCustomError("unknown_key", "unknown key", context)
        elif kind not in ("missing",):
            kind = PydanticCustomError(typing.cast(Any, item["type"]), typing.cast(Any, item["msg"].replace("{", "{{")))
        details.append(InitErrorDetails(type=kind, loc=item["loc"], input=item["input"]))
    return ValidationError.from_exception_data("component", details)


OnNone = Literal["auto", "skip_row", "ignore_component", "zero", "error"]

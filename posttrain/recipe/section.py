"""Base class of every recipe section, and sections that name a registered component.

Modules of sections evaluate their annotations (no `from __future__ import annotations`): pydantic would otherwise parse
each annotation as text, in every command.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    create_model,
    model_serializer,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError, ValidationError

from posttrain import registry
from posttrain.errors import RecipeError, did_you_mean
from posttrain.options import Channel, Column, Gate, PartialColumn, RewardName, ScoreName, TextColumn
from posttrain.path_resolution import split_function
from posttrain.recipe.limits import MAX_COUNT, argument_limits

Positive = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]


def check_steps_or_share(value: Any) -> Any:
    """Refuse a number that is neither a whole number nor below 1. Raises PydanticCustomError."""
    if isinstance(value, float) and value >= 1 and not value.is_integer():
        raise PydanticCustomError("steps_or_share", "must be a whole number of steps or a share below 1")
    return value


StepsOrShare = Annotated[Count | Annotated[float, Field(gt=0, lt=1)], BeforeValidator(check_steps_or_share)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Workers = Annotated[int, Field(gt=0, le=1024)]
Width = Annotated[int, Field(gt=0, le=65_536)]
Rate = Annotated[float, Field(gt=0, le=10)]  # learning rate
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]

# The pydantic schemas are built at first use (defer_build).
STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True)


@dataclass(frozen=True)
class Names:
    """Marks a key of the schema, or an argument of a function, as the name of something outside the recipe.

    kind: a model; data; a run (its directory or a file in it); a file next to the recipe, such as a template. what: the
    noun for it in error messages. holds: files of which the directory must contain one.
    """

    kind: Literal["model", "data", "run", "file"]
    what: str
    holds: tuple[str, ...] = ()


@dataclass(frozen=True)
class Idle:
    """Marks a key that has no effect when a condition holds (`requirements.py`): "KEY: does nothing WHY".

    Applies to values that were written and differ from the default. right: what to do instead. note: the recipe stays
    valid and the run prints a note; otherwise the recipe is refused. below: applies to every key of the section.
    """

    when: str
    why: str
    right: str = "remove it"
    note: bool = False
    below: bool = False


class Refused(NamedTuple):
    """Marks a key that is not allowed when a condition holds: "KEY: WHAT". right: what would be right."""

    when: str
    what: str
    right: str = "remove one of them"


class Unused(NamedTuple):
    """Marks a key of a shared section that some stages (`eval|generate`) never use: "KEY: not used by stage STAGE:
    WHY". The key is unknown there, whatever its value."""

    stages: str
    why: str


NO_TRAINING = Unused("merge|eval|harness|generate|pairs|pipeline", "this stage does not train")
READ_ONLY = Unused("eval|harness|generate", "this stage does not train")


class NoImages(NamedTuple):
    """Marks a key that cannot be used with images when a condition holds: "KEY: the rows have images, and it WHY".

    in_replies: nor with images that tools or an environment show during a rollout.
    """

    when: str
    why: str
    in_replies: bool = False


ModelName = Annotated[str, Names("model", "model")]
DataName = Annotated[str, Names("data", "data")]
CompletionsName = Annotated[str, Names("run", "completions", ("completions.jsonl",))]
PairsName = Annotated[str, Names("run", "pairs", ("pairs.jsonl",))]
EVALUATION = Names("run", "evaluation", ("problems.jsonl",))
EvalName = Annotated[str, EVALUATION]
CriticName = Annotated[str, Names("run", "critic", ("critic.safetensors", "final/critic.safetensors"))]
TemplateName = Annotated[str, Names("file", "template")]
CorpusName = Annotated[str, Names("file", "corpus")]


class Section(BaseModel):
    """A section of a recipe. Strict (4.7 is not an int, "3" is not a number), frozen, unknown keys are errors."""

    model_config = STRICT


def expand_use(value: Any) -> Any:
    """Expand `NAME` alone into the section `use: NAME`."""
    return {"use": value} if isinstance(value, str) else value


def _allow_name_alone(schema: dict[str, Any]) -> None:
    full_schema = dict(schema)
    schema.clear()
    schema["anyOf"] = [{"type": "string", "description": "short for `use: NAME`"}, full_schema]


class NamedSection(Section):
    """A section with the key `use`; `NAME` alone is short for `use: NAME`."""

    model_config = ConfigDict(json_schema_extra=_allow_name_alone)

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return expand_use(value)


class ComponentSection(Section):
    """`use: NAME` plus the keyword arguments of that component; `NAME` alone is short for `use: NAME`.

    Arguments are checked against components.json, so torch is not imported. The arguments of a user's
    `file.py:function` are unknown here: its keys are accepted unchecked and checked when the function is loaded.
    """

    kinds: ClassVar[tuple[registry.Kind, ...]]  # kinds of component allowed in this section
    use: str
    _params: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def params(self) -> dict[str, Any]:
        """Keyword arguments of the component, with defaults filled in."""
        return dict(self._params)

    @model_validator(mode="wrap")
    @classmethod
    def _check_component(cls, value: Any, handler: Any) -> Any:
        """Validate the section's own keys and the component's arguments together, so that all errors are reported."""
        value = expand_use(value)
        if not isinstance(value, Mapping):
            return handler(value)
        declared = {k: v for k, v in value.items() if k in cls.model_fields}
        use = declared.get("use", cls.default_use())
        problems: list[InitErrorDetails] = []
        section, params = None, {}
        try:
            section = handler(declared)
        except ValidationError as error:
            problems += _details(error)
        try:
            if isinstance(use, str):
                params = component_params(cls.kinds, use, {k: v for k, v in value.items() if k not in declared})
        except ValidationError as error:
            problems += _details(error)
        if problems or section is None:
            raise ValidationError.from_exception_data(cls.__name__, problems)
        section._params.update(params)
        return section

    @model_serializer(mode="wrap")
    def _with_params(self, handler: Any) -> dict[str, Any]:
        return {**handler(self), **self._params}

    @classmethod
    def registered_components(cls) -> dict[str, dict[str, Any]]:
        """Return the registered components allowed in this section: name -> its entry in the index."""
        return {name: entry for kind in cls.kinds for name, entry in registry.load_index().get(kind, {}).items()}

    @property
    def index_entry(self) -> dict[str, Any]:
        """Index entry of the component in use; empty for a user's function."""
        return self.registered_components().get(self.use, {})

    @property
    def is_function(self) -> bool:
        """Whether `use` is a user's function, which may read any field."""
        return split_function(self.use) is not None

    @property
    def needs(self) -> set[str]:
        """What the component in use declares that it needs."""
        return set(self.index_entry.get("needs", []))

    def load(self, base_dir: Path | None) -> registry.Component:
        """Load the component in use. Raises UserError for an unknown name, and for keys that are not arguments of a
        user's function, whose signature is first known here."""
        component = registry.resolve(self.kinds, self.use, base_dir)
        head, takes = f"{component.kind} `{self.use}`", f"it takes: {', '.join(component.params) or 'none'}"
        if unknown := next((key for key in self.params if key not in component.params), None):
            hint = did_you_mean(unknown, component.params)
            raise RecipeError(f"{head} has no argument {unknown}", allowed=takes, hint=hint)
        for key, (_, default) in component.params.items():
            if default is ... and key not in self.params:
                raise RecipeError(f"{head} needs the argument {key}", allowed=takes)
        hints = registry.resolve_annotations(component.function)
        for key, value in self.params.items():
            if why := registry.explain_type_mismatch(hints.get(key), value):
                raise RecipeError(f"{head}: argument {key}: {why}, got {registry.format_value(value)}")
        return component

    @classmethod
    def default_use(cls) -> str | None:
        """Return the default component of the section, or None if `use` is required."""
        default = cls.model_fields["use"].default
        return default if isinstance(default, str) else None


def find_registered(kind: registry.Kind, name: str) -> str:
    """Return `name` if a component of that kind is registered under it. Raises PydanticCustomError otherwise."""
    if name not in registry.load_index().get(kind, {}):
        raise PydanticCustomError("unknown_component", "unknown component", {"kind": kind})
    return name


def component_params(kinds: tuple[registry.Kind, ...], use: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the validated keyword arguments of a component with defaults. Raises ValidationError with the exact
    keys."""
    if split_function(use) is not None:
        return dict(given)
    kind = registry.find_kind(kinds, use)
    try:
        find_registered(kind, use)
    except PydanticCustomError as unknown:
        details = InitErrorDetails(type=unknown, loc=("use",), input=use)
        raise ValidationError.from_exception_data("component", [details]) from None
    return params_model(kind, use).model_validate(dict(given)).model_dump()


@functools.cache
def params_model(kind: str, name: str) -> type[BaseModel]:
    """Build the pydantic model of a component's keyword arguments from the index."""
    fields: dict[str, Any] = {}
    for key, described in registry.load_index()[kind][name]["params"].items():
        annotation = eval(described[0], {"__builtins__": {}}, _NAMES)  # only reads the index shipped with the package
        default = described[1] if len(described) > 1 else ...
        if limits := argument_limits(kind, name, key):
            annotation = typing.Annotated[annotation, Field(**limits)]
        if "tuple" in described[0]:  # YAML and JSON have no tuples
            annotation = typing.Annotated[annotation, Field(strict=False)]
            default = tuple(default) if isinstance(default, list) else default
        fields[key] = (annotation, default)
    return create_model(f"{kind}_{name}", __config__=STRICT, **fields)


_NAMES = (
    {t.__name__: t for t in (int, float, str, bool, list, dict, tuple)}
    | {n: getattr(typing, n) for n in ("Literal", "Any", "Optional", "Union")}
    | {"Mapping": Mapping, "Sequence": Sequence, "None": None}
    | {"Gate": Gate, "Channel": Channel, "Column": Column, "PartialColumn": PartialColumn}
    | {"TextColumn": TextColumn, "RewardName": RewardName, "ScoreName": ScoreName}
)


def _details(error: ValidationError) -> list[InitErrorDetails]:
    """Return the errors of a nested validation in the form in which they can be raised again with their paths."""
    details: list[InitErrorDetails] = []
    for item in error.errors(include_url=False):
        kind: Any = item["type"]
        context = item.get("ctx", {})
        if kind in ("unknown_component", "value_error"):
            kind = PydanticCustomError(kind, typing.cast(Any, item["msg"].replace("{", "{{")), context)
        details.append(InitErrorDetails(type=kind, loc=item["loc"], input=item["input"], ctx=context))
    return details


OnNone = Literal["auto", "skip_row", "ignore_component", "zero", "error"]

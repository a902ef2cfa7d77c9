"""Component registry: a component is a registered pure function whose keyword-only arguments are its recipe keys.

    @register("loss", "clip", paper="1707.06347")
    def clip(batch, logp, *, clip_low: float = 0.2, clip_high: float | None = None) -> TokenLoss: ...

Nothing is declared twice: annotations become types, defaults become defaults, the docstring becomes the help.
`components.json` has what the light commands need (names, keys, defaults, docstrings), so that a recipe is checked
without importing torch; `python -m posttrain.registry` rewrites it and a test keeps it equal to the code.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import is_typeddict

from posttrain.errors import UserError, did_you_mean
from posttrain.path_resolution import (
    EARLIER,
    PathText,
    find,
    is_shipped,
    locate_function,
    missing_function_error,
    missing_module_error,
    split_function,
)
from posttrain.redact import without_secrets

_SCRIPT_MODULE_PREFIX = "posttrain_script_"  # prefix of the module names of user scripts
INDEX = Path(__file__).with_name("components.json")

# kind -> the package whose modules register components of that kind, in call order within a step
PACKAGES = {
    "prompt_variants": "posttrain.variants",
    "sampler": "posttrain.curriculum",
    "shape": "posttrain.shapes",
    "workflow": "posttrain.workflows",
    "replay": "posttrain.replay",
    "group_reward": "posttrain.advantage",
    "keep": "posttrain.advantage",
    "advantage": "posttrain.advantage",
    "factor": "posttrain.advantage",
    "advantage_transform": "posttrain.advantage",
    "credit_assignment": "posttrain.advantage",
    "select": "posttrain.advantage",
    "correction": "posttrain.loss",
    "loss": "posttrain.loss",
    "group_loss": "posttrain.loss",
    "kl": "posttrain.loss",
    "regulariser": "posttrain.loss",
    "controller": "posttrain.control",
    "pair_loss": "posttrain.loss",
    "token_weight": "posttrain.loss",
    "merge": "posttrain.merge",
    "task": "posttrain.data.tasks",
}

Kind = Literal[
    "prompt_variants",
    "sampler",
    "shape",
    "workflow",
    "replay",
    "group_reward",
    "keep",
    "advantage",
    "factor",
    "advantage_transform",
    "credit_assignment",
    "select",
    "correction",
    "loss",
    "group_loss",
    "kl",
    "regulariser",
    "controller",
    "pair_loss",
    "token_weight",
    "merge",
    "task",
]


@dataclass(frozen=True)
class Component:
    """A registered function. `params`: recipe key -> (annotation as text, default); `...` marks a required key."""

    kind: str
    name: str
    function: Callable[..., Any]
    paper: str = ""
    needs: tuple[str, ...] = ()
    stage_note: str = ""
    exclusive: tuple[str, ...] = ()
    params: dict[str, tuple[str, Any]] = field(default_factory=dict)
    roles: tuple[str, ...] = ()  # roles of a workflow

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.function) or ""


_components: dict[tuple[str, str], Component] = {}


KINDS_WITHOUT_BATCH = (  # kinds whose `needs` are not fields of a batch
    *("sampler", "shape", "workflow", "prompt_variants", "replay", "pair_loss", "token_weight", "merge", "task"),
)
ALWAYS_PRESENT = (  # batch fields that are always present, without `needs`
    "advantages", "group_ids", "keep", "lengths", "mask", "memory", "replayed", "reward_weights", "sampler_state",
    "selected", "step", "total_steps", "truncated", "turn_rewards", "versions",
)  # fmt: skip


def register(
    kind: Kind,
    name: str,
    *,
    paper: str = "",
    needs: tuple[str, ...] = (),
    note: str = "",
    exclusive: tuple[str, ...] = (),
    roles: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under its recipe name. Raises ValueError if the kind already has that name.

    paper: arXiv id.

    needs: requirements, so that a recipe which cannot work or would have no effect is refused at load time. For
    components of a step: fields of the batch (`ref_logp`, `rollout_logp`, `old_logp`, `entropy`, ...), `groups` (more
    than one completion per prompt), `several_updates` (more than one per step), `all_correct` (groups that are all
    correct must not be filtered out), `every_group` (no group of a step may be filtered out), `equal_groups` (all
    groups have one size), `every_row` (a gradient even where the advantage is 0), `every_token` (reads the mask of all
    rows by token, so every rank must hold all tokens), `own_mean` (a loss that defines the denominator of its mean by
    `counted`), `own_credit` (a loss that reads rewards or correctness and no advantages), `frozen_critic` (`values`
    come from `critic.path`), `multiplies` (a controller that multiplies the recipe's number, which must not be 0),
    `measured_kl` (a controller that follows the metric `kl`). For prompt variants: `solution` (a data column with
    solutions), `begins_answer` (tokens before the sampled ones, for which tool turns have no position), `hinted` (rows
    that had help are marked). For shapes: `own_group` (the rows of a rollout form a group), `shared_reward` (some rows
    only have the reward of their rollout), `tree` (rows are paths whose nodes have values), `grades` (rewards score
    rows during the rollout), `rollout_logp` (the engine's log-probs of all sampled tokens), `goes_on` (rollouts may
    continue in the next step), `parts` (rows are divided into parts: `part_ids`). For replay: `replaces` (stored rows
    replace fresh ones), `adds_rows` (stored rows are added), `trains_apart` (stored rows have a separate update).

    note: deviation of this implementation from its source. exclusive: effects that at most one component of a recipe
    may have, e.g. `correct the ratio to the engine`. roles: roles that a workflow may call; a recipe that names another
    role is refused.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if (kind, name) in _components:
            raise ValueError(f"{kind} `{name}` is registered twice")
        own = keyword_parameters(function)
        _components[kind, name] = Component(kind, name, function, paper, needs, note, exclusive, own, roles)
        return function

    return decorate


def keyword_parameters(function: Callable[..., Any]) -> dict[str, tuple[str, Any]]:
    """Return the keyword-only arguments of a function or of a class's constructor.

    name -> (annotation as text, default or `...`).
    """
    made = function.__init__ if inspect.isclass(function) else function  # type: ignore[misc]
    hints = typing.get_type_hints(made, include_extras=True)
    return {
        name: (
            _annotation(hints.get(name, Any)),
            ... if parameter.default is inspect.Parameter.empty else parameter.default,
        )
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }


def _annotation(hint: Any) -> str:
    text = inspect.formatannotation(hint)
    for module in ("typing.", "collections.abc.", "posttrain.options.", "pathlib._local.", "pathlib."):  # 3.13: _local
        text = text.replace(module, "")
    text = re.sub(r"Annotated\[str, (\w+)\]", r"\1", text)  # names of data columns and rewards
    return re.sub(r"Optional\[(\w+)\]", r"\1 | None", text).replace("NoneType", "None")


def get(kind: Kind, name: str) -> Component:
    """Return the component of that kind and name, importing only its module. Raises UserError with a suggestion."""
    if (kind, name) not in _components:
        entry = load_index().get(kind, {}).get(name)
        if entry is None:
            known = sorted(load_index().get(kind, {}))
            raise UserError(
                f"unknown {kind}: {name}",
                allowed=f"known: {', '.join(known)}; or path/file.py:function",
                hint=did_you_mean(name, known),
            )
        importlib.import_module(entry["module"])
    return _components[kind, name]


def resolve(kinds: Kind | tuple[Kind, ...], use: str, base_dir: Path | None = None) -> Component:
    """Return a component by registered name, `file.py:function` or `module:function`.

    A file is looked up next to the recipe or in the working directory. Several kinds may share a position in a recipe;
    a user's function gets the first kind, unless it is registered.
    """
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if split_function(use) is None:
        return get(find_kind(kinds, use), use)
    function = load_function(use, base_dir, what=kinds[0].replace("_", " "))
    marked = next((c for c in _components.values() if c.function is function and c.kind in kinds), None)
    if marked is not None:
        check_needs(marked)
    return marked or Component(kinds[0], use, function, params=keyword_parameters(function))


def allowed_needs(kind: str) -> set[str]:
    """Return the words that a component of that kind may list in `needs`."""
    if kind in KINDS_WITHOUT_BATCH:
        return {word for entry in load_index().get(kind, {}).values() for word in entry["needs"]}
    others = (
        entry for k, entries in load_index().items() if k not in KINDS_WITHOUT_BATCH for entry in entries.values()
    )
    return {word for entry in others for word in entry["needs"]}.union(ALWAYS_PRESENT)


def check_needs(component: Component) -> None:
    """Raise UserError for an unknown word in the `needs` of a user's component."""
    known = allowed_needs(component.kind)
    for word in component.needs:
        if word not in known:
            raise UserError(
                f"{component.kind} `{component.name}` needs `{word}`, which nothing measures",
                allowed=f"known: {', '.join(sorted(known))}",
                hint=did_you_mean(word, sorted(known)),
            )


def find_kind(kinds: tuple[Kind, ...], name: str) -> Kind:
    """Return the kind that has a component of that name; the first kind if none has."""
    return next((kind for kind in kinds if name in load_index().get(kind, {})), kinds[0])


def load_function(
    use: str, base_dir: Path | None, *, what: str, error: type[UserError] = UserError
) -> Callable[..., Any]:
    """Import `file.py:name` or `module:name` and return the function.

    A file is imported by path under a private module name; its folder is not added to sys.path.
    """
    left, name = locate_function(use, base_dir, what, error)
    if isinstance(left, Path):
        module, left = load_module(left), str(left)
    else:
        try:
            module = importlib.import_module(left)
        except (Exception, SystemExit) as cause:
            why = str(cause) if isinstance(cause, ImportError) else f"{type(cause).__name__}: {cause}"
            raise missing_module_error(use, base_dir, what, why, error) from cause
    try:
        return getattr(module, name)
    except AttributeError:
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        own = [n for n in public if getattr(vars(module)[n], "__module__", None) == module.__name__]
        raise missing_function_error(
            left, name, own or public, error
        ) from None  # prefer functions it defines to imported ones


def resolve_annotations(function: Callable[..., Any], *, extras: bool = False) -> dict[str, Any]:
    """Return the resolved annotations of a user's function or class constructor; {} if they cannot be resolved.

    extras: with the marks of `Annotated`.
    """
    inner = getattr(function, "func", function)  # the function inside a partial
    if inspect.isclass(inner):
        inner = inner.__init__
    elif not inspect.isroutine(inner):
        inner = type(inner).__call__
    try:
        return typing.get_type_hints(inner, include_extras=extras)
    except Exception:
        return {}


def resolve_paths(
    function: Callable[..., Any],
    params: Mapping[str, Any],
    base_dir: Path | None,
    what: str,
    error: type[UserError],
    *,
    in_pipeline: bool = False,
) -> dict[str, Any]:
    """Return a recipe's arguments of a function or class with absolute paths for those annotated as `Path`, also in
    lists, in dicts and in keys of a TypedDict: next to the recipe, then in the working directory.

    what: the function, for messages. in_pipeline: do not look for `stage:NAME`, which the pipeline replaces before the
    stage starts. Raises `error` for a path that does not exist, unless it is marked `PathText`.
    """
    hints = resolve_annotations(function, extras=True) if callable(function) else {}

    def resolve_path(hint: Any, value: Any, what: str) -> Any:
        parts = [hint]  # with the types and marks of unions and Annotated, in any order
        for part in parts:
            if typing.get_origin(part) in (typing.Annotated, typing.Union, types.UnionType):
                parts += typing.get_args(part)
        inside = {typing.get_origin(part): typing.get_args(part) for part in parts}
        if isinstance(value, Mapping):
            typed = next(filter(is_typeddict, parts), None)
            keys = typing.get_type_hints(typed, include_extras=True) if typed else {}
            other = (inside.get(dict) or inside.get(Mapping) or [None])[-1]
            return {key: resolve_path(keys.get(key, other), inner, what) for key, inner in value.items()}
        if isinstance(value, list):
            (item_hint, *_) = inside.get(list) or inside.get(Sequence) or [None]
            return [resolve_path(item_hint, item, what) for item in value]
        if not isinstance(value, str):
            return value
        if in_pipeline and value.startswith(EARLIER):
            return Path(value) if Path in parts else value
        if mark := next((part for part in parts if isinstance(part, PathText)), None):
            return mark.resolve(value, base_dir)
        return find(value, base_dir, what, error) if Path in parts else value

    return {
        key: resolve_path(hints.get(key), value, f"{what}: parameter `{key}`: file or folder")
        for key, value in params.items()
    }


def awaits_stage(value: Any) -> bool:
    """Return whether a value, or one inside a mapping or list, names what an earlier stage of a pipeline makes."""
    if isinstance(value, Mapping | list):
        return any(map(awaits_stage, value.values() if isinstance(value, Mapping) else value))
    return str(value).startswith(EARLIER)


def explain_type_mismatch(annotation: Any, value: Any) -> str:
    """Return why a recipe's `value` does not match `annotation`, or "". Types unknown to pydantic accept any value."""
    if annotation is None:
        return ""
    from pydantic import PydanticUserError, TypeAdapter, ValidationError
    from pydantic_core import SchemaError

    try:
        TypeAdapter(annotation).validate_python(value, strict="tuple" not in str(annotation))  # YAML has lists only
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = _describe_unknown_field(annotation, first) or first["msg"]
        return f"`{place}`: {message}" if place else message
    except (PydanticUserError, SchemaError):
        return ""
    return ""


def _describe_unknown_field(annotation: Any, error: Mapping[str, Any]) -> str:
    """Return the message for an unknown key of a TypedDict, with the known keys and a note on API keys."""
    known = list(getattr(annotation, "__annotations__", {}))
    if error["type"] != "extra_forbidden" or len(error["loc"]) != 1 or not known:
        return ""
    kept = "; the key itself stands in the environment variable that key_env names"
    return f"no key of this section; known: {', '.join(known)}{kept if 'key_env' in known else ''}"


def format_value(value: Any, longest: int = 200) -> str:
    """Return a recipe's value for an error message: its repr, truncated, with secrets such as `api_key` redacted."""
    text = repr(without_secrets(value))
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def find_script_line(error: BaseException) -> str:
    """Return `FILE:LINE` of the user script that raised or called the raising code; "" if no script is involved."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = [line for _, line in traceback.walk_tb(error.__traceback__)]
    private = [str(frame.f_globals.get("__name__", "")).startswith(_SCRIPT_MODULE_PREFIX) for frame in frames]
    ours = [i for i, frame in enumerate(frames) if private[i] and not is_shipped(Path(frame.f_code.co_filename))]
    return f"{frames[ours[-1]].f_code.co_filename}:{lines[ours[-1]]}" if ours else ""


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Compiles a user's script at each load: Python's cached bytecode also counts for another text of the same size
    that was written in the same second."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.get_filename(fullname)), self.path)


@functools.cache
def load_module(path: Path) -> Any:
    """Load the script at `path` under a private module name, once per process. Raises UserError if it fails."""
    private = f"{_SCRIPT_MODULE_PREFIX}{path.stem}_{abs(hash(str(path))):x}"
    loader = None if is_shipped(path) else _ScriptLoader(private, str(path))
    spec = importlib.util.spec_from_file_location(private, path, loader=loader)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module  # dataclasses look up their module here
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:
        del sys.modules[private]
        line = find_script_line(cause).rpartition("/")[2]
        at = f" (at {line})" if line else ""
        raise UserError(f"{path} cannot be imported: {type(cause).__name__}: {cause}{at}") from cause
    return module


@functools.cache
def load_index() -> dict[str, dict[str, dict[str, Any]]]:
    """Return kind -> name -> {module, params: {key: [type, default?]}, paper, needs, note, doc}.

    Reads components.json only.
    """
    return json.loads(INDEX.read_text()) if INDEX.exists() else {}


def build_index() -> dict[str, dict[str, dict[str, Any]]]:
    """Import all component packages and describe every component: the contents of components.json."""
    for package in dict.fromkeys(PACKAGES.values()):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            importlib.import_module(f"{package}.{module.name}")
    described: dict[str, dict[str, dict[str, Any]]] = {}
    for (kind, name), component in sorted(_components.items()):
        if not component.function.__module__.startswith("posttrain."):
            continue
        described.setdefault(kind, {})[name] = {
            "module": component.function.__module__,
            "params": {
                key: [annotation] if default is ... else [annotation, default]
                for key, (annotation, default) in component.params.items()
            },
            "paper": component.paper,
            "needs": list(component.needs),
            "exclusive": list(component.exclusive),
            "note": component.stage_note,
            "doc": component.doc,
            **({"roles": list(component.roles)} if component.roles else {}),
            **({"late": list(late)} if (late := getattr(component.function, "late", ())) else {}),
        }
    return described


if __name__ == "__main__":
    # `python -m` runs this file as `__main__`, but components register in the imported module.
    from posttrain import registry

    INDEX.write_text(json.dumps(registry.build_index(), indent=1, sort_keys=True) + "\n")
    print(f"wrote {INDEX}")

"""Extraction of reward functions from a script into a reward script, with the imports, constants and functions they
read."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from posttrain.recipe.foreign.script_values import NotLiteral, Script


@dataclass(frozen=True)
class ScriptReward:
    """A function of a script. script: name of the script's file. parts: (position, source) of everything it needs, the
    function itself last. why: why it cannot be extracted, or empty."""

    script: str
    parts: tuple[tuple[int, str], ...] = ()
    why: str = ""


class _NotStandalone(Exception):
    """Raised for a function that reads values which exist only in the running script."""


def extract_reward(script: Script, name: str, path: Path) -> ScriptReward:
    """Return a function of a script with everything it reads, or the reason why it cannot be extracted."""
    parts: dict[int, str] = {}
    try:
        _collect(script, name, path.parent, parts, set())
    except _NotStandalone as bound:
        return ScriptReward(path.name, why=f"{bound}: copy it to a file of its own, and write `use: FILE.py:{name}`")
    return ScriptReward(path.name, tuple(sorted(parts.items())))


def write_rewards(rewards: Sequence[ScriptReward]) -> str:
    """Return the source of a reward script with these functions."""
    parts = dict(part for reward in rewards for part in reward.parts)
    texts = [text for _, text in sorted(parts.items())]
    imports = [text for text in texts if text.startswith(("import ", "from "))]
    head = f'"""Reward functions copied from {rewards[0].script}, with what they read."""'
    top = [head, "from __future__ import annotations", *(["\n".join(dict.fromkeys(imports))] if imports else [])]
    return "\n\n\n".join(["\n\n".join(top), *(text for text in texts if text not in imports)]) + "\n"


def _collect(script: Script, name: str, folder: Path, parts: dict[int, str], seen: set[str]) -> None:
    """Add a function and everything it reads to `parts`, by position. Raises _NotStandalone."""
    function = script.functions[name]
    seen.add(name)
    if function.decorator_list:
        raise _NotStandalone(f"`{name}` has a decorator")
    defaults = [*function.args.defaults, *(default for default in function.args.kw_defaults if default is not None)]
    for default in defaults:
        _refuse_computed(script, default, f"a default of `{name}`")
    for read, line in _free_names(function):
        if read in seen or hasattr(builtins, read):
            continue
        if read in script.functions:
            _collect(script, read, folder, parts, seen)
        elif statement := _import_of(script, read, folder):
            parts[statement[0]] = statement[1]
        else:
            _constant(script, read, line, name, folder, parts)
    parts[function.lineno] = ast.get_source_segment(script.text, function) or ast.unparse(function)


def _constant(script: Script, read: str, line: int, name: str, folder: Path, parts: dict[int, str]) -> None:
    """Add a module-level constant: a literal, or a regular expression."""
    assignments = [statement for statement in script.tree.body if _assigns(statement, read)]
    if len(assignments) != 1 or len(script.names.get(read, [])) != 1:
        raise _NotStandalone(f"`{name}` reads `{read}` (line {line}), which the script computes")
    value = assignments[0].value  # type: ignore[attr-defined]  # _assigns: it has one
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "re.compile":
        for argument in value.args[:1]:
            _refuse_computed(script, argument, f"`{read}`")
        if statement := _import_of(script, "re", folder):
            parts[statement[0]] = statement[1]
    else:
        _refuse_computed(script, value, f"`{read}`, which `{name}` reads,")
    parts[assignments[0].lineno] = ast.get_source_segment(script.text, assignments[0]) or ast.unparse(assignments[0])


def _assigns(node: ast.stmt, name: str) -> bool:
    targets: Sequence[ast.expr] = node.targets if isinstance(node, ast.Assign) else ()
    if isinstance(node, ast.AnnAssign) and node.value is not None:
        targets = [node.target]
    return any(isinstance(target, ast.Name) and target.id == name for target in targets)


def _refuse_computed(script: Script, value: ast.expr, what: str) -> None:
    """Raise _NotStandalone unless a value is a literal: names of other constants would be missing."""
    if any(isinstance(inner, ast.Name) for inner in ast.walk(value)):
        raise _NotStandalone(f"{what} is computed")
    try:
        script.value(value)
    except NotLiteral:
        raise _NotStandalone(f"{what} is computed") from None


def _import_of(script: Script, name: str, folder: Path) -> tuple[int, str] | None:
    """Return (position, statement) of the import that defines a name, or None. Raises _NotStandalone for a local
    file."""
    for node in ast.walk(script.tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        for alias in node.names:
            bound = alias.asname or (alias.name.split(".")[0] if isinstance(node, ast.Import) else alias.name)
            if bound != name:
                continue
            module = alias.name if isinstance(node, ast.Import) else node.module or ""
            top = module.split(".")[0]
            local = (folder / f"{top}.py").is_file() or (folder / top).is_dir()
            if local or (isinstance(node, ast.ImportFrom) and node.level):
                raise _NotStandalone(f"it reads `{name}` of {module or 'a file'} beside the script")
            named = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
            text = f"import {named}" if isinstance(node, ast.Import) else f"from {module} import {named}"
            return node.lineno * 1000 + node.names.index(alias), text
    return None


def _free_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[tuple[str, int]]:
    """Return (name, line) of the names that a function reads but does not bind, in order. Raises _NotStandalone for
    `global`."""
    bound = {function.name}
    read: dict[str, int] = {}
    for body in [*function.body, function.args]:
        for node in ast.walk(body):
            if isinstance(node, ast.Global | ast.Nonlocal):
                raise _NotStandalone(f"`{function.name}` keeps `{node.names[0]}` from call to call")
            if isinstance(node, ast.arg):
                bound.add(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler):
                bound.add(node.name or "")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    annotations = {id(inner) for node in ast.walk(function) for part in _annotations(node) for inner in ast.walk(part)}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in annotations:
            read.setdefault(node.id, node.lineno)
    return sorted(((name, line) for name, line in read.items() if name not in bound), key=lambda one: one[1])


def _annotations(node: ast.AST) -> Iterable[ast.expr]:
    """Yield the annotations of a node: they are not evaluated in the written script, so the names in them are not
    needed."""
    if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
        yield node.annotation
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
        yield node.returns

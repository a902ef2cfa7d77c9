"""Docstrings of the packages with formulas: a first sentence, tensor shapes, raised exceptions, and the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import posttrain
from posttrain import registry

ROOT = Path(posttrain.__file__).parent
CHECKED = ("loss", "advantage", "merge", "evaluate", "verify")
_SIDE = r"(?:[A-Z](?: [+-] 1)?|1|\.\.\.)"
SHAPE = re.compile(rf"\[(?:{_SIDE}(?:, ?{_SIDE})*)?\]|\b(?:any|same) shape|\bscalar\b")
SOURCE = re.compile(r"arXiv|\bpaper|\bauthors?\b|TRL|verl|mergekit|https?://|\d{4}\.\d{5}|Source: |Schulman")
TENSOR = re.compile(r"\bTensor\b")
WITHOUT_SOURCE = {  # common knowledge, or sums of components that have a source
    "advantage/batch", "advantage/reward", "merge/checkpoint_average", "merge/lora_combine",
    "regulariser/entropy_bonus", "regulariser/kl_old", "task/count_shapes", "task/find_square",
    "token_weight/ce",
}  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


def public_functions(package: str) -> Iterator[tuple[str, Function, str]]:
    """Yield (`module.function`, its definition, the module's docstring) of all public functions of a package's
    modules."""
    for path in sorted((ROOT / package).glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in module.body:
            overload = isinstance(node, Function) and any(ast.unparse(d) == "overload" for d in node.decorator_list)
            if isinstance(node, Function) and not node.name.startswith("_") and not overload:
                yield f"{path.stem}.{node.name}", node, ast.get_docstring(module) or ""


def own_raises(function: Function) -> set[str]:
    """Return the exceptions that the body itself raises by name."""
    raised = (node.exc for node in ast.walk(function) if isinstance(node, ast.Raise))
    names = (exc.func if isinstance(exc, ast.Call) else exc for exc in raised)
    return {n.id for n in names if isinstance(n, ast.Name) and n.id[0].isupper() and n.id != "NotImplementedError"}


def has_tensors(function: Function) -> bool:
    """Return whether an argument or the result contains tensors."""
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    hints = [a.annotation for a in arguments] + [function.returns]
    return any(TENSOR.search(ast.unparse(hint)) for hint in hints if hint is not None)


def problems(function: Function, module: str = "") -> list[str]:
    """Return what a docstring lacks, in words. A module may give the shapes of all its functions: `Shapes: ...`."""
    text = ast.get_docstring(function) or ""
    if not text:
        return ["no docstring"]
    found = []
    head = " ".join(text.split("\n\n")[0].split("\n")[:2])
    if not re.search(r"[.:?](?:\s|$)", head) or not re.match(r"[^a-z]|[a-z_]+[\W]", head):
        found.append("the first two lines hold no whole sentence")
    shared = module.partition("Shapes: ")[2]
    if has_tensors(function) and not SHAPE.search(text) and not SHAPE.search(shared):
        found.append("no shape of a tensor")
    line = " ".join(text.split())
    missing = sorted(name for name in own_raises(function) if not re.search(rf"Raises? [^.]*\b{name}\b", line))
    return found + [f"raises {name} unsaid" for name in missing]


@pytest.mark.parametrize("package", CHECKED)
def test_docstrings_have_shapes_and_raised_exceptions(package: str) -> None:
    found = {
        name: wrong for name, function, module in public_functions(package) if (wrong := problems(function, module))
    }
    assert found == {}


@pytest.mark.parametrize(
    "kind", [k for k, package in registry.PACKAGES.items() if package.rpartition(".")[2] in CHECKED]
)
def test_components_have_a_source(kind: str) -> None:
    """In `register(paper=...)`, in the component's docstring or note, or for a whole module in its docstring."""
    entries = registry.load_index()[kind].items()
    texts = {name: f"{e['doc']} {e['note']} {import_module(e['module']).__doc__}" for name, e in entries}
    said = {name: " ".join(text.split()) for name, text in texts.items()}
    missing = {f"{kind}/{name}" for name, e in entries if not e["paper"] and not SOURCE.search(said[name])}
    assert missing == {one for one in WITHOUT_SOURCE if one.startswith(f"{kind}/")}, (
        "name the source of a component (`paper=`, or in its docstring), or list it in WITHOUT_SOURCE of this file"
    )


def test_check_finds_missing_parts() -> None:
    def wrong(code: str) -> list[str]:
        node = ast.parse(code).body[0]
        assert isinstance(node, Function)
        return problems(node)

    assert wrong("def f(x: Tensor) -> Tensor:\n    '''The mean.'''") == ["no shape of a tensor"]
    assert wrong("def f(x: Tensor) -> Tensor:\n    '''The mean of x [N,T].'''") == []
    assert wrong("def f(x: int) -> int:\n    '''One.'''\n    raise ValueError(x)") == ["raises ValueError unsaid"]
    assert wrong("def f(x: int) -> int:\n    '''One. Raises ValueError for 0.'''\n    raise ValueError(x)") == []
    assert wrong("def f() -> None:\n    '''no sentence'''") == ["the first two lines hold no whole sentence"]
    assert wrong("def f() -> None: ...") == ["no docstring"]
    node = ast.parse("def f(x: Tensor) -> Tensor:\n    '''The mean.'''").body[0]
    assert isinstance(node, Function) and problems(node, "Means.\n\nShapes: x [N,T].") == []
    assert all(map(SHAPE.search, ("[N]", "[N,T]", "[..., K + 1]", "[1, T, V]", "[]", "of any shape")))
    assert not any(map(SHAPE.search, ("[0, 1]", "[low, high]", "[0, 1)")))
    assert sum(len(list(public_functions(package))) for package in CHECKED) > 800

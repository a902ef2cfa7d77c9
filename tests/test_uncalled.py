"""No dead code: functions that nothing in the package, the shelves, the docs or the benchmarks calls are listed here
with a reason."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import posttrain

ROOT = Path(posttrain.__file__).parent
CALLERS = ("posttrain", "rewards", "tools", "recipes", "docs", "benchmarks")
FOR_TESTS = {
    "run/samples.py": {"read_samples"},
}
FORMULAS = {  # formulas of papers, tested by tests/vectors; not reachable by a command or recipe
    "advantage/thinking_modes.py": {"tool_ledger"},
    "curriculum/difficulty.py": {"learnability"},
    "data/pairs.py": {"generalization_factor"},
    "loss/distill.py": {"sampled_distill", "sampled_logp"},
    "loss/nash.py": {"accelerated_policy", "mirror_prox", "nash_step"},
    "loss/regularise.py": {"tempered_reference"},
    "merge/blends.py": {"greedy_soup"},
    "merge/lora.py": {"combined_delta", "fold_matrices"},
    "data/tool_loop.py": {"layout"},
    "evaluate/contamination.py": {"probe_question"},
    "train/episodes.py": {"step_loss"},
    "verify/agents.py": {"episode_steps"},
}
REGISTERED = re.compile(r"register|command|callback|validator|serializer")  # decorators by which others find a function
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def iterate_mentions(node: ast.AST) -> Iterator[str]:
    """Return the names that code uses: as a name, as an attribute, imported, or in a short text such as
    `module:function`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.alias):
            yield part.name
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) < 80:
            yield from re.findall(r"\w+", part.value)


def iterate_definitions(node: ast.AST, *, methods: bool = True) -> Iterator[Definition]:
    """Return functions and classes, without methods of a class with bases, which its base class may call."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, Definition):
            if not part.name.startswith(("__", "_repr_")) and (methods or isinstance(part, ast.ClassDef)):
                yield part
            yield from iterate_definitions(part, methods=not (isinstance(part, ast.ClassDef) and part.bases))
        else:
            yield from iterate_definitions(part, methods=methods)


def is_registered(node: Definition) -> bool:
    return any(REGISTERED.search(ast.unparse(one)) for one in node.decorator_list)


def own_uses(node: Definition) -> int:
    """Return how often a function or class names itself, as in a recursion."""
    return sum(isinstance(part, ast.Name) and part.id == node.name for part in ast.walk(node))


def test_uncalled_functions_are_listed() -> None:
    used: Counter[str] = Counter()
    found: list[tuple[str, str, int]] = []  # file, name, uses of the name in its own definition
    for path in (path for folder in CALLERS for path in sorted((ROOT.parent / folder).rglob("*.py"))):
        tree = ast.parse(path.read_text())
        used.update(iterate_mentions(tree))
        if path.is_relative_to(ROOT):
            file = path.relative_to(ROOT).as_posix()
            found += [
                (file, node.name, own_uses(node)) for node in iterate_definitions(tree) if not is_registered(node)
            ]
    uncalled: dict[str, set[str]] = {}
    for file, name, own in found:
        if used[name] <= own:
            uncalled.setdefault(file, set()).add(name)
    assert uncalled == {**FORMULAS, **FOR_TESTS}

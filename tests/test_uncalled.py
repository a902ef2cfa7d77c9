"""No dead code: what nothing in the package, the shelves, the docs or the benchmarks calls is listed here, and why."""

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
FORMULAS = {  # of papers, held to their numbers by tests/vectors; no verb or recipe reaches them
    "advantage/thinking_modes.py": {"tool_ledger"},
    "curriculum/difficulty.py": {"learnability"},
    "data/pairs.py": {"generalisation_factor"},
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


def mentioned(node: ast.AST) -> Iterator[str]:
    """The names that code uses: as such, of something, imported, or in a short text such as `module:function`."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.alias):
            yield part.name
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and len(part.value) < 80:
            yield from re.findall(r"\w+", part.value)


def defined(node: ast.AST, *, methods: bool = True) -> Iterator[Definition]:
    """Functions and classes; without methods of a class with bases, which may be called by what it inherits from."""
    for part in ast.iter_child_nodes(node):
        if isinstance(part, Definition):
            if not part.name.startswith(("__", "_repr_")) and (methods or isinstance(part, ast.ClassDef)):
                yield part
            yield from defined(part, methods=not (isinstance(part, ast.ClassDef) and part.bases))
        else:
            yield from defined(part, methods=methods)


def is_called(node: Definition, used: Counter[str]) -> bool:
    own = sum(isinstance(part, ast.Name) and part.id == node.name for part in ast.walk(node))  # recursion
    return used[node.name] > own or any(REGISTERED.search(ast.unparse(one)) for one in node.decorator_list)


def test_what_nothing_calls_is_listed_here() -> None:
    files = [path for folder in CALLERS for path in sorted((ROOT.parent / folder).rglob("*.py"))]
    trees = {path: ast.parse(path.read_text()) for path in files}
    used = Counter(name for tree in trees.values() for name in mentioned(tree))
    uncalled: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for node in defined(tree) if path.is_relative_to(ROOT) else ():
            if not is_called(node, used):
                uncalled.setdefault(path.relative_to(ROOT).as_posix(), set()).add(node.name)
    assert uncalled == {**FORMULAS, **FOR_TESTS}

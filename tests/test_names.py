"""Functions and properties are named by verbs or nouns, not by bare participles (`told`, `dealt`, `sharing`)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("posttrain", "recipes", "rewards", "tools")
IRREGULAR = frozenset(
    """
    begun bent bitten born bought bound broken brought built caught chosen dealt done drawn driven eaten fallen
    fed felt forgotten fought found frozen given gone gotten grown heard held hidden kept known laid lain led
    left lent lost made meant met mistaken paid put ridden risen rewritten said seen sent shaken shown sold sought
    spent spoken stolen stood struck stuck sung sworn swept taken taught thought thrown told torn unasked
    understood undone woken won worn written
    """.split()  # noqa: SIM905
)
# Verbs and nouns that look like participles.
OTHER_WORDS = frozenset(
    """
    bed embed exceed feed need proceed red seed shed speed succeed anything bring everything king nothing ring
    something spring string thing wing
    """.split()  # noqa: SIM905
)
ALLOWED = {
    # Properties that are read like fields.
    "posttrain/batch/rollouts.py:shown",
    "posttrain/recipe/model_sections.py:divided",
    "posttrain/rollout/turns.py:used",
    "posttrain/evaluate/conversation.py:put",  # a method of transformers' `BaseStreamer`
    "posttrain/merge/lora.py:scaling",  # LoRA's own word for alpha / r
    "posttrain/recipe/tree.py:mapping",  # YAML's word for a node of keys and values
    "posttrain/recipe/yaml.py:mapping",
    "posttrain/verify/contract.py:batched",  # a decorator of reward scripts, named as itertools' and Hugging Face's
    # Rewards are named by what they measure, as their recipe keys.
    "rewards/judge.py:rating",
    "rewards/roles.py:won",
    "rewards/templates.py:augmented",
}


def is_bare_participle(name: str) -> bool:
    word = name.strip("_")
    return word not in OTHER_WORDS and (word in IRREGULAR or bool(re.fullmatch(r"[a-z]+(ed|ing)", word)))


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions, including properties and nested functions."""
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_function_is_named_by_a_bare_participle() -> None:
    named = {
        f"{path.relative_to(ROOT)}:{function.name}"
        for part in PARTS
        for path in (ROOT / part).rglob("*.py")
        for function in functions(ast.parse(path.read_text(encoding="utf-8")))
        if is_bare_participle(function.name)
    }
    assert not named - ALLOWED, "name them by what they do (CONTRIBUTING.md, Words)"
    assert not ALLOWED - named, "no longer there: take it off the list"


def test_check_finds_participles_only() -> None:
    assert all(map(is_bare_participle, ("told", "_heard", "sharing", "measured", "kept")))
    assert not any(map(is_bare_participle, ("seed", "string", "read_rows", "run", "measure", "sort_by_length")))

"""What a recipe names outside of itself: the schema says it, completely, and functions are found without an import."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.recipe import keys, named
from posttrain.recipe.functions import strange_arguments, written
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.rollout_sections import Environment, Tool
from posttrain.recipe.section import CompletionsName, ComponentSection, CriticName, EvalName, PairsName

# Keys that speak of files or models and name none that can be looked for: checked elsewhere, or written by the run.
OTHERS = {
    "run.output",  # written
    *("tokenizer_source", "tokenizer.source", "tokenizer.tokens.source"),  # one of the models
    "chat_template",  # a word, or the text itself
    "tools.command",  # looked for on the PATH
    *("data.split", "data.mix.split"),  # a part of a data set
    *("tools.name", "tools.description", "rewards.name", "best_of.rewards.name", "search.rewards.name"),
}


def _texts(annotation: Any) -> bool:
    """Text or a list of it; not a mapping."""
    if getattr(annotation, "__origin__", None) is dict:
        return False
    return annotation is str or any(_texts(part) for part in getattr(annotation, "__args__", ()))


def _keys() -> Iterator[tuple[str, type, str, Any]]:
    """(dotted key, section, key, field) of every key of every stage whose value may be text."""
    for stage in keys.BY_NAME.values():
        for dotted in keys.all_paths(stage):
            above, _, key = dotted.rpartition(".")
            section = keys.section_at(stage, above.split(".") if above else [])
            if section is not None and (field := keys.own_keys(section).get(key)) and _texts(field.annotation):
                yield dotted, section, key, field


def test_every_key_that_speaks_of_files_or_models_is_looked_up() -> None:
    """A new one must be marked (`section.Names`), have a `use` that is looked up, or stand among the others above."""
    speaks = re.compile(r"\b(files?|director(y|ies)|models?|runs?|path|completions of|function)\b|\.py:|Jinja")
    found = []
    for dotted, section, key, field in _keys():
        use = key == "use" and issubclass(section, ComponentSection | Reward | Tool | Environment)
        marked = list(named.names(named.Part((), section, {key: "x"}))) or list(
            named.names(named.Part((), section, {key: ["x"]}))
        )
        if speaks.search(field.description or key) and not use and not marked:
            found.append(dotted)
    assert set(found) == OTHERS, "neither marked nor known to be something else"


def test_what_directories_must_hold_is_what_is_read() -> None:
    from posttrain.evaluate.compare import PROBLEMS
    from posttrain.evaluate.pairs import PAIRS
    from posttrain.evaluate.sampling import COMPLETIONS
    from posttrain.train.critic import FILE

    holds = [name.__metadata__[0].holds for name in (CompletionsName, EvalName, PairsName, CriticName)]
    assert holds == [(COMPLETIONS,), (PROBLEMS,), (PAIRS,), (FILE, f"final/{FILE}")]


SCRIPT = """
from math import sqrt
from functools import partial
LIMIT, NAMES = 3, ["a"]
RATE = 0.1
def loss(batch, *, width=1.0): raise AssertionError("must not run")
class Keep: ...
root = partial(sqrt)
raise AssertionError("must not be imported")
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable package `lk_pkg` beside the scripts, which must not be run to be looked at."""
    (tmp_path / "mine.py").write_text(SCRIPT.replace("LIMIT, NAMES = 3, ", "NAMES = "), encoding="utf-8")
    (tmp_path / "star.py").write_text("from math import *\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    inner = tmp_path / "site" / "lk_pkg"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("raise AssertionError('must not be imported')\n", encoding="utf-8")
    (inner / "parts.py").write_text(SCRIPT.replace("LIMIT, NAMES = 3, ", "NAMES = "), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


@pytest.mark.parametrize(
    "use",
    ["mine.py:loss", "mine.py:Keep", "mine.py:root", "mine.py:sqrt", "star.py:cos", "lk_pkg.parts:loss", "json:dumps",
     "math:sqrt", "os.path:join", "importlib.metadata:version"],
)  # fmt: skip
def test_functions_are_found_without_running_their_script(use: str, package: Path) -> None:
    """A compiled module, or one that another made, is imported: its text is not there."""
    written(use, package, "loss")
    assert "lk_pkg" not in sys.modules


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("mine.py:los", r"mine\.py has no function los\n  it has: Keep, loss, root\n  hint: did you mean `loss`\?"),
        ("mine.py:RATE", r"has no function RATE"),
        ("mine.py:NAMES", r"has no function NAMES"),
        ("mime.py:loss", r"loss script not found: mime\.py\n  searched: .*\n  hint: did you mean `mine\.py`\?"),
        ("broken.py:f", r"broken\.py is no Python: line 1"),
        ("lk_pkg.parts:los", r"lk_pkg\.parts has no function los\n  it has: Keep, loss, root\n  hint: .*`loss`"),
        ("math:sqrtt", r"math has no function sqrtt\n  it has: .*\n  hint: did you mean `sqrt`\?"),
        ("mine:loss", r"loss `mine:loss`: cannot import mine: .*\n  hint: did you mean `mine\.py:loss`\?"),
        ("jsn:dumps", r"cannot import jsn: .*\n  hint: did you mean `json:dumps`\?"),
        ("json.decodr:scan", r"cannot import json\.decodr: .*\n  hint: did you mean `json\.decoder:scan`\?"),
        ("json.tool.x:f", r"cannot import json\.tool\.x"),
        ("mine.py", r"is not of the form"),
    ],
)
def test_functions_that_are_not_there(use: str, told: str, package: Path) -> None:
    with pytest.raises(UserError, match=told):
        written(use, package, "loss")


def test_arguments_of_a_function_that_was_only_read(package: Path) -> None:
    (package / "f.py").write_text("def f(size, seed, terms=2, *, deep=1): ...\ndef g(**rest): ...\n", encoding="utf-8")
    function, open_one = written("f.py:f", package, "loss"), written("f.py:g", package, "loss")
    assert function is not None and open_one is not None
    assert list(strange_arguments(function, ["deep", "terms", "size"])) == ["terms", "size"]
    assert list(strange_arguments(function, ["deep", "terms", "size", "dep"], of_data=True)) == ["size", "dep"]
    assert strange_arguments(open_one, ["x"]) == {}


def test_arguments_of_a_class_and_those_that_are_needed(package: Path) -> None:
    text = "class C:\n    def __init__(self, *, slope, base=0): ...\nclass D(C): ...\n"
    (package / "f.py").write_text(text, encoding="utf-8")
    made = written("f.py:C", package, "controller")
    assert made is not None and written("f.py:D", package, "controller") is None
    assert strange_arguments(made, ["slope"]) == {}
    told = strange_arguments(made, ["slop"])
    assert {key: str(error) for key, error in told.items()} == {
        "use": "C needs `slope`",
        "slop": "C has no argument slop\n  it takes: slope, base\n  hint: did you mean `slope`?",
    }

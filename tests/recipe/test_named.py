"""Files, models and functions that a recipe names: declared completely by the schema, and functions are found without
an import."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.recipe import keys, references
from posttrain.recipe.functions import find_argument_errors, find_data_argument_errors, find_definition
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.section import CompletionsName, ComponentSection, CriticName, EvalName, PairsName
from posttrain.recipe.tool_sections import Environment, Tool
from posttrain.registry import load_function

# Keys about files or models whose values cannot be looked up: checked elsewhere, or written by the run.
OTHERS = {
    "run.output",  # written
    *("tokenizer_source", "tokenizer.source", "tokenizer.tokens.source"),  # one of the models
    "chat_template",  # a word, or the text itself
    "tools.command",  # looked up on the PATH
    *("rollout.vllm.server.file", "engine.vllm.server.file"),  # may change: looked up when a run is prepared
    *(
        "data.split",
        "data.mix.split",
        "eval.data.split",
        "data.select.decontaminate.benchmarks.split",
    ),  # a configuration of a data set
    *(
        "tools.name",
        "tools.description",
        "rewards.name",
        "best_of.rewards.name",
        "search.rewards.name",
        "search.evidence.rewards.name",
        "tree.rewards.name",
        *("eval.rewards.name", "track.name"),
    ),
}


def _texts(annotation: Any) -> bool:
    """Return whether the type is text or a list of text; not a mapping."""
    if getattr(annotation, "__origin__", None) is dict:
        return False
    return annotation is str or any(_texts(part) for part in getattr(annotation, "__args__", ()))


def _keys() -> Iterator[tuple[str, type, str, Any]]:
    """Yield (dotted key, section, key, field) of every key of every stage whose value may be text."""
    for stage in keys.BY_NAME.values():
        for dotted in keys.all_paths(stage):
            above, _, key = dotted.rpartition(".")
            section = keys.section_at(stage, above.split(".") if above else [])
            if section is not None and (field := keys.own_keys(section).get(key)) and _texts(field.annotation):
                yield dotted, section, key, field


def test_every_key_for_a_file_or_model_is_looked_up() -> None:
    """A new key must be marked (`section.Names`), have a `use` that is looked up, or be in the list above."""
    speaks = re.compile(r"\b(files?|director(y|ies)|models?|runs?|path|completions of|function)\b|\.py:|Jinja")
    found = []
    for dotted, section, key, field in _keys():
        use = key == "use" and issubclass(section, ComponentSection | Reward | Tool | Environment)
        marked = list(references.names(references.SectionRef((), section, {key: "x"}))) or list(
            references.names(references.SectionRef((), section, {key: ["x"]}))
        )
        if speaks.search(field.description or key) and not use and not marked:
            found.append(dotted)
    assert set(found) == OTHERS, "neither marked nor known to be something else"


def test_required_files_of_directories_are_those_that_are_read() -> None:
    from posttrain.evaluate.compare import PROBLEMS
    from posttrain.evaluate.pairs import PAIRS_FILE
    from posttrain.evaluate.sampling import COMPLETIONS
    from posttrain.train.critic import FILE

    holds = [name.__metadata__[0].holds for name in (CompletionsName, EvalName, PairsName, CriticName)]
    assert holds == [(COMPLETIONS,), (PROBLEMS,), (PAIRS_FILE,), (FILE, f"final/{FILE}")]


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
    """An importable package `lk_pkg` beside the scripts, which must not be run by the lookup."""
    (tmp_path / "mine.py").write_text(SCRIPT.replace("LIMIT, NAMES = 3, ", "NAMES = "), encoding="utf-8")
    (tmp_path / "star.py").write_text("from math import *\n", encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:\n", encoding="utf-8")
    inner = tmp_path / "site" / "lk_pkg"
    inner.mkdir(parents=True)
    (inner / "__init__.py").write_text("raise AssertionError('must not be imported')\n", encoding="utf-8")
    (inner / "parts.py").write_text(SCRIPT.replace("LIMIT, NAMES = 3, ", "NAMES = "), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return tmp_path


def imported(folder: Path) -> Callable[[str, str], None]:
    """Return the description of a function by import, used if its source is not enough; commands ask another
    process."""
    return lambda use, what: void(load_function(use, folder, what=what))


def void(_: object) -> None:
    return None


@pytest.mark.parametrize(
    "use",
    ["mine.py:loss", "mine.py:Keep", "mine.py:root", "mine.py:sqrt", "star.py:cos", "lk_pkg.parts:loss", "json:dumps",
     "math:sqrt", "os.path:join", "importlib.metadata:version"],
)  # fmt: skip
def test_functions_are_found_without_running_their_script(use: str, package: Path) -> None:
    """A compiled module, or one that another made, is imported: its text is not there."""
    find_definition(use, package, "loss", imported(package))
    assert "lk_pkg" not in sys.modules


@pytest.mark.parametrize(
    ("use", "told"),
    [
        ("mine.py:los", r"mine\.py has no function los\n  it has: Keep, loss, root\n  hint: did you mean `loss`\?"),
        ("mine.py:RATE", r"has no function RATE"),
        ("mine.py:NAMES", r"has no function NAMES"),
        ("mime.py:loss", r"loss script not found: mime\.py\n  searched: .*\n  hint: did you mean `mine\.py`\?"),
        ("broken.py:f", r"broken\.py is not valid Python: line 1"),
        ("lk_pkg.parts:los", r"lk_pkg\.parts has no function los\n  it has: Keep, loss, root\n  hint: .*`loss`"),
        ("math:sqrtt", r"math has no function sqrtt\n  it has: .*\n  hint: did you mean `sqrt`\?"),
        ("mine:loss", r"loss `mine:loss`: cannot import mine: .*\n  hint: did you mean `mine\.py:loss`\?"),
        ("./mine:loss", r"\./mine is not a module\n  hint: a script ends in \.py: \./mine\.py:loss"),
        ("jsn:dumps", r"cannot import jsn: .*\n  hint: did you mean `json:dumps`\?"),
        ("json.decodr:scan", r"cannot import json\.decodr: .*\n  hint: did you mean `json\.decoder:scan`\?"),
        ("json.tool.x:f", r"cannot import json\.tool\.x"),
        ("mine.py", r"is not of the form"),
    ],
)
def test_missing_functions_raise_with_similar_names(use: str, told: str, package: Path) -> None:
    with pytest.raises(UserError, match=told):
        find_definition(use, package, "loss", imported(package))


def test_arguments_are_checked_from_the_source(package: Path) -> None:
    (package / "f.py").write_text("def f(size, seed, terms=2, *, deep=1): ...\ndef g(**rest): ...\n", encoding="utf-8")
    function = find_definition("f.py:f", package, "loss", imported(package))
    open_one = find_definition("f.py:g", package, "loss", imported(package))
    assert function is not None and open_one is not None
    assert list(find_argument_errors(function, dict.fromkeys(["deep", "terms", "size"]))) == ["terms", "size"]
    given = dict.fromkeys(["deep", "terms", "size", "dep"])
    assert list(find_data_argument_errors(function, given, 3)) == ["size", "dep"]
    assert find_argument_errors(open_one, {"x": 1}) == {}


@pytest.mark.parametrize(
    ("signature", "given", "size", "told"),
    [
        ("size, seed", {}, 3, {}),
        ("size, seed", {}, None, {"source": "f makes rows: give `size`, the number of rows"}),
        ("size=9, seed=0", {}, None, {}),
        ("*, size: int = 9, seed: int", {}, None, {}),
        ("seed", {}, 3, {"source": "f takes no `size`"}),
        ("count", {}, 3, {"source": "f takes no `size` and no `seed`"}),
        ("size, seed, folder", {}, 3, {"source": "f needs `folder`"}),
        ("size, seed, folder", {"folder": "x"}, 3, {}),
        ("size, seed, *, terms: int", {"terms": "two"}, 3, {"terms": "f: argument terms: "}),
        ("size, seed, *, terms: int | None = None", {"terms": None}, 3, {}),
        ("size, seed, *, terms: list[int]", {"terms": [1, 2]}, 3, {}),
        ("size, seed, *, how: Literal['a', 'b']", {"how": "c"}, 3, {"how": "Input should be 'a' or 'b'"}),
        ("size, seed, *, tensor: torch.Tensor", {"tensor": "c"}, 3, {}),  # known only after an import
        ("size, seed, *, odd: [print(1)]", {"odd": "c"}, 3, {}),
        ("**anything", {"x": 1}, 3, {}),
    ],
)
def test_arguments_of_a_data_function_are_checked(
    signature: str, given: dict[str, Any], size: int | None, told: dict[str, str], package: Path
) -> None:
    (package / "d.py").write_text(f"def f({signature}): ...\n", encoding="utf-8")
    function = find_definition("d.py:f", package, "data function", imported(package))
    assert function is not None
    found = {key: str(error) for key, error in find_data_argument_errors(function, given, size).items()}
    assert found.keys() == told.keys()
    assert all(told[key] in found[key] for key in told)


def test_arguments_of_a_class_and_required_ones_are_checked(package: Path) -> None:
    text = "class C:\n    def __init__(self, *, slope, base=0): ...\nclass D(C): ...\n"
    (package / "f.py").write_text(text, encoding="utf-8")
    made = find_definition("f.py:C", package, "controller", imported(package))
    assert made is not None and find_definition("f.py:D", package, "controller", imported(package)) is None
    assert find_argument_errors(made, {"slope": 1}) == {}
    told = find_argument_errors(made, {"slop": 1})
    assert {key: str(error) for key, error in told.items()} == {
        "use": "C needs `slope`",
        "slop": "C has no argument slop\n  it takes: slope, base\n  hint: did you mean `slope`?",
    }

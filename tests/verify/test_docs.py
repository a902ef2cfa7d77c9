"""The scripts in docs/rewards.md run as documented, and the answers that docs/verifier.md calls equal are equal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from posttrain.recipe import tree, yaml
from posttrain.recipe.reward_sections import Reward
from posttrain.verify.examples import run_examples
from posttrain.verify.load import shipped_function

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_page_contains_scripts() -> None:
    assert len(SCRIPTS) == 5


@pytest.mark.parametrize("text", SCRIPTS, ids=["one_row", "transcript", "many_rows", "by_turn", "judge"])
def test_examples_of_the_page_pass(text: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(text, encoding="utf-8")
    outcomes = run_examples(tmp_path / "script.py")
    assert len(outcomes) >= 2
    assert [o.outcome for o in outcomes if not o.ok] == []


def test_recipe_of_the_page_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    rewards, by_role, instructions, judged, local = (
        [Reward.model_validate(entry) for entry in tree.plain(yaml.parse(block, "page").tree)["rewards"]]
        for block in blocks
    )
    assert by_role[0].reads == "solver" and by_role[1].roles == ["solver"]
    assert instructions[0].params == {"mode": "share", "loose": False}
    assert judged[1].use == "judge.rating" and local[1].use == "judge_model"
    assert rewards[1].condition is not None and rewards[1].condition.on == "accuracy"


def test_answers_that_the_page_calls_equal_are_equal() -> None:
    page = PAGE.with_name("verifier.md").read_text(encoding="utf-8")
    table = re.search(r"\| gold \| equal \| not equal \|\n\|[-|]+\|\n((?:\|.*\n)+)", page)
    assert table
    said = []
    for line in table[1].splitlines():
        (gold,), equal, different = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("|").split(" | "))
        said += [(gold, text, 1.0) for text in equal if text != "decimals"]  # the key that sets the rounding
        said += [(gold, text, 0.0) for text in different]
    assert len(said) > 150
    accuracy = shipped_function("math.accuracy")
    wrong = [(gold, text) for gold, text, right in said if accuracy(rf"\boxed{{{text}}}", gold) != right]
    assert wrong == []

"""`posttrain reward test`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain import thoughts
from posttrain.cli.app import app

pytestmark = pytest.mark.usefixtures("forked_workers")

GOOD = "def score(completion, answer): return float(completion.strip() == answer)\n"
EXAMPLES = 'EXAMPLES = [("7", {"answer": "7"}, 1.0), ("", {"answer": "7"}, 0.0)]\n'


def reward_test(*args: str) -> Any:
    return CliRunner().invoke(app, ["reward", "test", *args])


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """An RL recipe with its data beside it; the reward is `score` of mine.py."""
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(100, 110)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(GOOD + EXAMPLES)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "stage: rl\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\n"
        "rewards: [{use: mine.py:score}]\nscoring: {workers: 1}\nrun: {steps: 1}\n"
    )
    return path


def test_examples_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD + EXAMPLES)
    for target in (str(path), f"{path}:score"):
        result = reward_test(target)
        assert result.exit_code == 0, result.output
        assert "mine.py:score  2 of 2 examples right" in result.stdout


def test_a_failing_example_is_shown_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(GOOD + EXAMPLES.replace("0.0", "0.5"))
    result = reward_test(str(path))
    assert result.exit_code == 2
    assert "1 of 2 examples right" in result.stdout
    assert "'' {'answer': '7'}\n    expected 0.5, got 0.0" in result.stdout


def test_a_shipped_script_as_json() -> None:
    result = reward_test("length.cosine", "--json")
    assert result.exit_code == 0, result.output
    [told] = json.loads(result.stdout)["examples"]
    assert (told["function"], told["failed"]) == ("cosine", 0)
    assert told["passed"] == len(told["outcomes"]) > 4


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere.py", "reward script not found"),
        ("length.cosin", "has no function cosin\n  it has: cosine, "),
        ("nothing", "no recipe"),
    ],
)
def test_unknown_targets(target: str, message: str) -> None:
    result = reward_test(target)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_script_beside_is_named_as_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("def f(completion): return 1\nEXAMPLES = [('', {}, 1)]\n")
    assert "hint: write mine.py\n" in reward_test("mine").stderr
    assert "hint: write mine.py:f\n" in reward_test("mine.f").stderr
    assert reward_test("mine.py:").exit_code == reward_test("mine.py").exit_code == 0


def test_a_recipe_tries_its_rewards_on_its_rows(recipe: Path) -> None:
    result = reward_test(str(recipe), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["examples"][0]["passed"] == 2
    [part] = found["recipe"]
    assert (part["rows"], part["gold_written_as"], part["bad_gold"], part["ok"]) == (10, "plain", {}, True)
    means = {kind: cell["mean"] for kind, cell in part["components"]["score"]["variants"].items()}
    assert means.pop("gold") == 1.0
    assert set(means.values()) == {0.0}
    assert set(means) == {"near miss", "empty", "truncated", "very long", "unicode", "garbage"}


def test_the_table_of_a_recipe(recipe: Path) -> None:
    result = reward_test(str(recipe))
    assert "rl: 10 rows, gold written as it stands in the row" in result.stdout
    assert "near miss" in result.stdout
    assert "gold scores best on 10 of 10 rows (score)" in result.stdout


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        ("return 1.0", "gold scores best on 0 of 10 rows"),
        ("return 1 / len(completion) if completion != answer else 1.0", "10 error"),
    ],
)
def test_a_recipe_whose_reward_fails_exits_2(body: str, shown: str, recipe: Path) -> None:
    (recipe.parent / "mine.py").write_text(f"def score(completion, answer): {body}\n")
    result = reward_test(str(recipe))
    assert result.exit_code == 2
    assert shown in result.stdout
    assert "score has no EXAMPLES" in result.stderr


def test_errors_of_one_gold_format_are_shown_first(recipe: Path) -> None:
    """A plain number is divided by nothing; a box is no number, and scores 0 without a word."""
    body = "try: gap = abs(int(completion) - int(answer))\n  except ValueError: return 0.0\n  return 1 - gap / 0"
    (recipe.parent / "mine.py").write_text(f"def score(completion, answer):\n  {body}\n")
    result = reward_test(str(recipe))
    assert result.exit_code == 2 and "gold written as it stands in the row" in result.stdout
    assert result.stdout.index("ZeroDivisionError") < result.stdout.index("gold written as it")


LAST = "(re.findall(r'-?[0-9]+', completion.rpartition('</think>')[2]) or [''])[-1]"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("float(answer in completion)", ["gold in the thought", "every answer", "wrong size"]),
        (f"float({LAST}.lstrip('-') == answer)", ["wrong sign"]),
        (f"float({LAST}.startswith(answer))", ["wrong size"]),
        (f"float('correct' in completion or {LAST} == answer)", ["injection"]),
        (f"float(completion.count(answer)) if {LAST} == answer else 0.0", ["repeated"]),
    ],
)
def test_exploited_tricks_of_a_bad_reward_are_named(body: str, named: list[str], recipe: Path) -> None:
    """Each of the five rewards scores gold answers highest, so only the tricks expose it."""
    (recipe.parent / "mine.py").write_text(f"import re\ndef score(completion, answer): return {body}\n")
    result = reward_test(str(recipe))
    assert result.exit_code == 2
    assert "gold scores best on 10 of 10 rows" in result.stdout
    paying = result.stdout.partition("tricks that score as high as gold: ")[2].partition("(tried")[0]
    assert paying and {trick for trick in named if f"{trick} on 10 of 10 rows" in paying} == set(named)


@pytest.mark.parametrize(("weight", "code"), [(0.1, 2), (0, 0)])
def test_higher_total_reward_of_wrong_answers_is_reported(weight: float, code: int, recipe: Path) -> None:
    """Words pay ten times more than being right; where being right pays nothing, that is what is wanted."""
    (recipe.parent / "mine.py").write_text(GOOD + EXAMPLES + "def wordy(completion): return len(completion) / 10\n")
    rewards = f"rewards: [{{use: mine.py:score, weight: {weight}, correct: true}}, {{use: mine.py:wordy}}]"
    recipe.write_text(recipe.read_text().replace("rewards: [{use: mine.py:score}]", rewards))
    result = reward_test(str(recipe))
    assert "tricks that score as high as gold: none" in result.stdout
    assert "with a higher total reward than gold: " in result.stdout and "injection on 10 of 10 rows" in result.stdout
    assert result.exit_code == code


def test_rows_of_a_script(tmp_path: Path) -> None:
    path = tmp_path / "my own.py"
    path.write_text(GOOD + EXAMPLES + 'ROWS = [{"prompt": "7?", "answer": "7"}]\n')
    result = reward_test(str(path))
    assert result.exit_code == 0, result.output
    assert "score: 1 row, gold written as it stands in the row" in result.stdout
    path.write_text(path.read_text().replace("completion.strip() == answer", "answer in completion"))
    assert reward_test(f"{path}:score").exit_code == 2


def test_missing_column_raises(recipe: Path) -> None:
    (recipe.parent / "mine.py").write_text("def score(completion, anwser): return 1.0\n")
    result = reward_test(str(recipe))
    assert result.exit_code == 2
    assert "the data has no column `anwser`" in result.stderr


def test_torch_is_not_loaded(recipe: Path) -> None:
    program = (
        "import sys; from posttrain.__main__ import main\n"
        f"sys.argv = ['posttrain', 'reward', 'test', {str(recipe)!r}]\n"
        "try: main()\nexcept SystemExit as e: assert not e.code, e.code\n"
        "assert 'torch' not in sys.modules"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_recipe_can_have_the_name_of_a_shipped_script(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tools.yaml` is the recipe, not a function `yaml` of the shipped rewards/tools.py."""
    monkeypatch.chdir(recipe.parent)
    recipe.rename(recipe.with_name("tools.yaml"))
    result = reward_test("tools.yaml")
    assert result.exit_code == 0 and "score" in result.output, result.output


def test_examples_of_a_trl_style_function(tmp_path: Path) -> None:
    """It takes everything by `**kwargs`, and gets what TRL offers without an example that names it."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def right(completions, answer, **kwargs):\n"
        "    assert kwargs['trainer_state'].global_step == 0 and len(kwargs['prompts']) == len(completions)\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n\n"
        'EXAMPLES = [("7", {"answer": "7"}, 1.0), ("8", {"answer": "7", "prompt": "3+4=?"}, 0.0)]\n'
    )
    result = reward_test(str(path))
    assert result.exit_code == 0, result.output


def test_marks_of_thoughts_of_the_recipe_are_recognized(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise no completion has the `</reason>` that the reward asks for: texts have `</think>` in its place."""
    monkeypatch.setattr(thoughts, "KNOWN_FORMATS", list(thoughts.FORMATS))
    reward = "{use: math.accuracy, params: {think_delimiter: </reason>, require_think: true}}"
    for model, code in (("{path: tiny}", 2), ('{path: tiny, thoughts: ["<reason>", "</reason>"]}', 0)):
        recipe.write_text(
            f"stage: rl\nmodel: {model}\ndata: {{source: rows.jsonl}}\nrewards: [{reward}]\nscoring: {{workers: 1}}\n"
            "run: {steps: 1}\n"
        )
        result = reward_test(str(recipe))
        assert result.exit_code == code, result.output

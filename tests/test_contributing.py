"""CONTRIBUTING.md: the names in it exist, in the order in which a step calls them, and its examples run."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from posttrain.batch import RolloutBatch
from posttrain.recipe import keys
from posttrain.recipe.reward_sections import Scoring
from posttrain.verify.script_rows import own_rows
from posttrain.verify.trial import try_rewards

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
WAY = re.findall(r"^\| `([\w/]+\.py)` \| `(\w+)` \|", TEXT, re.MULTILINE)


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def checks_of(file: str) -> dict[str, Callable[..., None]]:
    """Return the test functions of a file, by name."""
    spec = importlib.util.spec_from_file_location("checks_of_contributing", ROOT / "tests" / file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {name: value for name, value in vars(module).items() if name.startswith("test_")}


def test_minimal_example_is_named_first() -> None:
    assert re.findall(r"\]\(([^)]+)\)", TEXT)[0] == "examples/grpo_minimal.py"


def test_functions_of_the_step_table_are_in_their_files() -> None:
    assert len(WAY) > 15
    assert [(file, name) for file, name in WAY if name not in functions(ROOT / "posttrain" / file)] == []


def test_step_table_has_the_order_of_calls() -> None:
    """Functions called by `step` itself are in the table in the order of the function's body."""
    tree = ast.parse((ROOT / "posttrain" / "train" / "rl.py").read_text(encoding="utf-8"))
    step = next(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "step")
    calls = [node.func for node in ast.walk(step) if isinstance(node, ast.Call)]
    called = {getattr(f, "attr", getattr(f, "id", "")): f.lineno for f in calls}
    lines = [called[name] for _, name in WAY if name in called]
    assert len(lines) >= 5 and lines == sorted(lines)


def test_functions_and_fields_named_in_sections_exist() -> None:
    named = re.findall(r"`posttrain/([\w/]+\.py)` \(`(\w+)`\)|`(\w+)` in `posttrain/([\w/]+\.py)`", TEXT)
    places = [(a or d, b or c) for a, b, c, d in named]
    assert len(places) >= 5
    sources = {file: (ROOT / "posttrain" / file).read_text(encoding="utf-8") for file, _ in places}
    missing = [
        (f, n) for f, n in places if not re.search(rf"^\s*(def {n}\(|class {n}\b|{n}\b.*= )", sources[f], re.MULTILINE)
    ]
    assert missing == []
    tensors = re.findall(r"^\| `(\w+)` \[N,T\]", section("Words"), re.MULTILINE)
    assert {"old_logp", "ref_logp", "mask"} <= set(tensors)
    assert [name for name in tensors if name != "logp" and name not in RolloutBatch.__dataclass_fields__] == []


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"`make ([a-z-]+)", TEXT))
    assert len(targets) > 6
    assert [target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)] == []


def test_reward_of_the_page_passes_its_examples(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", section("Add a reward"), re.DOTALL)
    assert code
    (tmp_path / "brief.py").write_text(re.sub(r"^   ", "", code[1], flags=re.MULTILINE))
    command = [sys.executable, "-m", "posttrain", "reward", "test", "brief.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "brief" in done.stdout, done.stdout + done.stderr
    for name, check in checks_of("rewards/test_shelf.py").items():
        if name not in ("test_reward_scripts_are_found",):
            check(tmp_path / "brief.py")
    (own,) = own_rows(tmp_path / "brief.py")
    trial = try_rewards(own.rewards, Scoring(workers=1), None, own.rows)
    assert trial.failures == 0 and [name for name, counts in trial.outbid.items() if counts[0]] == []


@pytest.mark.parametrize(
    ("task", "place"),
    [
        ("Add a loss", "posttrain/loss/"),
        ("Add a reward", "posttrain/verify/endpoint.py"),
        ("A prompt's path through one RL step", "posttrain/train/rl_metrics.py"),
        ("Map", "posttrain/advantage/keep.py"),
        ("Add a recipe key", "rollout_sections.py"),
    ],
)
def test_task_table_names_existing_places(task: str, place: str) -> None:
    assert place in section(task)


def test_recipe_key_table_names_the_files_of_sections() -> None:
    """The class of each section is in the file that the table names, and the listed readers use a key of it."""
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \|$", section("Add a recipe key"), re.MULTILINE)[1:]
    listed = {file for _, fields, _ in rows for file in re.findall(r"`(\w+\.py)`", fields)}
    sections = {path.name for path in (ROOT / "posttrain" / "recipe").glob("*sections.py")}
    assert listed == {*sections, "rl_stage.py", "stages.py"}
    checked = 0
    for what, fields, readers in rows:
        stages = set(re.findall(r"\w+", re.sub("`[^`]*`", "", what))) & keys.BY_NAME.keys()
        module = fields.partition(".py")[0].strip("`")
        texts = [(ROOT / "posttrain" / file).read_text() for file in re.findall(r"`([\w/]+\.py)`", readers)]
        for stage in stages or {"rl"}:
            for key in re.findall(r"`([\w.]+)`", what):
                found = keys.section_at(keys.BY_NAME[stage], key.split("."))
                if found is None:  # `sampling` is of eval
                    continue
                assert found.__module__ == f"posttrain.recipe.{module}", (stage, key)
                names = "|".join(keys.own_keys(found))
                assert any(re.search(rf"\.({names})\b", text) for text in texts), (stage, key)
                checked += 1
    assert checked > 20

"""Shipped row builders based on searches: look-ahead in an environment, spliced episodes of runs, step labels."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.models.load import load
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sections import Data, Model
from posttrain.registry import load_function
from posttrain.run.jsonl import read_rows

DATA = shipped_folder("recipes") / "data"
Values = dict[str, Any]


def function(name: str) -> Any:
    return load_function(name, DATA, what="data function")


def rows_of(name: str, **keys: Any) -> list[Values]:
    return load_rows(Data(source=f"{DATA}/{name}", **keys), DATA)


def write(path: Path, rows: list[Values]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# --- ProAct: look-ahead


def test_look_ahead_sees_the_coin_after_the_next() -> None:
    """Coins 1 9 2, two moves.

    Looking two moves ahead, gamma 0.9: left pays 1, then 9: (1 + 8.1) / 12; right pays 2, then 9: (2 + 8.1) / 12.
    One move ahead, without longer plays, left is worth 1/12 and right 2/12. For 1 9 1 2, one move ahead prefers
    right; two moves ahead left, then 9.
    """
    world = function("lookahead.py:Coins")(takes=2)
    world.reset({"coins": "1 9 2"})
    how: Values = {"plays": 1, "horizon": 0, "gamma": 0.9}
    rank = function("lookahead.py:rank_moves")
    best, other = rank(world, random.Random(0), depth=2, **how)
    assert (best.action, best.value) == ("right", pytest.approx(10.1 / 12)) and other.value == pytest.approx(9.1 / 12)
    assert (best.shown, other.shown, world.coins) == ("1 9", "9 2", [1, 9, 2])
    world.reset({"coins": "1 9 1 2"})
    assert [rank(world, random.Random(0), depth=d, **how)[0].action for d in (1, 2)] == ["right", "left"]


def test_episode_plays_the_best_moves_and_explains_each() -> None:
    """Each thought names both moves with their outcomes; the last line is the move that is played next."""
    rows = rows_of("lookahead.py:lookahead", size=3)
    assert len(rows) == 3
    for row in rows:
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 3
        shown = row["messages"][0]["content"]
        for asked, answer in zip(row["messages"][::2], row["messages"][1::2], strict=True):
            assert asked["content"] == shown
            first, second, move = answer["content"].split("\n")
            assert first.startswith(f"{move}: ") and {first.split(":")[0], second.split(":")[0]} == {"left", "right"}
            coins = shown.split()
            shown = " ".join(coins[1:] if move == "left" else coins[:-1])
            assert f"{move}: {shown}, worth" in first or "the end, worth" in first


# --- Agent-R: episodes of a run, and the policy's judgement of their steps


def episodes(folder: Path) -> None:
    def record(sample: int, reward: float | None, *turns: tuple[str, str | None]) -> Values:
        told = [{"text": t, "calls": [], **({} if r is None else {"reply": r})} for t, r in turns]
        return {"uid": "x", "sample": sample, "reward": reward, "turns": told}

    write(
        folder / "completions.jsonl",
        [
            record(0, 0.2, ("left", "wall"), ("sit", None)),
            record(1, 1.0, ("left", "wall"), ("right", None)),
            record(2, 0.9, ("right", None)),
            record(3, None, ("left", None)),
        ],
    )
    write(folder / "problems.jsonl", [{"uid": "x", "prompt": "go", "row": {}}])


def test_bad_steps_are_judged_and_spliced(tmp_path: Path) -> None:
    """Of four episodes one is 0.8 worse than the best, and one is unscored.

    Its two steps are judged, each with the steps before it. The judge calls the second bad: the row has the bad
    path, a reflection (trained), and the best path from the step at which they diverge (trained).
    """
    episodes(tmp_path / "paths")
    params = {"run": str(tmp_path / "paths" / "completions.jsonl"), "alpha": 0.5, "beta": 0.2}
    asked = rows_of("spliced.py:questions", params=params)
    assert [(row["path"], row["place"]) for row in asked] == [("x/0", 1), ("x/0", 3)]
    assert "Shown: go\nAgent: left\nShown: wall\n\nIts next step:\nsit\n" in asked[1]["prompt"]
    judged = tmp_path / "judged"
    write(judged / "problems.jsonl", [{"uid": r["uid"], "prompt": r["prompt"], "row": r} for r in asked])
    said = ["bad? No: good.", "It is BAD."]
    write(judged / "completions.jsonl", [{"uid": r["uid"], "completion": s} for r, s in zip(asked, said, strict=True)])
    [row] = rows_of("spliced.py:revise_paths", params={**params, "judged": str(judged)})
    assert [m["content"] for m in row["messages"] if not m["train"]] == ["go", "left", "wall", "sit", "ok."]
    trained = [m["content"] for m in row["messages"] if m["train"]]
    assert trained[0].startswith("Thought:") and trained[1:] == ["right"]
    swapped = {**params, "judged": str(judged), "good": "bad", "bad": "good"}  # then the first step is the bad one
    [row] = rows_of("spliced.py:revise_paths", params=swapped)
    assert [m["content"] for m in row["messages"] if m["train"]][1:] == ["left", "right"]


def test_run_without_episodes_is_named(tmp_path: Path) -> None:
    write(tmp_path / "r" / "problems.jsonl", [{"uid": "x", "prompt": "go", "row": {}}])
    write(tmp_path / "r" / "completions.jsonl", [{"uid": "x", "completion": "a"}])
    with pytest.raises(DataError, match="no scored episodes"):
        rows_of("spliced.py:questions", params={"run": str(tmp_path / "r")})


# --- PRA: labels of steps by a teacher


def test_teacher_labels_each_step_with_and_without_evidence(tmp_path: Path) -> None:
    """Two completions of three steps and one: four rows, each the solution up to a step.

    Labels follow from the model's next-token log-probs of `1` and `0`.
    """
    write(tmp_path / "r" / "problems.jsonl", [{"uid": "x", "prompt": "1+1=", "row": {"document": "one and one: 2"}}])
    texts = ["one.two.three", "2"]
    write(tmp_path / "r" / "completions.jsonl", [{"uid": "x", "completion": text} for text in texts])
    rows = rows_of("step_labels.py:label_steps", params={"run": str(tmp_path / "r"), "teacher": "tiny", "ends": "."})
    assert [row["completion"] for row in rows] == ["one.", "one.two.", "one.two.three", "2"]
    assert {row["prompt"] for row in rows} == {"1+1="}
    module = function("step_labels.py:label_steps").__globals__
    bare = [module["ASK"].format(question="1+1=", steps=row["completion"]) for row in rows]
    informed = [module["EVIDENCE"].format(document="one and one: 2") + text for text in bare]
    ask = function("step_labels.py:ask_teacher")
    margins = [one - zero for one, zero in ask("tiny", [*bare, *informed])]
    shifts = [abs(a - b) for a, b in zip(margins[:4], margins[4:], strict=True)]
    assert [row["reasoning"] for row in rows] == [int(margin > 0) for margin in margins[4:]]
    assert sum(row["search"] for row in rows) == 2  # above the median of four
    assert {row["search"] for row, shift in zip(rows, shifts, strict=True) if shift >= sorted(shifts)[2]} == {1}
    twice = rows_of("step_labels.py:label_steps", params={"run": str(tmp_path / "r"), "teacher": "tiny", "ends": ".",
                                                       "shown": True})  # fmt: skip
    assert [(row["search"], row["reasoning"]) for row in twice[::2]] == [(row["search"], None) for row in rows]
    assert [(row["search"], row["reasoning"]) for row in twice[1::2]] == [(None, row["reasoning"]) for row in rows]
    assert {row["prompt"] for row in twice[1::2]} == {"Evidence:\none and one: 2\n\n1+1="}
    loaded = load(Model(path="tiny"), tmp_path)
    written = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": bare[0]}], add_generation_prompt=True, tokenize=False
    )
    ids = loaded.tokenizer(written, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        last = loaded.model(ids).logits[0, -1].log_softmax(-1)
    expected = [float(last[loaded.tokenizer.encode(t, add_special_tokens=False)[0]]) for t in "10"]
    assert ask("tiny", bare)[0] == pytest.approx(expected, abs=1e-5)


def test_missing_column_is_named(tmp_path: Path) -> None:
    write(tmp_path / "r" / "problems.jsonl", [{"uid": "x", "prompt": "1+1=", "row": {}}])
    write(tmp_path / "r" / "completions.jsonl", [{"uid": "x", "completion": "2"}])
    with pytest.raises(DataError, match="a row without the column `document`"):
        rows_of("step_labels.py:label_steps", params={"run": str(tmp_path / "r"), "teacher": "tiny"})


# --- the pipelines


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["proact_tiny", "agent_r_tiny", "pra_tiny", "lspo_tiny"])
def test_shipped_pipelines_run(recipe: str, tmp_path: Path) -> None:
    """ProAct's policy learns to look ahead and its episodes have returns of random plays; Agent-R trains on paths
    whose bad step the policy named; PRA's search is guided by the agent that learned the teacher's labels; LSPO's
    games are clustered, solved, and trained on in pairs, twice.
    """
    found = CliRunner().invoke(app, ["run", recipe, "--output", str(tmp_path / "run")])
    assert found.exit_code == 0, found.output
    seed = tmp_path / "run" / "seed-0"
    if recipe == "proact_tiny":
        losses = [row["loss"] for row in read_rows(seed / "imitation" / "metrics.jsonl")]
        assert losses[-1] < 0.5 * losses[0]
        assert any(row["grad_norm"] > 0 for row in read_rows(seed / "play" / "metrics.jsonl"))
    elif recipe == "agent_r_tiny":
        assert len(read_rows(seed / "revised" / "metrics.jsonl")) == 3
        trees = [record["tree"] for record in read_rows(seed / "paths" / "completions.jsonl")]
        assert any(len({path["nodes"][0] for path in tree["paths"]}) > 1 for tree in trees), "the tree branched"
        assert all(path["turns"] and 0 <= path["reward"] <= 1 for tree in trees for path in tree["paths"])
    elif recipe == "lspo_tiny":
        for number in (1, 2):
            games = read_rows(seed / f"improve.{number}.games" / "completions.jsonl")
            assert all("won" in call["note"] for game in games for call in game["calls"])
            last = read_rows(seed / f"improve.{number}.train" / "metrics.jsonl")[-1]
            assert last["rewards/margins"] > 0, "speeches of better strategies became more likely than those of worse"
    else:
        rewards = [record["search"]["search/reward"] for record in read_rows(seed / "answers" / "completions.jsonl")]
        assert len(rewards) == 6 and all(0 < reward < 5 for reward in rewards)


def test_evidence_for_a_step_is_retrieved_from_a_corpus() -> None:
    """By the words of the question and of the last step; rare words weigh more."""
    step, retrieve = function("step_labels.py:Step"), function("step_labels.py:retrieve")
    texts = ["Oslo lies in Norway.", "Rome lies in Italy.", "The lira was money of Italy."]
    asked = step("Where does it lie?", "Rome is old.\n\nIt paid in lira.\n\n", "")
    assert retrieve(asked, texts, 1, "\n\n") == texts[2]
    assert retrieve(asked._replace(steps="Rome is old.\n\n"), texts, 1, "\n\n") == texts[1]

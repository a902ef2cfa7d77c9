"""Published systems through the command line on `tiny`, three steps each: the central mechanism of each system takes
effect.

docs/systems.yaml names the test of each system; this file has the tests that are in no other file.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.evaluate import implicit_reward
from posttrain.path_resolution import shipped_folder
from posttrain.recipe import presets
from posttrain.train.critic import TwinHead
from posttrain.verify.examples import Example, read_examples

from .test_pair_losses import NUMBERS, SETTINGS

pytestmark = pytest.mark.slow
Values = dict[str, Any]


def ran(cli: Any, folder: Path, values: Values, *, rows: list[Values], name: str = "run") -> list[Values]:
    """Run the recipe in `folder` on these rows and return its metrics."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    around: Values = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "run": {"steps": 3}}
    recipe = folder / f"{name}.yaml"
    recipe.write_text(json.dumps({**around, **values}))
    cli.run(values["stage"].replace("_", "-"), str(recipe), "--output", str(folder / name))
    found: list[Values] = cli.rows_of(folder / name)
    return found


def samples(run: Path) -> list[Values]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", presets.names("dpo"))
def test_preference_preset_widens_the_margin(name: str, cli: Any, tmp_path: Path) -> None:
    """Runs `algorithm: NAME` on pairs with every column that such a loss may read.

    The target margin of mnpo is finite, and its history starts above it.
    """
    loss = {"loss": SETTINGS[use]} if (use := presets.preset(name).choices["loss"]["use"]) in SETTINGS else {}
    rows = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i), "rejected": f"{i} {i} {i}", **NUMBERS} for i in range(12)]
    if name == "kto":
        rows = [{"prompt": f"{i}+{i}=", "completion": str(i), "label": i % 2 == 0} for i in range(12)]
    around: Values = {"optim": {"lr": 1e-3}, "batch": {"size": 12}, "run": {"steps": 5}}
    values = {"stage": "dpo", "algorithm": name, **presets.preset(name).example, **loss, **around}
    metrics = ran(cli, tmp_path, values, rows=rows)
    assert len(metrics) == 5
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert name == "mnpo" or metrics[-1]["rewards/margins"] > metrics[0]["rewards/margins"] + 1e-4


REWARDS = (
    "qa.ansf1",
    "qa.craft_qa",
    "qa.reseek",
    "qa.search_r2",
    "reasoning.critique_rl",
    "reasoning.dianjin",
    "reasoning.srpo_reflection",
    "reasoning.taco_tac",
    "bleu.bleuberi",
    "numeric.distance",
    "structured.rl_struct",
    "sql.reasoning_sql",
    "tools.toolrl",
    "boxes.visual_rft_iou",
    "countdown.expression",
)


def expected_reward(example: Example) -> float | None:
    """Return the reward that an example expects."""
    found = example.expected["reward"] if isinstance(example.expected, Mapping) else example.expected
    return None if found is None else float(found)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", REWARDS)
def test_shipped_reward_scores_its_examples_in_a_run(use: str, cli: Any, tmp_path: Path) -> None:
    """Stored completions from the reward's examples get the expected rewards in a run and are trained on."""
    script, function = use.split(".")
    path = Path(str(shipped_folder("rewards").joinpath(f"{script}.py")))
    known = [
        e for e in read_examples(path)[function] if not e.params and e.completion and expected_reward(e) is not None
    ]
    known = [e for e in known if e.columns.keys() == known[0].columns.keys()][:8]
    rows = [
        {"prompt": f"Question {n}?", "completion": e.completion, **e.columns, "paid": expected_reward(e)}
        for n, e in enumerate(known)
    ]
    assert len({row["paid"] for row in rows}) > 1
    values: Values = {
        "stage": "rl",
        "rollout": {"engine": "stored", "group_size": 1, "prompts_per_step": len(rows), "max_new_tokens": 1000},
        "rewards": [{"use": use}],
        "scoring": {"workers": 1, "max_bad_gold": 1},
        "advantage": "batch",
        "loss": "reinforce",
        "run": {"steps": 3, "samples_per_step": 99},
    }
    metrics = ran(cli, tmp_path, values, rows=rows)
    assert len(metrics) == 3 and all(row["grad_norm"] > 0 for row in metrics)
    expected = {row["prompt"]: row["paid"] for row in rows}
    found = {prompt: s["reward"] for s in samples(tmp_path / "run") for prompt in expected if prompt in s["prompt"]}
    assert found == pytest.approx(
        expected, abs=0.05
    )  # srpo_reflection counts tokens, and this tokenizer counts differently


WORLD = '''
class World:
    """Never ends by itself; each turn earns whether its text is short."""

    def __init__(self, **_): self.turns = []
    def reset(self, row): return None
    def step(self, text):
        self.turns.append(text)
        return f"turn {len(self.turns)} was {len(text)} characters", False
    def score(self): return sum(len(t) % 2 for t in self.turns) / max(len(self.turns), 1)
    def close(self): pass
'''


def test_turn_limit_grows_by_stage(cli: Any, tmp_path: Path) -> None:
    """ScalingInter-RL: one turn in the first step, two in the second, three in the third; replies are scripted."""
    (tmp_path / "world.py").write_text(WORLD)
    values: Values = {
        "stage": "rl",
        "environment": {"use": "world.py:World"},
        "rollout": {
            **{"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 200, "turn_tokens": 12, "max_turns": 3},
            "stop": ["e", "a", "o", "i", "1", " "],
        },
        "rewards": [{"use": "environment.score", "correct": True}],
        "scoring": {"workers": 1},
        "controllers": {"rollout.max_turns": {"use": "equal_stages", "values": [1, 2, 3], "every": 1}},
        "run": {"steps": 3, "samples_per_step": 99},
    }
    metrics = ran(cli, tmp_path, values, rows=[{"prompt": f"Go {i}!"} for i in range(12)])
    assert [row["control/rollout.max_turns"] for row in metrics] == [1, 2, 3]
    turns = [row["turns/mean"] for row in metrics]
    assert turns[0] == 1 < turns[1] <= 2 and turns[1] < turns[2] <= 3
    assert [row["turns/reply_tokens"] > 0 for row in metrics] == [False, True, True]
    assert all(row["completions/max_length"] <= 12 * n for n, row in enumerate(metrics, 1)), "replies are no samples"


def test_two_value_heads_are_pessimistic_when_they_disagree(cli: Any, tmp_path: Path) -> None:
    """SAFE: both heads learn and stay different, and the values used for advantages are below their mean."""
    values: Values = {
        "stage": "rl",
        "algorithm": "safe",
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8},
        "rewards": [{"use": "rewards.py:even", "correct": True}],
        "scoring": {"workers": 1},
        "critic": {"lr": 1e-2},
        "run": {"steps": 3, "save_every": 1},
    }
    (tmp_path / "rewards.py").write_text("def even(completion): return float(len(completion) % 2)\n")
    metrics = ran(cli, tmp_path, values, rows=[{"prompt": f"{i}+{i}="} for i in range(12)])
    assert all({"control/kl.coef", "entropy_bonus"} <= row.keys() for row in metrics)
    heads = [load_file(path) for path in sorted((tmp_path / "run" / "checkpoints").glob("*/critic.safetensors"))]
    first, last = heads[0], heads[-1]
    assert last["weight"].shape[0] == 2
    assert (last["weight"] - first["weight"]).abs().amax(-1).min() > 1e-3, "both move"
    head = TwinHead(last["weight"].shape[1], 0.3)
    head.load_state_dict(last)
    states = torch.randn(64, head.in_features, generator=torch.Generator().manual_seed(0))
    apart = torch.nn.functional.linear(states, head.weight, head.bias)
    assert (apart[:, 0] - apart[:, 1]).abs().max() > 0.01
    assert bool((head(states)[:, 0] <= apart.mean(-1) + 1e-6).all())


def test_question_with_shuffled_options_is_answered_again(cli: Any, tmp_path: Path) -> None:
    """ACRE, with a character that the tiny model sometimes writes as `close`: such rows get a second answer, which
    rewards read. Only the completion is trained on.
    """
    (tmp_path / "marks.py").write_text(
        "def second(completion):\n"
        "    head, _, tail = completion.rpartition('<second permutation=')\n"
        "    assert head.endswith(chr(10)) and tail.endswith('</second>')\n"
        "    return float(len(tail.partition('>')[2]) > len('</second>'))\n"
        "def even(completion): return float(len(completion) % 2)\n"
    )
    values: Values = {
        "stage": "rl",
        "rollout": {
            **{"prompts_per_step": 4, "group_size": 6, "max_new_tokens": 40, "stop": ["a", "o"]},
            "shape": {"use": "shuffled_options", "close": "e", "answer_tokens": 6},
        },
        "rewards": [
            {"use": "reasoning.acre"},
            {"use": "marks.py:even", "weight": 0.1, "correct": True},
            {"use": "marks.py:second", "weight": 0},
        ],
        "scoring": {"workers": 1, "max_bad_gold": 1},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "samples_per_step": 99},
    }
    rows = [
        {
            "prompt": f"{i}+{i}=? A. {2 * i} B. {2 * i + 1} C. none",
            "options": [f"{2 * i}", f"{2 * i + 1}", "none"],
            "answer": "A",
        }
        for i in range(10, 22)
    ]
    metrics = ran(cli, tmp_path, values, rows=rows)
    assert all(row["grad_norm"] > 0 and "rewards/acre/consistent/mean" in row for row in metrics)
    shares = [row["rewards/second/mean"] for row in metrics]
    assert max(shares) > 0 and min(shares) < 1, "some thoughts ended and were answered again"
    assert all(len(sample["segments"]) == 1 for sample in samples(tmp_path / "run") if sample.get("segments"))


def test_ratio_is_clipped_around_averaged_weights(cli: Any, tmp_path: Path) -> None:
    """PPO-EWMA: the averaged weights lag the policy, follow each of two updates per step, and are in checkpoints."""
    values: Values = {
        "stage": "rl",
        "algorithm": "decoupled_ppo",
        "loss": {"use": "ppo_ewma", "decay": 0.5},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "staleness": 1},
        "rewards": [{"use": "rewards.py:even", "correct": True}],
        "scoring": {"workers": 1},
        "batch": {"minibatches": 2},
        "optim": {"lr": 1e-2},
        "run": {"steps": 3, "save_every": 1, "keep_checkpoints": 9},
    }
    (tmp_path / "rewards.py").write_text("def even(completion): return float(len(completion) % 2)\n")
    rows = [{"prompt": f"{i}+{i}="} for i in range(12)]
    metrics = ran(cli, tmp_path, values, rows=rows)
    run = tmp_path / "run"
    updates = sum(row["updates"] for row in metrics)
    average = load_file(run / "checkpoints" / "step-00000003" / "proximal.safetensors")
    assert updates == 6 and float(average.pop("total_weight")) == pytest.approx(sum(0.5**n for n in range(7)))
    policy = load_file(run / "checkpoints" / "step-00000003" / "model.safetensors")
    apart = [float((average[name] - policy[name]).abs().max()) for name in average if name in policy]
    assert max(apart) > 1e-3, "it is behind the policy"
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    (run / "summary.json").unlink()
    cli.run("rl", str(tmp_path / "run.yaml"), "--output", str(run), "--resume")
    assert cli.rows_of(run) == metrics


def test_dpo_log_ratio_scores_answers_and_guides_a_search(cli: Any, tmp_path: Path) -> None:
    """From r to Q*: after DPO, digits score higher than letters by the model's log-ratio, and a search by that score
    finds better answers than sampling.
    """
    pairs = [{"prompt": f"{i}+{i}=", "chosen": str(2 * i) * 3, "rejected": "abcdef"} for i in range(12)]
    start = {"stage": "sft", "optim": {"lr": 1e-6}, "run": {"steps": 1}}
    ran(cli, tmp_path, start, rows=[{"prompt": "1+1=", "completion": "2"}] * 4, name="start")
    around: Values = {"batch": {"size": 12}, "optim": {"lr": 3e-3}, "run": {"steps": 5}, "loss": {"use": "dpo"}}
    ran(cli, tmp_path, {"stage": "dpo", "model": {"path": "start/final"}, **around}, rows=pairs, name="dpo")
    worth = {"use": "implicit_reward", "params": {"path": "dpo/final", "reference": "start/final"}}
    rows = [{"prompt": f"{i}+{i}=", "completion": text} for i in range(4) for text in (str(2 * i) * 3, "abcdef")]
    stored: Values = {
        "stage": "rl",
        "model": {"path": "start/final"},
        "rollout": {"engine": "stored", "group_size": 1, "prompts_per_step": 8, "max_new_tokens": 20},
        "rewards": [worth],
        "scoring": {"workers": 1},
        "advantage": "batch",
        "loss": "reinforce",
        "run": {"steps": 3, "samples_per_step": 99},
    }
    metrics = ran(cli, tmp_path, stored, rows=rows, name="rl")
    assert all({"rewards/implicit_reward/lowest_at/mean"} <= row.keys() for row in metrics)
    first = [sample for sample in samples(tmp_path / "rl") if sample["step"] == 1]
    digits, letters = (
        [s["reward"] for s in first if ("abc" in s["completion"]) == is_text] for is_text in (False, True)
    )
    assert len(digits) == len(letters) == 4 and min(digits) > max(letters)

    asked: Values = {
        "stage": "generate",
        "model": {"path": "start/final"},
        "sampling": {"max_new_tokens": 6},
        "run": {},
    }
    search = {"beam": 2, "branch": 3, "step_tokens": 2, "max_steps": 3, "rewards": [worth]}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(6)))
    for name, more in (("found", {"search": search}), ("drawn", {})):
        recipe = {"data": {"source": "rows.jsonl"}, **asked, **more}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(recipe))
        cli.run("generate", str(tmp_path / f"{name}.yaml"), "--output", str(tmp_path / name))
    texts = [
        [json.loads(line)["completion"] for line in (tmp_path / name / "completions.jsonl").read_text().splitlines()]
        for name in ("found", "drawn")
    ]
    means = []
    for some in texts:
        conversations = [[{"role": "user", "content": f"{i}+{i}="}] for i in range(6)]
        values = implicit_reward.score(some, conversations, **{**worth["params"], "base_dir": str(tmp_path)})
        means.append(sum(v["reward"] for v in values if v) / max(sum(v is not None for v in values), 1))
    assert means[0] > means[1]

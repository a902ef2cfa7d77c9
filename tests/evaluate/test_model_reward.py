"""Reward models as rewards: the tokens that they were trained on, how members are combined, where they run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.data.prepare import prepare_pairs
from posttrain.errors import ModelError, RewardError
from posttrain.evaluate import model_reward
from posttrain.models import scorer
from posttrain.models.scorer import Card
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.recipe.sections import Data, Model
from posttrain.verify.contract import in_trainer
from posttrain.verify.load import load_reward
from posttrain.verify.score import Sample, Scorer

TEXTS = ["4", "44444444", "five"]
ASKED = [{"role": "user", "content": "2+2"}]


@pytest.fixture(autouse=True)
def let_go():
    yield
    model_reward.close_models()


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """Write a reward model with fresh, untrained heads to a folder NAME."""

    def make(name: str, outputs: int = 1, seed: int = 0, **card: Any) -> Path:
        loaded = scorer.load(Model(path="tiny"), tmp_path, outputs=outputs, seed=seed)
        torch.manual_seed(seed)
        torch.nn.init.normal_(loaded.model.score.weight, std=0.3)
        scorer.save(loaded, tmp_path / name, Card(**{"data": {"chat": True, "system": None}, **card}))
        return tmp_path / name

    return make


def scores(**params: Any) -> list[Any]:
    return model_reward.score(TEXTS, [ASKED] * 3, **params)


def test_reward_model_reads_the_same_tokens_as_in_training(made, tmp_path):
    """A pair's sides as `prepare_pairs` renders them for training, including the system message."""
    folder = made("rm", data={"chat": True, "system": "Be brief.", "prompt_template": None})
    row = {"prompt": "2+2", "chosen": "4", "rejected": "five"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    one = model_reward._load_models(str(folder), ".", "cpu", "auto")[0]
    section = Data(source="rows.jsonl", system="Be brief.")
    pair = prepare_pairs(section, one.model.tokenizer, tmp_path).items[0]
    assert model_reward.read_row(one, ASKED, None, None, "4").ids == pair.prompt_ids + pair.chosen_ids
    asked = [*ASKED, {"role": "assistant", "content": "gold"}]
    assert model_reward.read_row(one, asked, None, None, "five").ids == pair.prompt_ids + pair.rejected_ids


def test_members_are_combined(made):
    """uwo: mean - 0.5 * variance; wco: the lowest; the deviation is logged. A single model has none."""
    paths = [str(made(f"rm{n}", seed=n)) for n in range(3)]
    each = torch.tensor([scores(path=p) for p in paths])
    found = scores(path=paths, calibrate=False)
    assert [f["reward"] for f in found] == pytest.approx((each.mean(0) - 0.5 * each.var(0, correction=0)).tolist())
    assert [f["spread"] for f in found] == pytest.approx(each.std(0, correction=0).tolist())
    lowest = scores(path=paths, aggregate="wco", calibrate=False)
    assert [f["reward"] for f in lowest] == pytest.approx(each.amin(0).tolist())
    worst = scores(path=paths, aggregate="maxmin", calibrate=False)
    assert [f["reward"] for f in worst] == pytest.approx(each[each.mean(1).argmin()].tolist())


def test_member_scores_are_standardized(made):
    """(score - center) / scale of each member, as measured on held-out answers."""
    a, b = str(made("a", seed=1, center=(1.0,), scale=(2.0,))), str(made("b", seed=2, center=(-3.0,), scale=(0.5,)))
    first, second = torch.tensor(scores(path=a)), torch.tensor(scores(path=b))
    found = scores(path=[a, b], aggregate="mean")
    expected = ((first - 1) / 2 + (second + 3) / 0.5) / 2
    assert [f["reward"] for f in found] == pytest.approx(expected.tolist(), rel=1e-5)
    assert scores(path=a, calibrate=True) == pytest.approx(((first - 1) / 2).tolist())


def test_labels_are_parts_with_weights(made):
    folder = str(made("rm", outputs=2, use="label_regression", heads=("safe", "kind")))
    found = scores(path=folder)
    assert all(f["reward"] == pytest.approx(f["safe"] + f["kind"], abs=1e-6) for f in found)
    half = scores(path=folder, weights={"kind": 0.5})
    assert [f["reward"] for f in half] == pytest.approx([0.5 * f["kind"] for f in found])
    with pytest.raises(RewardError, match="weights names clean"):
        scores(path=folder, weights={"clean": 1.0})


def test_gaussian_heads_give_brme(made):
    """Three means and three log-deviations: the mean of the most certain head, averaged with the lowest mean."""
    folder = str(made("rm", outputs=6, use="gaussian", heads=("a", "b", "c")))
    one = model_reward._load_models(folder, ".", "auto", "auto")[0]
    rows = [model_reward.read_row(one, ASKED, None, None, text).ids for text in TEXTS]
    means, log_stds = scorer.score_rows(one.model, rows).chunk(2, dim=1)
    nominal = means.gather(1, log_stds.argmin(1, keepdim=True))[:, 0]
    expected = 0.6 * nominal + 0.4 * means.amin(1)
    assert [f["reward"] for f in scores(path=folder, calibrate=False)] == pytest.approx(expected.tolist(), rel=1e-5)
    with pytest.raises(RewardError, match="needs Gaussian heads"):
        scores(path=str(made("plain")), aggregate="brme")


def test_scorer_runs_reward_models_in_process_and_scripts_in_workers(made, tmp_path):
    made("rm")
    rewards = [
        Reward(use="math.accuracy"),
        Reward(use="reward_model", weight=0.5, params={"path": "rm"}),
    ]
    samples = [Sample(completion=t, row={"uid": str(n), "prompt": "2+2", "answer": "4"}) for n, t in enumerate(TEXTS)]
    with Scorer(rewards, Scoring(workers=1), tmp_path) as scored:
        assert model_reward._load.cache_info().currsize, "loaded before the policy is"
        found = scored.score(samples)
    assert not model_reward._load.cache_info().currsize, "let go"
    expected = scores(path="rm", base_dir=str(tmp_path))
    assert found.components["reward_model"] == pytest.approx(expected)
    assert found.rewards[1] == pytest.approx(found.components["accuracy"][1] + 0.5 * expected[1])
    alone = Scorer(rewards[1:], Scoring(), tmp_path)
    with alone:
        assert alone.pool.workers == []
        assert alone.score(samples).rewards == pytest.approx([0.5 * e for e in expected])


PID: list[int] = []


@in_trainer(lambda **_: None, lambda: None)
def wrong(completions, **_):
    PID.append(os.getpid())
    return [1.0] * (len(completions) + 1)


def test_invalid_reward_model_output_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr("posttrain.evaluate.model_reward.score", wrong)
    with (
        Scorer([Reward(use="reward_model", params={"path": "a"})], Scoring(), tmp_path) as scored,
        pytest.raises(RewardError, match="must return a list of one number"),
    ):
        scored.score([Sample(completion="x", row={})])
    assert os.getpid() in PID


@pytest.mark.parametrize(
    ("params", "error", "told"),
    [
        ({}, RewardError, "path: FOLDER"),
        ({"path": "./nowhere"}, ModelError, "model not found: ./nowhere"),
        ({"path": "tiny"}, RewardError, "tiny is no reward model"),
    ],
)
def test_wrong_path_is_reported_before_scoring(params, error, told, tmp_path):
    with pytest.raises(error, match=told), Scorer([Reward(use="reward_model", params=params)], Scoring(), tmp_path):
        pass


def test_typos_are_reported():
    with pytest.raises(RewardError, match="did you mean `aggregate`"):
        load_reward(Reward(use="reward_model", params={"agregate": "uwo"}), None)
    with pytest.raises(RewardError, match="did you mean `reward_model`"):
        load_reward(Reward(use="reward_modle"), None)


def test_reward_model_is_trained_and_used_in_one_pipeline(tmp_path):
    """A reward model of one stage is the reward of the next; a stage without a model cannot be a reward."""
    from posttrain.errors import RecipeError
    from posttrain.pipeline import run_stage
    from posttrain.recipe.load import load_dict
    from posttrain.run.directory import RunDirectory
    from posttrain.run.metrics import read_metrics

    rows = [{"prompt": f"{n}", "chosen": "12", "rejected": "0"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}}
    trained = {"name": "rm", "stage": "reward_model", **common, "batch": {"size": 4}, "run": {"steps": 1}}
    policy = {
        "name": "rl", "stage": "rl", **common, "run": {"steps": 1},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
        "rewards": [{"use": "reward_model", "params": {"path": "stage:rm"}}],
    }  # fmt: skip
    pipeline = {"stage": "pipeline", "stages": [trained, policy]}
    loaded = load_dict(pipeline, base_dir=tmp_path, where="test")
    with RunDirectory.open(tmp_path / "run", name="p", text="", resolved=loaded.resolved) as directory:
        run_stage(loaded.recipe, directory)
    (step,) = read_metrics(tmp_path / "run" / "seed-0" / "rl")
    assert step["rewards/reward_model/mean"] == pytest.approx(step["reward"]) and step["reward"] != 0
    wrong = {**policy, "model": {"path": "stage:rm"}}
    with pytest.raises(RecipeError, match="does not produce a model"):
        load_dict({"stage": "pipeline", "stages": [trained, wrong]}, base_dir=tmp_path, where="test")

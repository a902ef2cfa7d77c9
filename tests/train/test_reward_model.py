"""Reward models on `tiny`: learning from pairs, labels and users, saving, and the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from posttrain.errors import DataError, Interrupted, ModelError, RecipeError
from posttrain.images import Image
from posttrain.models import scorer
from posttrain.recipe.load import load_dict
from posttrain.recipe.sections import Model
from posttrain.train import reward_model
from posttrain.train.reward_rows import Item, count_lone_pairs, heads_of_row, held_out

from .conftest import merge_sections


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def digit_pairs(draw: random.Random, count: int, of: str = "0123456789") -> str:
    return "".join(draw.choice(of) for _ in range(count))


def length_biased_pairs(n: int) -> list[dict[str, Any]]:
    """Return pairs of which 95% prefer the longer answer, with no other difference."""
    draw = random.Random(0)
    rows = []
    for i in range(n):
        short = draw.randrange(2, 8)
        sides = [digit_pairs(draw, short), digit_pairs(draw, short + draw.randrange(0, 10))]
        if draw.random() < 0.05:
            sides.reverse()
        rows.append({"prompt": f"{i % 10}", "chosen": sides[1], "rejected": sides[0]})
    return rows


def content_pairs(n: int) -> list[dict[str, Any]]:
    """Return pairs that prefer answers with an `x`; lengths of both sides have the same distribution."""
    draw = random.Random(1)
    texts = [[digit_pairs(draw, draw.randrange(3, 9)) for _ in range(2)] for _ in range(n)]
    return [{"prompt": "1", "chosen": a[:-1] + "x", "rejected": b} for a, b in texts]


@pytest.fixture
def recipe_of(tmp_path: Path) -> Any:
    """Return a function that builds a reward-model recipe on rows; keyword arguments change keys of its sections."""
    base = {
        "stage": "reward_model",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "objective": {"holdout": 0.25},
        "batch": {"size": 16, "micro_size": 8},
        "optim": {"lr": 3e-3},
        "run": {"steps": 6},
    }

    def make(rows: list[dict[str, Any]], **changes: Any) -> Any:
        write_rows(tmp_path / "rows.jsonl", rows)
        return load_dict(merge_sections(base, changes), base_dir=tmp_path, where="test").recipe

    return make


def test_length_bias_is_in_the_report(recipe_of, opened):
    with opened() as directory:
        summary = reward_model.run(recipe_of(length_biased_pairs(320), run={"steps": 50}), directory)
    length = summary["report"]["length"]
    assert summary["report"]["accuracy"]["low"] > 0.7
    assert length["correlation"] > 0.5
    assert length["scores_longer_higher"]["low"] > 0.7
    assert length["accuracy_chosen_shorter"]["mean"] is None or length["accuracy_chosen_shorter"]["mean"] < 0.5
    told = " ".join(summary["findings"])
    assert "prefers the longer answer" in told and "`the longer answer wins` is as good" in told


def test_model_without_length_bias_is_not_reported(recipe_of, opened):
    with opened() as directory:
        summary = reward_model.run(recipe_of(content_pairs(320), run={"steps": 40}), directory)
    report = summary["report"]
    assert report["accuracy"]["low"] > 0.9
    assert report["length"]["accuracy_matched"]["low"] > 0.5
    assert not any("longer" in line or "shorter" in line for line in summary["findings"])


@pytest.mark.parametrize("model", [{"path": "tiny"}, {"path": "tiny", "lora": {"rank": 4}}], ids=["full", "lora"])
def test_plain_transformers_gives_the_same_scores(recipe_of, opened, tmp_path, model):
    with opened() as directory:
        summary = reward_model.run(recipe_of(content_pairs(64), model=model), directory)
    assert summary["save"]["max_score_gap"] < 1e-4
    folder = tmp_path / "run" / "final"
    tokenizer, plain = AutoTokenizer.from_pretrained(folder), AutoModelForSequenceClassification.from_pretrained(folder)
    loaded = scorer.load(Model(path=str(folder)), tmp_path)
    rows = [tokenizer(text)["input_ids"] for text in ("12x", "1", "3333333x")]
    batch = scorer.pad_rows(rows, loaded.pad_id)
    torch.testing.assert_close(plain.eval()(**batch).logits, scorer.score_rows(loaded, rows))
    assert plain.config.id2label == {0: "reward"}
    card = scorer.read_card(folder, 1)
    assert card.heads == ("reward",) and card.data["chat"] is True and card.scale[0] > 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": {"lora": {"rank": 4}}},
        {"objective": {"use": "mixture", "user": "who", "rounds": 2}},
        {"objective": {"best_response": 0.05}},
    ],
    ids=["full", "lora", "mixture", "best_response"],
)
def test_run_resumes_exactly(recipe_of, opened, rows_of, monkeypatch, changes):
    rows = [{**row, "who": f"u{n % 5}"} for n, row in enumerate(content_pairs(48))]
    recipe = recipe_of(rows, **changes)
    unbroken = rows_of(reward_model.run, recipe, "unbroken")
    original = reward_model.RewardTrainer.log

    def stop_after_three(self, logs, start_time=None):
        self.stop.requested = self.job.state.step == 2
        original(self, logs, start_time)

    with opened("broken") as directory, monkeypatch.context() as patched, pytest.raises(Interrupted):
        patched.setattr(reward_model.RewardTrainer, "log", stop_after_three)
        reward_model.run(recipe, directory)
    assert rows_of(reward_model.run, recipe, "broken", resume=True) == unbroken


@pytest.mark.parametrize("use", ["bradley_terry", "label_regression", "soft_label", "gaussian"])
def test_micro_batches_change_nothing(recipe_of, rows_of, use):
    """Rows of uneven length, heads trained on different rows, and missing labels."""
    draw = random.Random(3)
    if use == "bradley_terry":
        rows, objective = content_pairs(48), {"heads": 3, "share": 0.5}
    else:
        rows = [
            {"prompt": "1", "completion": digit_pairs(draw, 3 + n % 7), "good": n % 3, "kind": n % 2} for n in range(48)
        ]
        for row in rows[::4]:
            row["kind"] = None
        labels = ["good"] if use == "gaussian" else ["good", "kind"]
        if use == "soft_label":
            rows = [{**row, "good": row["good"] / 2} for row in rows]
        objective = {"use": use, "labels": labels} | ({"heads": 2} if use == "gaussian" else {})
    found = [
        rows_of(reward_model.run, recipe_of(rows, objective=objective, batch={"micro_size": micro}), f"m{micro}")
        for micro in (16, 4)
    ]
    for one, other in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "score"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_attention_does_nothing_with_tiny(tmp_path):
    """As its causal model: the key once changed the classifier alone, and a missing flash-attn was an ImportError."""
    section = Model(path="tiny", device="cpu", attention="flash_attention_2")
    rows = [[5, 6, 7]]
    given, plain = (scorer.load(s, tmp_path, outputs=1) for s in (section, Model(path="tiny", device="cpu")))
    torch.testing.assert_close(scorer.score_rows(given, rows), scorer.score_rows(plain, rows), rtol=0, atol=0)


def test_labels_are_learned_and_missing_ones_ignored(recipe_of, opened, tmp_path):
    draw = random.Random(2)
    rows = []
    for n in range(240):
        x, y = draw.random() < 0.5, draw.random() < 0.5
        text = digit_pairs(draw, 4) + ("x" if x else "") + ("y" if y else "")
        rows.append({"prompt": "1", "completion": text, "has_x": float(x), "has_y": float(y) if n % 3 else None})
    objective = {"use": "label_regression", "labels": ["has_x", "has_y"]}
    with opened() as directory:
        summary = reward_model.run(recipe_of(rows, objective=objective, run={"steps": 60}), directory)
    found = summary["report"]["labels"]
    assert found["has_y"]["rows"] < found["has_x"]["rows"] == 60
    assert found["has_x"]["mse"]["high"] < found["has_x"]["variance"] / 2
    assert found["has_y"]["correlation"] > 0.7
    loaded = scorer.load(Model(path=str(tmp_path / "run" / "final")), tmp_path)
    assert loaded.model.config.id2label == {0: "has_x", 1: "has_y"}


def test_mixture_separates_two_groups_of_users(recipe_of, opened, tmp_path):
    """Half of the users prefer the answer with x, the others the answer without: one head cannot fit both."""
    rows = []
    for n, row in enumerate(content_pairs(300)):
        sides = (row["chosen"], row["rejected"]) if n % 10 < 5 else (row["rejected"], row["chosen"])
        rows.append({"prompt": "1", "chosen": sides[0], "rejected": sides[1], "who": f"u{n % 10}"})
    objective = {"use": "mixture", "user": "who", "rounds": 4}
    with opened() as directory:
        summary = reward_model.run(recipe_of(rows, objective=objective, run={"steps": 48}), directory)
    assert summary["report"]["accuracy"]["low"] > 0.8
    assert sorted(summary["report"]["users_by_head"]) == [5, 5]
    users = scorer.read_card(tmp_path / "run" / "final", 2).users
    assert len({users[f"u{n}"] for n in range(5)}) == 1 and users["u0"] != users["u9"]


@pytest.mark.slow
def test_parl_lowers_scores_of_pairs_with_high_loss(recipe_of, opened, monkeypatch):
    """PARL: against a model trained on the pairs alone, the summed scores of a pair are lower the more its initial loss
    exceeded that of its prompt's other pairs."""
    seen = {}

    def trained(name, **objective):
        begin = reward_model.RewardTrainer.begin

        def begin_seen(self, items):
            begin(self, items)
            seen[name] = self

        changes = {"objective": {"holdout": 0.0, **objective}, "optim": {"lr": 5e-4}, "run": {"steps": 18}}
        with opened(name) as directory, monkeypatch.context() as patched:
            patched.setattr(reward_model.RewardTrainer, "begin", begin_seen)
            reward_model.run(recipe_of(content_pairs(48), **changes), directory)
        scores = reward_model.score_items(seen[name].job.loaded, seen[name].items.trained)
        return (scores[0::2] + scores[1::2])[:, 0]

    moved = trained("bilevel", best_response=0.3) - trained("plain")
    excess = torch.tensor(seen["bilevel"].job.state.memory["at_start"]["excess"])[:, 0]
    assert excess.std() > 0 and torch.corrcoef(torch.stack([moved, excess]))[0, 1] < -0.3


@pytest.mark.slow
def test_policy_and_reward_model_train_alternately(tmp_path, cli):
    """recipes/parl_tiny.yaml: the second reward model starts from the first, on pairs of the policy that optimized it,
    and changes from there; the policy then trains on it."""
    cli.run("run", "parl_tiny", "--output", str(tmp_path / "run"))
    runs = tmp_path / "run" / "seed-0"
    response = [row["response"] for row in cli.rows_of(runs / "scorer-2")]
    assert response[0] < 1e-4 < 0.05 < response[-1]
    assert "response" not in cli.rows_of(runs / "scorer-1")[0]
    assert all(row["grad_norm"] > 0 for row in cli.rows_of(runs / "policy-2"))


def test_best_response_needs_several_pairs_per_prompt(recipe_of, opened):
    alone = [{**row, "prompt": str(n)} for n, row in enumerate(content_pairs(8))]
    with opened() as directory, pytest.raises(DataError, match="each prompt has one"):
        reward_model.run(recipe_of(alone, objective={"best_response": 0.1}), directory)


@pytest.mark.parametrize(
    ("prompts", "told"),
    [
        ("aabbcd", "does not affect 2 of 6 pairs"),  # two of six train as without it, and the run says so
        ("aabbccdd", None),
        ("aabcde", "4 of 6 are their prompt's only one"),
        ("aabc", "2 of 4 are their prompt's only one"),
    ],
)
def test_single_pairs_are_counted_and_must_not_be_the_majority(recipe_of, opened, capsys, prompts, told):
    rows = [{**row, "prompt": prompt} for row, prompt in zip(content_pairs(len(prompts)), prompts, strict=True)]
    recipe = recipe_of(rows, objective={"best_response": 0.1, "holdout": 0.0}, run={"steps": 1})
    with opened() as directory:
        if told and "only one" in told:
            with pytest.raises(DataError, match=told):
                reward_model.run(recipe, directory)
        else:
            reward_model.run(recipe, directory)
            shown = capsys.readouterr().err
            assert (told or "pairs of a prompt") in shown if told else "best_response" not in shown


def test_duplicate_pairs_and_other_images_do_not_count_as_further_pairs():
    """Three prompts by tokens and image: the first has two different pairs, the second the same pair twice."""
    one, two = ((1, 2), (1, 3)), ((1, 4), (1, 5))
    seen = [(one, "a.png"), (two, "a.png"), (one, "b.png"), (one, "b.png"), (two, "c.png")]
    items = [Item(str(n), rows, (1, 1), prompt=(1,), images=(Image(name),)) for n, (rows, name) in enumerate(seen)]
    assert count_lone_pairs(items) == 3


def test_margin_raises_the_initial_loss(recipe_of, rows_of):
    """At the start scores are close: the loss with margin m is log(1 + e^m)."""
    rows = [{**row, "by": 3.0} for row in content_pairs(32)]
    objective = {"margin": "by", "center_coef": 0.0}
    found = rows_of(reward_model.run, recipe_of(rows, objective=objective, optim={"lr": 1e-6}))
    assert found[0]["loss"] == pytest.approx(math.log(1 + math.exp(3)), abs=0.3)


@pytest.mark.parametrize(
    ("objective", "row", "told"),
    [
        ({"margin": "by"}, {"by": None}, "learns from the column `by`"),
        ({"margin": "by"}, {"by": "much"}, "`by` is 'much', not a finite number"),
        ({"use": "mixture", "user": "who"}, {}, "learns from the column `who`"),
        ({"use": "label_regression", "labels": ["ok"]}, {"completion": "1"}, "learns from the column `ok`"),
    ],
)
def test_invalid_rows_raise_with_their_index(recipe_of, opened, objective, row, told):
    rows = [{**content_pairs(1)[0], **row}]
    with opened() as directory, pytest.raises(DataError, match=r"rows\.jsonl:1 \(row \w+\)  ") as error:
        reward_model.run(recipe_of(rows, objective=objective), directory)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("objective", "told"),
    [
        ({"use": "label_regression"}, "name them"),
        ({"use": "gaussian", "labels": ["a", "b"]}, "gaussian learns one label"),
        ({"labels": ["a"]}, "bradley_terry learns from pairs"),
        ({"user": "who"}, "`user` is for mixture"),
        ({"use": "mixture", "best_response": 0.1}, "best_response"),
        ({"use": "brandley_terry"}, "bradley_terry"),
    ],
)
def test_invalid_objectives_are_refused(recipe_of, objective, told):
    with pytest.raises(RecipeError, match=told):
        recipe_of(content_pairs(4), objective=objective)


def test_language_model_as_reward_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="is not a reward model"):
        scorer.load(Model(path="tiny"), tmp_path)


def test_reward_model_loads_with_attention_setting_and_reports_missing_weights(tmp_path):
    """`model.attention` also applies to a reward model that is trained further."""
    made = scorer.load(Model(path="tiny"), tmp_path, outputs=1)
    scorer.save(made, tmp_path / "rm", scorer.Card())
    eager = scorer.load(Model(path="rm", attention="eager"), tmp_path)
    assert eager.model.config._attn_implementation == "eager"
    weights = tmp_path / "rm" / "model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if name != "score.weight"}, weights)
    with pytest.raises(ModelError, match=r"lacks 1 weight of its architecture, e\.g\. score\.weight"):
        scorer.load(Model(path="rm"), tmp_path)


def test_distinct_rows_and_rows_per_head():
    uids = [str(n) for n in range(40)]
    assert len(held_out(uids, 0.25, 0)) == 10 and held_out(uids, 0.25, 0) != held_out(uids, 0.25, 1)
    assert held_out(uids, 0.0, 0) == set() and len(held_out(uids, 0.001, 0)) == 1
    seen = [heads_of_row(0, uid, 4, 0.5) for uid in uids]
    assert 0.35 < sum(map(sum, seen)) / 160 < 0.65 and all(any(row) for row in seen)

"""SFT objectives on `tiny`: each trains through the stage, and properties shared with cross-entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import DataError, NonFiniteError, RecipeError, UserError
from posttrain.train import logprobs, optim, sft, sft_objective
from posttrain.train.sft_objective import BEHAVIOR

FIVE = {"steps": 5}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "ce": {"objective": {"use": "ce"}},
    "dft": {"objective": {"use": "dft"}},
    "pear": {"objective": {"use": "pear", "behavior_model": "tiny", "level": "block", "gamma": 0.9}},
    "action_aware": {"objective": {"use": "action_aware", "action_open": "<answer>", "action_weight": 3.0}},
    "neftune": {"objective": {"use": "ce", "neftune": 5.0}},
    "thought_dropout": {"data": {"thought_dropout": 0.5}},
    "stable_decay": {"optim": {"schedule": "stable_decay", "decay_steps": 3, "min_lr": 1e-4}},
    "packing": {"objective": {"use": "dft"}, "batch": {"packing": True}},
}


@pytest.fixture
def answers(tmp_path: Path, sft_recipe: Any) -> Any:
    """Return recipes on rows with a thought and an answer."""
    rows = [{"prompt": f"{i}+1", "completion": f"<think>{i}.</think><answer>{i + 1}</answer>"} for i in range(20)]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**changes: Any) -> Any:
        data = {"source": "answers.jsonl", **changes.pop("data", {})}
        return sft_recipe(data=data, **{"run": FIVE, **changes})

    return make


def test_all_objectives_are_tested() -> None:
    assert registry.load_index()["token_weight"].keys() <= OBJECTIVES.keys()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_trains_five_steps(answers: Any, rows_of: Any, name: str) -> None:
    rows = rows_of(sft.run, answers(**OBJECTIVES[name]), name)
    assert len(rows) == 5
    loss = "cross_entropy" if "cross_entropy" in rows[0] else "loss"
    assert rows[-1][loss] < rows[0][loss]


def test_weights_of_one_equal_cross_entropy(answers: Any, rows_of: Any) -> None:
    """action_aware with factors 1, through the weighted sum, against the trainer's own loss."""
    plain = rows_of(sft.run, answers(), "plain")
    ones = {"use": "action_aware", "action_weight": 1.0, "ground_weight": 1.0}
    weighted = rows_of(sft.run, answers(objective=ones), "weighted")
    for row, other in zip(weighted, plain, strict=True):
        for key in ("loss", "grad_norm", "entropy", "mean_token_accuracy", "lr", "trained_ratio"):
            assert row[key] == pytest.approx(other[key], rel=2e-4), (row["step"], key)
        assert row["cross_entropy"] == pytest.approx(row["loss"], rel=1e-5) and row["token_weight"] == 1


@pytest.mark.parametrize("name", ["ce", "dft", "pear", "action_aware", "thought_dropout"])
def test_micro_batches_and_packing_change_nothing(answers: Any, rows_of: Any, name: str) -> None:
    changes = OBJECTIVES[name]
    whole = rows_of(sft.run, answers(**changes, batch={"size": 8, "micro_size": 8}), "whole")
    small = rows_of(sft.run, answers(**changes, batch={"size": 8, "micro_size": 2}), "small")
    packed = rows_of(sft.run, answers(**changes, batch={"packing": True}), "packed")
    for rows in (small, packed):
        for row, other in zip(rows, whole, strict=True):
            for key in {"loss", "grad_norm", "token_weight"} & other.keys():
                assert row[key] == pytest.approx(other[key], rel=2e-4), (row["step"], key)


def test_weighted_tokens_are_computed_in_chunks(answers: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `rl`: with 32k tokens in a forward pass and a vocabulary of 150k, full logits would take 20 GB in
    float32."""
    whole = rows_of(sft.run, answers(objective={"use": "dft"}), "whole")
    at_once: list[int] = []
    forward = logprobs.Head.forward
    monkeypatch.setattr(logprobs.Head, "forward", lambda self, h: at_once.append(len(h)) or forward(self, h))
    monkeypatch.setattr(logprobs, "MIN_CHUNK", 7)
    monkeypatch.setattr(logprobs, "CHUNK_CELLS", 0)
    chunks = rows_of(sft.run, answers(objective={"use": "dft"}), "chunks")
    assert max(at_once) == 7
    for row, other in zip(chunks, whole, strict=True):
        assert row == {key: pytest.approx(other[key], rel=2e-4) for key in row}


def test_unsupported_output_head_is_refused(answers: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in `rl`: logits that the architecture changes after its head would be weighted by other probabilities."""
    monkeypatch.setattr(logprobs.Head, "forward", lambda self, hidden: 1.1 * self.project(hidden))
    monkeypatch.setattr(logprobs.Head, "plain_weight", property(lambda _: None))
    with pytest.raises(NonFiniteError, match="nats from its own logits"):
        rows_of(sft.run, answers(objective={"use": "dft"}), "scaled")


def test_weights_summing_to_less_than_one_are_divided_by_their_sum(answers: Any, rows_of: Any, tmp_path: Path) -> None:
    """Weights of 0.001 that sum to less than 1 in a step: divided by their sum, they equal cross-entropy."""
    (tmp_path / "small.py").write_text("def small(rows):\n    return rows.mask * 1e-3\n")
    plain = rows_of(sft.run, answers(), "plain")
    small = rows_of(sft.run, answers(objective={"use": "small.py:small", "divide_by": "weights"}), "small")
    assert [row["loss"] for row in small] == pytest.approx([row["loss"] for row in plain], rel=1e-4)


def test_author_model_ignores_the_policys_revision(answers: Any) -> None:
    """model.revision belongs to the trained hub model; the author is another model, here a local one."""
    from posttrain.models import tiny

    hub = {"path": "someone/something", "revision": "v2"}
    recipe = answers(model=hub, objective={"use": "pear", "behavior_model": "tiny"})
    author = sft_objective._behavior_model(recipe, tiny.build_tokenizer())
    assert author.source == "tiny"


def test_untrainable_rows_raise_before_the_model_is_loaded(
    answers: Any, rows_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.jsonl").write_text(json.dumps({"prompt": "1", "completion": "2" * 99}))
    monkeypatch.setattr(sft.sharding, "load", lambda *_, **__: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match="no row is left"):
        rows_of(sft.run, answers(data={"source": "none.jsonl", "max_length": 20}), "none")


def test_action_weights(answers: Any, rows_of: Any) -> None:
    """Trained: <think> i . </think> <answer> i+1 </answer> EOS. A factor 3 on the digits inside the answer only."""
    row = rows_of(sft.run, answers(**OBJECTIVES["action_aware"], run={"steps": 1}, data={"shuffle": False}), "one")[0]
    # rows 0..7: 8 tokens each (characters as tokens), of which one is a digit inside the answer: (7 + 3) / 8
    assert row["token_weight"] == pytest.approx(10 / 8)


def test_author_log_probs_are_computed_once(
    answers: Any, rows_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The author is the model that is trained, so in the first step every ratio is 1: with gamma 1, plain SFT.

    One pass of the author over each of the 20 rows, whatever the number of steps; none when the run goes on.
    """
    objective = {"use": "pear", "behavior_model": "tiny", "gamma": 1.0}
    passes: list[str] = []
    score = sft_objective.score_examples
    monkeypatch.setattr(
        sft_objective,
        "score_examples",
        lambda author, rows: passes.extend(row.uid for row in rows) or score(author, rows),
    )
    first = rows_of(sft.run, answers(objective=objective), "first")
    assert first[0]["token_weight"] == pytest.approx(1, abs=1e-4)
    assert first[-1]["token_weight"] != pytest.approx(1, abs=1e-3)
    assert len(passes) == len(set(passes)) == 20
    (stored,) = tmp_path.rglob(BEHAVIOR)
    before = stored.read_bytes()
    further = rows_of(sft.run, answers(objective=objective, run={"steps": 7}), "first", resume=True)
    assert len(further) == 7 and further[:5] == first
    assert len(passes) == 20 and stored.read_bytes() == before
    assert further == rows_of(sft.run, answers(objective=objective, run={"steps": 7}), "unbroken")


def test_messages_with_train_false_are_masked(answers: Any, tmp_path: Path, rows_of: Any) -> None:
    """Two assistant turns of one token, the first with `train: false`: its token and end of turn are not trained on."""
    turns = [("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    for name, flag in (("both", {}), ("one", {"train": False})):
        messages = [{"role": role, "content": text, **(flag if text == "2" else {})} for role, text in turns]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    batch, run = {"size": 1, "micro_size": 1}, {"steps": 1}
    found = {
        name: rows_of(
            sft.run,
            answers(data={"source": f"{name}.jsonl", "train_on": "assistant"}, batch=batch, run=run),
            name,
        )[0]
        for name in ("both", "one")
    }
    assert found["one"]["trained_ratio"] == pytest.approx(found["both"]["trained_ratio"] / 2)
    (tmp_path / "none.jsonl").write_text(
        json.dumps(
            {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "train": False}]}
        )
    )
    with pytest.raises(DataError, match="no row is left"):
        rows_of(sft.run, answers(data={"source": "none.jsonl"}, batch=batch, run=run), "none")


def test_stable_decay_schedule_ends_at_min_lr() -> None:
    """10 steps, 4 of decay: constant for 6, continuous there, never rising, min_lr after the end."""
    from posttrain.recipe.training_sections import Optim

    section = Optim(lr=1.0, schedule="stable_decay", decay_steps=4, min_lr=0.1)
    rates = [optim.lr_factor(step, section, 10) for step in range(12)]
    assert rates[:7] == [1.0] * 7 and rates[8] == pytest.approx(0.55) and rates[10:] == [0.1, 0.1]
    assert rates == sorted(rates, reverse=True)
    assert optim.stable_decay(3, stable_steps=3, decay_steps=0, lr=1.0, min_lr=0.5) == 0.5


def test_warm_up_below_one_is_a_share_of_the_updates() -> None:
    """0.1 of 25 updates is 3, rounded up; each update then has the rate of `warmup_steps: 3`."""
    from posttrain.recipe.training_sections import Optim

    share, steps = (Optim(lr=1.0, schedule="cosine", warmup_steps=warmup) for warmup in (0.1, 3))
    rates = [[optim.lr_factor(step, section, 25) for step in range(25)] for section in (share, steps)]
    assert rates[0] == rates[1] and rates[0][:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "stable_decay"])
def test_all_schedules_have_the_same_warm_up(schedule: str) -> None:
    """3 steps: 1/4, 2/4 and 3/4 of the peak, which follows them. stable_decay once reached it in the third."""
    from posttrain.recipe.training_sections import Optim

    section = Optim(lr=0.2, schedule=schedule, warmup_steps=3)
    assert [optim.lr_factor(step, section, 40) for step in range(4)] == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"objective": {"use": "pear"}}, "write `behavior_model`"),
        ({"objective": {"use": "dft", "behavior_model": "tiny"}}, "does nothing with dft"),
        ({"objective": {"use": "dft", "divide_by": "weights"}}, "divide_by: tokens"),
        ({"optim": {"min_lr": 0.1}}, "schedule: stable_decay"),
        ({"objective": {"use": "dtf"}}, "did you mean `dft`"),
    ],
)
def test_unused_or_missing_settings_raise(answers: Any, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(RecipeError, match=match):
        answers(**changes)


def test_inspect_shows_token_weights(answers: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The digit of the answer 1 counts three times, every other token once, and the prompt not at all."""
    from posttrain.cli.data import show
    from posttrain.data.inspect import inspect
    from posttrain.models import tiny
    from posttrain.train.sft_objective import example_weights

    recipe = answers(**OBJECTIVES["action_aware"])
    tokenizer = tiny.build_tokenizer()
    report = inspect("sft", recipe.data, tokenizer, tmp_path, (2,), 1, example_weights(recipe, tokenizer))
    runs = report["samples"][0]["parts"]["sequence"]["runs"]
    weighted = [(run["text"], run["weight"]) for run in runs if run["fate"] == "trained"]
    assert [weight for _, weight in weighted] == [1, 3, 1] and weighted[1][0] == "1"
    assert runs[0]["weight"] == 0
    show(report)
    assert "[x3]" in capsys.readouterr().out
    assert example_weights(answers(objective={"use": "dft"}), tokenizer) is None


@pytest.mark.parametrize("name", ["dft", "pear"])
def test_inspect_shows_model_dependent_weights(answers: Any, name: str) -> None:
    """dft: the initial model's probabilities. pear with the initial model as author: gamma^(tokens to the end), at the
    end of each block."""
    from posttrain.data.prepare import prepare_examples
    from posttrain.models import tiny
    from posttrain.train.sft_objective import example_weights

    recipe, tokenizer = answers(**OBJECTIVES[name]), tiny.build_tokenizer()
    example = prepare_examples(recipe.data, tokenizer, recipe.base_dir).items[0]
    weigh = example_weights(recipe, tokenizer, with_model=True)
    assert weigh is not None
    weights = weigh(example)
    own = [weight for weight, on in zip(weights, example.trained, strict=True) if on]
    assert all(weight == 0 for weight, on in zip(weights, example.trained, strict=True) if not on)
    if name == "dft":
        assert len(set(own)) > 1 and all(0 < weight < 1 for weight in own)
        return
    left = [len(own) - 1 - min(i // 4 * 4 + 3, len(own) - 1) for i in range(len(own))]
    assert own == pytest.approx([0.9**count for count in left], rel=1e-4)


def test_inspect_loads_no_model_for_model_independent_weights(answers: Any) -> None:
    from posttrain.cli.data import _make_token_weights

    with pytest.raises(UserError, match="no token weights of this recipe depend on the model"):
        _make_token_weights(answers(), None, True)

"""Rollout shapes: follow-up requests of a rollout, the rows it becomes, and which tokens are trained on; also on two
ranks and after resuming."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.anytime import advantage_at_budgets, budget_relative, decay_exits
from posttrain.advantage.segments import normalize_rollouts
from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.errors import RecipeError
from posttrain.loss.aggregate import aggregate, count_trajectory_tokens, totals
from posttrain.models import load as models
from posttrain.recipe.load import load_dict
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.continuation import Shape, generate_shaped
from posttrain.rollout.engine import Completion, GenerationBatch
from posttrain.shapes.budgets import answer_at_budgets
from posttrain.shapes.exits import count_tokens_before, draw_cuts
from posttrain.shapes.protocol import Row
from tests.scripted_engines import ConcurrentScriptedEngine

from .conftest import Seen

Values = dict[str, Any]

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
'''
SHAPES = """
from posttrain.batch import Segment
from posttrain.shapes.protocol import Row

async def twice(asked, *, words: str = " so "):
    (first,) = await asked.sample([asked.prompt], 4)
    middle = asked.encode(words)
    (second,) = await asked.sample([(*asked.prompt, *first.ids, *middle)], 3)
    return [Row(asked.prompt, (first.segment, Segment("injected", middle), second.segment), second.finish)]

async def greedily(asked):
    (free,) = await asked.sample([asked.prompt], 6)
    first, again = await asked.sample([asked.prompt, asked.prompt], 6, greedy=True)
    assert first.ids == again.ids, (first.ids, again.ids)
    (two,) = await asked.sample([(*asked.prompt, *first.ids[:1])], 5, greedy=True)
    assert two.ids == first.ids[1:], "the most probable token follows from what stands before it"
    return [Row(asked.prompt, (free.segment,), free.finish, text=f"{asked.text(free.ids)} {first.ids == free.ids}")]

async def wrong(asked):
    return ["text"]

async def fails(asked):
    return [asked.prompt / 2]

def no_coroutine(asked):
    return []
"""
CHUNKS = {"use": "chunks", "keep_head": 1, "keep_tail": 3, "max_chunks": 4}
BUDGETS = {"use": "budgets", "budgets": [3, 7], "num_answers": 2, "closing": "!\n", "answer_tokens": 4}
EXITS = {"use": "serial_exit", "num_exits": 3, "inducer": "!\n", "answer_tokens": 5}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "shapes.py").write_text(SHAPES)
    rows = [{"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values_of(shape: Any = None, **changes: Any) -> Values:
    rollout = {"prompts_per_step": 5, "group_size": 2, "max_new_tokens": 8, **changes.pop("rollout", {})}
    return {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {**rollout, **({"shape": shape} if shape else {})},
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.2},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2, "samples_per_step": 40},
        **changes,
    }


def test_shape_can_request_greedy_tokens(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """Beside a completion at temperature 1, which nearly always differs."""
    ran(values_of("./shapes.py:greedily", run={"steps": 1}))
    texts = [rollout.text for rollout in seen.rollouts[0]]
    assert len(texts) == 10 and sum(text.endswith("False") for text in texts) > 5


def test_s_grpo_rewards_decay_with_the_cut(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """S-GRPO: a group consists of one thought's prefixes, shortest first, each with the sentence (untrained) and an
    answer; the whole thought is last. The k-th right answer earns 2^-(k-1), and advantages are these minus their
    mean."""
    metrics = ran(values_of(EXITS, algorithm="s_grpo", rollout={"group_size": 2}))
    assert any(row["grad_norm"] > 0 for row in metrics)
    decayed = 0
    for step in range(3):
        groups = seen.trajectories(step)
        assert len(groups) == 10 and len({rows[0][0].group for rows in groups}) == 10
        for rows in groups:
            whole, lengths, earned = rows[-1][0], [], []
            assert len(whole.segments) == 1 and 2 <= len(rows) <= 4
            right = 0
            for rollout, batch in rows:
                assert rollout.prompt.ids == whole.prompt.ids and rollout.group == whole.group
                if rollout is not whole:
                    prefix, sentence, answer = rollout.segments
                    assert prefix.ids == whole.ids[: len(prefix.ids)] and len(prefix.ids) < len(whole.ids) + 1
                    assert prefix.logps == whole.segments[0].logps[: len(prefix.ids)]
                    assert sentence.kind == "injected" and 1 <= len(answer.ids) <= 5
                    lengths.append(len(prefix.ids))
                    start = len(prefix.ids)
                    masked = batch.mask[0, start : start + len(sentence.ids)]
                    assert not masked.any() and batch.mask.sum() == len(rollout.ids) - len(sentence.ids)
                earned.append(2.0**-right if rollout.correct else 0.0)
                right += bool(rollout.correct)
            assert lengths == sorted(set(lengths))
            decayed += right > 1
            mean = sum(earned) / len(earned)
            found = [float(batch.advantages[0]) for _, batch in rows]
            assert found == pytest.approx([reward - mean for reward in earned])
    assert decayed > 0


def test_answer_only_masks_the_copied_thought(ran: Callable[..., list[Values]], seen: Seen) -> None:
    ran(values_of({**EXITS, "loss_on": "answer_only"}, algorithm="s_grpo", run={"steps": 1}))
    exits = [row for rows in seen.trajectories() for row in rows[:-1]]
    assert exits and all(int(batch.mask.sum()) == len(rollout.segments[-1].ids) for rollout, batch in exits)


def check_shared(rows: list[tuple[Rollout, RolloutBatch]], group: list[float]) -> None:
    """Check that all rows of a rollout have its advantage: its reward against the other rollouts of the prompt."""
    rewards = [r.reward for r, _ in rows]
    assert rewards[:-1] == [None] * (len(rows) - 1) and rewards[-1] is not None
    spread = torch.tensor(group, dtype=torch.float64)
    expected = float((rewards[-1] - spread.mean()) / (spread.std() + 1e-6))
    assert [float(batch.advantages[0]) for _, batch in rows] == pytest.approx([expected] * len(rows))


def test_delethink_chunks_see_the_question_and_carried_tokens(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """Delethink: each chunk's prompt is the question, the first token of the answer and the last three tokens before
    the chunk; the context stays within prompt + 8; all sampled tokens are trained on, no carried token is."""
    metrics = ran(values_of(CHUNKS, algorithm="delethink", rollout={"group_size": 3}, batch={"minibatches": 1}))
    assert any(row["grad_norm"] > 0 for row in metrics)
    longest = 0
    for step in range(3):
        trajectories = seen.trajectories(step)
        rewards: dict[int, list[float]] = {}
        for rows in trajectories:
            rewards.setdefault(rows[0][0].group, []).append(rows[-1][0].reward or 0.0)
        assert len(trajectories) == 15 and {len(group) for group in rewards.values()} == {3}
        for rows in trajectories:
            question = rows[0][0].prompt.ids
            answer: tuple[int, ...] = ()
            total = sum(len(r.ids) for r, _ in rows)
            for n, (rollout, batch) in enumerate(rows):
                carried = rollout.prompt.ids[len(question) :]
                assert rollout.prompt.ids[: len(question)] == question and rollout.part == n
                assert carried == (answer if n == 0 else (answer[0], *answer[-3:]))
                assert len(carried) + len(rollout.ids) <= 8
                assert int(batch.mask.sum()) == len(rollout.ids) and int(batch.trajectory_tokens[0]) == total
                assert (rollout.finish == "stop") or n == len(rows) - 1 == 3
                answer += rollout.ids
            check_shared(rows, rewards[rows[0][0].group])
            longest = max(longest, total)
    assert longest > 8


def test_supo_summary_replaces_the_context(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """SUPO: a full context is summarized, and the summary is trained on; the next stretch sees the question and the
    summary. A rollout that never ends has weight 0."""
    shape = {"use": "summaries", "instruction": "!\n", "answer_tokens": 4, "max_summaries": 2}
    metrics = ran(values_of(shape, algorithm="supo", rollout={"group_size": 3}))
    assert any(row["grad_norm"] > 0 for row in metrics)
    several, masked = 0, 0
    for step in range(3):
        trajectories = seen.trajectories(step)
        rewards: dict[int, list[float]] = {}
        for rows in trajectories:
            rewards.setdefault(rows[0][0].group, []).append(rows[-1][0].reward or 0.0)
        for rows in trajectories:
            for (before, batch), (after, _) in itertools.pairwise(rows):
                work, instruction, summary = before.segments
                assert instruction.kind == "injected" and 1 <= len(summary.ids) <= 4
                assert int(batch.mask.sum()) == len(work.ids) + len(summary.ids)
                rest = after.prompt.ids[len(rows[0][0].prompt.ids) :]
                assert rest == summary.ids[: len(rest)] and len(rest) >= len(summary.ids) - 1
                several += 1
            if rows[-1][0].finish == "length":
                masked += 1
                assert len(rows) == 3 and all(float(batch.advantages[0]) == 0 for _, batch in rows)
            else:
                check_shared(rows, rewards[rows[0][0].group])
    assert several > 0 and masked > 0


def test_brpo_answers_a_thought_at_every_budget(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """BRPO: two answers after each of two cuts, the only trained tokens of their rows; the thought is the last row, and
    its tokens get `budget_relative` of the answers at their budget and the later one."""
    metrics = ran(values_of(BUDGETS, algorithm="brpo", rollout={"group_size": 3}))
    assert any(row["grad_norm"] > 0 for row in metrics)
    differing = 0
    for step in range(3):
        groups: dict[int, list[list[tuple[Rollout, RolloutBatch]]]] = {}
        for rows in seen.trajectories(step):
            groups.setdefault(rows[0][0].group, []).append(rows)
        assert len(groups) == 5 and all(len(members) == 3 for members in groups.values())
        for members in groups.values():
            for rows in members:
                thought, own = rows[-1]
                assert len(rows) == 5 and thought.reward is None and not thought.scored and 1 <= len(thought.ids) <= 7
                assert int(own.mask.sum()) == len(thought.ids) and thought.segments[0].logps is not None
                for n, (answer, batch) in enumerate(rows[:-1]):
                    before, sampled = answer.segments
                    budget = (3, 7)[n // 2]
                    assert before.kind == "injected" and 1 <= len(sampled.ids) <= 4 and answer.reward is not None
                    assert before.ids[: min(budget, len(thought.ids))] == thought.ids[:budget]
                    assert int(batch.mask.sum()) == len(sampled.ids)
            earned = torch.tensor([[[r[2 * s + a][0].reward for a in (0, 1)] for s in (0, 1)] for r in members])
            expected = budget_relative(earned.double(), torch.tensor([1.0, 2.0], dtype=torch.float64))
            for n, rows in enumerate(members):
                for m, (_, batch) in enumerate(rows[:-1]):
                    found = batch.advantages[batch.mask]
                    assert found.tolist() == pytest.approx([float(expected.answers[n, m // 2, m % 2])] * len(found))
                length = len(rows[-1][0].ids)
                by_token = [float(expected.thought[n, int(place >= 3)]) for place in range(length)]
                assert rows[-1][1].advantages[0, :length].tolist() == pytest.approx(by_token)
                differing += len(set(by_token)) > 1
    assert differing > 5


@pytest.mark.parametrize("stop", ["whole", "closed"])
def test_thought_that_ends_early_is_answered_whole(tmp_path: Path, stop: str) -> None:
    """A thought of two tokens and its end mark, or without one, at budgets 1 and 5: cut and closed at 1; at 5 answered
    after its own mark, or after the shape's if it has none. Text after the mark is dropped."""
    tokenizer = models.load_tokenizer(load_dict(values_of(), base_dir=tmp_path, where="test").recipe.model, tmp_path)
    told = "ab!c" if stop == "closed" else "ab"
    engine = ConcurrentScriptedEngine(lambda request, _: told if len(request.ids) == 2 else "8", tokenizer)
    params = {"budgets": [1, 5], "num_answers": 1, "closing": "?!", "close": "!", "answer_tokens": 3}
    shape = Shape("budgets", partial(answer_at_budgets, **params), tokenizer, own_group=False, room=5)
    found = generate_shaped(
        engine, shape, GenerationBatch([Prompt("a", {}, "xy", (5, 6))], 1, Sampling(max_new_tokens=6), 3, [0]),
        group_stride=100, grade=lambda _: [], metrics={},
    )  # fmt: skip
    first, second, thought = found
    a, b, mark, closing = (shape.encode(text) for text in ("a", "b", "!", "?!"))
    whole = (*a, *b, *(mark if stop == "closed" else ()))
    assert [request.ids for request in engine.asked[1:]] == [
        (5, 6, *a, *closing),
        (5, 6, *whole, *(() if stop == "closed" else closing)),
    ]
    assert thought.ids == whole and thought.ends == (0, len(whole) - 1)
    assert first.segments[0].ids == (*a, *closing) and second.ends[0] == -1 and not thought.scored


def test_unscored_answer_is_excluded_at_its_cut() -> None:
    """One thought of two tokens at two budgets of two answers: 1 and unscored at the first, 0 and 1 at the second. q =
    (1, 1/2), weights 1/3 and 2/3: R = (2/3, 1/3); V1 = (0, 1 * 2/3), no group: A = (2/3, 1/3 - V1 / 2) = (2/3, 0)."""
    nan = float("nan")
    batch = RolloutBatch(
        group_ids=torch.zeros(5, dtype=torch.long),
        mask=torch.tensor([[True, True], *[[False, True]] * 4]),
        rewards=torch.tensor([nan, 1.0, nan, 0.0, 1.0], dtype=torch.float64),
        trajectory_ids=torch.full((5,), 3),
        step_ids=torch.tensor([4, 0, 1, 2, 3]),
        part_ids=torch.tensor([[0, 1], [0, 0], [0, 0], [0, 1], [0, 1]]),
    )
    found = advantage_at_budgets(batch)
    assert found[0].tolist() == pytest.approx([2 / 3, 0.0])
    assert found[1:, 1].tolist() == pytest.approx([0.0, 0.0, -0.5, 0.5]) and not bool(found[1:, 0].any())


def test_concurrent_engine_gets_each_follow_up_request(tmp_path: Path) -> None:
    """Two rollouts with two requests each: each second request has the first completion in its prompt, its own seeds,
    and starts wherever the other rollout is; tokens have the version of their weights if these change in between."""
    tokenizer = models.load_tokenizer(load_dict(values_of(), base_dir=tmp_path, where="test").recipe.model, tmp_path)
    engine = ConcurrentScriptedEngine(lambda request, _: "7" * 20 if len(request.ids) == 2 else "8", tokenizer)

    async def again(asked: Any) -> list[Row]:
        (first,) = await asked.sample([asked.prompt], 3)
        engine.version = 1
        second, third = await asked.sample([(*asked.prompt, *first.ids), (*asked.prompt, *first.ids[:1])], 4)
        return [Row(asked.prompt, (first.segment, one.segment), one.finish) for one in (second, third)]

    shape = Shape("again", again, tokenizer, own_group=True, room=2)
    prompt = Prompt("a", {}, "ab", (5, 6))
    found = generate_shaped(
        engine, shape, GenerationBatch([prompt], 2, Sampling(max_new_tokens=6), 3, [0], first_group=4),
        group_stride=100, grade=lambda _: [], metrics={},
    )  # fmt: skip
    assert [(r.group, r.part) for r in found] == [(4, 0), (4, 1), (104, 0), (104, 1)]
    assert [request.max_new_tokens for request in engine.asked[:2]] == [3, 3]
    assert len(engine.asked) == 6 and len({request.seed for request in engine.asked}) == 6
    assert {request.ids for request in engine.asked[2:]} == {(5, 6, *found[0].ids[:3]), (5, 6, found[0].ids[0])}
    assert found[0].text == "7778" and found[0].finish == "stop" and found[0].versions[0] == found[0].version == 0
    assert found[0].versions[3:] == (1, 1) and found[0].logps == (-1.0,) * 5


@pytest.mark.parametrize(("stop", "end"), [(["!"], ""), (["!"], "<eos>"), ([], "<eos>")])
def test_shape_reads_a_stop_string_as_text_and_no_eos_token(tmp_path: Path, stop: list[str], end: str) -> None:
    """What the model has written ends with `!` if that was the stop string, and before the EOS token otherwise."""
    tokenizer = models.load_tokenizer(load_dict(values_of(), base_dir=tmp_path, where="test").recipe.model, tmp_path)
    text = "7" if end else "7!"
    ids = (*tokenizer.encode(text, add_special_tokens=False), *([tokenizer.eos_token_id] if end else []))
    engine: Any = ConcurrentScriptedEngine(lambda *_: text, tokenizer)

    async def complete(request: Any, sampling: Sampling) -> list[Completion]:
        del sampling
        return [Completion(ids, (-1.0,) * len(ids), "stop")] * request.n

    engine.complete = complete
    seen: list[str] = []

    async def read(asked: Any) -> list[Row]:
        (found,) = await asked.sample([asked.prompt])
        seen.append(asked.decode(found.ids_without_eos))
        return [Row(asked.prompt, (found.segment,), found.finish)]

    shape = Shape("read", read, tokenizer, own_group=False, room=0)
    sampling = Sampling(max_new_tokens=6, stop=stop)
    batch = GenerationBatch([Prompt("a", {}, "xy", (5, 6))], 1, sampling, 3, [0])
    generate_shaped(engine, shape, batch, group_stride=100, grade=lambda _: [], metrics={})
    assert seen == [text]


def test_evaluation_uses_the_rollout_shape(ran: Callable[..., list[Values]], home: Path, cli: Any) -> None:
    """An untrained model hardly ever ends by itself, so answers in chunks are longer than one request: 8 tokens, and up
    to three times 4 more. An evaluation of the final model in chunks gives the run's last values."""
    held_out = {"every": 3, "data": {"source": "rows.jsonl"}, "temperature": 0.0}
    values = values_of(CHUNKS, advantage="trajectory", eval=held_out, run={"steps": 3})
    metrics = ran(values)
    assert 8 < metrics[-1]["eval/mean_length"] <= 20
    plain = ran({**values, "eval": {**held_out, "shaped": False}}, "plain")
    assert plain[-1]["eval/mean_length"] <= 8 and plain[-1]["reward"] == metrics[-1]["reward"]
    tested = {key: values[key] for key in ("data", "rewards", "scoring")}
    tested |= {"stage": "eval", "model": {"path": str(home / "run" / "final")}, "engine": {"batch_size": 10}}
    tested |= {"sampling": {"temperature": 0.0, "max_new_tokens": 8, "shape": CHUNKS}}
    (home / "tested.yaml").write_text(json.dumps(tested))
    cli.run("eval", str(home / "tested.yaml"), "--output", str(home / "tested"))
    records = [json.loads(line) for line in (home / "tested" / "completions.jsonl").open()]
    assert len(records) == 24 and [r["problem"] for r in records] == list(range(24))
    assert max(r["tokens"] for r in records) > 8 and all(r["prompt"].count("<|user|>") == 1 for r in records)
    mean = sum(r["reward"] for r in records) / 24
    assert mean == pytest.approx(metrics[-1]["eval/reward"])
    assert sum(r["tokens"] for r in records) / 24 == pytest.approx(metrics[-1]["eval/mean_length"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"shape": EXITS}}, "a rollout of `serial_exit` has several answers"),
        (
            {"sampling": {"shape": CHUNKS}, "tools": [{"use": "calculator"}]},
            "a completion continues with their replies",
        ),
    ],
)
def test_evaluation_has_one_answer_per_prompt(home: Path, changes: Values, message: str) -> None:
    values = {key: values_of()[key] for key in ("model", "data", "rewards")}
    with pytest.raises(RecipeError, match=message):
        load_dict({**values, "stage": "eval", **changes}, base_dir=home, where="test")
    with pytest.raises(RecipeError, match="a rollout of `serial_exit` has several answers"):
        held_out = {"every": 1, "data": {"source": "rows.jsonl"}, "shaped": True}
        load_dict(values_of(EXITS, eval=held_out), base_dir=home, where="test")


def test_user_shape_with_two_scored_rows_cannot_be_evaluated(home: Path, cli: Any) -> None:
    (home / "two.py").write_text(
        "from posttrain.shapes.protocol import Row\n"
        "async def two(asked):\n"
        "    (one,) = await asked.sample([asked.prompt])\n"
        "    return [Row(asked.prompt, (one.segment,), one.finish)] * 2\n"
    )
    values = {**{key: values_of()[key] for key in ("model", "data", "rewards")}, "stage": "eval"}
    (home / "run.yaml").write_text(json.dumps({**values, "sampling": {"max_new_tokens": 4, "shape": "two.py:two"}}))
    with pytest.raises(AssertionError, match=r"shape `two.py:two` gave 2 scored rows for .*rows\.jsonl:1"):
        cli.run("eval", str(home / "run.yaml"), "--output", str(home / "run"))


def test_plan_counts_the_rows_of_a_rollout(home: Path, cli: Any) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(CHUNKS, advantage="trajectory")))
    assert re.search(r"rows of a rollout that fills its limits\s+4", cli.run("plan", str(home / "run.yaml")))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({**CHUNKS, "keep_tail": 7}, "leave later chunks no token"),
        ({"use": "summaries", "answer_tokens": 8}, "leaves nothing for what follows it"),
        ({**BUDGETS, "budgets": [3, 9]}, "a thought of 9 tokens is longer than a completion"),
        ({**BUDGETS, "budgets": [3, 3]}, "rising numbers of tokens"),
    ],
)
def test_lengths_that_do_not_fit_raise_before_the_model_is_loaded(
    home: Path, cli: Any, monkeypatch: pytest.MonkeyPatch, shape: Values, message: str
) -> None:
    monkeypatch.setattr("posttrain.train.assemble.models.load", lambda *_, **__: pytest.fail("the model was loaded"))
    (home / "run.yaml").write_text(json.dumps(values_of(shape, advantage="trajectory")))
    with pytest.raises(AssertionError, match=message):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_rows_without_a_reward_need_a_rollout_level_advantage(home: Path) -> None:
    with pytest.raises(RecipeError, match="write `advantage: trajectory`"):
        load_dict(values_of(CHUNKS), base_dir=home, where="test")
    with pytest.raises(RecipeError, match="every row is a rollout"):
        load_dict(values_of(loss={"aggregation": "trajectory_mean"}), base_dir=home, where="test")


def test_rollout_counts_once_in_its_group() -> None:
    """Rewards 1 and 0, one rollout of three rows and one of one: +-1/2 over the std of 1/sqrt 2; a third is
    unscored."""
    nan = float("nan")
    batch = RolloutBatch(
        group_ids=torch.zeros(5, dtype=torch.long),
        mask=torch.ones(5, 2, dtype=torch.bool),
        rewards=torch.tensor([1.0, nan, 0.0, nan, nan], dtype=torch.float64),
        trajectory_ids=torch.tensor([4, 4, 9, 4, 2]),
        step_ids=torch.tensor([2, 0, 0, 1, 0]),
    )
    found = normalize_rollouts(batch, eps=0.0)
    assert found.tolist() == pytest.approx([0.5**0.5, 0.5**0.5, -(0.5**0.5), 0.5**0.5, 0.0])
    assert normalize_rollouts(batch, norm_std=False).tolist() == [0.5, 0.5, -0.5, 0.5, 0.0]


def test_rollouts_weigh_equally_in_any_micro_batches() -> None:
    """Rollouts of 3 and 1 tokens, values 1 and 5: (1 + 5) / 2, in one pass or row by row, and over two batches each of
    which has a part of the first."""
    mask = torch.tensor([[1, 1], [1, 0], [1, 0]], dtype=torch.bool)
    values, ids = torch.tensor([[1.0, 1.0], [1.0, 9.0], [5.0, 9.0]]), torch.tensor([3, 3, 8])
    tokens = count_trajectory_tokens(mask, ids)
    assert tokens.tolist() == [3, 3, 1]
    whole = totals(mask, True, tokens)
    assert whole.trajectories == pytest.approx(2)
    each = [aggregate(values[[n]], mask[[n]], "trajectory_mean", whole, None, tokens[[n]]) for n in range(3)]
    assert float(sum(each)) == pytest.approx(3.0)
    parts = totals(mask[:1], True, tokens[:1]) + totals(mask[1:], True, tokens[1:])
    assert parts.trajectories == pytest.approx(2)


@pytest.mark.parametrize(("algorithm", "shape"), [("s_grpo", EXITS), ("delethink", CHUNKS), ("brpo", BUDGETS)])
@pytest.mark.parametrize("staleness", [0, 1])
def test_run_resumes_exactly(
    ran: Callable[..., list[Values]], home: Path, staleness: int, algorithm: str, shape: Values
) -> None:
    """With staleness the rows of steps to come are in the checkpoint."""
    correct = {"corrections": [{"use": "tis"}]} if staleness else {}
    values = values_of(shape, algorithm=algorithm, rollout={"staleness": staleness}, **correct)
    whole = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in ran(values)]
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    again = ran(values, "run", "--resume")
    assert [{k: v for k, v in row.items() if not k.startswith("time/")} for row in again] == whole


def test_user_defined_shape(ran: Callable[..., list[Values]], seen: Seen) -> None:
    ran(values_of("./shapes.py:twice", run={"steps": 1}))
    assert len(seen.rollouts[0]) == 10 and {len(r.segments) for r in seen.rollouts[0]} == {3}
    assert all(len(r.segments[0].ids) <= 4 and len(r.segments[2].ids) <= 3 for r in seen.rollouts[0])
    assert len({r.group for r in seen.rollouts[0]}) == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", r"rows.jsonl:\d+ .*returned 'text'"),
        ("fails", "TypeError: unsupported operand"),
        ("no_coroutine", "is no coroutine function"),
    ],
)
def test_invalid_user_shape_raises(home: Path, cli: Any, name: str, message: str) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(f"./shapes.py:{name}")))
    with pytest.raises(BaseException, match=message):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"engine": "stored", "group_size": 1}}, r"rollout\.engine stored samples nothing"),
        ({"tools": [{"use": "calculator"}]}, "with `tools` or an `environment` a rollout continues with their replies"),
        ({"prompt_variants": "templates"}, "`prompt_variants` also change"),
        ({"replay": "success"}, "`replay` stores single rows"),
        ({"opponent": {"ema": 0.1}}, "single completions"),
        ({"rollout": {"max_gen_batches": 2}, "keep": "mixed"}, "refilling counts prompts"),
        ({"sampler": "xrpo"}, "samples a prompt again in a further round"),
    ],
)
def test_settings_incompatible_with_a_shape_are_refused(home: Path, changes: Values, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_dict(values_of(EXITS, **changes), base_dir=home, where="test")


def test_exit_decay_without_a_shape_is_refused(home: Path) -> None:
    with pytest.raises(RecipeError, match=r"rollouts of several rows: `rollout\.shape`"):
        load_dict(values_of(group_rewards=["exit_decay"]), base_dir=home, where="test")


def test_exit_decay_follows_the_order_of_cuts() -> None:
    """Two thoughts, rows out of order: 0, 1, 1 in the order of cuts earns 0, 1, 1/2; an unscored row has no reward and
    delays no other."""
    nan = float("nan")
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 0, 1, 1]),
        mask=torch.ones(5, 2, dtype=torch.bool),
        rewards=torch.tensor([9.0, 9.0, 9.0, 9.0, nan], dtype=torch.float64),
        correct=torch.tensor([1.0, 0.0, 1.0, 1.0, nan], dtype=torch.float64),
        trajectory_ids=torch.tensor([7, 7, 7, 8, 8]),
        step_ids=torch.tensor([2, 0, 1, 1, 0]),
    )
    found = decay_exits(batch, decay=2.0)
    assert found[:4].tolist() == [0.5, 0.0, 1.0, 1.0] and bool(found[4].isnan())


def test_cuts_are_distinct_and_at_most_the_thoughts_length() -> None:
    cuts = draw_cuts(5, 100, random.Random(0))
    assert cuts == [1, 2, 3, 4, 5] and draw_cuts(0, 3, random.Random(0)) == []
    words = ["a ", "b ", "</th", "ink>", " c"]

    def decode(ids: Any) -> str:
        return "".join(words[i] for i in ids)

    assert count_tokens_before([0, 1, 2, 3, 4], "</think>", decode) == 2
    assert count_tokens_before([0, 1, 4], "</think>", decode) == 3

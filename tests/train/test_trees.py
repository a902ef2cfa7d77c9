"""Tree search in rollouts: a search branches, grades its leaves, backs up their values, and its paths are trained
on; also on two ranks (test_distributed.py) and resumed from a checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.tree import tree_steps
from posttrain.batch import Prompt, Rollout, RolloutBatch, Segment
from posttrain.errors import RecipeError
from posttrain.models import load as models
from posttrain.recipe.load import load_dict
from posttrain.recipe.sampling_sections import Sampling
from posttrain.rollout.continuation import Shape, generate_shaped
from posttrain.rollout.engine import GenerationBatch
from posttrain.shapes.mcts import TreeSearch
from posttrain.shapes.protocol import Asked, Ended, Grade, Row, Sampled
from posttrain.train import rl
from tests.scripted_engines import ConcurrentScriptedEngine

Values = dict[str, Any]

REWARDS = '''
from pathlib import Path

def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    with (Path(__file__).parent / "calls.txt").open("a") as file:
        file.write(repr(completion) + "\\n")
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def together(completions):
    return [0.5] * len(completions)
'''
SHAPES = """
from posttrain.batch import Node, Segment
from posttrain.shapes.protocol import Row

async def best_of_two(asked, *, words: str = "!"):
    first = await asked.sample([asked.prompt] * 2, 3)
    grades = await asked.grade([Row(asked.prompt, (one.segment,), one.finish) for one in first])
    scores = [grade.reward or 0.0 for grade in grades]
    best = scores.index(max(scores))
    second = await asked.sample([(*asked.prompt, *first[best].ids)] * 2, 4)
    nodes = (Node(1 + best, scores[best]),)
    return [
        Row(asked.prompt, (first[best].segment, one.segment), one.finish, nodes=(*nodes, Node(3 + n, 0.0)))
        for n, one in enumerate(second)
    ]
"""
MCTS = {"use": "mcts", "segment_tokens": 2, "width": 3, "max_depth": 4, "paths": 4}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "shapes.py").write_text(SHAPES)
    rows = [{"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values_of(shape: Any = MCTS, **changes: Any) -> Values:
    rollout = {
        "prompts_per_step": 5,
        "max_new_tokens": 8,
        "group_size": 1,
        **changes.pop("rollout", {}),
        "shape": shape,
    }
    return {
        "stage": "rl",
        "algorithm": "deepsearch",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": rollout,
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.2},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2, "samples_per_step": 40},
        **changes,
    }


Trained = list[tuple[list[Rollout], RolloutBatch]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """Record the rollouts and the batch of each step, with advantages."""
    found: Trained = []
    update, batch_of = rl.update, rl.batch_of
    sampled: list[list[Rollout]] = []

    def batched(ctx: Any, rollouts: list[Rollout], state: Any) -> RolloutBatch:
        sampled.append(list(rollouts))
        return batch_of(ctx, rollouts, state)

    def updated(ctx: Any, batch: RolloutBatch, sequences: Any, *rest: Any) -> Any:
        found.append((sampled[-1], batch.to("cpu")))
        return update(ctx, batch, sequences, *rest)

    monkeypatch.setattr(rl, "batch_of", batched)
    monkeypatch.setattr(rl, "update", updated)
    return found


@pytest.fixture
def run(cli: Any, home: Path) -> Callable[..., list[Values]]:
    """Run a recipe's steps through the command line and return their metrics."""

    def started(values: Values, name: str = "run", *options: str) -> list[Values]:
        (home / f"{name}.yaml").write_text(json.dumps(values))  # JSON is YAML
        cli.run("rl", str(home / f"{name}.yaml"), "--output", str(home / name), *options)
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in cli.rows_of(home / name)]

    return started


def trees_of(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return the rows of each tree, by position."""
    found: dict[int, list[int]] = {}
    for place, rollout in enumerate(rollouts):
        found.setdefault(rollout.group, []).append(place)
    return list(found.values())


def test_tree_paths_share_tokens_and_steps_get_the_advantage_of_their_node(
    run: Callable[..., list[Values]], trained: Trained
) -> None:
    """Three steps of DeepSearch: paths of a tree start with the same tokens and log-probs up to the node they share;
    a token's advantage is tanh(value) of its node (for a leaf the value itself) minus the mean over the tree's
    leaves; no node on a right path has a value below 0, and a right leaf has value 1.
    """
    metrics = run(values_of())
    assert any(row["grad_norm"] > 0 for row in metrics)
    branched = right = 0
    for rollouts, batch in trained:
        trees = trees_of(rollouts)
        assert len(trees) == 5 and all(len(rows) == 4 for rows in trees)
        for rows in trees:
            segments: dict[int, Segment] = {}
            for place in rows:
                rollout = rollouts[place]
                assert len(rollout.nodes) == len(rollout.segments) <= 4 and len(rollout.ids) <= 8
                for node, segment in zip(rollout.nodes, rollout.segments, strict=True):
                    branched += node.number in segments
                    assert segments.setdefault(node.number, segment) == segment and segment.kind == "model"
                if rollout.correct:
                    right += 1
                    assert rollout.nodes[-1].value == 1 and all(node.value >= 0 for node in rollout.nodes)
            mean = sum(rollouts[place].nodes[-1].value for place in rows) / len(rows)
            for place in rows:
                nodes, lengths = rollouts[place].nodes, [len(s.ids) for s in rollouts[place].segments]
                worth = [*(float(torch.tanh(torch.tensor(n.value).double())) for n in nodes[:-1]), nodes[-1].value]
                expected = [w - mean for w, count in zip(worth, lengths, strict=True) for _ in range(count)]
                assert batch.advantages is not None
                assert batch.advantages[place, : len(expected)].tolist() == pytest.approx(expected)
    assert branched > 0 and right > 0


def test_shared_node_is_trained_once_unless_each_path_trains_it(
    run: Callable[..., list[Values]], trained: Trained
) -> None:
    run(values_of({**MCTS, "shared_prefix": "once"}, run={"steps": 1}))
    rollouts, batch = trained[0]
    for rows in trees_of(rollouts):
        counts: dict[int, int] = {}
        for place in rows:
            start = 0
            for node, segment in zip(rollouts[place].nodes, rollouts[place].segments, strict=True):
                masked = batch.mask[place, start : start + len(segment.ids)]
                start += len(segment.ids)
                assert bool(masked.all()) == bool(masked.any())
                counts[node.number] = counts.get(node.number, 0) + int(masked.all())
        assert set(counts.values()) == {1}


def test_rows_graded_by_the_search_are_not_scored_again(run: Callable[..., list[Values]], home: Path) -> None:
    """Each leaf is graded once, including leaves that are no row: there are as many calls as leaves of all trees,
    each of which is in a row or a sibling of one.
    """
    metrics = run(values_of(run={"steps": 1, "samples_per_step": 40}))
    scored = (home / "calls.txt").read_text().splitlines()
    records = [json.loads(line) for line in (home / "run" / "samples.jsonl").read_text().splitlines()]
    rows = [repr(record["completion"]) for record in records]
    assert len(rows) == 20 and len(scored) > 20 and set(rows) <= set(scored)
    assert metrics[0]["rollout/drawn_tokens"] > sum(len(set(s["ids"])) for r in records for s in r["segments"][-1:])
    numbers = [node["number"] for node in records[0]["nodes"]]
    assert numbers == sorted(numbers) and {"number", "value", "visits"} == set(records[0]["nodes"][0])


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_with_trees_resumes_exactly(run: Callable[..., list[Values]], home: Path, staleness: int) -> None:
    """With staleness, the paths of the next step are in the checkpoint, with their nodes."""
    correct = {"corrections": [{"use": "tis"}]} if staleness else {}
    values = values_of(rollout={"staleness": staleness}, **correct)
    whole = run(values)
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    assert run(values, "run", "--resume") == whole


def test_stored_right_answers_of_hard_prompts_replace_the_search(
    run: Callable[..., list[Values]], trained: Trained, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has the same five prompts.

    Prompts with at most half of their paths right are not searched again: their right answers are the first rows,
    given and trained on with value 1, next to whole completions. A resumed run has the stored answers too.
    """
    shape = {**MCTS, "reuse_below": 0.5, "direct": 4}
    values = values_of(shape, data={"source": "rows.jsonl", "size": 5}, scoring={"workers": 1, "correct_at": 0.15})
    learn = TreeSearch.learn  # as if paths of 8 tokens had ended with EOS: unfinished paths are not stored

    def learn_of_all(self: Any, memory: Any, ended: Any, step: int) -> Any:
        return learn(self, memory, [one._replace(finish="stop") for one in ended], step)

    monkeypatch.setattr(TreeSearch, "learn", learn_of_all)
    metrics = run(values)
    assert metrics[0]["store/prompts"] > 0 and metrics[0]["store/reused"] == 0
    assert metrics[1]["store/reused"] == metrics[0]["store/prompts"]
    (first, _), (second, batch) = trained[:2]
    right = {(r.prompt.uid, r.ids) for r in first if r.correct}
    given = [n for n, r in enumerate(second) if r.is_given]
    reused = {second[n].prompt.uid for n in given}
    assert given and {(second[n].prompt.uid, second[n].ids) for n in given} <= right
    assert batch.advantages is not None and batch.node_values is not None
    for uid in reused:
        own = [n for n, r in enumerate(second) if r.prompt.uid == uid]
        assert len(own) == 4 and len({second[n].group for n in own}) == 1 and second[own[0]].is_given
        ends = [float(batch.node_values[n][batch.mask[n]][0]) for n in own]
        assert [end == 1.0 for end in ends] == [bool(second[n].correct) for n in own]
        assert batch.mask[own[0]].sum() == len(second[own[0]].ids)
        assert batch.advantages[own[0], 0] == pytest.approx(1.0 - sum(ends) / 4)
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    assert run(values, "run", "--resume") == metrics


def test_prompt_solved_more_often_leaves_the_store() -> None:
    """At most a quarter right: stored; none right: unchanged; half right: removed. Given rows do not count."""
    search = TreeSearch(reuse_below=0.25, stored=2)

    def step(memory: Any, *rights: bool, uid: str = "a", given: bool = False) -> Any:
        ended = [Ended(uid, (n, 2), False, None, right) for n, right in enumerate(rights)]
        return search.learn(memory, [*ended, *([Ended(uid, (9, 2), True, 1.0, True)] if given else [])], 0).memory

    stored = step(None, True, False, False, False)
    assert stored == {"a": [[0, 2]]}
    assert step(stored, False, False, given=True) == stored
    assert step(stored, False, True, False, False) == {"a": [[0, 2], [1, 2]]}
    assert step(stored, True, False) == {}
    assert step({"a": [[1, 2]]}, False, True, False, False) == {"a": [[1, 2]]}, "the same answer once"
    many = {"a": [[9, n] for n in range(7)]}
    assert step(many, True, False, False, False) == {"a": [*many["a"][1:], [0, 2]]}, "the newest `direct` - 1"
    assert list(step(step(stored, *[True] + [False] * 3, uid="b"), *[True] + [False] * 3, uid="c")) == ["b", "c"]
    cut = [Ended("a", (n, 2), False, 1.0, n < 2, "length" if n == 0 else "stop") for n in range(8)]
    assert search.learn(None, cut, 0).memory == {"a": [[1, 2]]}, "a right one that was cut off is no whole answer"
    assert search.learn(None, cut[:1] + cut[2:], 0).memory == {}
    assert TreeSearch().learn(None, [Ended("a", (1,), False, 1.0, True)], 0) == ({}, {})


def test_class_without_learn_is_refused(home: Path, cli: Any) -> None:
    (home / "one.py").write_text("class Forgets:\n    async def run(self, asked):\n        return []\n")
    (home / "run.yaml").write_text(
        json.dumps(values_of("one.py:Forgets", advantage="group", algorithm=None, rollout={"group_size": 2}))
    )
    with pytest.raises(AssertionError, match=r"rollout.shape `one.py:Forgets` is a class without `learn`"):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_custom_function_grows_a_tree(run: Callable[..., list[Values]], trained: Trained) -> None:
    """The better of two prefixes is continued twice; both rows have its value and share its tokens."""
    run(values_of("./shapes.py:best_of_two", run={"steps": 1}))
    rollouts, batch = trained[0]
    assert len(rollouts) == 10 and batch.node_ids is not None
    for one, other in zip(rollouts[::2], rollouts[1::2], strict=True):
        assert one.nodes[0] == other.nodes[0] and one.segments[0] == other.segments[0]
        assert (one.nodes[1].number, other.nodes[1].number) == (3, 4)


def test_data_inspect_shows_the_rows_of_a_tree(home: Path, cli: Any) -> None:
    """Four paths of four segments of two tokens.

    No path ends well, so the deepest unexpanded node is next. With `once` the second and third add two segments each
    to the first, and the fourth three.
    """
    for shared, trained in (("each", 32), ("once", 22)):
        (home / "run.yaml").write_text(json.dumps(values_of({**MCTS, "shared_prefix": shared})))
        said = " ".join(cli.run("data", "inspect", str(home / "run.yaml")).split())
        assert f"mcts: a rollout that fills its limits is 4 rows, a group of its own; {trained} of 32 tokens" in said


def test_plan_counts_the_tree_paths(home: Path, cli: Any) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of()))
    assert re.search(r"rows of a rollout that fills its limits\s+4", cli.run("plan", str(home / "run.yaml")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout": {"temperature": 0.0}}, "branches of `mcts` would all be the same"),
        ({"tools": [{"use": "calculator"}]}, "with `tools` or an `environment` a rollout continues with their replies"),
        ({"prompt_variants": "templates"}, "`prompt_variants` also change"),
        ({"replay": "success"}, "`replay` stores single rows"),
        ({"rollout": {"engine": "stored"}}, r"rollout\.engine stored samples nothing"),
        ({"rollout": {"max_gen_batches": 2}, "keep": "mixed"}, "refilling counts prompts"),
    ],
)
def test_keys_incompatible_with_a_tree_are_refused(home: Path, changes: Values, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_dict(values_of(**changes), base_dir=home, where="test")


def test_node_advantage_without_a_tree_is_refused(home: Path) -> None:
    values = values_of({"use": "serial_exit"}, algorithm="grpo", advantage="tree_steps")
    with pytest.raises(RecipeError, match=r"paths of a tree: `rollout\.shape: mcts`"):
        load_dict(values, base_dir=home, where="test")


def test_batched_reward_with_a_tree_is_refused_before_the_model_loads(
    home: Path, cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.train.assemble.sharding.load", lambda *_, **__: pytest.fail("the model was loaded"))
    values = values_of(rewards=[{"use": "rewards.py:digits", "correct": True}, {"use": "rewards.py:together"}])
    (home / "run.yaml").write_text(json.dumps(values))
    with pytest.raises(AssertionError, match="reads many rows in a call"):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def search(
    answers: Callable[[tuple[int, ...], int], tuple[int, ...]], right: Callable[[Row], bool], **keys: Any
) -> list[Row]:
    """Return the rows of `mcts` for the prompt (9,), of at most six tokens; answers: (request, position) -> tokens,
    where 0 ends a completion.
    """

    async def draw(prompts: Sequence[tuple[int, ...]], limits: Sequence[int], *, greedy: bool = False) -> list[Sampled]:
        assert not greedy
        ids = [answers(prompt, place) for place, prompt in enumerate(prompts)]
        assert all(len(one) <= limit for one, limit in zip(ids, limits, strict=True))
        return [
            Sampled(Segment("model", one, (-float(one[0]),) * len(one)), "stop" if one[-1] == 0 else "length")
            for one in ids
        ]

    async def grade(rows: Sequence[Row]) -> list[Grade]:
        return [Grade(float(right(row)), right(row)) for row in rows]

    asked = Asked((9,), {}, 6, 100, 0, draw, grade, lambda _: (), lambda _: "", lambda _: "")
    return asyncio.run(TreeSearch(segment_tokens=2, **keys).run(asked))


def test_search_continues_below_nodes_with_right_leaves() -> None:
    """Two children each, tokens 1 and 2, which end at depth 3; paths that begin with 2 are right.

    The first path follows the first children, as UCT ties, and ends wrong: -1/4, -1/2, -3/4, -1 from the root down.
    Of the unexpanded nodes, (1,2) has the parent value -1/2 / 2 and (2) the root's -1/4 / 1: equal, so the deeper
    one is next. It ends wrong: (1) has -1 and the root -1/2. Then only (2) can be expanded; its first child ends
    right, which sets the root to 1/4 and (2), which had 0, to 1/2; the second ends right, too: 1/2 and 1.
    """

    def answers(prompt: tuple[int, ...], place: int) -> tuple[int, ...]:
        return (place + 1, 0) if len(prompt) == 3 else (place + 1,)

    rows = search(answers, lambda row: row.segments[0].ids == (2,), width=2, max_depth=3, paths=4)
    paths = [tuple(i for s in row.segments for i in s.ids) for row in rows]
    assert paths == [(1, 1, 1, 0), (1, 2, 1, 0), (2, 1, 1, 0), (2, 2, 1, 0)]
    assert [[node.value for node in row.nodes] for row in rows] == [
        [-1, -0.75, -1], [-1, -0.75, -1], [1, 0.75, 1], [1, 0.75, 1]
    ]  # fmt: skip
    assert rows[0].nodes[0].visits == rows[2].nodes[0].visits == 3  # once as a candidate, and in two paths


def test_right_leaf_with_the_highest_log_probs_is_backed_up() -> None:
    """Leaves (1,0), (2,0) and (3,0); the last two are right and (2,0) has the higher log-probs.

    The next path is the remaining leaf (3,0), as no node can be expanded.
    """
    rows = search(
        lambda _, place: (place + 1,), lambda row: row.segments[0].ids != (1,),
        width=3, max_depth=1, paths=2,
    )  # fmt: skip
    assert [row.segments[0].ids for row in rows] == [(2,), (3,)]


def test_tree_at_max_nodes_returns_one_path() -> None:
    """max_nodes is reached before any leaf: the newest path is a truncated row."""
    rows = search(lambda _, place: (place + 1,), lambda _: True, width=2, max_depth=3, paths=4, max_nodes=4)
    assert len(rows) == 1 and rows[0].finish == "length" and len(rows[0].segments) == 1


def test_node_advantages_by_hand() -> None:
    """Two paths of one tree: node values 0.5 and 1, and 0.5 and -1, with a mean leaf of 0; a third row is alone in
    its tree, and nothing is subtracted. With the reward as the final score: 1 and 0, mean 1/2.
    """
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 1]),
        mask=torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=torch.bool),
        rewards=torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64),
        node_ids=torch.tensor([[1, 1, 2], [1, 3, -1], [7, -1, -1]]),
        node_values=torch.tensor([[0.5, 0.5, 1.0], [0.5, -1.0, 0.0], [0.25, 0.0, 0.0]], dtype=torch.float64),
    )
    half = float(torch.tanh(torch.tensor(0.5).double()))
    assert tree_steps(batch).flatten().tolist() == pytest.approx([half, half, 1.0, half, -1.0, 0.0, 0.25, 0.0, 0.0])
    by_reward = tree_steps(batch, final="reward").flatten().tolist()
    assert by_reward == pytest.approx([half - 0.5, half - 0.5, 0.5, half - 0.5, -0.5, 0.0, 1.0, 0.0, 0.0])


def test_concurrent_engine_grows_the_same_tree(tmp_path: Path) -> None:
    """Two prompts whose trees do not wait for each other: each request has the path so far as its prompt and a
    separate seed; leaves are graded by calls in this thread, each once; and all tokens are counted, including those
    of no path.
    """
    tokenizer = models.load_tokenizer(load_dict(values_of(), base_dir=tmp_path, where="test").recipe.model, tmp_path)
    engine = ConcurrentScriptedEngine(lambda request, _: str(len(request.ids)) * 9, tokenizer)
    graded: list[Rollout] = []

    def grade(rollouts: Sequence[Rollout]) -> list[Grade]:
        graded.extend(rollouts)
        return [Grade(1.0, True) for _ in rollouts]

    keys = {"segment_tokens": 2, "width": 2, "max_depth": 2, "paths": 3, "max_nodes": 9}
    shape = Shape("mcts", TreeSearch(**keys).run, tokenizer, own_group=True, room=0, reads_logps=True)
    prompts = [Prompt("a", {}, "ab", (5, 6)), Prompt("b", {}, "c", (7,))]
    metrics: Values = {}
    found = generate_shaped(
        engine, shape, GenerationBatch(prompts, 1, Sampling(max_new_tokens=6), 3, [0, 1]), group_stride=100,
        grade=grade, metrics=metrics,
    )  # fmt: skip
    assert [(r.group, r.part) for r in found] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len(engine.asked) == 12 and len({request.seed for request in engine.asked}) == 12
    assert {len(request.ids) for request in engine.asked} == {2, 4, 1, 3} and metrics["rollout/drawn_tokens"] == 24
    assert len(graded) == 8 and all(r.nodes[-1].value == 1 for r in found)
    assert {r.trajectory for r in graded} == {r.trajectory for r in found}

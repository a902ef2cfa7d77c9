"""CPU time of every registered component, shipped reward and bookkeeping step on the host, slowest first.

    python benchmarks/host_parts.py      # 64 prompts x 8 completions of 240 to 512 tokens; a CPU, a minute
    python benchmarks/host_parts.py --only advantage_transform --only select --out FILE.json

Milliseconds of CPU time per step on one thread, so that other processes hardly matter. A reward's time is the sum of
its calls, which workers share in a run. Rewards that call a server or start a process per call are excluded, because
their time is not the host's. A run on a GPU computes tensor operations of components there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from posttrain import registry
from posttrain.batch import PairBatch, Prompt, Rollout, RolloutBatch, Segment, ToolCall, Turn
from posttrain.curriculum.protocol import Group, Pool, Request
from posttrain.loss.token_weights import TokenRows
from posttrain.models import tiny
from posttrain.path_resolution import shipped_folder
from posttrain.rollout.engine import Completion, as_rollouts
from posttrain.train import rl_metrics, saved_rollouts
from posttrain.train.collate import rollout_batch, sequences_of
from posttrain.train.logprobs import micro_batches
from posttrain.train.scoring import token_ends
from posttrain.train.turn_fields import BY_TURN
from posttrain.variants.plan import Asked, Outcome, Stateless
from posttrain.verify.examples import Example, read_examples
from posttrain.verify.load import load_script
from posttrain.verify.score import combine

Work = Callable[[], Any]
HIDDEN, TOP = 64, 50
TEXT = 400  # characters of a completion
ELSEWHERE = ("audits", "judge", "code", "sql")  # scripts whose calls wait for a server or a process
# Kinds that a step does not call, that ask an engine (shape, workflow) or that read a store (replay): not timed here.
OUTSIDE_A_STEP = ("merge", "task", "shape", "workflow", "replay")
REQUIRED: dict[tuple[str, str], dict[str, Any]] = {
    ("advantage", "beta_norm"): {"reward_max": 1.1},  # of `reward_weights`
    ("advantage", "channels"): {"channels": [{"rewards": {"accuracy": 1.0}}, {"rewards": {"format": 1.0}}]},
    ("advantage", "decs"): {"max_length": 512},
    ("advantage", "riskpo"): {"bundle_size": 2},
    ("controller", "equal_stages"): {"values": (1.0, 2.0)},
    ("controller", "stages"): {"values": (1.0, 2.0), "until": (10,)},
    ("group_reward", "gated"): {"gate": {"pass_rate": 0.5}},
    ("group_reward", "remaining_length"): {"max_length": 512},
    ("prompt_variants", "instructions"): {"pool": ("Think first.", "Be brief.")},
    ("select", "capo"): {"learning_rate": 1e-6},
    ("select", "d3s"): {"n_query": 4, "n_batch": 128, "token_frac": 0.2},
}


# --- a step's rollouts ---


def rollouts_of(prompts: int, group: int, shortest: int, longest: int) -> list[Rollout]:
    """Return rollouts of three turns with a tool reply between them, of random lengths; texts are words and an
    answer."""
    draw = random.Random("host_parts")
    found = []
    for number in range(prompts):
        question, answer = text(draw, 300), str(draw.randrange(10))
        row = {"uid": f"p{number}", "prompt": question, "answer": answer, "easiness": 0.5}
        asked = Prompt(f"p{number}", row, question, tuple(draw.randrange(20, 100) for _ in range(80)))
        for _ in range(group):
            segments, turns = turns_of(draw, draw.randrange(shortest, longest + 1))
            right, form = draw.random() < 0.5, draw.random()
            written = f"{text(draw, TEXT)} \\boxed{{{answer if right else draw.randrange(10, 20)}}}"
            rollout = Rollout(asked, number, segments, written, "stop", 0, turns=turns)
            rollout.scores = {"accuracy": float(right), "format": form}
            rollout.reward, rollout.correct = right + 0.1 * form, right
            found.append(rollout)
    return found


def turns_of(draw: random.Random, length: int) -> tuple[tuple[Segment, ...], tuple[Turn, ...]]:
    sizes = [length // 3, length // 8, length // 6, length // 8]
    segments = []
    for place, size in enumerate([*sizes, length - sum(sizes)]):
        ids = tuple(draw.randrange(20, 100) for _ in range(size))
        logps = None if place % 2 else tuple(-draw.random() for _ in range(size))
        segments.append(Segment("tool" if place % 2 else "model", ids, logps))
    calls = [(ToolCall("search", {"query": str(draw.randrange(3))}, text(draw, 60)),) for _ in range(2)]
    turns = [Turn(text(draw, 130), call, call[0].result, draw.random(), draw.random()) for call in calls]
    return tuple(segments), (*turns, Turn(text(draw, 130), reward=draw.random(), mc_value=draw.random()))


def text(draw: random.Random, characters: int) -> str:
    words = ("so", "the", "sum", "of", "both", "numbers", "is", "then", "wait", "let", "me", "check", "that", "\n")
    out = ""
    while len(out) < characters:
        out += f"{draw.choice(words)} {draw.randrange(100)} " if draw.random() < 0.2 else f"{draw.choice(words)} "
    return out[:characters]


def batch_of(rollouts: list[Rollout]) -> RolloutBatch:
    """Return a batch with every field that a component reads; values that a model would compute are random."""
    batch = rollout_batch(rollouts, ("boxed",), {*BY_TURN, "turn_states"})
    torch.manual_seed(0)
    rows, width = batch.mask.shape
    names = named_columns()
    log_probs = (
        "old_logp",
        "ref_logp",
        "opponent_logp",
        "tempered_ref_logp",
        "expert_logp",
        "old_vocab_mean_logp",
        "prox_logp",
        "masked_logp",
        "perturbed_logp",
    )
    made = {name: -torch.rand(rows, width) for name in (*log_probs, "vocab_mean_logp", "entropy", "prompt_logp")}
    made |= {name: torch.rand(rows, width) for name in ("values", "new_values", "returns", "new_entropy", "divergence")}
    columns = {name: torch.randint(1, 4, (rows,)).double() for name in names}
    return batch.replace(
        **made,
        components={**batch.components, **columns},
        columns={**batch.columns, **columns},
        reward_weights={"accuracy": 1.0, "format": 0.1, **dict.fromkeys(names, 0.0)},
        advantages=torch.randn(rows, dtype=torch.float64),
        channels={name: torch.randn(rows, dtype=torch.float64) for name in ("0", "1", "local", "global")},
        opponent_rewards=torch.rand(rows, 4, dtype=torch.float64),
        prompt_mask=torch.ones(rows, width, dtype=torch.bool),
        hidden=torch.randn(rows, width, HIDDEN),
        router_loss=torch.rand(rows),
        topk_logp=torch.randn(rows, width, TOP).log_softmax(-1).sort(-1, descending=True).values,
        topk_chosen=torch.nn.functional.one_hot(torch.randint(0, TOP, (rows, width)), TOP).bool(),
        agent_ids=torch.randint(0, 3, (rows,)),
        roles=("planner", "solver", "critic"),
        trajectory_ids=torch.arange(rows),
        step_ids=torch.zeros(rows, dtype=torch.long),
        part_ids=torch.arange(width).expand(rows, width) // 100,
        node_ids=torch.arange(width).expand(rows, width) // 100 + width * torch.arange(rows)[:, None],
        node_values=torch.rand(rows, 1).expand(rows, width),
        answer_logp=-torch.rand(rows, 3),
        finished=torch.rand(rows) < 0.9,
        new_tokens=torch.ones(rows, width, dtype=torch.bool),
        hinted=torch.rand(rows) < 0.5,
        hint_mask=torch.arange(width).expand(rows, width) < 20,
        external=torch.zeros(rows, width, dtype=torch.bool),
        bins=torch.randint(0, 4, (rows,)),
        sampler_state={"scores": {"0": 0.2, "1": 0.1}, "kl_threshold": 0.1},
        turn_scores={
            name: torch.rand(rows, width, dtype=torch.float64).round() for name in ("meta_tag", "meta_reward")
        },
        step=3,
        total_steps=10,
    )


def named_columns() -> list[str]:
    """Return reward components and data columns that components read by default."""
    entries = [entry for kind, named in registry.load_index().items() if kind != "merge" for entry in named.values()]
    defaults = [value[1] for entry in entries for value in entry["params"].values() if len(value) == 2]
    return sorted({value for value in defaults if isinstance(value, str)})


# --- timed functions ---


def components(batch: RolloutBatch) -> Iterator[tuple[str, Work]]:
    logp = -torch.rand(batch.mask.shape)
    pairs, rows = pairs_of(len(batch)), token_rows(batch)
    for kind, named in registry.load_index().items():
        for name in named if kind not in OUTSIDE_A_STEP else ():
            function = registry.get(kind, name).function  # type: ignore[arg-type]
            params = REQUIRED.get((kind, name), {})
            given: tuple[Any, ...] = (batch,)
            if kind in ("correction", "loss", "group_loss", "kl", "regulariser"):
                given = (batch, logp)
            elif kind == "pair_loss":
                given = (pairs,)
            elif kind == "token_weight":
                given = (rows,)
            way = {"controller": controlled, "sampler": drawing, "prompt_variants": asking}.get(kind, called)
            yield f"{kind} {name}", way(function, given, params)


def called(function: Callable[..., Any], given: tuple[Any, ...], params: Mapping[str, Any]) -> Work:
    return lambda: function(*given, **params)


def controlled(function: Callable[..., Any], given: tuple[Any, ...], params: Mapping[str, Any]) -> Work:
    del given
    controller = function(**params)
    state = controller.start(1.0)
    metrics = {"kl": 0.1, "entropy": 1.0, "reward": 0.5, "rollout/rows": 512}
    return lambda: (controller.value(state, 3), controller.update(state, metrics, 3))


def drawing(function: Callable[..., Any], given: tuple[RolloutBatch], params: Mapping[str, Any]) -> Work:
    """Return a sampler's plan of a step, and its state after the groups of that step."""
    groups = len(given[0].group_ids.unique())
    size = len(given[0]) // groups
    uids = [f"p{n}" for n in range(8 * groups)]
    rows = [{"task": f"sums{n % 3}", "level": n % 4} for n in range(len(uids))]
    pool = Pool(uids, rows, groups, size)
    sampler = function(**params)
    state = sampler.start(pool)
    stream = range(sampler.places(groups))
    request = Request(0, 10, groups, size, stream, seed=0, values=[0.5] * len(stream))
    ends = tuple(float(n % 2) for n in range(size))
    more: dict[str, Any] = {"loss": 0.1, "kl": 0.1, "lengths": tuple(range(size))}
    seen = [Group(n, uids[n], ends, ends, bin=n % 3, group=n, **more) for n in range(groups)]
    return lambda: (
        sampler.propose(state, request, pool),
        sampler.update(state, seen, pool, step=0, planned=1),
    )


def asking(function: Callable[..., Any], given: tuple[RolloutBatch], params: Mapping[str, Any]) -> Work:
    """Return a kind's output for each prompt of a step, in its first round and in rounds without a right rollout."""
    planner = function(**params) if isinstance(function, type) else Stateless(function, params)
    asked = [
        Asked(f"p{n}", "What is 1 + 2?", {"hint": "Add.", "guidance": "Add."}, tuple(range(20, 60)), seed=n)
        for n in range(len(given[0].group_ids.unique()))
    ]

    def ask() -> None:
        for one in asked:
            failed = [Outcome(one.uid, v, (0.0,), (False,), ("",)) for v in planner.plan(one)]
            planner.plan(dataclasses.replace(one, rounds=tuple(failed)))

    return ask


def pairs_of(count: int) -> PairBatch:
    values = {f.name: torch.randn(count) for f in PairBatch.__dataclass_fields__.values() if "Tensor" in str(f.type)}
    return PairBatch(**values | {name: torch.randn(2, count) for name in values if name.startswith("history")})


def token_rows(batch: RolloutBatch) -> TokenRows:
    words = [["word "] * batch.mask.shape[1]] * len(batch)
    return TokenRows(-torch.rand(batch.mask.shape), batch.mask, -torch.rand(batch.mask.shape), words)


def bookkeeping(rollouts: list[Rollout], batch: RolloutBatch, folder: Path) -> Iterator[tuple[str, Work]]:
    """Return the bookkeeping steps of every RL step, independent of its components."""
    rows = [r.group for r in rollouts]
    scores = {name: [r.scores[name] for r in rollouts] for name in rollouts[0].scores}
    plain = rollout_batch(rollouts)
    lengths = sequences_of(rollouts).lengths
    saved = saved_rollouts.build_saved(plain, plain.replace(old_logp=batch.old_logp), -torch.rand(batch.mask.shape))
    yield "step rollout_batch", lambda: rollout_batch(rollouts)
    for name in (*BY_TURN, "turn_states"):
        yield f"step rollout_batch with {name}", called(rollout_batch, (rollouts, None, (name,)), {})
    yield "step rollout_batch with answer_ids", lambda: rollout_batch(rollouts, ("boxed", "last_number"))
    yield "step sequences_of", lambda: sequences_of(rollouts)
    tokenizer = tiny.build(0)[1]
    sampled = [Completion(r.ids, r.logps, "stop") for r in rollouts]
    asked = [r.prompt for r in rollouts]
    yield "step as_rollouts", lambda: as_rollouts(asked, 1, sampled, tokenizer, first_group=0, version=0)
    yield "step token_ends (scoring.split)", lambda: [token_ends(r.ids, tokenizer) for r in rollouts]
    yield "step micro_batches", lambda: micro_batches(lengths, 16384, packed=True)
    yield "step combine", lambda: combine(scores, dict.fromkeys(scores, 1.0), dict.fromkeys(scores, "auto"), rows)
    yield "step rollout_metrics", lambda: rl_metrics.rollout_metrics(rollouts, batch)
    yield "step age_metrics", lambda: rl_metrics.age_metrics(batch, 3)
    yield "step sample_records", lambda: [rl_metrics.sample_record(rollouts[n]) for n in range(4)]
    yield "step saved_rollouts", lambda: saved_rollouts.write(folder, 1, saved, keep=1)


def rewards(count: int) -> Iterator[tuple[str, Work]]:
    """Return every shipped reward on its own examples, with completions as long as in a run, `count` calls."""
    draw = random.Random("host_parts/rewards")
    for path in sorted(shipped_folder("rewards").glob("*.py")):
        if path.stem in ELSEWHERE:
            continue
        module = load_script(path)
        module.get("setup", lambda: None)()
        for name, examples in read_examples(path).items():
            asked = [
                longer(examples[n % len(examples)], draw) for n in range(count)
            ]  # all different, so that nothing is cached
            yield f"reward {path.stem}.{name}", calls(module[name], asked)


def longer(example: Example, draw: random.Random) -> Example:
    """Return the example with a completion of `TEXT` more characters, inside its thought if it starts with one."""
    opening = "<think>" if example.completion.startswith("<think>") else ""
    added = f"{opening}{text(draw, TEXT)} {example.completion.removeprefix(opening)}"
    return Example(added, example.columns, example.expected, example.params)


def calls(function: Callable[..., Any], examples: list[Example]) -> Work:
    def run() -> None:
        for example in examples:
            with contextlib.suppress(Exception):  # an example that must fail
                function(example.completion, **example.columns, **example.params)

    return run


# --- time ---


def milliseconds(work: Work, repeats: int) -> float:
    """Return CPU milliseconds, the best of several runs; slow functions run less often."""
    times: list[float] = []
    while len(times) < repeats and sum(times) < 1.0:
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1000 * min(times)


def measured(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    rollouts = rollouts_of(args.prompts, args.group, *args.tokens)
    batch = batch_of(rollouts)
    found: dict[str, float] = {}
    for parts in (components(batch), bookkeeping(rollouts, batch, folder), rewards(len(rollouts))):
        for name, work in parts:
            if not args.only or any(word in name for word in args.only):
                found[name] = milliseconds(work, args.repeats)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs=2, default=(240, 512), metavar=("SHORTEST", "LONGEST"))
    parser.add_argument("--only", action="append", help="parts whose name holds this word; may be repeated")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(args, Path(folder))
    for name, cost in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{cost:9.2f} ms  {name}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

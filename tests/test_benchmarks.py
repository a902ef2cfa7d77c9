"""The benchmarks' arithmetic: ratios come from the steps in the JSON. With `make test-slow` the scripts run, on tiny
models, and what they call equal is equal."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.places import shipped

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
def test_a_committed_file_gives_its_ratios(tmp_path, script):
    """Two steps left out: 2.0 s against 4.0 s a step, 10 GiB against 20."""
    file = tmp_path / "x.json"
    file.write_text(json.dumps(record(trl_tries=[])))
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), "--recompute", str(file)], capture_output=True, text=True, check=True
    )
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    assert rows["seconds a step"] == ["2.000", "4.000", "0.500"]
    assert rows["update"] == ["1.000", "2.000", "0.500"]
    assert rows["peak GiB"] == ["10.000", "20.000", "0.500"]


def test_the_fastest_try_by_the_token_counts(sides):
    slow, packed = side([4.0] * 5), side([8.0] * 5, tokens=4000)
    failed = {"error": "x", "settings": {}}
    assert sides.best_of([failed, slow, packed]) is packed
    assert sides.best_of([failed]) is failed


def test_a_failed_side_is_told(sides):
    text = sides.table(record(trl={"error": "Traceback\nValueError: no", "settings": {}}))
    assert "trl: failed: ValueError: no" in text and "2.000" in text


def test_the_floor_of_an_update(sides):
    """6 FLOP a weight and token over 45% of 989 TFLOP/s; 4 with frozen weights, which have no gradient."""
    assert sides.floor_update_s("NVIDIA H100", 10**9, 10**5, lora=False) == pytest.approx(6e14 / (0.45 * 989e12))
    assert sides.floor_update_s("NVIDIA H100", 10**9, 10**5, lora=True) == pytest.approx(4e14 / (0.45 * 989e12))
    assert sides.floor_update_s("CPU", 10**9, 10**5, lora=True) is None


def test_running_out_of_memory_is_a_result(sides, tmp_path, capsys):
    out = tmp_path / "out.json"
    with sides.reporting({"out": str(out)}):
        try:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")
        except RuntimeError as cause:
            raise ValueError("step failed") from cause
    assert json.loads(out.read_text()) == {"error": "ValueError: step failed", "out_of_memory": True}
    assert "Traceback" in capsys.readouterr().err


def test_memory_is_that_of_the_process_tree(sides):
    child = subprocess.Popen([sys.executable, "-c", "x = bytearray(200 << 20); print(flush=True); input()"],
                             stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
    with sides.Memory(None) as memory:
        memory.pid = child.pid
        child.stdout.readline()
        assert memory.read() > 0.19
        sides.time.sleep(0.2)
    child.communicate(b"\n")
    assert memory.peak > 0.19


def test_memory_is_that_of_the_first_visible_gpu(sides, monkeypatch):
    """NVML does not know of CUDA_VISIBLE_DEVICES."""

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


def test_generation_alone_repeats_the_last_step_with_its_lengths(monkeypatch):
    """As many requests as rollouts, each with its own number of tokens, and no more steps than there are lengths."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rl_posttrain

    from posttrain.rollout.pushed import Request

    class Engine:
        def __init__(self):
            self.calls, self.closed, self.asleep = [], False, True
            self.loaded, self.version = argparse.Namespace(model="model"), 2

        def sync(self, model, version):
            assert (model, version) == ("model", 2)
            self.asleep = False

        def complete(self, requests, sampling, *, seed, done=None):
            del sampling, seed, done
            self.calls.append([(r.max_new_tokens, r.ends, r.logprobs) for r in requests])
            return [["sample"] for _ in requests]

        def close(self):
            self.closed = True

    engine, result = Engine(), {}
    spec = {"lengths": [list(range(16)), list(range(16, 32))], "smoke": False}
    rl_posttrain.prepared(engine, spec, result)
    asked = [Request(ids=(1,), n=8, number=i, seed=0, max_new_tokens=99, logprobs=True, ends=True) for i in range(2)]
    for _ in range(2):
        assert engine.complete(asked, None, seed=1) == [["sample"] * 8] * 2
    engine.close()
    assert engine.closed and not engine.asleep and len(result["generate_alone_s"]) == 2
    assert engine.calls[1] == [(n, False, True) for n in range(16, 32)]
    assert engine.calls[2:] == [[(n, False, False) for n in range(16, 32)]] * 2


def test_every_part_of_the_host_is_timed(monkeypatch, tmp_path):
    """All registered components but merges, all rewards but those that wait for others, and a step's bookkeeping."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import host_parts

    args = argparse.Namespace(prompts=2, group=2, tokens=(12, 20), only=[], repeats=1)
    found = host_parts.measured(args, tmp_path)
    assert min(found.values()) > 0
    listed = {f"{kind} {name}" for kind, named in registry.index().items() if kind != "merge" for name in named}
    assert listed < found.keys()
    scripts = {path.stem for path in shipped("rewards").glob("*.py")} - set(host_parts.ELSEWHERE)
    assert {name.split()[1].partition(".")[0] for name in found if name.startswith("reward ")} == scripts
    assert sum(name.startswith("step ") for name in found) > 10
    args.only = ["select", "controller"]
    assert {name.split()[0] for name in host_parts.measured(args, tmp_path)} == {"select", "controller"}


# --- the scripts as commands, on tiny models ---

TRL = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed")


@pytest.fixture
def smoke(tmp_path):
    """Runs a script from a folder of its own; its JSON and what it printed. An exit code that is not 0 is an error."""

    def run(script: str, *flags: str) -> tuple[dict[str, Any], str]:
        out = tmp_path / "the results" / f"{script}.json"
        command = [sys.executable, str(BENCHMARKS / script), *flags, "--out", str(out)]
        threads = {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **threads})
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return json.loads(out.read_text()), done.stdout

    return run


def same(one: dict[str, Any], other: dict[str, Any], *curves: str) -> None:
    """The two sides saw the same tokens, and these figures of each step are equal but for rounding."""
    assert one["tokens"] == other["tokens"] and min(one["tokens"]) > 0
    for curve in curves:
        assert one[curve] == pytest.approx(other[curve], rel=1e-4, abs=1e-5), curve
        assert len({round(value, 5) for value in one[curve]}) > 1, f"{curve} never changes: it shows nothing"


def test_the_loop_of_the_product_runs_between_the_clocks(smoke):
    """Not slow: the clocks take the place of functions of the loop, and a change there must be seen at once."""
    record, printed = smoke("scale_ranks.py", "--smoke", "--ranks", "1")
    measured = record["ranks"]["1"]
    assert {"generate", "score", "sync", "update"} <= measured["phases"].keys()
    assert min(measured["tokens"]) > 0 and min(measured["step_s"]) > 0 and "error" not in measured
    assert printed.splitlines()[-1].split()[:2] == ["1", "ranks"]


@pytest.mark.slow
@TRL
def test_sft_and_trl_have_the_same_losses(smoke):
    """Padded and padding-free TRL see the rows of each step; packed, it puts them in lines of its own."""
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
def test_dpo_and_trl_have_the_same_losses(smoke):
    """As it comes, TRL sees the pairs of each step; grouped by length, all of them in another order."""
    record, printed = smoke("dpo.py", "--smoke")
    same(record["posttrain"], record["trl_tries"][0], "loss", "grad_norm", "margins")
    ways = [one["settings"]["way"] for one in record["trl_tries"]]
    assert ways == ["as_it_comes", "group_by_length"] and "error" not in record["trl_tries"][1]
    assert record["posttrain"]["reference_s"] > 0 and "reference pass, once: " in printed
    assert printed.count("largest gap of the loss 0.0000") == 2  # in two tables, of the first way alone


@pytest.mark.slow
@TRL
def test_an_rl_step_is_that_of_trl(smoke):
    """Work B: the same tokens on both sides, so the same rewards and gradients. Work A samples: both sides run."""
    record, printed = smoke("rl_step.py", "--smoke")
    assert record["work"] == "B"
    same(record["posttrain"], record["trl"], "reward", "grad_norm")
    assert {"generate", "score", "sync", "update"} <= record["posttrain"]["phases"].keys()
    assert "work A" in printed and "failed" not in printed
    assert all(line.split()[-1] != "0.000" for line in printed.splitlines() if line.startswith("seconds a step"))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--shard"]])
def test_replayed_updates_do_not_depend_on_the_ranks(smoke, more):
    record, printed = smoke("replay_ranks.py", "--smoke", *more)
    assert record["largest_gap"] < 1e-5 and "2 ranks  loss " in printed
    for curve in ("loss", "grad_norm"):
        assert len(set(record["ranks"]["1"][curve])) == 5


@pytest.mark.slow
def test_a_step_is_the_same_on_all_numbers_of_ranks(smoke):
    record, printed = smoke("scale_ranks.py", "--smoke", "--weak")
    assert list(record["ranks"]) == ["1", "2", "2 weak"]
    one, two, weak = record["ranks"].values()
    same(one, two, "reward", "grad_norm")
    assert all(2 * a < 3 * b for a, b in zip(one["tokens"], weak["tokens"], strict=True))
    assert [line.split()[:2] for line in printed.splitlines()[-3:]] == [["1", "ranks"], ["2", "ranks"], ["2", "ranks,"]]


@pytest.mark.slow
def test_a_step_is_the_same_with_an_engine_elsewhere(smoke):
    """`server` samples what `one` samples, and has its log-probs corrected: another gradient, the same rewards."""
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
@TRL
def test_rewards_are_those_of_a_plain_loop(smoke):
    record, printed = smoke("rewards.py", "--n", "200", "--workers", "2")
    for kind, rows in (("grouped", 200), ("distinct", 40)):
        assert record[kind]["rows"] == rows and record[kind]["agreement_with_the_loop"] == 1.0
    assert 0 <= record["endless_row"]["beyond_its_limit"] < 5
    assert "same scores as the loop on 100.0%" in printed


@pytest.mark.slow
def test_weights_arrive_by_both_ways():
    command = [sys.executable, str(BENCHMARKS / "transfer.py"), "--gib", "0.07", "--repeats", "1"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["gib"] == 2 / 32 and found["gib_per_s"].keys() == {"shared memory", "HTTP"}
    assert found["ratio"] == pytest.approx(found["gib_per_s"]["shared memory"] / found["gib_per_s"]["HTTP"])
    assert all(len(times) == 2 and min(times) > 0 for times in found["seconds"].values())

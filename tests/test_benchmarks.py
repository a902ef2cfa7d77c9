"""The benchmarks' arithmetic: ratios come from the steps in the JSON. That the sides run is `--smoke`, by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
    with sides.Memory(None, 0) as memory:
        memory.pid = child.pid
        child.stdout.readline()
        assert memory.read() > 0.19
        sides.time.sleep(0.2)
    child.communicate(b"\n")
    assert memory.peak > 0.19


def test_generation_alone_repeats_the_last_step_with_its_lengths(monkeypatch):
    """As many requests as rollouts, each with its own number of tokens, and no more steps than there are lengths."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import rl_posttrain

    from posttrain.rollout.pushed import Request

    class Engine:
        def __init__(self):
            self.calls, self.closed = [], False

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
    assert engine.closed and len(result["generate_alone_s"]) == 2
    assert engine.calls[1] == [(n, False, True) for n in range(16, 32)]
    assert engine.calls[2:] == [[(n, False, False) for n in range(16, 32)]] * 2

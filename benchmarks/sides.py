"""Shared code of the benchmarks: a side in a separate process, its device memory seen from outside, and the comparison.

A side is `SCRIPT --worker NAME --spec FILE`; it reads a JSON of settings and writes a JSON of results. Memory is what
NVML says the device holds, polled at 20 Hz by this process, so that an engine in a third process counts too; without a
GPU it is the resident memory of the side and its children.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from posttrain.run import environment as run_environment

HERTZ = 20
LEFT_OUT = 2  # first steps: compilation, caches, allocator; a side's `left_out` is another number
BF16_PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # dense FLOP/s by name of the card
USED_SHARE = 0.45  # share of the peak that a well-optimized update reaches
GIB = 1 << 30
TALKING = {"VLLM_LOGGING_LEVEL": "INFO"}  # of a side: vLLM's output goes to its log
DURATION = re.compile(r"\d s\b|\bsecs?\b|\bseconds\b")


def nvml() -> Any:
    """Return pynvml, from vLLM or on its own; None without a GPU."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # vLLM reads it when it is imported
    for name in ("vllm.third_party.pynvml", "pynvml"):
        try:
            found = __import__(name, fromlist=["nvmlInit"])
            found.nvmlInit()
            return found
        except Exception:  # not installed, or no driver: each raises an error of its own
            continue
    return None


def visible_gpus(lib: Any) -> list[str]:
    """Return the GPUs visible to child processes, as CUDA_VISIBLE_DEVICES names them. lib: of `nvml`."""
    if lib is None:
        return []
    every = ",".join(str(n) for n in range(lib.nvmlDeviceGetCount()))
    return [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",") if name]


def handle(lib: Any) -> Any:
    """Return NVML's handle of the GPU that a side trains on, the first visible one. NVML itself counts all GPUs,
    whatever CUDA_VISIBLE_DEVICES contains."""
    name = visible_gpus(lib)[0]
    return lib.nvmlDeviceGetHandleByIndex(int(name)) if name.isdecimal() else lib.nvmlDeviceGetHandleByUUID(name)


class Memory:
    """Memory of everything on the device (or of a process tree) while entered, in GiB."""

    def __init__(self, lib: Any) -> None:
        self.lib = lib
        self.pid: int | None = None
        self.idle = self.read()
        self.seen = [(time.perf_counter(), self.idle)]
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def peak(self, since: float = 0.0) -> float:
        """Return the maximum since a time of `time.perf_counter`, which all processes of a Linux machine share."""
        return max((gib for when, gib in self.seen if when >= since), default=self.idle)

    def read(self) -> float:
        if self.lib is not None:
            return self.lib.nvmlDeviceGetMemoryInfo(handle(self.lib)).used / GIB
        return sum(resident(pid) for pid in tree(self.pid)) / GIB if self.pid else 0.0

    def _poll(self) -> None:
        while not self._done.wait(1 / HERTZ):
            self.seen.append((time.perf_counter(), self.read()))

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def tree(pid: int) -> Iterator[int]:
    """Return a process and its descendants, as Linux lists them."""
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from tree(int(child))


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def run_side(
    script: str, name: str, spec: dict[str, Any], folder: Path, lib: Any, seconds: float | None = None
) -> dict[str, Any]:
    """Run one side; return its results, `peak_gib`, `idle_gib`, `settings`, and seconds: `start_s` from the command to
    its first step, `wall_s` to its end. If it failed, also `error`.

    seconds: time limit. A side that reaches it has `cut_off`, and the results of its steps until then.
    """
    tag = f"{name}-{len(list(folder.glob(f'{name}-*.spec.json')))}"
    spec = {**spec, "out": str(folder / f"{tag}.result.json"), "run": str(folder / f"{tag}.run")}
    (folder / f"{tag}.spec.json").write_text(json.dumps(spec))
    log = folder / f"{tag}.log"
    started = time.perf_counter()
    with Memory(lib) as memory, log.open("w") as output:
        command = [sys.executable, script, "--worker", name, "--spec", str(folder / f"{tag}.spec.json")]
        child = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=os.environ | TALKING
        )
        memory.pid = child.pid
        try:
            code = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_session(child)
    out = Path(spec["out"])
    result: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    if code is None:
        result["cut_off"] = f"after {seconds:.0f} s"
    finished = result.get("step_s") if code is None else result and code == 0
    if "error" not in result and not finished:
        result["error"] = f"{log.read_text()[-3000:]}\n{result.get('cut_off', f'exit code {code}')}"
    result["vllm_said"] = durations(log.read_text(errors="replace"))
    wait_until_free(memory)
    if "began" in result:
        result["start_s"] = round(result.pop("began") - started, 1)  # Linux has one such clock for all processes
    if "marks" in result:
        result["marks"] = {name: round(when - started, 1) for name, when in result["marks"].items()}
    return {
        **result,
        "settings": spec[name],
        "left_out": spec.get("left_out", LEFT_OUT),
        "peak_gib": round(memory.peak(result.pop("measured_since", 0.0)), 3),
        "idle_gib": round(memory.idle, 3),
        "wall_s": round(time.perf_counter() - started, 1),
    }


def durations(log: str, most: int = 40) -> list[str]:
    """Return the lines in which vLLM reports how long a part of its start took."""
    found = [line.strip()[-200:] for line in log.splitlines() if "INFO" in line and DURATION.search(line)]
    return found[:most]


def end_session(child: subprocess.Popen[bytes]) -> None:
    """Kill a side and its child processes, including those that outlived it."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def wait_until_free(memory: Memory, seconds: float = 20) -> None:
    """Wait for the driver, which releases the memory of an ended process a moment later."""
    memory.pid = None
    end = time.monotonic() + seconds
    while memory.read() > memory.idle + 0.5 and time.monotonic() < end:
        time.sleep(0.2)


@contextmanager
def reporting(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Context manager for a worker: the yielded dict becomes the result. Running out of memory is a result too."""
    result: dict[str, Any] = {}
    try:
        yield result
    except Exception as error:
        traceback.print_exc()
        result["error"] = f"{type(error).__name__}: {error}"[:600]
        result["out_of_memory"] = is_out_of_memory(error)
    report(spec, result)


def report(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """Write a worker's current result atomically, so that a killed worker leaves no partial file."""
    out = Path(spec["out"])
    new = out.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(out)


def is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ == "OutOfMemoryError" or "out of memory" in str(error).lower():
            return True
        error = error.__cause__
    return False


def best_of(tries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fastest successful try per token; the last try if none succeeded."""
    ran = [one for one in tries if "error" not in one]
    return min(ran, key=seconds_a_token) if ran else tries[-1]


def counted(side: dict[str, Any], values: list[float]) -> list[float]:
    """Return the values by step that count: without the first steps, but at least the last one."""
    return values[min(side.get("left_out", LEFT_OUT), len(values) - 1) :]


def seconds_a_step(side: dict[str, Any]) -> float:
    return mean(counted(side, side["step_s"]))


def seconds_a_token(side: dict[str, Any]) -> float:
    return sum(counted(side, side["step_s"])) / sum(counted(side, side["tokens"]))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def environment(lib: Any) -> dict[str, Any]:
    """Return what is needed to reproduce a figure: GPU, versions, commit, command and variables."""
    card = "CPU"
    if lib is not None:
        name = lib.nvmlDeviceGetName(handle(lib))
        card = name.decode() if isinstance(name, bytes) else name
    repository = run_environment.git(Path(__file__).parent)
    return {
        "card": card,
        "versions": {"python": platform.python_version(), **run_environment.packages()},
        "commit": repository["commit"] if repository else None,
        "command": shlex.join(["python", *sys.argv]),
        "variables": run_environment.variables(),
        "date": datetime.date.today().isoformat(),
    }


def floor_update_s(card: str, parameters: int, tokens: float, *, lora: bool) -> float | None:
    """Return seconds of forward and backward at 45% of the GPU's bf16 rate: 6 FLOP per weight and token (LoRA: 4)."""
    peak = next((rate for name, rate in BF16_PEAK.items() if name in card), None)
    return None if peak is None else (4 if lora else 6) * parameters * tokens / (USED_SHARE * peak)


def table(record: dict[str, Any], floor: Callable[[dict[str, Any]], list[str]] | None = None) -> str:
    """Return seconds by phase, tokens per second, peak and ratios, all computed from the steps in the record."""
    sides = [name for name in ("posttrain", "trl") if name in record]
    good = [name for name in sides if "error" not in record[name]]
    first = {record[name].get("left_out", LEFT_OUT) + 1 for name in sides}
    steps = " or ".join(map(str, sorted(first)))
    lines = [f"work {record['work']}  {record['card']}  steps {steps} and later of each side"]
    for name in sides:
        if name not in good:
            lines.append(f"{name}: failed: {record[name]['error'].strip().splitlines()[-1]}")
        elif "cut_off" in record[name]:
            lines.append(f"{name}: ended {record[name]['cut_off']}, in step {len(record[name]['step_s']) + 1}")
    rows: dict[str, dict[str, float]] = {"seconds a step": {n: seconds_a_step(record[n]) for n in good}}
    for phase in dict.fromkeys(phase for n in good for phase in record[n]["phases"]):
        rows[f"  {phase}"] = {
            n: mean(counted(record[n], record[n]["phases"][phase])) for n in good if phase in record[n]["phases"]
        }
    rows["before step 1"] = {n: record[n]["start_s"] for n in good if "start_s" in record[n]}
    rows["before step 1, first time"] = {n: record[n]["cold_start_s"] for n in good if "cold_start_s" in record[n]}
    rows["tokens a step"] = {n: mean(counted(record[n], record[n]["tokens"])) for n in good}
    rows["seconds per 1M tokens"] = {n: 1e6 * seconds_a_token(record[n]) for n in good}
    rows["tokens/s"] = {n: rows["tokens a step"][n] / rows["seconds a step"][n] for n in good}
    rows["peak GiB"] = {n: record[n]["peak_gib"] for n in good if record[n]["peak_gib"]}  # of another GPU: none
    rows = {label: row for label, row in rows.items() if row}
    lines.append(f"{'':26}" + "".join(f"{n:>12}" for n in good) + (f"{'ratio':>12}" if len(good) == 2 else ""))
    for label, row in rows.items():
        cells = "".join(f"{row[n]:>12.3f}" if n in row else f"{'-':>12}" for n in good)
        both = len(good) == 2 and all(row.get(n) for n in good)
        lines.append(f"{label:26}{cells}" + (f"{row['posttrain'] / row['trl']:>12.3f}" if both else ""))
    for name in good:
        lines.append(f"{name}: " + ", ".join(f"{k} {v}" for k, v in record[name]["settings"].items()))
        if marks := record[name].get("marks"):
            lines.append(f"{name}: seconds until " + ", ".join(f"{what} {s:.1f}" for what, s in marks.items()))
        if predicted := record[name].get("predicted_peak_gib"):
            taken = record[name]["peak_gib"] - record[name]["idle_gib"]
            share = f" = {predicted / taken:.3f}" if taken else ""
            lines.append(f"{name}: peak predicted by plan / measured: {predicted:.2f} / {taken:.2f} GiB{share}")
    return "\n".join([*lines, *(floor(record) if floor else [])])


def finish(
    record: dict[str, Any], out: Path | None, floor: Callable[[dict[str, Any]], list[str]] | None = None
) -> None:
    write(record, out)
    print(table(record, floor))


def write(record: dict[str, Any], out: Path | None) -> None:
    """Write the record as JSON if a path is given."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n")

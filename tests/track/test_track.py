"""Trackers: their offline files hold the run's metrics and samples, and a failing tracker stops nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.recipe.load import load_dict
from posttrain.redact import without_secrets
from posttrain.run.directory import RunDirectory
from posttrain.track import backends, follow, start
from posttrain.track.backends import COLUMNS, TRACKERS
from posttrain.track.follow import Rows, finite_numbers, run_key

Values = dict[str, Any]
EVIL = "<script>alert(1)</script> | **b** \x1b[31m"


def needs(package: str) -> pytest.MarkDecorator:
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"{package} is not installed (pip install 'posttrain[track]')")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of three steps, with an evaluation before them."""
    folder = tmp_path / "first"
    folder.mkdir()
    resolved = {"stage": "rl", "optim": {"lr": 1e-3}, "rewards": [{"use": "judge", "params": {"api_key": "sk-1"}}]}
    (folder / "resolved.json").write_text(json.dumps(resolved))
    (folder / "status.json").write_text('{"state": "finished"}')
    (folder / "summary.json").write_text('{"reward_last": 0.5, "model": "final", "stopped": true}')
    rows = [
        {"step": 0, "eval/accuracy": 0.25, "eval/pass@2": 0.5},
        *({"step": s, "reward": s / 8, "completions/mean_length": 3, "kl": None} for s in (1, 2, 3)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {"prompt": "2+2", "completion": EVIL, "reward": 0.5, "correct": True, "finish": "stop", "tokens": 2}
    samples = [{"step": s, **record, "scores": {"digits": s}} for s in (1, 3)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


EXPECTED = {  # (step, name) -> value; summaries at the last step
    (0, "eval/accuracy"): 0.25,
    (0, "eval/pass@2"): 0.5,
    **{(s, "reward"): s / 8 for s in (1, 2, 3)},
    **{(s, "completions/mean_length"): 3.0 for s in (1, 2, 3)},
    (3, "summary/reward_last"): 0.5,
}


def send(run: Path, name: str, **environment: str) -> None:
    """Send a run in a separate process, as `track: [{use: NAME, offline: true}]` does."""
    code = (
        "import sys; from pathlib import Path; from posttrain.track.follow import follow\n"
        f"follow(Path({str(run)!r}), [{{'use': {name!r}, 'offline': True, 'project': 'p'}}], sys.exit)"
    )
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO", "MLFLOW"))}
    done = subprocess.run([sys.executable, "-c", code], env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def same(found: dict[tuple[int, str], float]) -> None:
    assert found == {key: pytest.approx(value) for key, value in EXPECTED.items()}


# --- what the files hold ---


@needs("tensorboard")
def test_tensorboard(run: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    send(run, "tensorboard")
    found, texts = {}, {}
    for path in (run / "track" / "tensorboard").iterdir():
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.HasField("tensor"):
                    texts[value.tag] = value.tensor.string_val[0].decode()
                else:
                    found[(event.step, value.tag)] = value.simple_value
    same(found)
    assert "| optim.lr | 0.001 |" in texts["config/text_summary"] and "sk-1" not in texts["config/text_summary"]
    table = texts["samples/text_summary"]
    assert table.count("2+2") == 2 and "<script>" not in table and "\x1b" not in table and "\\u001b" in table


@needs("trackio")
def test_trackio(run: Path) -> None:
    send(run, "trackio")
    (store,) = (run / "track" / "trackio").glob("p.db")
    rows = sqlite3.connect(store).execute("select step, metrics from metrics").fetchall()
    logged = [(step, json.loads(metrics)) for step, metrics in rows]
    same({(step, name): v for step, metrics in logged for name, v in metrics.items() if name != "samples"})
    (table,) = [metrics["samples"]["_value"] for _, metrics in logged if "samples" in metrics]
    assert [(row["step"], row["completion"]) for row in table] == [(1, EVIL), (3, EVIL)]
    assert set(table[0]) == set(COLUMNS)
    (config,) = sqlite3.connect(store).execute("select config from configs").fetchone()
    assert json.loads(config)["optim.lr"] == 1e-3 and b"sk-1" not in config


def wandb_records(path: Path) -> Iterator[Any]:
    """Return the records of a .wandb file: LevelDB's log format, blocks of 32 KiB, a record in one or several parts."""
    from wandb.proto import wandb_internal_pb2 as pb

    data, at, parts = path.read_bytes(), 7, b""  # after the file header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part
            record = pb.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


@needs("wandb")
def test_wandb(run: Path) -> None:
    send(run, "wandb")
    (folder,) = (run / "track" / "wandb" / "wandb").glob("offline-run-*")
    (path,) = folder.glob("*.wandb")
    found: dict[tuple[int, str], float] = {}
    config: Values = {}
    tables = []
    for record in wandb_records(path):
        if record.HasField("history"):
            items = {"/".join([item.key, *item.nested_key]).lstrip("/"): json.loads(item.value_json)
                     for item in record.history.item}  # fmt: skip
            step = int(items.get("_step", record.history.step.num))
            found |= {(step, k): v for k, v in items.items() if not k.startswith(("_", "samples"))}
            tables += [v for k, v in items.items() if k.startswith("samples") and isinstance(v, dict)]
        if record.HasField("run"):
            config |= {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.run.config.update}
    same(found)
    assert config["optim"] == {"lr": 1e-3} and "sk-1" not in json.dumps(config)
    (media,) = (folder / "files" / "media" / "table").glob("samples*.json")
    table = json.loads(media.read_text())
    assert table["columns"] == list(COLUMNS)
    assert [(row[0], row[3]) for row in table["data"]] == [(1, EVIL), (3, EVIL)]


@needs("mlflow")
def test_mlflow(run: Path) -> None:
    send(run, "mlflow")
    folder = run / "track" / "mlflow"
    found = {}
    for path in folder.glob("*/*/metrics/**/*"):
        if path.is_file():
            name = path.relative_to(next(p for p in path.parents if p.name == "metrics")).as_posix()
            for line in path.read_text().splitlines():
                _, value, step = line.split()
                found[(int(step), name.replace("pass_2", "pass@2"))] = float(value)
    same(found)
    (params,) = folder.glob("*/*/params/optim.lr")
    assert params.read_text() == "0.001"
    (table,) = folder.glob("*/*/artifacts/samples/*.json")
    assert len(json.loads(table.read_text())["data"]) == 2


# --- a run with trackers ---


class Told:
    """A tracker that records its calls."""

    made: list[Told] = []  # noqa: RUF012

    def __init__(self, target: backends.Target) -> None:
        self.target, self.steps, self.rows, self.state = target, list[int](), list[Any](), ""
        self.made.append(self)

    def log(self, step: int, _: Any) -> None:
        self.steps.append(step)

    def samples(self, _: int, rows: Any) -> None:
        self.rows += rows

    def finish(self, state: str) -> None:
        self.state = state


class Failing(Told):
    def log(self, step: int, metrics: Any) -> None:
        if step == 2:
            raise ConnectionError("the server is on fire\nand more")
        super().log(step, metrics)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Told]:
    Told.made = []
    monkeypatch.setattr(follow, "TRACKERS", {**TRACKERS, "wandb": Told, "trackio": Failing})
    return Told.made


def test_failing_tracker_is_reported_once_and_the_others_continue(run: Path, told: list[Told]) -> None:
    notes: list[str] = []
    follow.follow(run, [{"use": "trackio"}, {"use": "wandb"}], notes.append)
    assert notes == ["tracker trackio is disabled: ConnectionError: the server is on fire"]
    assert told[0].steps == [0, 1] and told[0].state == ""
    assert told[1].steps == [0, 1, 2, 3, 3] and told[1].state == "finished" and len(told[1].rows) == 2


def test_tracker_that_cannot_start_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> Any:
        raise SystemExit("no such account")

    monkeypatch.setattr(follow, "TRACKERS", {"wandb": broken})
    notes: list[str] = []
    follow.follow(run, [{"use": "wandb"}], notes.append)
    assert notes == ["tracker wandb is disabled: SystemExit: no such account"]


def test_resumed_run_sends_no_step_twice(run: Path, told: list[Told]) -> None:
    follow.follow(run, [{"use": "wandb"}], pytest.fail)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward": 1.0}\n{"step": 4, "eval/loss": 2.0}\n')
    follow.follow(run, [{"use": "wandb"}], pytest.fail)
    assert told[1].steps == [4, 4, 4] and told[1].rows == [], "two rows of the step, and the summary"
    assert told[0].target.key == told[1].target.key and told[1].target.resumed and not told[0].target.resumed


def test_status_of_an_earlier_start_does_not_end_tracking(
    run: Path, told: list[Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run is resumed: its status is still the earlier one while a process has it open."""
    (run / "status.json").write_text('{"state": "stopped", "attempt": 1}')
    seen = []

    def wait(_: float) -> None:
        seen.append(told[0].state)
        (run / "status.json").write_text('{"state": "finished", "attempt": 2}')

    monkeypatch.setattr(follow.time, "sleep", wait)
    monkeypatch.setattr(follow, "is_locked", lambda _: True)
    follow.follow(run, [{"use": "wandb"}], pytest.fail, attempt=2)
    assert seen == [""] and told[0].state == "finished"


def test_only_complete_rows_are_read_and_a_shorter_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = Rows(path)
    assert rows.new() == []
    path.write_text('{"step": 1}\n{"step": 2}\nbroken\n{"st')
    assert [row["step"] for row in rows.new()] == [1, 2]
    path.write_text('{"step": 1}\n')
    assert [row["step"] for row in rows.new()] == [1]


def test_numbers_and_secrets() -> None:
    row = {"step": 1, "a": 1, "b": None, "c": True, "d": float("nan"), "e": "x", "f": [1]}
    assert finite_numbers(row) == {"a": 1.0}
    kept = {"max_new_tokens": 5, "token_mean": 1, "api_key": None}
    assert without_secrets({**kept, "x": [{"apiKey": "1", "auth_token": "2", "password": "3"}]}) == {
        **kept, "x": [{"apiKey": "***", "auth_token": "***", "password": "***"}],
    }  # fmt: skip


CHILD = """
import sys, time
from pathlib import Path
from posttrain.report.live import keep_report
from posttrain.run.directory import RunDirectory
from posttrain.track.start import track_run

resolved = {"stage": "rl", "track": [{"use": "tensorboard"}]}
with RunDirectory.open(Path(sys.argv[1]), name="r", text="", resolved=resolved) as directory:
    with track_run(resolved["track"], directory), keep_report(directory):
        metrics = directory.metrics(None)
        for step in (1, 2, 3):
            metrics.write(step, {"reward": step / 8})
        print("ready", flush=True)
        if sys.argv[2] == "killed":
            time.sleep(60)
"""


@needs("tensorboard")
@pytest.mark.parametrize("how", ["finished", "killed"])
def test_tracking_process_outlives_its_run(how: str, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    folder = tmp_path / "run"
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(folder), how], stdout=subprocess.PIPE, text=True)
    assert child.stdout and child.stdout.readline() == "ready\n"
    if how == "killed":
        child.kill()
    child.wait(90)

    def events() -> list[Any]:
        return [event for path in (folder / "track" / "tensorboard").glob("*")
                for event in LegacyEventFileLoader(str(path)).Load()]  # fmt: skip

    def states() -> list[str]:
        values = [value for event in events() for value in event.summary.value]
        return [v.tensor.string_val[0].decode() for v in values if v.tag == "state/text_summary"]

    wait_until(lambda: states() == [how])
    rewards = [(e.step, v.simple_value) for e in events() for v in e.summary.value if v.tag == "reward"]
    assert rewards == [(1, 0.125), (2, 0.25), (3, 0.375)]


def wait_until(is_so: Callable[[], bool]) -> None:
    import time

    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_failing_or_hanging_tracking_process_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    directory = RunDirectory.open(tmp_path / "run", name="r", text="", resolved={})
    problem = directory.logs / start.PROBLEMS
    code = f"open({str(problem)!r}, 'w').write('tracker wandb is disabled\\n'); import time; time.sleep(60)"
    hanging = subprocess.Popen([sys.executable, "-c", code])
    monkeypatch.setattr(start, "_start_tracker", lambda _: hanging)
    monkeypatch.setattr(start, "WAIT_S", 0.1)
    with directory, start.track_run(["x"], directory):
        log = directory.metrics(None)
        wait_until(lambda: problem.exists() and problem.stat().st_size > 0)
        log.write(1, {})
        log.write(2, {})
    hanging.kill()
    hanging.wait()
    said = capsys.readouterr().err
    assert said.count("tracker wandb is disabled") == 1 and "1 tracker still sending" in said
    with RunDirectory.open(tmp_path / "other", name="r", text="", resolved={}) as other:
        monkeypatch.undo()
        monkeypatch.setattr(start.sys, "executable", str(tmp_path / "no python"))
        with start.track_run(["x"], other):
            pass
    assert "the run goes on without them" in capsys.readouterr().err


def test_run_key_is_unique_and_survives_a_resume(tmp_path: Path) -> None:
    keys = set()
    for name in ("a", "b"):
        with RunDirectory.open(tmp_path / name, name="r", text="", resolved={}) as directory:
            keys.add(run_key(directory.path))
        with RunDirectory.open(tmp_path / name, name="r", text="", resolved={}, resume=True) as directory:
            keys.add(run_key(directory.path))
    assert len(keys) == 2


# --- recipes and the command ---


def test_recipes_name_trackers(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    base = {"stage": "sft", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "run": {"steps": 1}}
    track = ["tensorboard", {"use": "wandb", "project": "sums", "offline": True}]
    loaded = load_dict({**base, "track": track}, base_dir=tmp_path, where="test")
    assert [one["use"] for one in loaded.resolved["track"]] == ["tensorboard", "wandb"]
    with pytest.raises(ValueError, match=r"track\.0: `wand` \(text\) is not a value of this key\n  allowed: wandb, "):
        load_dict({**base, "track": ["wand"]}, base_dir=tmp_path, where="test")


def test_track_command(run: Path, tmp_path: Path, told: list[Told], monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else found("json"))
    missing = CliRunner().invoke(app, ["track", str(run), "--to", "wandb"])
    assert missing.exit_code != 0 and not told
    assert "wandb, which is not installed" in missing.stderr and "posttrain[track]" in missing.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found("json"))
    failed = CliRunner().invoke(app, ["track", str(run), "--to", "trackio"])
    assert failed.exit_code == 1 and "tracker trackio is disabled: ConnectionError" in failed.stderr
    told.clear()
    sent = CliRunner().invoke(app, ["track", str(run), "--to", "wandb"])
    assert sent.exit_code == 0, sent.stderr
    assert "wandb: sent 4 rows of metrics, 2 samples; view it with: " in sent.stderr
    assert "wandb sync" in sent.stderr and "track/wandb/wandb/offline-run-*" in sent.stderr.replace("\n", "")
    assert told[0].state == "finished"
    for words, message in (
        (["track", str(run)], "has no `track`"),
        (["track", str(run), "--to", "comet"], "there is no tracker `comet`"),
        (["track", str(tmp_path)], "is not a run directory"),
    ):
        refused = CliRunner().invoke(app, words)
        assert refused.exit_code == 2 and message in refused.stderr


def test_view_command_quotes_the_run_path() -> None:
    target = backends.Target("sums", "one", "key", Path("my runs/track"), offline=True)
    found = {name: backends.VIEW_COMMANDS[name](target) for name in ("wandb", "tensorboard", "mlflow")}
    assert found == {
        "wandb": "wandb sync 'my runs/track/wandb'/offline-run-*-key",
        "tensorboard": "tensorboard --logdir 'my runs/track'",
        "mlflow": "mlflow ui --backend-store-uri 'my runs/track'",
    }

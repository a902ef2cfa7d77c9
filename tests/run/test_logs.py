"""JSON-lines logs: durability, torn lines, and resuming."""

import contextlib
import json
from pathlib import Path

import pytest

from posttrain.errors import RunError
from posttrain.run.jsonl import lost_rows
from posttrain.run.metrics import MetricsLog, read_metrics
from posttrain.run.samples import SamplesLog, read_samples


def log(tmp_path, resume_after=None):
    return MetricsLog(tmp_path / "metrics.jsonl", resume_after, tmp_path / "attic")


def test_rows_are_readable_as_soon_as_they_are_written(tmp_path):
    metrics = log(tmp_path)
    metrics.write(1, {"reward": 0.5, "kl": None})
    assert read_metrics(tmp_path) == [{"step": 1, "reward": 0.5, "kl": None}]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_full_disk_raises_at_close_too(tmp_path):
    """The row that did not fit is still buffered, and does not fit again when the end of a run closes the file."""
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    metrics = MetricsLog.without_file()
    metrics.path = tmp_path / "metrics.jsonl"
    metrics._file.close()
    metrics._file = metrics.path.open("a")
    with pytest.raises(RunError, match="no space left on the disk"), contextlib.closing(metrics):
        metrics.write(1, {"reward": 0.5})


def test_nan_and_infinity_are_written_as_null(tmp_path):
    log(tmp_path).write(1, {"a": float("nan"), "b": float("inf"), "c": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": null, "b": null, "c": 1}\n'


@pytest.mark.parametrize("tail", ['{"step": 4, "re', '{"step": 4}', '{"step": 4, "re\n'])
def test_torn_last_line_is_skipped_and_removed_on_resume(tmp_path, tail):
    metrics = log(tmp_path)
    for step in (1, 2, 3):
        metrics.write(step, {"x": step})
    metrics.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(tail)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2, 3]

    resumed = log(tmp_path, resume_after=2)
    resumed.write(3, {"x": 30})
    assert [row["x"] for row in read_metrics(tmp_path)] == [1, 2, 30]
    assert read_metrics(tmp_path / "attic" / "metrics-after-resume-point.jsonl") == [{"step": 3, "x": 3}]


def test_resume_without_a_checkpoint_empties_the_file(tmp_path):
    log(tmp_path).write(1, {"x": 1})
    log(tmp_path, resume_after=None)
    assert read_metrics(tmp_path) == []


def test_broken_line_in_the_middle_raises_with_its_number(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path)


def test_samples_have_their_step(tmp_path):
    samples = SamplesLog(tmp_path / "samples.jsonl", None, tmp_path)
    samples.write(7, [{"completion": "ü\n", "reward": float("nan")}, {"completion": "b"}])
    assert read_samples(tmp_path) == [
        {"step": 7, "completion": "ü\n", "reward": None},
        {"step": 7, "completion": "b"},
    ]
    assert [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()] == read_samples(
        tmp_path
    )


BROKEN = [
    '{"st',
    "[1, 2]",
    '{"reward": 1}',
    '{"step": "2"}',
    "\x00\x00\x00",
    '{"step": 2} {"step": 3}',
    "[" * 100_000,
    "",
]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_broken_lines_are_kept_and_do_not_block_a_resume(tmp_path, capsys, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    resumed = log(tmp_path, resume_after=3)
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 3]
    said = capsys.readouterr().err
    assert f"{path}:2  1 broken line left out" in said
    kept = (tmp_path / "attic" / "metrics-broken-lines.txt").read_text()
    assert kept == f"line 2: {line}\n"
    assert (resumed.rows, resumed.last) == (2, 3)


@pytest.mark.parametrize(
    ("present", "expected", "lost"),
    [
        ([1, 2, 3], 2, None),
        ([1, 2], 2, None),
        ([1, 3], 2, "lost 1 of 2 rows"),
        ([3], 2, "lost 2 of 2 rows"),
        ([], 2, "lost 2 of 2 rows"),
        ([1, 2, 3], None, None),
        ([1, 2, 3], 0, None),
    ],
)
def test_resume_with_fewer_rows_than_the_checkpoint_counted(tmp_path, present, expected, lost):
    """The row of step 3 is written after its checkpoint, which counts the rows before it."""
    metrics = log(tmp_path)
    for step in present:
        metrics.write(step, {"x": 1})
    metrics.close()
    told = lost_rows(log(tmp_path, resume_after=3), expected, but=3)
    assert told is None if lost is None else lost in told


def test_rows_are_flushed_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr("posttrain.run.jsonl.os.fsync", synced.append)
    metrics = log(tmp_path)
    metrics.write(1, {"x": 1})
    assert not synced
    metrics.sync()
    assert len(synced) == 1
    MetricsLog.without_file().sync()

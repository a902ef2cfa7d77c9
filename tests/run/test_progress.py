"""Progress display: lines without a terminal, the live display, notes, and number formats."""

import io

import pytest
from rich.console import Console

from posttrain import terminal
from posttrain.run import progress as module
from posttrain.run.progress import Progress, duration, format_value, sparkline


def console(**kwargs):
    return Console(file=io.StringIO(), width=100, **kwargs)


def test_without_a_terminal_lines_are_rare_but_the_last_is_printed(monkeypatch):
    clock = iter([0.0, 0.0, 1.0, 2.0, 6.0, 7.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    out = console()
    with Progress("rl", 5, ["reward", "signal/share", "time/tokens_per_s"], console=out) as progress:
        for step in range(1, 6):
            progress.update(step, {"reward": step / 10, "signal/share": 0.5, "time/tokens_per_s": 12345.6})
    lines = out.file.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/5", "4/5", "5/5"]
    assert lines[1] == "rl 4/5  reward 0.4  signal 50%  tokens/s 12.3k  left 0:02"  # 3 steps took 6 s, one remains


def test_remaining_time_of_a_resumed_run_counts_earlier_attempts(monkeypatch):
    """50 of 60 minutes were spent before the resume; a step takes 6 s, so the limit comes first."""
    clock = iter([0.0, 0.0, 6.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    out = console()
    with Progress("rl", 1000, ["reward"], max_minutes=60, console=out) as progress:
        progress.update(501, {"reward": 0.1}, spent=3000.0)
        progress.update(502, {"reward": 0.1}, spent=3006.0)
    assert out.file.getvalue().splitlines()[-1].endswith("left 9:54")


def test_repeated_note_is_shown_less_and_less_often():
    out = console()
    with Progress("rl", 20, [], console=out) as progress:
        for _ in range(9):
            progress.note("no signal")
        progress.note("another")
    shown = ["no signal", *(f"no signal ({n} times so far)" for n in (2, 4, 8)), "another"]
    assert out.file.getvalue().splitlines() == shown


def test_terminal_gets_a_live_display_with_a_curve():
    out = console(force_terminal=True)
    with Progress("rl", 3, ["reward"], console=out) as progress:
        progress.update(1, {"reward": 0.1})
        progress.note("kept above")
        progress.update(3, {"reward": 0.9})
    text = out.file.getvalue()
    assert "kept above" in text and "3/3" in text and "▁█" in text


def test_display_with_unknown_total_and_missing_values():
    out = console()
    with Progress("sft", None, ["loss", "kl"], console=out) as progress:
        progress.update(1, {"loss": None})
        progress.note("[not markup]")
    assert out.file.getvalue() == "sft 1  loss -  left -\n[not markup]\n"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("signal", 0.256, "26%"),
        ("lr", 2e-6, "2e-06"),
        ("tokens", 1_234_567, "1.2M"),
        ("x", 512.6, "513"),
        ("n", 7, "7"),
    ],
)
def test_numbers_are_formatted_short(name, value, text):
    assert format_value(name, value) == text


def test_format_of_durations_and_sparklines():
    assert [duration(s) for s in (None, 5.4, 65, 3725)] == ["-", "0:05", "1:05", "1:02:05"]
    assert sparkline([0, 1], width=10) == "▁█"
    assert sparkline([0, 0, 7, 7], width=2) == "▁█"
    assert sparkline([3, 3], width=5) == "▁▁"
    assert sparkline([1], width=5) == ""


def test_only_a_long_start_is_explained(monkeypatch):
    clock = iter([0.0, 19.0, 0.0, 95.4])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    out = console()
    for _ in range(2):
        with Progress("rl", 5, ["reward"], console=out) as progress:
            progress.ready({"engine start": 60.2, "longest rows": 18.9})
    assert out.file.getvalue() == "ready after 95 s: engine start 60 s, longest rows 19 s\n"


class ClosedPipe(io.StringIO):
    def write(self, _text):
        raise BrokenPipeError(32, "Broken pipe")


def test_closed_pipe_ends_the_display_and_not_the_run(monkeypatch):
    """`posttrain rl R 2>&1 | head`: rich alone would exit, and the steps since the last checkpoint would be lost."""
    monkeypatch.setattr("sys.stderr", ClosedPipe())
    with Progress("rl", 2, ["reward"]) as progress:
        progress.update(1, {"reward": 0.5})
        progress.note("a note")
        progress.update(2, {"reward": 0.5})
    terminal.note("after the run")
    assert progress._console.quiet

"""Progress display of a run: live on a terminal, plain lines everywhere else. All on stderr."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from posttrain import terminal
from posttrain.run import ranks

PLAIN_EVERY_S = 5.0  # minimum interval between plain lines
LONG_START_S = 20.0  # a start that takes longer is explained
LABELS = {
    "completions/mean_length": "length",
    "completions/clipped_ratio": "cut",
    "time/tokens_per_s": "tokens/s",
    "time/step": "s/step",
    "signal/share": "signal",
    "grad_norm": "grad",
}
SHARES = ("signal", "cut", "share", "correct", "accuracy")  # labels of values shown in percent
_BLOCKS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows the newest values of `columns` (metric keys), the step and the remaining time.

    title: name of what runs. total: number of steps; None if only a time limit ends the run. max_minutes: time limit
    that may end the run earlier. The first column is also shown as a small curve.
    """

    def __init__(
        self,
        title: str,
        total: int | None,
        columns: Sequence[str],
        *,
        max_minutes: float | None = None,
        console: Console | None = None,
    ) -> None:
        self.title, self.total, self.columns, self.max_minutes = title, total, tuple(columns), max_minutes
        self._console = console or terminal.console(stderr=True, quiet=not ranks.is_main())
        self._live: Live | None = None
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # step and time of the first update, for the time left
        self._printed = float("-inf")
        self._history: deque[float] = deque(maxlen=200)
        self._noted: Counter[str] = Counter()

    def __enter__(self) -> Progress:
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(Text(f"{self.title}: starting"), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, step: int, values: Mapping[str, float | int | None], *, spent: float | None = None) -> None:
        """Show a finished step. Without a terminal: a line, at most every few seconds.

        spent: seconds that count towards max_minutes, including those before a resume; None: all since the first step.
        """
        now = time.monotonic()
        left = self._time_left(step, now, spent)
        cells = [(label(key), format_value(label(key), values[key])) for key in self.columns if key in values]
        head = values.get(self.columns[0]) if self.columns else None
        if head is not None:
            self._history.append(float(head))
        if self._live is not None:
            with self._ignore_write_errors():
                self._live.update(self._panel(step, cells, left))
        elif step == self.total or now - self._printed >= PLAIN_EVERY_S:
            self._printed = now
            shown = "  ".join(f"{name} {text}" for name, text in cells)
            self._print_line(
                f"{self.title} {step}{f'/{self.total}' if self.total else ''}  {shown}  left {duration(left)}"
            )

    def _time_left(self, step: int, now: float, spent: float | None) -> float | None:
        """Return the seconds until the last step at the pace so far, or until the time limit if that is earlier."""
        first_step, first_time = self._first = self._first or (step, now)
        if step == first_step or (self.total is None and self.max_minutes is None):
            return None
        pace = (now - first_time) / (step - first_step)
        by_steps = pace * (self.total - step) if self.total is not None else float("inf")
        spent = now - first_time if spent is None else spent
        by_time = 60 * self.max_minutes - spent if self.max_minutes is not None else float("inf")
        return max(0.0, min(by_steps, by_time))

    def note(self, text: str) -> None:
        """Print a line that stays above the live display. A repeated note, such as a step without a signal, is shown
        the first, second, fourth, eighth ... time."""
        self._noted[text] += 1
        times = self._noted[text]
        if times & (times - 1):  # not a power of two
            return
        if times > 1:
            text += f" ({times} times so far)"
        if self._live is not None:
            with self._ignore_write_errors():
                self._live.console.print(Text(text))
        else:
            self._print_line(text)

    def ready(self, parts: Mapping[str, float]) -> None:
        """Note how long the start took, if it was long; the first step follows. parts: seconds by name."""
        total = time.monotonic() - self._began
        if total >= LONG_START_S:
            self.note(f"ready after {total:.0f} s: {', '.join(f'{name} {s:.0f} s' for name, s in parts.items())}")

    def _print_line(self, text: str) -> None:
        with self._ignore_write_errors():
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    @contextlib.contextmanager
    def _ignore_write_errors(self) -> Iterator[None]:
        """End the display, and not the run, if a line cannot be written (`| head` has exited, the disk of a log is
        full)."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def _panel(self, step: int, cells: Sequence[tuple[str, str]], left: float | None) -> Group:
        head = Table.grid(padding=(0, 2))
        count = f"{step}/{self.total}" if self.total else str(step)
        bar = ProgressBar(total=self.total or max(step, 1), completed=step, width=28)
        head.add_row(Text(self.title, style="bold"), bar, count, f"left {duration(left)}")
        body = Table.grid(padding=(0, 3))
        body.add_row(*(Text(name, style="dim") for name, _ in cells))
        body.add_row(*(Text(text, style="bold cyan") for _, text in cells))
        curve = Text(sparkline(list(self._history), width=56), style="green")
        return Group(head, body, curve)


def label(key: str) -> str:
    """Return the short name of a metric key for a narrow display."""
    return LABELS.get(key, key.rsplit("/", 1)[-1].replace("_", " "))


def format_value(name: str, value: float | int | None) -> str:
    """Return a number as text: shares in percent, large numbers with k or M, three digits otherwise."""
    if value is None:
        return "-"
    if name in SHARES:
        return f"{100 * value:.0f}%"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.1f}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.1f}k"
    return f"{value:d}" if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """Return `1:02:03` or `2:03`; `-` if unknown."""
    if seconds is None:
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as a line of block characters, averaged into at most `width` of them."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BLOCKS[round((m - low) * scale)] for m in means)

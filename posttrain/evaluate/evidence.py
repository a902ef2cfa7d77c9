"""Evidence for the judge of a search: passages of a corpus or texts of the row, retrieved for each step of a trace."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from posttrain.batch import Rollout
from posttrain.data.files import not_utf8_error
from posttrain.errors import DataError
from posttrain.path_resolution import find
from posttrain.recipe.eval_sections import Evidence
from posttrain.workflows.documents import find_passages

Rate = Callable[[Sequence[Rollout]], Sequence[float]]


@dataclass(frozen=True)
class EvidenceReader:
    """Prepends evidence to the question of traces.

    texts: the corpus, None = a column of the row. ends: step delimiters. asks: returns the need for evidence of each
    trace; None = always.
    """

    settings: Evidence
    ends: Sequence[str]
    texts: Sequence[str] | None
    asks: Rate | None = None

    @classmethod
    def from_section(
        cls, settings: Evidence, ends: Sequence[str], base_dir: Path | None, asks: Rate | None = None
    ) -> EvidenceReader:
        """Read the corpus, one text per line. Raises DataError for a corpus that is missing, empty or not UTF-8."""
        if settings.corpus is None:
            return cls(settings, ends, None, asks)
        path = find(settings.corpus, base_dir, "corpus", DataError)
        try:
            texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as cause:
            raise not_utf8_error(path) from cause
        if not texts:
            raise DataError("the corpus is empty", where=str(path), allowed="one text per line")
        return cls(settings, ends, texts, asks)

    def inform(self, traces: Sequence[Rollout]) -> list[Rollout]:
        """Return the traces for the judge, with evidence for the newest step of the traces that need it."""
        needs = [1.0] * len(traces) if self.asks is None else self.asks(traces)
        return [
            self._with_evidence(trace) if need > self.settings.above or self.asks is None else trace
            for trace, need in zip(traces, needs, strict=True)
        ]

    def _with_evidence(self, trace: Rollout) -> Rollout:
        """Return the trace with the retrieved evidence before its question; unchanged if nothing was found."""
        row = trace.prompt.row
        messages = _messages(row)
        question = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if question is None:
            return trace
        found = self._find(str(question["content"]), trace)
        if not found:
            return trace
        question["content"] = self.settings.show(found, str(question["content"]))
        plain = {key: value for key, value in row.items() if key != "messages"}
        return replace(trace, prompt=replace(trace.prompt, row={**plain, "prompt": messages, "messages": messages}))

    def _find(self, question: str, trace: Rollout) -> str:
        """Return the passages that match the question and the newest step, or the row's evidence column as text."""
        if self.texts is None:
            return _as_text(trace.prompt.row.get(self.settings.column or ""))
        steps = [step for step in re.split("|".join(map(re.escape, self.ends)), trace.text) if step.strip()]
        return "\n".join(find_passages(f"{question} {steps[-1] if steps else ''}", self.texts, self.settings.top))


def _as_text(value: Any) -> str:
    """Format a column for the judge: a list as one entry per line, values that are neither text nor number as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(_as_text, value)))
    return json.dumps(value, ensure_ascii=False, default=str)


def _messages(row: Any) -> list[dict[str, Any]]:
    """Return a copy of the row's conversation."""
    prompt = row.get("messages") or row.get("prompt")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt or ()]

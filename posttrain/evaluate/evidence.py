"""Evidence that the judge of a search reads: texts of a corpus or of the row, found for each step of a trace."""

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
    """Puts evidence before the question of traces. texts: of the corpus, None = of the row's column. ends: what ends a
    step. asks: what the agent says of whether a trace needs evidence; None = each does."""

    settings: Evidence
    ends: Sequence[str]
    texts: Sequence[str] | None
    asks: Rate | None = None

    @classmethod
    def from_section(
        cls, settings: Evidence, ends: Sequence[str], base_dir: Path | None, asks: Rate | None = None
    ) -> EvidenceReader:
        """Reads the corpus, a text a line. Raises DataError for one that is missing, empty or not UTF-8."""
        if settings.corpus is None:
            return cls(settings, ends, None, asks)
        path = find(settings.corpus, base_dir, "corpus", DataError)
        try:
            texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError as cause:
            raise not_utf8_error(path) from cause
        if not texts:
            raise DataError("the corpus is empty", where=str(path), allowed="a text a line")
        return cls(settings, ends, texts, asks)

    def inform(self, traces: Sequence[Rollout]) -> list[Rollout]:
        """The traces as the judge reads them: with evidence for the newest step of those that need it."""
        needs = [1.0] * len(traces) if self.asks is None else self.asks(traces)
        return [
            self._with_evidence(trace) if need > self.settings.above or self.asks is None else trace
            for trace, need in zip(traces, needs, strict=True)
        ]

    def _with_evidence(self, trace: Rollout) -> Rollout:
        """The trace after a question that begins with what was found; as it is where nothing was."""
        row = trace.prompt.row
        messages = _messages(row)
        asked = next((m for m in reversed(messages) if m["role"] == "user"), None)
        if asked is None:
            return trace
        found = self._find(str(asked["content"]), trace)
        if not found:
            return trace
        asked["content"] = self.settings.show(found, str(asked["content"]))
        plain = {key: value for key, value in row.items() if key != "messages"}
        return replace(trace, prompt=replace(trace.prompt, row={**plain, "prompt": messages, "messages": messages}))

    def _find(self, question: str, trace: Rollout) -> str:
        if self.texts is None:
            return _as_text(trace.prompt.row.get(self.settings.column or ""))
        steps = [step for step in re.split("|".join(map(re.escape, self.ends)), trace.text) if step.strip()]
        return "\n".join(find_passages(f"{question} {steps[-1] if steps else ''}", self.texts, self.settings.top))


def _as_text(value: Any) -> str:
    """A column as the judge reads it: a list with an entry a line, what is neither text nor number as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list | tuple):
        return "\n".join(filter(None, map(_as_text, value)))
    return json.dumps(value, ensure_ascii=False, default=str)


def _messages(row: Any) -> list[dict[str, Any]]:
    """The conversation of a row, copied."""
    asked = row.get("messages") or row.get("prompt")
    return [{"role": "user", "content": asked}] if isinstance(asked, str) else [dict(m) for m in asked or ()]

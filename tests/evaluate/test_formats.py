"""ARM's consensus mode: which completions are generated if cheap formats agree, and if they disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from scripted_engines import ScriptedEngine

from posttrain.evaluate import sampling
from posttrain.models import tiny
from posttrain.run.jsonl import read_rows

FORMATS = {"direct": "<D>", "short": "<S>", "code": "<C>", "long": "<L>"}


def test_long_chain_is_generated_only_if_cheap_formats_disagree(
    evaluate: Callable[..., dict[str, Any]], folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1+1 to 1+3: all agree, on 1+3 wrongly; otherwise the program is wrong and the long chain is right."""

    def script(prompt: Any, sample: int) -> str:
        del sample
        number = int(str(prompt.row["prompt"])[2:])
        right = f"<answer>{number + 1}</answer>"
        if prompt.text.endswith("<L>"):
            return f"a long thought {right}"
        if number == 3:
            return "<answer>9</answer>"
        return "<answer>0</answer>" if prompt.text.endswith("<C>") and number > 3 else right

    engine = ScriptedEngine(script, tiny.build_tokenizer())
    monkeypatch.setattr(sampling, "make_engine", lambda *_, **__: engine)
    summary = evaluate(eval={"consensus": FORMATS})
    found = summary["consensus"]
    assert (found["problems"], found["agreed"]) == (6, 0.5)
    assert found["accuracy"] == pytest.approx(5 / 6)
    long = read_rows(folder / "run" / "consensus_long.jsonl")
    assert len(long) == 3 and all("a long thought" in row["completion"] for row in long)
    cheap = read_rows(folder / "run" / "consensus.jsonl")
    assert len(cheap) == 18
    assert found["tokens"] == pytest.approx(sum(row["tokens"] for row in [*cheap, *long]) / 6)

"""`posttrain data inspect --rollouts RUN`: which tokens of sampled rollouts carry loss."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli.data import inspect
from posttrain.errors import UserError
from posttrain.models.tiny import build, build_tokenizer


def test_replies_carry_no_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encode = build_tokenizer().encode
    segments = [
        {"kind": kind, "ids": encode(text, add_special_tokens=False)}
        for kind, text in (
            ("model", "<tool_call>x</tool_call><eos>"),
            ("tool", "<|tool|>4<|assistant|>"),
            ("model", "4"),
        )
    ]
    (tmp_path / "resolved.json").write_text('{"stage": "rl"}')
    row = {"step": 1, "uid": "a", "segments": segments}
    (tmp_path / "samples.jsonl").write_text(json.dumps({**row, "segments": segments[:1]}) + "\n")
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write(json.dumps({**row, "step": 2}) + "\n")
    inspect("debug/tools", rollouts=tmp_path)
    shown = capsys.readouterr().out
    assert "»<tool_call>x</tool_call><eos>«<|tool|>4<|assistant|>»4«" in shown
    assert "(8 tokens, 5 trained on)" in shown and "step 2: 1 of the rollouts" in shown
    inspect("debug/tools", rollouts=tmp_path, as_json=True)
    runs = json.loads(capsys.readouterr().out)[0]["parts"]["rollout"]["runs"]
    assert [run["fate"] for run in runs] == ["trained", "prompt", "trained"]

    with pytest.raises(UserError, match="saved no model yet") as told:
        inspect(rollouts=tmp_path)
    assert "inspect RECIPE --rollouts RUN" in str(told.value)
    for part in build():
        part.save_pretrained(tmp_path / "final")
    inspect(rollouts=tmp_path, as_json=True)
    assert json.loads(capsys.readouterr().out)[0]["parts"]["rollout"]["runs"] == runs


def test_neither_a_recipe_nor_a_run() -> None:
    with pytest.raises(UserError, match="no rows are named"):
        inspect()


def test_what_is_no_rl_run_is_told(tmp_path: Path) -> None:
    def told(run: Path) -> str:
        with pytest.raises(UserError) as error:
            inspect(rollouts=run)
        return str(error.value)

    assert told(tmp_path / "nowhere").startswith(
        f"there is no directory {tmp_path}/nowhere\n  hint: name the directory"
    )
    assert f"{tmp_path} is not a run directory: it has no resolved.json" in told(tmp_path)
    rl = tmp_path / "seed-0" / "my rl"
    rl.mkdir(parents=True)
    (rl / "resolved.json").write_text('{"stage": "rl"}')
    with pytest.raises(UserError, match="holds no sampled rollouts yet"):
        inspect("debug/tools", rollouts=rl)
    (tmp_path / "resolved.json").write_text('{"stage": "pipeline"}')
    assert f"is a run of stage pipeline, not of rl\n  hint: name its stage: '{rl}'" in told(tmp_path)
    (tmp_path / "resolved.json").write_text('{"stage": "sft"}')
    (rl / "resolved.json").write_text('{"stage": "sft"}')
    assert "is a run of stage sft, not of rl\n  hint: name the directory of an `rl` run" in told(tmp_path)

"""Words in `needs` of a user's component: provided ones are accepted, others refused."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest

from posttrain import registry
from posttrain.batch import RolloutBatch
from posttrain.errors import UserError
from posttrain.redact import is_secret

LOSS = """
from posttrain.registry import register

@register("loss", "{name}", needs=("{word}",))
def mine(batch, logp):
    return logp
"""


def test_unknown_word_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "typo.py").write_text(LOSS.format(name="a_typo", word="ref_logprob"))
    with pytest.raises(UserError, match="loss `a_typo` needs `ref_logprob`, which nothing measures") as told:
        registry.resolve("loss", "typo.py:mine", tmp_path)
    assert "did you mean `ref_logp`" in str(told.value) and "old_logp" in str(told.value)


def test_provided_words_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(LOSS.format(name="a_right_one", word="ref_logp"))
    assert registry.resolve("loss", "right.py:mine", tmp_path).needs == ("ref_logp",)


def test_every_batch_field_is_a_known_need() -> None:
    """Derived fields (padding of answers and prompts) come with their sources, and fields of step rows only with
    `advantage.steps`."""
    fields = {field.name for field in dataclasses.fields(RolloutBatch)}
    steps = {"trajectory_ids", "trajectory_tokens", "step_ids", "state_ids", "dones"}
    assert fields - registry.allowed_needs("loss") <= {"answer_mask", "prompt_mask"} | steps
    assert "win_rates" in registry.allowed_needs("pair_loss") and "win_rates" not in registry.allowed_needs("loss")


def test_secrets_are_not_shown_in_errors() -> None:
    value = {
        "url": "x",
        "api_key": "sk-1",
        "api_kee": "sk-1",
        "nested": [{"token": "sk-1"}],
        "key_env": "NAME",
        "max_tokens": 3,
    }
    assert not is_secret("pad_token") and not is_secret("max_tokens")
    told = registry.format_value(value)
    assert "sk-1" not in told and "NAME" in told and "3" in told
    assert registry.format_value("y" * 500, 60).endswith("...") and len(registry.format_value("y" * 500, 60)) == 60


def test_script_of_the_same_size_and_second_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs write reward scripts several times a second; Python would run the bytecode of the first one."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    script = tmp_path / "changing.py"
    for value in (1, 2):
        script.write_text(f"VALUE = {value}\n")
        os.utime(script, (1_700_000_000, 1_700_000_000))
        registry.load_module.cache_clear()
        assert value == registry.load_module(script).VALUE
    assert [path.name for path in tmp_path.iterdir()] == ["changing.py"], "something was written beside the script"

"""Every method of the literature is found by its common id: `posttrain methods show ID`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.recipe import catalogue

IDS = Path(__file__).with_name("method_ids.txt").read_text().split()
PENDING = {  # not implemented yet; remove the id when its method is added
    "agent_rlvr", "dereason", "drive", "guide_grpo", "inspo", "prior_prompt", "prompt_augmentation", "seele",
    "skywork_ssb", "xrpo_icl_seeding",
}  # fmt: skip


def test_every_id_is_found() -> None:
    assert len(IDS) == len(set(IDS)) > 240
    entries = catalogue.list_entries()
    missing = {
        name for name in IDS if not catalogue.find_entries(name, entries) and not catalogue.describe_unregistered(name)
    }
    assert missing <= PENDING


@pytest.mark.parametrize("name", ["toolrl", "apc", "drqa", "urpo", "a_parl"])
def test_command_shows_the_method(name: str) -> None:
    result = CliRunner().invoke(app, ["methods", "show", name])
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) > 2


@pytest.mark.parametrize("name", sorted(catalogue.FORMULAS))
def test_formula_path_exists(name: str) -> None:
    module, _, function = catalogue.FORMULAS[name][1].partition(":")
    assert callable(getattr(importlib.import_module(f"posttrain.{module}"), function))

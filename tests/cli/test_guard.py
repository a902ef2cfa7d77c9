"""What a command says when it fails."""

from __future__ import annotations

import pytest
import typer

from posttrain.cli.guard import run_guarded
from posttrain.errors import Interrupted, PeerLost, RecipeError, RunError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (RunError("the engine is gone"), "rank 0: the engine is gone"),
        (ValueError("a wrong shape"), "rank 0: unexpected ValueError: a wrong shape"),
        (PeerLost("rank 1 failed: no more"), "rank 1 failed: no more"),
        (RecipeError("no such key"), "no such key"),
        (Interrupted("stopped after step 3", hint=""), "stopped after step 3"),
    ],
)
def test_of_several_processes_the_one_that_failed_says_which_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, told: str
) -> None:
    """Rank 0's own failures had no name. A mistake in the recipe, and a stop, are those of all."""

    def fails() -> None:
        raise error

    alone = told.removeprefix("rank 0: ")
    for world, text in (("2", told), ("1", alone)):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(typer.Exit):
            run_guarded({}, fails)
        assert capsys.readouterr().err.splitlines()[0] == text

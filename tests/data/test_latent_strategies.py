"""Latent strategies: speeches of recorded games as moves of a game that is solved, and pairs by its values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from posttrain.data.rows import load_rows
from posttrain.errors import DataError
from posttrain.path_resolution import shipped_folder
from posttrain.recipe.sections import Data

DATA = shipped_folder("recipes") / "data"
Values = dict[str, Any]
CLAIMS, MUMBLES = ["3333 1111", "1111 3333"], ["zzz zz zzz", "zz zzzz z"]  # two kinds of speech


def speech(player: int, role: str, text: str, said: bool, won: bool, turn: int, heard: list[int]) -> Values:
    state = f"{role}, day 1" + (", has seen a werewolf" if role == "seer" else "")
    side = "werewolves" if role == "werewolf" else "village"
    note = {"player": player, "side": side, "state": state, "turn": turn, "said": said, "heard": heard}
    return {"role": role, "text": text, "note": {**note, "asked": f"You are a {role}.", "won": won}}


def game(seer: str, other: str, village: bool) -> Values:
    """Return a game in which the seer makes one of two speeches, and a werewolf answers it with one of two."""
    first = [speech(1, "seer", seer, True, village, 0, []), speech(1, "seer", other, False, village, 0, [])]
    answers = [(text, n == 0) for n, text in enumerate([MUMBLES[0], CLAIMS[0]])]
    return {"calls": [*first, *(speech(2, "werewolf", text, said, not village, 2, [0]) for text, said in answers)]}


def rows_of(folder: Path, games: list[Values], **params: Any) -> list[Values]:
    (folder / "completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in games))
    params = {"run": str(folder), "model": "tiny", "clusters": 2, **params}
    return load_rows(Data(source=f"{DATA}/latent_strategies.py:pairs", params=params), DATA)


def test_winning_speech_cluster_is_chosen(tmp_path: Path) -> None:
    """A seer who claims wins in 3 of 3 games, one who mumbles in 0 of 2: 1 and -1, for any wording.

    Speeches that the werewolf never made have no value and give no pair.
    """
    games = [game(CLAIMS[n % 2], MUMBLES[n % 2], True) for n in range(3)]
    games += [game(MUMBLES[n], CLAIMS[n], False) for n in range(2)]
    rows = rows_of(tmp_path, games)
    assert len(rows) == 5
    for row in rows:
        assert row["chosen"] in CLAIMS and row["rejected"] in MUMBLES and row["prompt"] == "You are a seer."
        assert (row["chosen_score"], row["rejected_score"]) == (1.0, -1.0)
        assert row["chosen_strategy"] != row["rejected_strategy"] and row["state"] == "seer, day 1, has seen a werewolf"


def test_games_without_outcome_or_value_difference_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no two speeches of a turn differ"):
        rows_of(tmp_path, [game(CLAIMS[0], MUMBLES[0], True)])
    cut = game(CLAIMS[0], MUMBLES[0], True)
    del cut["calls"][0]["note"]["won"]
    with pytest.raises(DataError, match="no finished game"):
        rows_of(tmp_path, [cut])
    with pytest.raises(DataError, match="parameter `run`: file or folder not found"):
        rows_of(tmp_path, [cut], run=str(tmp_path / "nowhere"))

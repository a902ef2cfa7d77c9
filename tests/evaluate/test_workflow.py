"""`workflow` of the generate stage, with a game of Werewolf whose players' texts are scripted."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Prompt
from posttrain.errors import RecipeError, UserError
from posttrain.evaluate import generate
from posttrain.evaluate.workflow import WorkflowEngine, bind_workflow
from posttrain.models.load import load_tokenizer
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import GenerateRecipe
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import read_rows
from posttrain.workflows.werewolf import RULES, SPEAK, Game
from tests.scripted_engines import ScriptedEngine

Values = dict[str, Any]


def recipe_of(folder: Path, workflow: Any, **changes: Any) -> GenerateRecipe:
    values: Values = {
        "stage": "generate",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "sampling": {"max_new_tokens": 40},
        "workflow": workflow,
        **changes,
    }
    (folder / "rows.jsonl").write_text('{"prompt": "Game 1"}\n{"prompt": "Game 2"}\n')
    recipe = load_dict(values, base_dir=folder, where="test").recipe
    assert isinstance(recipe, GenerateRecipe)
    return recipe


def play(folder: Path, script: Any, seed: int, **keys: Any) -> list[Values]:
    """Return the calls of one game."""
    recipe = recipe_of(folder, {"use": "werewolf", "max_prompt_tokens": 4000, **keys})
    assert recipe.workflow is not None
    tokenizer = load_tokenizer(recipe.model, folder)
    prompts = [Prompt("a", {"uid": "a", "prompt": "Game 1"}, "", (5,))]
    shape = bind_workflow(recipe.workflow, recipe.data, tokenizer, prompts, 40, folder, key="workflow")
    scripted = ScriptedEngine(lambda prompt, _: script(tokenizer.decode(list(prompt.ids))), tokenizer)
    engine = WorkflowEngine(scripted, shape)
    found = engine.generate(prompts, 1, recipe.sampling, seed=seed, logprobs=False)
    calls: list[Values] = engine.describe(found)[0]["calls"]
    assert [(one.prompt, one.text) for one in found] == [(prompts[0], calls[-1]["text"])]
    return calls


def wise(prompt: str) -> str:
    """Return texts of a truthful seer, villagers who believe it, and a werewolf who mumbles."""
    known = prompt.rpartition("You are player")[2]
    if "It is your turn to speak" in prompt:
        seen = re.findall(r"you saw that player (\d) is a werewolf", known)
        return f"It is {seen[-1]}!" if seen else "Hm."
    allowed = re.findall(r"\d", prompt.rpartition("You may choose")[2])
    claimed = [one for one in re.findall(r"said: It is (\d)!", known) if one in allowed]
    if "vote out" in prompt and claimed:
        return f"I am sure. <player>{claimed[-1]}</player>"
    return f"<player>{allowed[0]}</player>" if "a seer" in known or "vote out" in prompt else "<player>9</player>"


def test_village_that_believes_its_seer_wins(tmp_path: Path) -> None:
    """Over ten deals: the seer's finding is in its prompt and in no other; one of a turn's candidates is said; a
    true claim wins the game, and the winner is in every note.
    """
    claims = 0
    for seed in range(10):
        calls = play(tmp_path, wise, seed, candidates=2)
        speeches = [call for call in calls if "state" in call["note"]]
        turns = {call["note"]["turn"] for call in speeches}
        assert all(sum(c["note"]["said"] for c in speeches if c["note"]["turn"] == turn) == 1 for turn in turns)
        assert all("you saw" not in call["note"]["asked"] for call in speeches if call["role"] != "seer")
        night = [call for call in calls[:2] if call["role"] == "werewolf"]
        assert night and night[0]["note"]["random"] is True, "player 9 is not at the table"
        sides = {call["note"]["side"]: call["note"]["won"] for call in calls}
        assert len(set(sides.values())) == len(sides) == 2
        if any(call["text"].startswith("It is") for call in speeches):
            claims += 1
            assert sides["village"], "all vote for the werewolf that the seer named"
    assert 0 < claims < 10


def test_setup_of_players_by_hand() -> None:
    """Five players, one werewolf: it wins against one other; two know each other among six."""
    table = Game.deal(5, 1, RULES, SPEAK, random.Random(0))
    assert sorted(table.roles.values()) == ["seer", "villager", "villager", "villager", "werewolf"]
    wolf = table.by_role("werewolf")[0]
    assert table.winner is None
    table.living = [wolf, next(player for player in table.roles if player != wolf)]
    assert table.winner == "werewolves"
    table.living.remove(wolf)
    assert table.winner == "village"
    pack = (two := Game.deal(6, 2, RULES, SPEAK, random.Random(0))).by_role("werewolf")
    assert [two.known[player] != [] for player in range(1, 7)] == [player in pack for player in range(1, 7)]
    assert "6 players, 2 of them werewolves" in two.ask(pack[0], "Go on.")
    with pytest.raises(UserError, match="4 players with 2 werewolves"):
        Game.deal(4, 2, RULES, SPEAK, random.Random(0))


def test_records_contain_their_calls_and_a_killed_run_resumes(tmp_path: Path) -> None:
    recipe = recipe_of(
        tmp_path,
        {"use": "werewolf", "players": 4, "speech_tokens": 4, "max_prompt_tokens": 1600},
        sampling={"max_new_tokens": 6},
        engine={"batch_size": 1},
    )
    for resume in (False, True):
        with RunDirectory.open(tmp_path / "run", name="g", text="", resolved={}, resume=resume) as directory:
            generate.run(recipe, directory)
        records = read_rows(tmp_path / "run" / "completions.jsonl")
        if not resume:
            whole = records
            lines = (tmp_path / "run" / "completions.jsonl").read_text().splitlines(keepends=True)
            (tmp_path / "run" / "completions.jsonl").write_text("".join(lines[:1]))
    assert records == whole and [record["prompt"] for record in records] != []
    for record in records:
        assert record["completion"] == record["calls"][-1]["text"]
        assert {call["role"] for call in record["calls"]} >= {"werewolf"} and "cut" not in record
        assert all("won" in call["note"] for call in record["calls"])


def test_game_without_room_is_reported(tmp_path: Path) -> None:
    """The rules alone have some 600 characters, which are tokens here."""
    with pytest.raises(RecipeError, match=r"workflow `werewolf`.*the prompt of the first call has \d+ tokens"):
        play(tmp_path, wise, 0, max_prompt_tokens=100)


@pytest.mark.parametrize(
    ("workflow", "changes", "message"),
    [
        ("werewolf", {"tools": [{"use": "calculator"}]}, "calls by role have no tools"),
        ("actor_extractor", {}, "calls rewards while it runs"),
        ({"use": "werewolf", "train": ["seer"]}, {}, "train"),
    ],
)
def test_keys_incompatible_with_a_workflow_are_refused(
    tmp_path: Path, workflow: Any, changes: Values, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe_of(tmp_path, workflow, **changes)

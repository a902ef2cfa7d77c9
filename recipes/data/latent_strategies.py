"""Latent Space Policy Optimization (2502.04686): games in which players talk, as a small game that can be solved, and
pairs of speeches of which the better one is what its solution would say.

Used as `source: ../data/latent_strategies.py:pairs` with `params: {run: RUN, model: MODEL}`: the run directory of a
`posttrain generate` with `workflow: werewolf`, or another workflow whose speeches have its notes. Speeches of a role
are clustered by the model's mean hidden states; a cluster is a move of the abstract game; counterfactual regret
minimisation gives each move its value in each state; of the speeches that were drawn in one turn the best is chosen and
the worst rejected. Used by recipes/lspo_tiny.yaml.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from posttrain.data.pairs import best_worst
from posttrain.errors import DataError
from posttrain.evaluate.clusters import k_means
from posttrain.evaluate.regret import Move, Played, Solved, empirical_game, minimize_regret
from posttrain.models.model_paths import TINY
from posttrain.path_resolution import PathText

BATCH = 16
Call = Mapping[str, Any]
Names = Mapping[int, str]  # the strategy of each speech of a game, by the number of its call


def games(size: int, seed: int) -> list[dict[str, str]]:
    """`size` rows that are names of games; what is dealt follows from the run's seed."""
    return [{"prompt": f"Game {seed}-{number}"} for number in range(size)]


def pairs(
    size: int | None = None,
    seed: int = 0,
    *,
    run: Path,
    model: Annotated[str, PathText(words=TINY)],
    clusters: int = 3,
    iterations: int = 500,
) -> Iterator[dict[str, Any]]:
    """The first `size` rows (None: all) {prompt, chosen, rejected}, one a turn whose speeches differ in value; beside
    them `state`, and of both sides the strategy (a role and the number of its cluster) and its value, from -1 (the
    speaker's side loses for certain) to 1.

    model: whose hidden states say which speeches are alike. clusters: of each role at most. iterations: of regret
    minimisation. Raises DataError for a run without finished games, and where no two speeches differ in value."""
    played = [game for game in read_games(run) if all("won" in call["note"] for call in game)]
    if not played:
        raise DataError("no finished game with speeches", where=str(run), hint="raise workflow.max_prompt_tokens")
    named = name_strategies(played, model, clusters, seed)
    solved = minimize_regret(empirical_game([record(*one) for one in zip(played, named, strict=True)]), iterations)
    found = [row for one in zip(played, named, strict=True) for row in pair_turns(*one, solved)]
    if not found:
        raise DataError(
            "no two speeches of a turn differ in value", where=str(run), hint="play more games, or raise clusters"
        )
    return itertools.islice(found, size)


def read_games(run: Path) -> list[list[Call]]:
    """The calls of each game of a run that has speeches, with their numbers."""
    path = run if run.is_file() else run / "completions.jsonl"
    if not path.is_file():
        raise DataError(f"no finished run: {path.name} is missing", where=str(path.parent))
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    games: list[list[Call]] = [
        [{"note": {}, **call, "number": n} for n, call in enumerate(row.get("calls", ()))] for row in rows
    ]
    return [game for game in games if any(is_speech(call) for call in game)]


def is_speech(call: Call) -> bool:
    """Whether a call is a speech, said or not, that is not blank."""
    return "state" in call["note"] and bool(call["text"].strip())


def name_strategies(games: Sequence[Sequence[Call]], model: str, clusters: int, seed: int) -> list[dict[int, str]]:
    """By game, the strategy of each speech: its role and its cluster among all speeches of the role."""
    speeches = [(number, call) for number, game in enumerate(games) for call in game if is_speech(call)]
    points = embed(model, [call["text"] for _, call in speeches])
    named: list[dict[int, str]] = [{} for _ in games]
    for role in sorted({call["role"] for _, call in speeches}):
        places = [place for place, (_, call) in enumerate(speeches) if call["role"] == role]
        for place, label in zip(places, k_means(points[places], clusters, seed=seed).labels, strict=True):
            game, call = speeches[place]
            named[game][call["number"]] = f"{role} {label}"
    return named


def record(game: Sequence[Call], names: Names) -> Played:
    """A game as the moves of the abstract one: who said a speech of which strategy, knowing what. The village is side
    1; what is chosen at night and voted is left to chance, as the policy does it."""
    said = [call for call in game if call["number"] in names and call["note"]["said"]]
    moves = tuple(
        Move(call["note"]["player"] - 1, side_of(call), state_of(call, names), names[call["number"]]) for call in said
    )
    return Played(moves, side_of(game[0]) * (1.0 if game[0]["note"]["won"] else -1.0))


def side_of(call: Call) -> int:
    """1 for the village, -1 for the werewolves."""
    return 1 if call["note"]["side"] == "village" else -1


def state_of(call: Call, names: Names) -> tuple[str, ...]:
    """What a speaker knows, and the strategies of the speeches that it has heard this day."""
    return (call["note"]["state"], *(names.get(number, "nothing") for number in call["note"]["heard"]))


def pair_turns(game: Sequence[Call], names: Names, solved: Solved) -> Iterator[dict[str, Any]]:
    """A row for each turn whose candidates differ in the value of their strategies."""
    turns: dict[int, list[Call]] = {}
    for call in game:
        if call["number"] in names:
            turns.setdefault(call["note"]["turn"], []).append(call)
    for drawn in turns.values():
        state = state_of(drawn[0], names)
        found = [solved.values.get(state, {}).get(names[call["number"]]) for call in drawn]
        values = [None if value is None else round(value, 9) for value in found]  # not by the rounding of sums
        judged = best_worst([[[value] for value in values]])
        if judged.keep[0]:
            sides = {"chosen": judged.chosen[0], "rejected": judged.rejected[0]}
            yield {
                "prompt": drawn[0]["note"]["asked"],
                "state": ", ".join(state),
                **{side: drawn[place]["text"] for side, place in sides.items()},
                **{f"{side}_strategy": names[drawn[place]["number"]] for side, place in sides.items()},
                **{f"{side}_score": values[place] for side, place in sides.items()},
            }


def embed(model: str, texts: Sequence[str]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Mean last hidden state of each text under a model [texts, width]."""
    import torch

    from posttrain.models.load import load
    from posttrain.models.scorer import pad_rows
    from posttrain.recipe.sections import Model

    loaded = load(Model(path=model), Path.cwd())
    rows = [list(loaded.tokenizer(text)["input_ids"]) for text in texts]
    found = []
    for start in range(0, len(rows), BATCH):
        batch = {
            name: value.to(loaded.device)
            for name, value in pad_rows(rows[start : start + BATCH], loaded.pad_id).items()
        }
        with torch.no_grad(), loaded.autocast():
            states = loaded.model(**batch, output_hidden_states=True).hidden_states[-1].double()
        mask = batch["attention_mask"].unsqueeze(-1)
        found.append(((states * mask).sum(1) / mask.sum(1)).cpu().numpy())
    return np.concatenate(found)

"""Training items of a reward model: one or two token rows each, with numbers, and the rows that are held out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data import binary_labels
from posttrain.data.images import Reader
from posttrain.data.prepare import Prepared, prepare_examples, prepare_pairs
from posttrain.errors import DataError, count_noun
from posttrain.images import Image
from posttrain.recipe.checks import refuse_with_images
from posttrain.recipe.stages import RewardModelRecipe
from posttrain.seeds import derive
from posttrain.train import rank_consistency

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Item:
    """A pair (chosen, rejected) or a labeled answer, as the model reads it, with the tokens of each answer alone."""

    uid: str
    rows: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    margin: float = 0.0
    labels: tuple[float, ...] = ()  # NaN: missing
    user: str = ""
    prompt: tuple[int, ...] = ()  # of a pair
    images: tuple[Image, ...] = ()  # in each of the rows

    @property
    def longest(self) -> int:
        return max(len(row) for row in self.rows)

    @property
    def prompt_key(self) -> tuple[Any, ...]:
        """Key of the prompt that both sides answer. It includes the images: images of one size have the same tokens."""
        return self.prompt, self.images


@dataclass(frozen=True)
class Items:
    """Training items `trained` and held-out items `held`, which the report is about.

    users: number of each user, in order of first appearance.
    """

    trained: list[Item]
    held: list[Item]
    users: dict[str, int]
    prepared: Prepared[Any]


def read(recipe: RewardModelRecipe, tokenizer: Any, reader: Reader | None) -> Items:
    """Read all rows as items. reader: image reader of a vision model.

    Raises DataError for a missing or wrong number, or if no row is left to train on.
    """
    settings = recipe.objective
    if settings.pairs:
        prepared: Prepared[Any] = prepare_pairs(recipe.data, tokenizer, recipe.base_dir, reader=reader)
    else:
        prepared = prepare_examples(recipe.data, tokenizer, recipe.base_dir, labels_read=True, reader=reader)
    refuse_with_images(recipe, prepared.rows)
    rank_consistency.check_rows([item.uid for item in prepared.items])
    sources = {str(row["uid"]): row for row in prepared.rows}
    items = [(_pair if settings.pairs else _answer)(item, sources[item.uid], recipe) for item in prepared.items]
    held_uids = held_out([item.uid for item in items], settings.holdout, recipe.run.seed)
    held, trained = ([item for item in items if (item.uid in held_uids) == out] for out in (True, False))
    if not trained:
        what = f"no row is left to train on: {count_noun(len(items), 'row')} held out"
        raise DataError(what, hint="lower objective.holdout, or give more rows")
    if settings.best_response is not None and 2 * (alone := count_lone_pairs(trained)) >= len(trained):
        which = (
            "each prompt has one" if alone == len(trained) else f"{alone} of {len(trained)} are their prompt's only one"
        )
        what = f"objective.best_response compares the pairs of a prompt, and {which}"
        raise DataError(what, hint="make several of each, e.g. with `max_pairs` of the stage pairs")
    users = {user: n for n, user in enumerate(dict.fromkeys(item.user for item in items))}
    return Items(trained, held, users, prepared)


def held_out(uids: Sequence[str], share: float, seed: int) -> set[str]:
    """Choose the uids of the held-out rows, which the report is about; depends on uids and seed alone.

    At least one row if `share` is not 0.
    """
    count = max(round(share * len(uids)), 1) if share else 0
    return set(sorted(uids, key=lambda uid: uniform_hash(seed, "holdout", uid))[:count])


def uniform_hash(seed: int, *names: str | int) -> float:
    """Return a pseudo-random number in [0, 1) for a purpose, the same in every run with this seed."""
    return derive(seed, *names) / 2**63


def _pair(pair: Any, row: Row, recipe: RewardModelRecipe) -> Item:
    settings = recipe.objective
    rows = (pair.prompt_ids + pair.chosen_ids, pair.prompt_ids + pair.rejected_ids)
    margin = binary_labels.read_number(row, settings.margin) if settings.margin else 0.0
    if settings.margin and margin is None:
        raise binary_labels.missing_column_error(row, settings.margin)
    user = str(row["uid"])
    if settings.user:
        if row.get(settings.user) is None:
            raise binary_labels.missing_column_error(row, settings.user)
        user = str(row[settings.user])
    lengths = (len(pair.chosen_ids), len(pair.rejected_ids))
    return Item(pair.uid, rows, lengths, margin or 0.0, user=user, prompt=tuple(pair.prompt_ids), images=pair.images)


def _answer(example: Any, row: Row, recipe: RewardModelRecipe) -> Item:
    names = recipe.objective.labels
    numbers = [binary_labels.read_number(row, name) for name in names]
    if all(value is None for value in numbers) and len(names) == 1:
        raise binary_labels.missing_column_error(row, names[0])
    labels = tuple(math.nan if value is None else value for value in numbers)
    return Item(example.uid, (example.ids,), (sum(example.trained),), labels=labels, images=example.images)


def heads_of_row(seed: int, uid: str, heads: int, share: float) -> list[float]:
    """Return 1 for each head that sees the row, else 0; a row that no head would see is seen by all."""
    seen = [float(uniform_hash(seed, "head", head, uid) < share) for head in range(heads)]
    return seen if any(seen) else [1.0] * heads


def count_lone_pairs(items: Sequence[Item]) -> int:
    """Count the pairs that are compared with no other pair of their prompt. Repeated pairs count as one."""
    different = Counter(key for key, _ in {(item.prompt_key, item.rows) for item in items})
    return sum(different[item.prompt_key] == 1 for item in items)


def best_response_note(items: Sequence[Item]) -> str:
    """Return one line with the number of pairs that `best_response` does not affect; empty if all are compared."""
    alone = count_lone_pairs(items)
    if not alone:
        return ""
    return (
        f"objective.best_response does not affect {alone} of {count_noun(len(items), 'pair')}:"
        " they are the only pairs of their prompts"
    )


def lengths_note(items: Sequence[Item]) -> str:
    """Return one line that says how far length alone separates the sides of pairs."""
    longer = sum(item.lengths[0] > item.lengths[1] for item in items) / len(items)
    return f"the chosen side is longer in {longer:.0%} of the training pairs"

"""Rollouts as packed arrays: received bit for bit as sent, in fewer bytes."""

from __future__ import annotations

import math
import pickle
import random
import struct

import numpy as np
import pytest
import torch

from posttrain.batch import Prompt, PromptImages, Rollout, Segment
from posttrain.models.images import probe_image
from posttrain.train.collate import rollout_batch, row_batch, sequences_of, with_tokens
from posttrain.train.own_rows import OwnRows
from posttrain.train.rollout_exchange import pack, unpack


def short(number: float) -> float:
    """Return the nearest float32, as engines report log-probs."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def test_rollouts_are_received_unchanged() -> None:
    """Several segments, none, no log-probs, some that are no float32, versions, NaN. A prompt stays one object."""
    prompt = Prompt("p", {"answer": "3"}, "1+2=", (1, 2, 3))
    segments = (
        Segment("model", (5, 70000, 0), (short(-0.1), short(-1.7), 0.0), (0, 1, 1)),
        Segment("tool", (7, 7), None),
        Segment("model", (), ()),
        Segment("model", (2, 9), (-0.1, -math.inf)),
    )
    rollouts = [
        Rollout(prompt, 0, segments, "a text", "stop", 3, {"score": 1.0, "other": None}, 0.5, True),
        Rollout(prompt, 0, (), "", "length", 3),
    ]
    found, calls = unpack(pack((rollouts, [("calls", 2)])))
    assert found == rollouts and calls == [("calls", 2)] and found[0].prompt is found[1].prompt
    types = {type(n) for s in found[0].segments for part in (s.ids, s.logps, s.versions) for n in part or ()}
    assert types == {int, float} and all(type(s.ids) is tuple for s in found[0].segments)
    (with_nan,) = unpack(pack([Segment("model", (1,), (math.nan,))]))
    assert math.isnan(with_nan.logps[0])


def test_ranks_get_only_row_values_of_rollouts_they_do_not_train_on() -> None:
    """Reading tokens held by another rank raises instead of giving an empty row."""
    prompt = Prompt("p", {}, "1+2=", (1, 2, 3))
    segments = (Segment("model", (5,) * 4000, (-0.5,) * 4000), Segment("tool", (7, 7)))
    one = Rollout(prompt, 0, segments, "a text " * 500, "stop", 3, {"score": 1.0}, 0.5, True)
    parts = pack([one], by_row=True)
    assert sum(map(len, parts)) < 1000
    (found,) = unpack(parts)
    assert one.is_local and not found.is_local and (found.length, found.sampled_length, found.text) == (4002, 4000, "")
    assert (found.reward, found.scores, found.prompt, found.finish) == (0.5, {"score": 1.0}, prompt, "stop")
    for read in (lambda: found.ids, lambda: found.sampled_ids, lambda: list(found.segments[0].ids)):
        with pytest.raises(LookupError, match="these tokens are on another rank"):
            read()
    rows, whole = row_batch([found]), rollout_batch([one])
    for name in ("rewards", "correct", "truncated", "lengths", "group_ids"):
        assert torch.equal(getattr(rows, name), getattr(whole, name)), name
    assert rows.mask.tolist() == [[True]] and torch.equal(with_tokens(rows, whole).mask, whole.mask)


def test_a_token_takes_eight_bytes() -> None:
    """4 for its id, 4 for its log-prob; equal ids are one object after they are received."""
    draw = random.Random(0)
    ids = tuple(draw.randrange(300, 100_000) for _ in range(4000))
    logps = tuple(short(-draw.random()) for _ in ids)
    rollouts = [Rollout(Prompt("p", {}, "", (1,)), 0, (Segment("model", ids, logps),), "", "stop", 0)]
    parts = pack(rollouts)
    assert sum(map(len, parts)) < 8 * len(ids) + 1000 < len(pickle.dumps(rollouts)) * 0.7
    arrived = unpack([bytes(part) for part in parts])[0].ids
    again = unpack([np.frombuffer(part, np.uint8) for part in parts])[0].ids
    assert arrived == again == ids and all(a is b for a, b in zip(arrived, again, strict=True))


def test_idle_rank_runs_a_row_with_the_image_tokens_of_its_prompt() -> None:
    """Also if no token follows the image: more tokens than features would fail on that rank only."""

    class Alone:
        def send_tokens(self, rollouts: list[Rollout], owners: list[int]) -> None: ...

    image, ids = probe_image(), (1, 5, 9, 9)
    prompt = Prompt("p", {}, "", ids, PromptImages((image,), (1, 5, 9), len(ids)))
    other = Rollout(prompt, 0, (Segment("model", (7, 7, 7)),), "777", "stop", 0)
    rows_of = OwnRows(Alone(), 1, [[0]], frozenset({0}), [1], [], spare=(0,))  # type: ignore[arg-type]
    (ids,) = sequences_of(rows_of.receive_tokens([other])).ids
    assert list(ids).count(9) == 2 and len(ids) == 5

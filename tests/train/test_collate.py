"""Collating rollouts to the typed batch: each token's origin, log-prob and version at its position, followed by
padding."""

import torch
from torch import tensor

from posttrain.batch import Prompt, Rollout, Segment, concatenate_ranges, to_device
from posttrain.train.collate import completion_positions, pad_right, rollout_batch, sequences_of

NAN = float("nan")
PROMPT = Prompt("u", {"level": 2}, "ab", (1, 2))


def rollouts() -> list[Rollout]:
    """Return three rows of 4, 1 and 0 completion tokens; the first has a tool's reply in it and two policy versions."""
    segments = (
        Segment("model", (5, 6), (-0.5, -0.25), versions=(3, 4)),
        Segment("tool", (7,)),
        Segment("model", (8,), (-1.0,)),
    )
    return [
        Rollout(PROMPT, 0, segments, "x", "stop", 3, scores={"a": 1.0}, reward=1.0, correct=True),
        Rollout(PROMPT, 0, (Segment("model", (9,)),), "y", "length", 4, reward=None),
        Rollout(PROMPT, 1, (Segment("model", (), ()),), "", "stop", 4, scores={"a": None}, reward=0.0),
    ]


def test_cells_equal_the_segments() -> None:
    batch = rollout_batch(rollouts())
    assert batch.mask.tolist() == [[True, True, False, True], [True, False, False, False], [False] * 4]
    assert batch.lengths is not None and batch.lengths.tolist() == [3, 1, 0]
    assert batch.versions is not None and batch.versions.dtype == torch.int32
    assert batch.versions.tolist() == [[3, 4, 3, 3], [4, 0, 0, 0], [0, 0, 0, 0]]
    expected = tensor([[-0.5, -0.25, NAN, -1.0], [NAN] * 4, [NAN] * 4])
    torch.testing.assert_close(batch.rollout_logp, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(batch.rewards, tensor([1.0, NAN, 0.0]).double(), equal_nan=True)
    torch.testing.assert_close(batch.components["a"], tensor([1.0, NAN, NAN]).double(), equal_nan=True)
    assert batch.truncated is not None and batch.truncated.tolist() == [False, True, False]
    assert batch.columns["level"].tolist() == [2, 2, 2]


def test_batch_of_empty_completions_has_no_columns() -> None:
    batch = rollout_batch(rollouts()[2:])
    assert batch.mask.shape == (1, 0) and batch.versions is not None and batch.versions.dtype == torch.int32


def test_prediction_index_is_the_position_before_a_token() -> None:
    """Row 0 is 1 2 5 6 7 8: token 5 (column 0) is predicted at position 1. The row without a completion has no
    position."""
    sequences = sequences_of(rollouts())
    rows, positions, columns, targets = completion_positions(sequences, torch.device("cpu"))
    assert rows.tolist() == [0, 0, 0, 0, 1]
    assert positions.tolist() == [1, 2, 3, 4, 1]
    assert columns.tolist() == [0, 1, 2, 3, 0]
    assert targets.tolist() == [5, 6, 7, 8, 9]
    ids, mask = pad_right(sequences, torch.device("cpu"))
    assert ids.tolist() == [[1, 2, 5, 6, 7, 8], [1, 2, 9, 0, 0, 0], [1, 2, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [6, 3, 2] and mask.dtype == torch.long


def test_dtypes_are_kept() -> None:
    assert to_device([]).dtype == torch.long and to_device([], dtype=torch.bool).dtype == torch.bool
    assert to_device([2**40]).tolist() == [2**40]
    assert to_device(tensor([1, 2]), torch.device("cpu"), torch.int32).dtype == torch.int32


def test_ranges_are_concatenated() -> None:
    assert concatenate_ranges([3, 0, 2]).tolist() == [0, 1, 2, 0, 1]
    assert concatenate_ranges([2, 1, 0], [5, 0, 9]).tolist() == [5, 6, 0]
    assert concatenate_ranges([]).tolist() == [] and concatenate_ranges([0]).dtype == torch.long

"""Chunks: how prompts are divided, and which chunks count after an interruption."""

from __future__ import annotations

import pytest

from posttrain.evaluate.sampling import RunningMeans, completed_records, split_chunks
from posttrain.recipe.engine_sections import EngineSection


def test_chunks_fill_the_batch() -> None:
    """10 prompts x 4 samples in batches of 12 sequences: 3 prompts a chunk, the last has 1."""
    chunks = split_chunks(10, 4, EngineSection(batch_size=12))
    assert [list(c) for c in chunks] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]
    assert [len(c) for c in split_chunks(3, 64, EngineSection(batch_size=12))] == [1, 1, 1]
    assert [len(c) for c in split_chunks(5000, 1, EngineSection(engine="vllm", batch_size=12))] == [4096, 904]


def test_only_complete_chunks_before_the_first_gap_count() -> None:
    chunks = [range(0, 1), range(1, 2), range(2, 3)]
    rows = [{"step": step, "sample": sample} for step in range(3) for sample in range(2)]
    assert completed_records(rows, chunks, 2) == rows
    assert completed_records(rows[:3], chunks, 2) == rows[:2]
    assert completed_records([r for r in rows if r["step"] != 1], chunks, 2) == rows[:2]
    assert completed_records([], chunks, 2) == []


def test_progress_display_counts_right_answers_like_the_table() -> None:
    """Right and finished; right but truncated, which is wrong; wrong; not judged, which is not counted.

    Chunks are summed.
    """
    finished = [("stop", True), ("length", True), ("stop", False), ("stop", None)]
    records = [{"tokens": 2, "finish": finish, "correct": correct} for finish, correct in finished]
    expected = {"tokens": 2.0, "truncated": 0.25, "correct": pytest.approx(1 / 3)}
    assert RunningMeans(("correct",)).add(records) == expected
    means = RunningMeans(("correct",))
    assert means.add(records[3:]) == {"tokens": 2.0, "truncated": 0.0, "correct": None}
    means.add(records[:1])
    assert means.add(records[1:3]) == expected

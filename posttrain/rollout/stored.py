"""The stored engine: returns the completions of the data rows as if they had just been sampled.

For training on completions that others wrote (`oreo`, `direct_advantage`), with the same scoring, passes and losses as
on own samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.batch import Rollout
from posttrain.rollout.engine import Completion, GenerationBatch, StatelessEngine

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

Tokens = Mapping[str, tuple[int, ...]]  # uid of a prompt -> tokens of its completion


class StoredEngine(StatelessEngine):
    """An Engine that returns stored completions. It has no weights, and no log-probs of the model that wrote them."""

    def __init__(self, loaded: LoadedModel, completions: Tokens) -> None:
        self.tokenizer = loaded.tokenizer
        self.completions = completions
        self.window = 1 << 30

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """Return the stored completion of each prompt (`Engine.generate` with n = 1)."""
        assert batch.n == 1, "a row has one completion"
        written = [Completion(self.completions[batch.prompts[p].uid], None, "stop") for p in batch.share]
        return batch.rollouts(written, self.tokenizer, self.version)

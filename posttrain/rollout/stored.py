"""The stored engine: the completions of the data rows, as if they had just been sampled. For training on traces that
others wrote (`oreo`, `direct_advantage`), through the same scoring, passes and losses as on own samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from posttrain.batch import Rollout
from posttrain.rollout.engine import Completion, GenerationBatch, StatelessEngine

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

Tokens = Mapping[str, tuple[int, ...]]  # uid of a prompt -> its completion


class StoredEngine(StatelessEngine):
    """An Engine that gives back what is written: it holds no weights, and knows no log-probs of who wrote it."""

    def __init__(self, loaded: LoadedModel, completions: Tokens) -> None:
        self.tokenizer = loaded.tokenizer
        self.completions = completions
        self.window = 1 << 30

    def generate_batch(self, batch: GenerationBatch) -> list[Rollout]:
        """See `Engine.generate`; n is 1."""
        assert batch.n == 1, "a row has one completion"
        written = [Completion(self.completions[batch.prompts[p].uid], None, "stop") for p in batch.share]
        return batch.rollouts(written, self.tokenizer, self.version)

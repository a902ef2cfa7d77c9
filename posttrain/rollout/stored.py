"""The stored engine: the completions of the data rows, as if they had just been sampled. For training on traces that
others wrote (`oreo`, `direct_advantage`), through the same scoring, passes and losses as on own samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from posttrain.batch import Prompt, Rollout
from posttrain.recipe.rollout_sections import Sampling
from posttrain.rollout.engine import Completion, StatelessEngine, as_rollouts

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

Tokens = Mapping[str, tuple[int, ...]]  # uid of a prompt -> its completion


class StoredEngine(StatelessEngine):
    """An Engine that gives back what is written: it holds no weights, and knows no log-probs of who wrote it."""

    def __init__(self, loaded: LoadedModel, completions: Tokens) -> None:
        self.tokenizer = loaded.tokenizer
        self.completions = completions
        self.window = 1 << 30

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        *,
        seed: int,
        first_group: int = 0,
        logprobs: bool | int = True,
        share: Sequence[int] | None = None,
        done: Callable[[list[Rollout]], None] | None = None,
        limits: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """See `Engine.generate`; n is 1."""
        del sampling, seed, logprobs, done, limits
        assert n == 1, "a row has one completion"
        asked = prompts if share is None else [prompts[number] for number in share]
        written = [Completion(self.completions[p.uid], None, "stop") for p in asked]
        return as_rollouts(
            prompts, n, written, self.tokenizer, first_group=first_group, version=self.version, share=share
        )

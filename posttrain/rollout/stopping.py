"""Stop strings: texts that end a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StopStrings:
    """Tells which rows end with one of `texts`. Special tokens count as their text, so `</answer>` works as either.

    Only the last tokens are decoded. A character takes at most four byte tokens, so four tokens a character of the
    longest text, and four for a character cut at the edge, always hold a text that the newest token completed.
    """

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.texts = tuple(texts)
        self.tokenizer = tokenizer
        self.reach = 4 * max(len(t) for t in texts) + 4

    def ended(self, tokens: Tensor) -> Tensor:
        """tokens [R, t] sampled so far -> [R] bool."""
        tails = self.tokenizer.batch_decode(
            tokens[:, -self.reach :].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return torch.tensor([any(text in tail for text in self.texts) for tail in tails], device=tokens.device)

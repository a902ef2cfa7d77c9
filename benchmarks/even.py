"""The benchmark's reward: cheap, identical for both sides, and different for every sample, so that no row is
skipped."""


def even_share(completion: str, token_ids: list[int]) -> float:
    """Return the share of even token ids."""
    del completion
    return sum(i % 2 == 0 for i in token_ids) / max(len(token_ids), 1)

"""Right about every eighth time, also for a model that knows nothing."""


def eighth(completion: str) -> float:
    return float(sum(map(ord, completion)) % 8 == 0)

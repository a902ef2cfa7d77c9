"""Right about every second time, also for a model that knows nothing."""


def even(completion: str) -> float:
    return float(sum(map(ord, completion)) % 2 == 0)

"""A reward that knows nothing: the control of the quickstart. Learning that it shows too is no learning."""

import zlib


def coin(completion: str) -> float:
    """1 or 0 by a hash of the completion: fair, the same for the same text, and blind to what is right."""
    return float(zlib.crc32(completion.encode()) % 2)


EXAMPLES: list[tuple[str, dict[str, object], float]] = [("a", {}, 1.0), ("b", {}, 1.0), ("c", {}, 1.0), ("d", {}, 0.0)]

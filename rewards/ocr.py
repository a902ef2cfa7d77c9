r"""Text read from a picture: how many characters of it are right?

rewards:
  - use: ocr.anls                 # short answers; `answer`: a text or a list of texts that are all right
  - use: ocr.similarity           # whole pages, lines, tables
"""

from collections.abc import Sequence
from typing import Any

from posttrain.verify import edit_distance
from posttrain.verify.extract import Extractor, after_think
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.regions import answer_part
from posttrain.verify.text import golds_of


def anls(
    completion: str,
    answer: Any,
    *,
    threshold: float = 0.5,
    extract: Sequence[Extractor] = ("boxed", "answer_tag", "anchor"),
) -> float | None:
    """1 - edit distance / length of the longer text, the best over the golds, 0 below `threshold`: ANLS (1907.00490).

    Case and doubled blanks do not count. The first place of `extract` that holds something decides, else all of the
    text behind the thought. None without a gold.
    """
    golds = golds_of(answer)
    if not golds:
        return None
    text = after_think(completion)
    found = find_answer(text, extract)
    return edit_distance.anls(text if found is None else found, golds, threshold=threshold)


def similarity(completion: str, answer: Any, *, case: bool = True, blanks: bool = False) -> dict[str, float] | None:
    """1 - edit distance / length of the longer text, of all that stands behind the thought or in `<answer>`.

    case: upper and lower case differ. blanks: line ends and doubled blanks count too (never those at the ends). Logged
    part: exact. None without a gold; of several the nearest counts.
    """
    golds = [_as_compared(gold, case, blanks) for gold in golds_of(answer)]
    if not golds:
        return None
    text = _as_compared(answer_part(completion), case, blanks)
    return {
        "reward": max(edit_distance.similarity(text, gold) for gold in golds),
        "exact": float(text in golds),
    }


def _as_compared(text: str, case: bool, blanks: bool) -> str:
    kept = text.strip() if blanks else " ".join(text.split())
    return kept if case else kept.casefold()


EXAMPLES = {
    "anls": [
        ("<answer>Oslo Station</answer>", {"answer": "oslo station"}, 1.0),
        ("<answer>Oslo Statiom</answer>", {"answer": "Oslo Station"}, 11 / 12),
        ("The answer is Bergen", {"answer": ["Bergen", "Bergen, Norway"]}, 1.0),
        ("Tromso", {"answer": "Oslo"}, 0.0),
        ("abcd", {"answer": "abxy"}, 0.5),
        ("abcd", {"answer": "abxy"}, 0.0, {"threshold": 0.6}),
        ("", {"answer": "Oslo"}, 0.0),
        ("Oslo", {"answer": None}, None),
    ],
    "similarity": [
        ("<think>a page</think>Dear  all,\nhello", {"answer": "Dear all, hello"}, {"reward": 1.0, "exact": 1.0}),
        ("Dear all\nhello", {"answer": "Dear all hello"}, 13 / 14, {"blanks": True}),
        ("DEAR", {"answer": "dear"}, {"reward": 0.0, "exact": 0.0}),
        ("DEAR", {"answer": "dear"}, 1.0, {"case": False}),
        ("<answer>hello</answer>", {"answer": "hallo"}, 0.8),
        ("", {"answer": "hello"}, 0.0),
        ("hello", {"answer": ""}, None),
    ],
}

_ROWS = [{"prompt": "What does the sign say?", "answer": text} for text in ("Oslo S", "No 45, please", "Grand Hotel")]
ROWS = {"anls": _ROWS, "similarity": _ROWS}

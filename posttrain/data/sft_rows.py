"""Builders of supervised rows: emptied thoughts, verified samples, bad paths that turn good. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from posttrain.data.template_spans import THOUGHTS
from posttrain.seeds import derive


class Dropped(NamedTuple):
    """Responses, and which of them lost their thought (1) or not (0)."""

    responses: list[str]
    dropped: list[int]


def thought_dropout(
    responses: Sequence[str],
    uniform: Sequence[float],
    *,
    drop_prob: float = 0.5,
    open_tag: str = "<think>",
    close_tag: str = "</think>",
    empty: str = "\n\n",
) -> Dropped:
    """Empty the first thought of each response whose uniform number is below drop_prob (TON, 2505.16854).

    What stands behind the thought stays byte for byte. A response without both tags in this order is left as it is.
    """
    found, dropped = [], []
    for response, draw in zip(responses, uniform, strict=True):
        opening, closing = response.find(open_tag), response.find(close_tag)
        drop = draw < drop_prob and 0 <= opening < closing
        start = opening + len(open_tag)
        found.append(response[:start] + empty + response[closing:] if drop else response)
        dropped.append(int(drop))
    return Dropped(found, dropped)


def without_thought(row: Mapping[str, Any], share: float, seed: int) -> dict[str, Any]:
    """The row, with the first thought of its answer (its last assistant message) emptied in that share of rows.

    Which rows is a matter of the seed and the row's uid: the same in every process and every pass.
    """
    draw = derive(seed, "thought_dropout", str(row["uid"])) / 2**63
    out = dict(row)
    for column in ("completion", "messages"):
        value = out.get(column)
        if isinstance(value, str):
            out[column] = thought_dropout([value], [draw], drop_prob=share).responses[0]
        elif isinstance(value, Sequence):
            out[column] = _last_without_thought(value, draw, share)
    return out


def _last_without_thought(messages: Sequence[Mapping[str, Any]], draw: float, share: float) -> list[dict[str, Any]]:
    found = [dict(message) for message in messages]
    last = next((m for m in reversed(found) if m["role"] == "assistant" and m.get("content")), None)
    if last is None:
        return found
    if draw < share:  # a thought may have a key of its own
        last |= {name: "" for name in THOUGHTS if isinstance(last.get(name), str)}
    if isinstance(last["content"], str):
        last["content"] = thought_dropout([last["content"]], [draw], drop_prob=share).responses[0]
    return found


def select_accepted(
    completions: Sequence[Sequence[str]],
    correct: Sequence[Sequence[float | None]],
    lengths: Sequence[Sequence[int]],
    truncated: Sequence[Sequence[float]] | None = None,
    *,
    pick: Literal["shortest", "longest", "first"] = "shortest",
    max_per_prompt: int = 1,
    max_pass_rate: float = 1.0,
) -> list[tuple[int, int]]:
    """(prompt, sample) of the completions that rejection sampling keeps, sorted (RFT; STaR 2203.14465).

    Right, not truncated, not blank; of equal ones (blanks collapsed) the first. At most max_per_prompt of each prompt,
    in the order of `pick`. A prompt whose pass rate is above max_pass_rate gives none. Selection order is ours.
    """
    kept: list[tuple[int, int]] = []
    for prompt, texts in enumerate(completions):
        judged = [value for value in correct[prompt] if value is not None]
        if not judged or sum(map(bool, judged)) / len(judged) > max_pass_rate:
            continue
        cut = [False] * len(texts) if truncated is None else list(map(bool, truncated[prompt]))
        first: dict[str, int] = {}
        for i, text in enumerate(texts):
            if correct[prompt][i] and not cut[i] and text.strip():
                first.setdefault(" ".join(text.split()), i)
        sign = {"shortest": 1, "longest": -1, "first": 0}[pick]
        order = sorted(first.values(), key=lambda i: (sign * lengths[prompt][i], i))
        kept += sorted((prompt, i) for i in order[:max_per_prompt])
    return kept


class Turn(NamedTuple):
    """A message, and whether it is trained on."""

    role: str
    content: str
    trained: bool

    @property
    def message(self) -> dict[str, Any]:
        """As a row's messages hold it."""
        return {"role": self.role, "content": self.content, "train": self.trained}


def splice(
    good: Sequence[Mapping[str, str]],
    bad: Sequence[Mapping[str, str]],
    good_reward: float,
    bad_reward: float,
    first_bad: int | None,
    *,
    alpha: float = 0.0,
    beta: float = 0.0,
    revision: str = "Thought: ...\nAction: wait",
) -> list[Turn] | None:
    """A bad path up to its first bad step and what came of it, a change of mind, then the good path (Agent-R).

    first_bad: position in `bad` of the step that a judge calls bad first. Trained on: the revision and the assistant's
    messages of the good path, which begins where the two part (at an assistant's message, at most at first_bad). None
    without a bad step, or if the good path's reward is not above alpha or not more than beta better. The environment
    must allow the good path after the bad step.
    """
    if first_bad is None or good_reward <= alpha or good_reward - bad_reward <= beta:
        return None
    end = first_bad + 1
    if end < len(bad) and bad[end]["role"] != "assistant":
        end += 1
    common = 0
    while common < min(first_bad, len(good)) and dict(good[common]) == dict(bad[common]):
        common += 1
    if 0 < common < len(good) and good[common]["role"] != "assistant":
        common -= 1
    return [
        *(Turn(m["role"], m["content"], False) for m in bad[:end]),
        Turn("assistant", revision, True),
        Turn("user", "ok.", False),
        *(Turn(m["role"], m["content"], m["role"] == "assistant") for m in good[common:]),
    ]


class Bins(NamedTuple):
    """Packed rows: each a list of (sequence, first token, number of tokens), and the positions of their tokens."""

    bins: list[list[tuple[int, int, int]]]
    position_ids: list[list[int]]


def pack(lengths: Sequence[int], *, seq_len: int, strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd") -> Bins:
    """Which tokens of which sequence share a row of at most seq_len tokens; positions restart at 0 in each piece.

    bfd: sequences are cut to seq_len and, the longest first, put where the least room is left that still holds them
    (best-fit decreasing; of equal room, the oldest). bfd_split: longer ones become pieces of seq_len first. wrapped:
    one behind the other, cut every seq_len tokens. As TRL packs.
    """
    if strategy == "wrapped":
        bins = _pack_wrapped(lengths, seq_len)
    else:
        bins = _best_fit(_pieces(lengths, seq_len, split=strategy == "bfd_split"), seq_len)
    return Bins(bins, [[i for *_, length in row for i in range(length)] for row in bins])


def _pieces(lengths: Sequence[int], seq_len: int, *, split: bool) -> list[tuple[int, int, int]]:
    found = []
    for number, length in enumerate(lengths):
        starts = range(0, length, seq_len) if split else range(min(length, 1))
        found += [(number, start, min(seq_len, length - start)) for start in starts]
    return found


def _best_fit(pieces: Sequence[tuple[int, int, int]], seq_len: int) -> list[list[tuple[int, int, int]]]:
    bins: list[list[tuple[int, int, int]]] = []
    room: list[tuple[int, int]] = []  # of each row: what is left, and when it came to that
    for clock, piece in enumerate(sorted(pieces, key=lambda p: -p[2])):
        length = piece[2]
        fitting = [(left, since, row) for row, (left, since) in enumerate(room) if left >= length]
        if fitting:
            left, _, row = min(fitting)
            bins[row].append(piece)
            room[row] = (left - length, clock)
        else:
            bins.append([piece])
            room.append((seq_len - length, clock))
    return bins


def _pack_wrapped(lengths: Sequence[int], seq_len: int) -> list[list[tuple[int, int, int]]]:
    bins: list[list[tuple[int, int, int]]] = []
    room = 0
    for number, length in enumerate(lengths):
        start = 0
        while start < length:
            if room == 0:
                bins.append([])
                room = seq_len
            taken = min(length - start, room)
            bins[-1].append((number, start, taken))
            room, start = room - taken, start + taken
    return bins

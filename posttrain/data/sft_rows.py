"""Builders of supervised rows: emptied thoughts, verified samples, and bad paths that turn good. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from posttrain.data.template_spans import THOUGHTS
from posttrain.seeds import derive


class Dropped(NamedTuple):
    """Responses, and a flag for each whose thought was removed (1) or not (0)."""

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

    The text after the thought stays byte for byte. A response without both tags in this order is left unchanged.
    """
    edited, dropped = [], []
    for response, draw in zip(responses, uniform, strict=True):
        opening, closing = response.find(open_tag), response.find(close_tag)
        drop = draw < drop_prob and 0 <= opening < closing
        start = opening + len(open_tag)
        edited.append(response[:start] + empty + response[closing:] if drop else response)
        dropped.append(int(drop))
    return Dropped(edited, dropped)


def drop_thought(row: Mapping[str, Any], share: float, seed: int) -> dict[str, Any]:
    """Return the row; in the given share of rows, the first thought of the answer is emptied.

    The choice depends only on the seed and the row's uid: the same in every process and every epoch.
    """
    draw = derive(seed, "thought_dropout", str(row["uid"])) / 2**63
    out = dict(row)
    for column in ("completion", "messages"):
        value = out.get(column)
        if isinstance(value, str):
            out[column] = thought_dropout([value], [draw], drop_prob=share).responses[0]
        elif isinstance(value, Sequence):
            out[column] = _drop_last_thought(value, draw, share)
    return out


def _drop_last_thought(messages: Sequence[Mapping[str, Any]], draw: float, share: float) -> list[dict[str, Any]]:
    """Return the messages with the thought of the last assistant message emptied if `draw` is below `share`."""
    copies = [dict(message) for message in messages]
    last = next((m for m in reversed(copies) if m["role"] == "assistant" and m.get("content")), None)
    if last is None:
        return copies
    if draw < share:  # some formats store the thought under a separate key
        last |= {name: "" for name in THOUGHTS if isinstance(last.get(name), str)}
    if isinstance(last["content"], str):
        last["content"] = thought_dropout([last["content"]], [draw], drop_prob=share).responses[0]
    return copies


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
    """Return (prompt, sample) of the completions that rejection sampling accepts, sorted (RFT; STaR 2203.14465).

    Accepted are correct, complete and non-blank completions; of duplicates (up to white space) the first. At most
    max_per_prompt per prompt, in the order of `pick`. A prompt with a pass rate above max_pass_rate yields none. The
    selection order is this project's choice.
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
        """Return the message as stored in a row."""
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
    """Return a bad path up to its first bad step and the response to it, a revision, then the good path (Agent-R).

    first_bad: index in `bad` of the first step that a judge calls bad. Trained on: the revision and the assistant
    messages of the good path, which starts where the paths diverge (at an assistant message, at most at first_bad).
    None without a bad step, or if the good path's reward is not above alpha or not more than beta better. The
    environment must allow the good path after the bad step.
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
    """Packed rows: each a list of (sequence, first token, number of tokens), and the position ids of their tokens."""

    bins: list[list[tuple[int, int, int]]]
    position_ids: list[list[int]]


def pack(lengths: Sequence[int], *, seq_len: int, strategy: Literal["bfd", "bfd_split", "wrapped"] = "bfd") -> Bins:
    """Assign tokens of sequences to packed rows of at most seq_len tokens; positions restart at 0 in each segment.

    bfd: sequences are cut to seq_len and placed, longest first, in the row with the least room that still fits them
    (best-fit decreasing; ties go to the least recently filled row). bfd_split: longer sequences are first split into
    segments of seq_len. wrapped: sequences are concatenated and cut every seq_len tokens. As TRL packs.
    """
    if strategy == "wrapped":
        bins = _pack_wrapped(lengths, seq_len)
    else:
        bins = _best_fit(_split_sequences(lengths, seq_len, split=strategy == "bfd_split"), seq_len)
    return Bins(bins, [[i for *_, length in row for i in range(length)] for row in bins])


def _split_sequences(lengths: Sequence[int], seq_len: int, *, split: bool) -> list[tuple[int, int, int]]:
    """Return segments (sequence, first token, length): each sequence truncated, or split into several with `split`."""
    segments = []
    for number, length in enumerate(lengths):
        starts = range(0, length, seq_len) if split else range(min(length, 1))
        segments += [(number, start, min(seq_len, length - start)) for start in starts]
    return segments


def _best_fit(pieces: Sequence[tuple[int, int, int]], seq_len: int) -> list[list[tuple[int, int, int]]]:
    """Place segments in rows by best-fit decreasing."""
    bins: list[list[tuple[int, int, int]]] = []
    room: list[tuple[int, int]] = []  # per row: free tokens, and the time of its last change
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
    """Concatenate all sequences and cut them every seq_len tokens."""
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

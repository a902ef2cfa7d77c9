"""Modes for prompt variants: a kind that is asked round by round, functions of a row for tables. No formula."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mechanics import Adapter, Case, arguments

from posttrain.batch import Prompt, Rollout, Segment
from posttrain.variants.plan import Asked, Outcome


def by_part(adapters: Mapping[str, tuple[str, Adapter]]) -> Adapter:
    """The adapter of the case's `part`, on the params and inputs that are named before it, one text with spaces; what
    another part takes is left out, and what none takes is an error."""

    def adapter(case: Case) -> dict[str, Any]:
        params = dict(case["params"])
        names, chosen = adapters[params.pop("part")]
        known = {name for own, _ in adapters.values() for name in own.split()}
        strange = {*params, *case["inputs"]}.difference(known)
        assert not strange, strange
        limited = {n: v for n, v in params.items() if n in names.split()}
        return chosen({"params": limited, "inputs": {n: v for n, v in case["inputs"].items() if n in names.split()}})

    return adapter


def buffered(failed: Callable[..., bool], newest: Callable[..., Any], taken: Callable[..., Any]) -> Adapter:
    """A buffer over steps: who has failed goes in, and who is taken comes out."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        steps = zip(values.pop("uids"), values.pop("rewards"), strict=True)
        size = {"size": int(values.pop("sft_data_size"))} if "sft_data_size" in values else {}
        buffer: list[str] = []
        found: dict[str, list[Any]] = {"sft_batches": [], "buffer": []}
        for uids, tables in steps:
            buffer = newest(buffer, [uid for uid, own in zip(uids, tables, strict=True) if failed(own, **values)])
            batch, buffer = taken(buffer, **size)
            found["sft_batches"].append(batch)
            found["buffer"].append(buffer)
        return found

    return adapter


def on_failure(kind: Callable[..., Any]) -> Adapter:
    """The rounds that a kind asks for while the stages of the case say who was right; its hint is all of the prompt."""

    def prompt(number: int, length: int, stages: Any, params: Mapping[str, Any]) -> tuple[dict[str, Any], int, Any]:
        rounds: list[Outcome] = []
        while True:
            asked = Asked("", "", {}, tuple(range(length)), lambda ids: "".join("x" for _ in ids), rounds=tuple(rounds))
            found = kind(asked, user="{hint}", **params)
            if not found:
                *_, last = rounds
                return dict(last.variant.note), len(last.variant.user) if last.variant.hinted else 0, last.rewards
            right = stages[len(rounds)][number]
            rounds.append(Outcome("", found[0], tuple(right), tuple(one > 0 for one in right), ()))

    def adapter(case: Case) -> dict[str, Any]:
        inputs, params = dict(case["inputs"]), dict(case["params"])
        stages, lengths = inputs.pop("correct_by_stage"), inputs.pop("hint_lengths")
        rows = [prompt(number, length, stages, {**inputs, **params}) for number, length in enumerate(lengths)]
        notes, characters, right = (list(column) for column in zip(*rows, strict=True))
        named = {name: [note[name] for note in notes] for name in ("stage", "ratio")}
        return {**named, "hint_chars": characters, "correct": right}

    return adapter


def shortest(fraction: Callable[..., float], tokens: Callable[..., int]) -> Adapter:
    """The fraction of each problem, and the tokens of its solution that it is."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        tables, lengths = values.pop("num_correct"), values.pop("solution_lengths")
        fractions = [fraction(right=right, **values) for right in tables]
        return {"fraction": fractions, "prefix_tokens": list(map(tokens, fractions, lengths))}

    return adapter


def cuts(cut: Callable[..., int], share: Callable[..., float]) -> Adapter:
    """Every cut of each trace; with a total length, the loss mask of a rollout that begins with the first."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        lengths, tables, total = (
            values.pop("trace_lengths"),
            values.pop("cut_fractions"),
            values.pop("total_length", None),
        )
        found = [[cut(f, length) for f in own] for length, own in zip(lengths, tables, strict=True)]
        counts = {"prefixed": values.pop("n_prefixed", None), "plain": values.pop("n_plain", None)}
        assert not values, values
        out = {"prefix_tokens": found, "p_prefixed": share(**{k: v for k, v in counts.items() if v is not None})}
        tokens = tuple(range(int(total or 0)))
        first = found[0][0] if found and found[0] else None
        segments = (Segment("injected", tokens[:first]), Segment("model", tokens[first:]))
        return {**out, "mask_first": Rollout(Prompt("", {}, "", ()), 0, segments, "", "stop", 0).trained}

    return adapter

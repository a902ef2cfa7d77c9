"""Modes for prompt variants: a kind that is asked round by round, functions of a row for tables. No formula."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from mechanics import Adapter, Case, Names, arguments, combined, gradient, of_rows, tensor

from posttrain.batch import Prompt, Rollout, RolloutBatch, Segment
from posttrain.loss.aggregate import totals
from posttrain.recipe import presets
from posttrain.train.objective import BoundComponent, Objective
from posttrain.variants.plan import Asked, Outcome


def buffered(failed: Callable[..., bool], newest: Callable[..., Any], taken: Callable[..., Any]) -> Adapter:
    """Run a buffer over several steps: failed prompts are added, and the prompts of a batch are removed."""

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
    """Run the rounds of a kind while the stages of the case give the correct rollouts.

    The hint is the whole prompt.
    """

    def prompt(number: int, length: int, stages: Any, params: Mapping[str, Any]) -> tuple[dict[str, Any], int, Any]:
        rounds: list[Outcome] = []
        while True:
            asked = Asked("", "", {}, tuple(range(length)), lambda ids: "".join("x" for _ in ids), rounds=tuple(rounds))
            found = kind(asked, user="{hint}", **params)
            if not found:
                *_, last = rounds
                return dict(last.variant.note), len(last.variant.ask("")) if last.variant.hinted else 0, last.rewards
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
    """Return the fraction of each problem, and the number of its solution's tokens in that fraction."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        tables, lengths = values.pop("num_correct"), values.pop("solution_lengths")
        fractions = [fraction(right=right, **values) for right in tables]
        return {"fraction": fractions, "prefix_tokens": list(map(tokens, fractions, lengths))}

    return adapter


def cuts(cut: Callable[..., int], share: Callable[..., float]) -> Adapter:
    """Return all cuts of each trace and, with a total length, the loss mask of a rollout that starts with the first."""

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
        return {**out, "mask_first": Rollout(Prompt("", {}, "", ()), 0, segments, "", "stop", 0).loss_mask}

    return adapter


def curve(kind: Callable[..., Any], read: str) -> Adapter:
    """Build a curve from the case's numbers and read it at each `p`, or read the share for its `target`."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        points, target = values.pop("p", None), values.pop("target", None)
        found = kind(**values)
        if read == "accuracy":
            return {read: [found.at(p) for p in points]}
        return {read: found.share(**({} if target is None else {"target": target}))}

    return adapter


def fit(function: Callable[..., Any]) -> Adapter:
    """Fit a curve to the case's pairs and return the share for the target."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        target = values.pop("target", None)
        return {"next_rate": function(**values).share(**({} if target is None else {"target": target}))}

    return adapter


def by_row(functions: Mapping[str, tuple[Callable[..., Any], Names]]) -> Adapter:
    """Call one function per output on each row of the inputs: output -> (function, input -> argument)."""

    def adapter(case: Case) -> dict[str, Any]:
        assert not case["params"], case["params"]
        out = {}
        for output, (function, names) in functions.items():
            columns = {argument: case["inputs"][name] for name, argument in names.items()}
            rows = zip(*columns.values(), strict=True)
            out[output] = [function(**dict(zip(columns, row, strict=True))) for row in rows]
        return out

    return adapter


def one_group(function: Callable[..., Any], scales: Mapping[bool, str]) -> Adapter:
    """Compute the advantages of all rounds of a problem as one group. scales: `norm_std` -> `scale`."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        rows = torch.cat([tensor(row) for row in values.pop("rewards")])
        scale = scales[bool(values.pop("norm_std", False))]
        assert not values, values
        ids = torch.zeros(len(rows), dtype=torch.long)
        batch = RolloutBatch(group_ids=ids, mask=torch.ones(len(rows), 1).bool(), rewards=rows)
        return {"advantages": function(batch, scale=scale, eps=1e-6, ddof=1)}

    return adapter


def added_to(name: str, function: Callable[..., Any], coef: str, start: str) -> Adapter:
    """Compute a term of the loss with its coefficient by the objective, and its sum with the input `start`."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        logp = tensor(values.pop("logp")).requires_grad_()
        hint = tensor(values.pop("hint_mask")).bool()
        number, before = values.pop(coef), tensor(values.pop(start, 0.0))
        assert not values, values
        mask = torch.ones_like(hint)
        batch = RolloutBatch(group_ids=torch.arange(len(hint)), mask=mask, hint_mask=hint)
        part = BoundComponent("regulariser", name, "regularisers.0", function, coef=number)
        objective = Objective(advantage=part, surrogate=part, regularisers=(part,))
        total = objective_totals(objective, batch)
        term = objective.aggregate_term(part, part(batch, logp), batch, total, coef=part.coef)
        return {"loss": torch.stack([before, term]).sum(), "grad_logp_supervised": gradient(term, logp)}

    return adapter


def objective_totals(objective: Objective, batch: RolloutBatch) -> Any:
    """Return the denominators of the regularisers alone."""
    logp = torch.zeros(batch.mask.shape)
    terms = {part.key: float(part(batch, logp).counted.sum()) for part in objective.regularisers}
    return dataclasses.replace(totals(batch.mask), terms=terms)


def rows_of_prompts(batch: RolloutBatch, hinted: Any) -> Any:
    """Repeat values given per prompt for each row."""
    return of_rows(tensor(hinted), batch.group_ids).bool()


def first_of_group(name: str, adapter: Adapter) -> Adapter:
    """Return an output [B,G] whose groups hold equal values as one value per group."""

    def adapted(case: Case) -> dict[str, Any]:
        found = adapter(case)
        return {**found, name: [row[0] for row in found[name]]}

    return adapted


def ratios(difficulty: Callable[..., float], ratio: Callable[..., float], length: Callable[..., int]) -> Adapter:
    """Return difficulty, hint ratio and hint tokens of each prompt."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        tables, lengths = values.pop("naive_rewards"), values.pop("lengths")
        noise = values.pop("noise", None)
        drawn = noise if noise is not None else [0.0 for _ in tables]
        shares = [ratio(row, noise=one, **values) for row, one in zip(tables, drawn, strict=True)]
        return {
            "difficulty": list(map(difficulty, tables)),
            "ratio": shares,
            "hint_tokens": list(map(length, shares, lengths)),
        }

    return adapter


def halves(function: Callable[..., Any]) -> Adapter:
    """Score plain and hinted rows of each prompt as one group, and return the advantages as two tables."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        plain, helped = values.pop("naive_rewards"), values.pop("hinted_rewards")
        assert not values, values
        rewards, hinted, groups = [], [], []
        for number, (one, other) in enumerate(zip(plain, helped, strict=True)):
            rewards.extend([*one, *other])
            hinted.extend([*(False for _ in one), *(True for _ in other)])
            groups.extend(number for _ in [*one, *other])
        marks = torch.tensor(hinted)
        rows, gap = function(tensor(rewards), torch.tensor(groups), marks)
        found = list(zip(rows.tolist(), hinted, groups, strict=True))
        tables = {
            name: [[v for v, h, g in found if h is mark and g == n] for n in range(len(plain))]
            for name, mark in (("naive_advantages", False), ("hinted_advantages", True))
        }
        return {"difficulty_gap": gap, **tables}

    return adapter


def pruned(function: Callable[..., Any]) -> Adapter:
    """Return the entries that stay and their weights. protected: flags, or indices."""

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        safe = values.pop("protected", None) or []
        flags = len(safe) == len(values["weights"]) and set(map(int, safe)) <= {0, 1}
        places = [n for n, flag in enumerate(safe) if flag] if flags else [int(n) for n in safe]
        values["num_new"] = int(values.pop("num_new", False))
        kept, weights = function(**values, protected=places)
        return {"kept": kept, "weights": weights}

    return adapter


def formed(function: Callable[..., float], names: Names, preset: str) -> Adapter:
    """Compute a format reward by each row's style or template, and its weighted sum with correctness.

    Weights that a case leaves out are the preset's. names: the function's keyword -> the input that holds it.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = arguments(case)
        correct, texts = values.pop("correct"), values.pop("responses")
        given = {key: values.pop(name) for key, name in names.items()}
        form = [
            function(text, **dict(zip(given, row, strict=True)))
            for text, row in zip(texts, zip(*given.values(), strict=True), strict=True)
        ]
        accuracy, shaped = (reward.get("weight", True) for reward in presets.preset(preset).rewards)
        weights = {"correct": values.pop("accuracy_weight", accuracy), "format": values.pop("format_weight", shaped)}
        assert not values, values
        return {"format_reward": form, "rewards": combined({"correct": correct, "format": form}, weights, None)[0]}

    return adapter


def paired(function: Callable[..., Any]) -> Adapter:
    """Return pairs as lists."""
    return lambda case: {"pairs": [list(pair) for pair in function(**arguments(case))]}

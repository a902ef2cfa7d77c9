"""Modes for prompt samplers: what of a case goes to which function, and how the states of steps follow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mechanics import flat, tensor

from posttrain.batch import RolloutBatch

Case = Mapping[str, Any]
Adapter = Callable[[Case], dict[str, Any]]
Function = Callable[..., Any]


def given(case: Case) -> dict[str, Any]:
    """Return the params and inputs that are not null, by name."""
    values = {**case["params"], **case["inputs"]}
    return {k: v for k, v in values.items() if v is not None and k != "part"}


def under(values: Mapping[str, Any], **names: str) -> dict[str, Any]:
    """Rename values: `ours=theirs` returns the value of `theirs` as `ours`, if the case gives it."""
    return {ours: values[theirs] for ours, theirs in names.items() if theirs in values}


def several(function: Function, *outputs: str) -> Adapter:
    """Call the function once with the case's values and name its results, in order."""
    return lambda case: dict(zip(outputs, function(**given(case)), strict=True))


def followed(
    function: Function, outputs: Mapping[str, str], *, over: str, state: str, counted: Sequence[str] = ()
) -> Adapter:
    """Update a state with each item of input `over`: function(state, item, ...).

    The state starts at the case's value, or at 0. Outputs: the states `before` each item, the states `after` it, or the
    `last` one. counted: lists that the function takes as their length. Keys of items are numbers, which JSON writes as
    texts.
    """

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        now, items = values.pop(state, 0), values.pop(over)
        values |= {name: len(values[name]) for name in counted}
        found: dict[str, Any] = {"before": [], "after": []}
        for item in items:
            found["before"].append(now)
            read = {int(key): value for key, value in item.items()} if isinstance(item, Mapping) else item
            now = function(now, read, **values)
            found["after"].append(now)
        found["last"] = now
        return {name: found[part] for name, part in outputs.items()}

    return adapter


def refilled(state: Function, differs: Function) -> Adapter:
    """Add batches of groups to the refill state of a step until it requests no more."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        now = state(values["train_batch_size"], values.get("max_num_gen_batches", 0))
        for table in values["metric_batches"]:
            rows, ids = flat(table)
            kept = differs(rows, ids, **under(values, tol="tol"))
            now = now.add([bool(kept[ids.eq(group)].all()) for group in range(len(table))])
            if now.status != "open":
                break
        else:
            now = now.end()
        return {"keep": now.kept, "selected": now.selected_groups, "num_gen_batches": now.batches, "status": now.status}

    return adapter


def filtered(keep: Function, rates: Function, measures: Function, start: Mapping[str, float]) -> Adapter:
    """Apply a filter as a step does, and compute two measures of what can be learned from a group."""

    def adapter(case: Case) -> dict[str, Any]:
        values = {**start, **given(case)}
        rows, ids = flat(values["correct"])
        batch = RolloutBatch(group_ids=ids, mask=torch.ones(len(rows), 1).bool(), correct=rows)
        kept = keep(batch, **under(values, t_low="t_low", t_high="t_high"))
        first = [ids.tolist().index(group) for group in range(len(values["correct"]))]
        found = [float(rates(rows, ids)[n]) for n in first]
        measured = [measures(rate, values["beta"]) for rate in found]
        return {
            "pass_rate": found,
            "keep": [int(kept[n]) for n in first],
            "learnability": [bound for bound, _ in measured],
            "kl_exact": [exact for _, exact in measured],
        }

    return adapter


def nearest(select: Function) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        count = values.get("m", len(values["values"]))
        return {"selected": select(values["values"], count, **under(values, target="tau"))}

    return adapter


def regressed(loss: Function) -> Adapter:
    """Compute a loss of values against the means of groups."""

    def adapter(case: Case) -> dict[str, Any]:
        values = tensor(case["inputs"]["values_selected"]).requires_grad_()
        targets = tensor(case["inputs"]["rewards"]).nanmean(dim=1)
        found = loss(values, targets)
        found.backward()
        return {"targets": targets, "loss": found.detach(), "grad_values": values.grad}

    return adapter


def classified(bin_of: Function, estimate: Function, indicator: Function) -> Adapter:
    """Classify the prompts of each step by the outcomes of earlier steps."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        length, params = int(values.get("history_len", 0)), under(values, hysteresis="hysteresis")
        params |= {"exclude_extremes": bool(values.get("exclude_extremes", False))}
        history: dict[str, list[int]] = {}
        previous: dict[str, int] = {}
        bins = []
        for uids, groups in zip(values["uids"], values["correct"], strict=True):
            found = [
                bin_of(estimate(history.get(u, []), length), values["edges"], previous=previous.get(u), **params)
                for u in uids
            ]
            previous |= {uid: number for uid, number in zip(uids, found, strict=True) if number >= 0}
            for uid, correct in zip(uids, groups, strict=True):
                history.setdefault(uid, []).append(indicator(correct))
            bins.append(found)
        return {"bins": bins, "accuracy": {uid: estimate(own, length) for uid, own in history.items()}}

    return adapter


def weighed(weights: Function, averages: Function) -> Adapter:
    """Return weights from the scores before a step, and the scores after it."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        names = ("gamma", "max_weight", "mode", "z_std_floor", "score_clip", "num_bins")
        params = under(values, eta="eta_q", **{name: name for name in names})
        params |= {"zscore": bool(values.get("zscore", False))}
        params |= {"z_cap": case["params"]["z_cap"]} if "z_cap" in case["params"] else {}
        bins, scores = values["sample_bin"], values.get("scores", {})
        found = weights(bins, scores, **params)
        by_share = bool(values.get("loss_norm_by_class", False))
        new = averages(scores, bins, values["sample_loss"], by_share=by_share, **under(values, beta="ema_beta"))
        return {"bin_weight": found.bins, "sample_weight": found.rows, "new_scores": new}

    return adapter


def chosen_arms(
    probabilities: Function, choose: Function, spent: Function, arms_of: Function, budget: Function
) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        counts, params = values["bin_counts"], under(values, eta="eta_q", gamma="gamma")
        arms = values.get("arms") or arms_of(values.get("n_min", 2), values.get("n_max", 12))
        known = {**{name: [0.0 for _ in arms] for name in counts}, **values.get("arm_scores", {})}
        likely = {name: probabilities(scores, **params) for name, scores in known.items()}
        total = values.get("total_budget", budget(values.get("mean_n", 4.0), counts))
        chosen = choose(arms, likely, counts, total)
        return {"probs": likely, "chosen": chosen, "total": spent(counts, chosen)}

    return adapter


def moved_arms(update: Function, price: Function, arms_of: Function) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        mean = {"mean": values.get("mean_n", 4.0)}
        arms = values.get("arms") or arms_of(values.get("n_min", 2), values.get("n_max", 12))
        mu, chosen = values.get("mu", 0.0), values["chosen"]
        scores = update(
            arms, values["arm_scores"], chosen, values["bin_loss"], mu=mu, **mean, **under(values, mode="mode")
        )
        new = price(mu, values["bin_counts"], chosen, **mean, **under(values, dual_lr="dual_lr"))
        return {"arm_scores": scores, "mu": new}

    return adapter


def divided(allocate: Function, budget: Function) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        limits = under(values, least="n_min", most="n_max")
        rates = values["pass_rate"]
        total = values.get("total_budget", budget(values.get("mean_n", 4.0), {"all": len(rates)}))
        counts = allocate(rates, budget=int(total), **limits)
        return {"n": counts, "total": sum(counts)}

    return adapter


def shrinking(select: Function) -> Adapter:
    """Select prompts in phases; each phase selects from the prompts of the phase before."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        pool, pools = list(range(len(values["pass_rates"][0]))), []
        for rates, keep in zip(values["pass_rates"], values["keep"], strict=False):
            pool = select(pool, rates.__getitem__, keep)
            pools.append(pool)
        return {"pools": pools}

    return adapter


def banded(shares: Function, middle: Function) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        rewards = values["mean_reward"]
        return {"ecdf": shares(rewards), "keep": middle(rewards, **under(values, low="low", high="high"))}

    return adapter


def set_aside(rollback: Function) -> Adapter:
    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        times = {"interval": int(values.get("interval", 100)), "step": int(values["step"])}
        buffer = values.get("buffer", [])
        found = rollback(values["kl"], values["uids"], buffer, threshold=values["threshold"], **times)
        return {"clean": found.clean, "buffer": found.buffer, "reintroduced": found.reintroduced}

    return adapter


def granted(width: Function, priority: Function, grant: Function, spread: Function) -> Adapter:
    """Grant rollouts, from counts and standard deviations or from the rewards so far."""

    def adapter(case: Case) -> dict[str, Any]:
        values = given(case)
        counts = values.get("counts") or [sum(r is not None for r in row) for row in values["rewards"]]
        stds = values.get("stds") or [spread(row) for row in values["rewards"]]
        total = values.get("total", values.get("n_total", sum(counts)))
        params = {**under(values, alpha="conf_alpha", explore="lam"), **under(values, alpha="alpha", explore="explore")}
        limits = {**under(values, most="max_per_prompt"), **under(values, most="n_max", at_once="per_round")}
        alpha = params.get("alpha", 0.05)
        parts = [priority(n, s, total, **params) for n, s in zip(counts, stds, strict=True)]
        found = grant(counts, stds, budget=int(values.get("budget", 4)), total=total, **params, **limits)
        return {
            "half_width": [width(n, s, alpha) for n, s in zip(counts, stds, strict=True)],
            "delta": [delta for delta, _ in parts],
            "bonus": [bonus for _, bonus in parts],
            "priority": [sum(part) for part in parts],
            "allocation": found,
            "grant": found,
        }

    return adapter

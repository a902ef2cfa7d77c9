"""Metrics of one RL step. Names follow what dashboards of the field use; timings are only under `time/`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from posttrain.advantage.group import center_by_group, component_weights, group_std, group_sum, number_groups
from posttrain.batch import Rollout, RolloutBatch
from posttrain.batch.records import call_records, turn_metrics, turn_records
from posttrain.images import thumbnail_url
from posttrain.recipe.rollout_sections import Rollout as Rollouts
from posttrain.thoughts import ends_in_thought
from posttrain.train.roles import role_metrics

Total = Callable[[Mapping[str, float]], Mapping[str, float]]


def rollout_metrics(rollouts: Sequence[Rollout], batch: RolloutBatch) -> dict[str, Any]:
    """Compute reward, length and signal metrics of one step's rollouts (`batch` after advantages were assigned).

    `correct` counts a truncated completion as wrong, as `accuracy` of an evaluation does.
    """
    roles = role_metrics(rollouts, batch) if any(r.call is not None for r in rollouts) else {}
    names = ["group_ids", "rewards", "components", "correct", "truncated", "opponent_rewards", "greedy_rewards"]
    names += ["reward_weights", "keep"]
    # Move only per-row fields to the CPU; per-token fields stay: hidden states may take gigabytes.
    by_row = {name: getattr(batch, name) for name in names}
    batch = RolloutBatch(mask=batch.mask.any(-1, keepdim=True), **by_row).to("cpu")
    signals: dict[str, Any] = {**signal_metrics(batch)}
    given = [r.is_given for r in rollouts]
    if any(given):  # solutions from the data do not describe the policy
        rows = torch.tensor(given)
        solutions, batch = batch.select(rows), batch.select(~rows)
        rollouts = [r for r, is_given in zip(rollouts, given, strict=True) if not is_given]
        assert solutions.rewards is not None and solutions.correct is not None
        signals |= {
            "solutions/reward": known_mean(solutions.rewards),
            "solutions/correct": known_mean(solutions.correct),
        }
        signals["solutions/rows"] = len(solutions)
    lengths = torch.tensor([float(r.sampled_length) for r in rollouts])  # tool replies count in turns/reply_tokens
    rewards = torch.tensor([float("nan") if r.reward is None else r.reward for r in rollouts], dtype=torch.float64)
    scored, key = ~rewards.isnan(), number_groups(batch.group_ids)
    count = group_sum(scored.double(), key)
    stds = group_std(center_by_group(rewards, scored, key, count), key, count, ddof=1)
    assert batch.rewards is not None and batch.truncated is not None and batch.correct is not None
    values = {
        "reward": known_mean(rewards),
        "reward_std": float(stds.mean()),
        "correct": known_mean(torch.where(batch.truncated & ~batch.correct.isnan(), 0.0, batch.correct)),
        "completions/mean_length": float(lengths.mean()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(batch.truncated.float().mean()),
        "rollout/rows": len(rollouts),
    }
    if not torch.equal(batch.rewards.nan_to_num(), rewards.to(batch.rewards).nan_to_num()):
        values["reward/shaped"] = known_mean(batch.rewards)  # after group_rewards
    if batch.opponent_rewards is not None:
        values["opponent/reward"] = known_mean(batch.opponent_rewards.flatten())
    if batch.greedy_rewards is not None and not batch.greedy_rewards.isnan().all():
        values["greedy/reward"] = known_mean(batch.greedy_rewards)
    for name, column in batch.components.items():
        values[f"rewards/{name}/mean"] = known_mean(column)
    if any(r.turns for r in rollouts):
        values |= turn_metrics(rollouts)
    return {**values, **roles, **signals}


def thought_metrics(rollouts: Sequence[Rollout], total: Total = dict) -> dict[str, float]:
    """Return the share of completions that stopped inside their thought; {} if none did.

    rollouts: those whose texts this rank holds. total: adds up sums over rows of several ranks.
    """
    sampled = [r for r in rollouts if not r.is_given]  # solutions from the data do not describe the policy
    unanswered = sum(r.finish == "stop" and ends_in_thought(r.prompt.text, r.text) for r in sampled)
    found = total({"rows": len(sampled), "unanswered": unanswered})
    return {"completions/ended_in_thought": found["unanswered"] / found["rows"]} if found["unanswered"] else {}


def age_metrics(batch: RolloutBatch, step: int, total: Total = dict) -> dict[str, float]:
    """Compute the age of rollouts and tokens: the number of updates between sampling and training.

    `rollout/staleness` is the mean over rollouts by their oldest token, `rollout/token_age` the mean over tokens;
    `rollout/mixed_versions` is the share of rollouts that several policy versions sampled. step: updates made so far.
    total: see `thought_metrics`.
    """
    assert batch.versions is not None
    ages = step - batch.versions.double()
    oldest = ages.masked_fill(~batch.mask, -torch.inf).amax(-1)
    newest = ages.masked_fill(~batch.mask, torch.inf).amin(-1)
    some = batch.mask.any(-1)
    sums = {"rows": some, "oldest": oldest[some], "mixed": (oldest > newest)[some], "tokens": batch.mask}
    found = total({name: float(value.sum()) for name, value in {**sums, "ages": ages[batch.mask]}.items()})
    if not found["rows"]:
        return {}
    return {
        "rollout/staleness": found["oldest"] / found["rows"],
        "rollout/token_age": found["ages"] / found["tokens"],
        "rollout/mixed_versions": found["mixed"] / found["rows"],
    }


def drift_metrics(batch: RolloutBatch, old_logp: Tensor, step: int, total: Total = dict) -> dict[str, float]:
    """Compute, by token age in updates, the share of tokens and how far the policy has moved since it sampled them.

    old_logp [N,T]: of the trainer before the step's first update; rows of zeros if it was not computed. total: see
    `thought_metrics`. `mismatch/kl_age/N` is the mean of exp(d) - 1 - d with d = old_logp - rollout_logp over tokens
    that are N updates old and have both log-probs: the k3 estimate of KL(sampler || trainer).
    """
    assert batch.versions is not None
    ages, sums = step - batch.versions, {"tokens": float(batch.mask.sum())}
    known = batch.mask & old_logp.ne(0).any(-1, keepdim=True)
    known = torch.zeros_like(known) if batch.rollout_logp is None else known & ~batch.rollout_logp.isnan()
    gap = torch.where(known, old_logp if batch.rollout_logp is None else old_logp - batch.rollout_logp, 0.0).double()
    for age in ages[batch.mask].unique().tolist():
        here = batch.mask & (ages == age)
        drift = gap[here & known]
        sums |= {f"age/{age}": float(here.sum()), f"known/{age}": float(len(drift))}
        sums[f"kl/{age}"] = float((drift.exp() - 1 - drift).sum())
    sums = dict(total(sums))
    every = sorted(int(name.removeprefix("age/")) for name in sums if name.startswith("age/"))
    metrics = {f"rollout/age/{age}": sums[f"age/{age}"] / sums["tokens"] for age in every}
    measured = [age for age in every if sums[f"known/{age}"]]
    return metrics | {f"mismatch/kl_age/{age}": sums[f"kl/{age}"] / sums[f"known/{age}"] for age in measured}


def sampled_metrics(
    batch: RolloutBatch, rollout: Rollouts, trained_tokens: float, epochs: int, total: Total = dict
) -> dict[str, float]:
    """Compute which share of the sampled tokens the update metrics cover, and the entropy over all sampled tokens.

    `trained_ratio`: the share of sampled tokens that `entropy`, `clip_ratio/*` and other means of the updates are taken
    over; rows without a signal are not among them. `entropy/sampled` is reported only if it costs nothing: the computed
    entropy if a component needs it, else minus the mean log-prob of the tokens for which the engine has reported one
    (of the first prompts or of all). With top_p or top_k the engine's log-probs do not give the entropy.

    batch: before `compute_advantages`. trained_tokens: of all updates of the step. total: see `thought_metrics`.
    """
    whole = rollout.top_p == 1 and rollout.top_k == 0 and rollout.engine != "stored"
    values, known = batch.entropy, batch.mask
    if values is None and whole and batch.rollout_logp is not None:
        values, known = -batch.rollout_logp, batch.mask & ~batch.rollout_logp.isnan()
    sums = {"sampled": float(batch.mask.sum())}
    if values is not None:
        sums |= {"known": float(known.sum()), "entropy": float(values[known].double().sum())}
    sums = dict(total(sums))
    metrics = {"trained_ratio": trained_tokens / max(sums["sampled"] * epochs, 1.0)}
    return {**metrics, "entropy/sampled": sums["entropy"] / sums["known"]} if sums.get("known") else metrics


def signal_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Compute the share of groups with a signal, and the shares by reason for having none; these add up to 1.

    If every completion is a group of one, the whole step counts as the group. batch: after `compute_advantages`. A
    group whose rewards differ has no signal if `keep` has dropped all of its rows (`dropped`), or if none of its tokens
    is left in the mask (`masked`).
    """
    assert batch.rewards is not None and batch.correct is not None
    weights = component_weights(batch)
    weighted = [column for name, column in batch.components.items() if weights[name]]  # weight 0: an annotation
    counts = dict.fromkeys(("share", "too_easy", "too_hard", "cancelled", "unscored", "dropped", "masked"), 0)
    kept = torch.ones_like(batch.group_ids, dtype=torch.bool) if batch.keep is None else batch.keep
    group_ids = batch.group_ids
    if len(group_ids.unique()) == len(batch):
        group_ids = torch.zeros_like(group_ids)
    for number in group_ids.unique():
        rows = group_ids == number
        rewards, correct = batch.rewards[rows], batch.correct[rows]
        scored = rewards[~rewards.isnan()]
        if len(scored) < 2:
            counts["unscored"] += 1
        elif scored.max() > scored.min():
            stays = kept[rows]
            trained = bool(batch.mask[rows][stays].any())
            counts["share" if trained else "masked" if bool(stays.any()) else "dropped"] += 1
        elif any(len(column[rows & ~column.isnan()].unique()) > 1 for column in (*weighted, batch.correct)):
            counts["cancelled"] += 1  # answers differ in a component or in correctness, but not in the weighted sum
        elif known_mean(correct) == 1.0:
            counts["too_easy"] += 1
        else:
            counts["too_hard"] += 1
    groups, differ = sum(counts.values()), counts["share"] + counts["dropped"] + counts["masked"]
    shares = {f"signal/{name}": count / groups for name, count in counts.items()}
    return {**shares, "frac_reward_zero_std": 1.0 - differ / groups}


def token_ledger(
    sampled: RolloutBatch, batch: RolloutBatch, signal: Tensor, *, updated: bool = True
) -> dict[str, float]:
    """Count a step's sampled tokens by what happened to them, each token once.

    Replayed rows are left out, since they were counted in the step that sampled them. sampled: the scored batch. batch:
    after `compute_advantages`. signal [N]: rows that have a gradient. updated: whether the step has made an update.
    """
    fresh = torch.ones_like(signal) if sampled.replayed is None else ~sampled.replayed
    every, unmasked = (torch.where(fresh, part.mask.sum(-1), 0) for part in (sampled, batch))
    kept = torch.ones_like(signal) if batch.keep is None else batch.keep
    cut = torch.zeros_like(signal) if batch.truncated is None else batch.truncated & (unmasked == 0)
    masked = torch.where(kept, every - unmasked, 0)
    masks = {
        "trained" if updated else "without_update": torch.where(kept & signal, unmasked, 0),
        "without_signal": torch.where(kept & ~signal, unmasked, 0),
        "dropped": torch.where(kept, 0, every),
        "cut": torch.where(cut, masked, 0),
        "masked": torch.where(cut, 0, masked),
    }
    return {name: float(count.sum()) for name, count in masks.items()}


def signal_note(values: Mapping[str, Any]) -> str | None:
    """Return a sentence if no group of the step has a signal, with the cause and what would help; else None."""
    if values["signal/share"] > 0:
        return None
    if (share := values.get("completions/ended_in_thought", 0.0)) > 0.5:
        return f"no group has a signal; {share:.0%} of the completions end inside their thought: see rollout.stop"
    reward = values.get("reward") or 0.0  # above 0 without a right answer: partial credit
    easy, hard = values["signal/too_easy"], values["signal/too_hard"]
    partial = f"no answer reached scoring.correct_at (mean reward {reward:.3g})"
    none_right = partial if reward > 0 and not easy else "no answer was right"
    if easy and hard and easy + hard > 0.5:
        return (
            f"no group has a signal; every answer was right in {easy:.0%} of the groups, and none in {hard:.0%}: use "
            "more samples a prompt, or prompts that are solved sometimes"
        )
    causes = {
        "signal/too_easy": "every answer was right: use harder prompts",
        "signal/too_hard": f"{none_right}, and rewards within a group are equal: warm up with SFT, use easier "
        "prompts or more samples a prompt",
        "signal/cancelled": "answers that differ had equal rewards: change the weights of the components",
        "signal/unscored": "rewards could not be computed: see rewards/*/errors, /timeouts and /abstained",
        "signal/dropped": "`keep` dropped every group whose rewards differ: see what it filters on",
        "signal/masked": "no token is left of the groups whose rewards differ: see loss.mask_truncated and `select`",
    }
    cause = max(causes, key=lambda name: values[name])
    if cause == "signal/too_hard" and values.get("completions/clipped_ratio", 0.0) > 0.5:
        return f"no group has a signal; {none_right}, and most were cut: raise rollout.max_new_tokens"
    abstained = [key for key in values if key.startswith("rewards/") and key.endswith("/abstained") and values[key]]
    silent = [
        key[len("rewards/") : -len("/abstained")] for key in abstained if values[key] == values.get("rollout/rows")
    ]
    if cause == "signal/unscored" and silent:
        rows = f"all {values['rollout/rows']} completions"
        return f"no group has a signal; {' and '.join(silent)} returned None for {rows} (a missing `return`?)"
    return f"no group has a signal; {causes[cause]}"


@dataclass
class Mismatch:
    """Difference between the engine's and the trainer's log-probs, over the tokens that the engine reported.

    `add` leaves its results on the device; `to_numbers` reads them.
    """

    tokens: float | Tensor = 0.0
    absolute: float | Tensor = 0.0
    kl: float | Tensor = 0.0
    largest: float | Tensor = 0.0

    def add(self, logp: Tensor, batch: RolloutBatch, rows: Sequence[int] | slice = slice(None)) -> None:
        """Accumulate log-probs of the sampling policy, before any update, over the trained tokens that were sampled for
        this step: the engine's log-probs of replayed or older tokens come from older weights.

        logp: [N,T] of these rows of the batch.
        """
        if batch.rollout_logp is None or not logp.numel():
            return
        rollout_logp = batch.rollout_logp[rows]
        known = batch.mask[rows] & ~rollout_logp.isnan()
        if batch.new_tokens is not None:
            known &= batch.new_tokens[rows]
        if batch.replayed is not None:
            known &= ~batch.replayed[rows][:, None]
        gap = torch.where(known, logp.detach() - rollout_logp, 0.0).double()
        self.tokens = self.tokens + known.sum()
        self.absolute = self.absolute + gap.abs().sum()
        self.kl = self.kl + (gap.exp() - 1 - gap).sum()  # k3 of KL(engine || trainer), sampled from the engine
        self.largest = torch.clamp(gap.abs().amax(), min=self.largest)

    def to_numbers(self) -> Mismatch:
        """Return the same statistics as plain numbers."""
        return Mismatch(float(self.tokens), float(self.absolute), float(self.kl), float(self.largest))

    @classmethod
    def combine(cls, parts: Sequence[Mismatch]) -> Mismatch:
        """Combine the statistics of several sets of tokens."""
        sums = (sum(p.tokens for p in parts), sum(p.absolute for p in parts), sum(p.kl for p in parts))
        return cls(*sums, largest=max(part.largest for part in parts))

    def metrics(self) -> dict[str, float]:
        """Return `mismatch/mean`, `mismatch/max` and `mismatch/kl` over the accumulated tokens; {} without any."""
        if not self.tokens:
            return {}
        return {
            "mismatch/mean": float(self.absolute / self.tokens),
            "mismatch/max": float(self.largest),
            "mismatch/kl": float(self.kl / self.tokens),
        }


def update_metrics(sums: Mapping[str, float], norms: Sequence[float], *, lr: float, updates: int) -> dict[str, Any]:
    """Compute means over the trained tokens of all updates of a step.

    Loss and gradient norm are means over updates, including updates whose gradient was 0. updates: number of updates
    whose gradient was not 0. `shared_prompt_ratio`: of the tokens of the rows, the share that needed no pass because
    they are the prompt of another row.
    """
    tokens, skipped = max(sums.get("tokens", 0.0), 1.0), sums.get("skipped", 0.0)
    counts = ("loss", "tokens", "skipped", "rows_tokens", "shared_tokens")
    means = {name: value / tokens for name, value in sums.items() if name not in counts}
    return {
        **means,
        "loss": sums.get("loss", 0.0) / max(len(norms) + skipped, 1),
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "lr": lr,
        "updates": updates,
        **({"updates_skipped": skipped} if skipped else {}),
        **({"shared_prompt_ratio": sums["shared_tokens"] / sums["rows_tokens"]} if sums.get("rows_tokens") else {}),
        "trained_tokens": sums.get("tokens", 0.0),
    }


def sampled_rows(rows: int, count: int) -> list[int]:
    """Return the indices of `count` of `rows` rows, evenly spaced, so that they come from several groups."""
    count = min(count, rows)
    return [i * rows // count for i in range(count)]


def sample_record(r: Rollout, batch: RolloutBatch | None = None, row: int = 0) -> dict[str, Any]:
    """Return a rollout's record in samples.jsonl.

    batch, row: the batch after `compute_advantages` and the rollout's row there. They add `advantage`, the mean over
    the row's trained tokens if each token has its own (None without one), and `kept`, False if `keep` dropped the row.
    """
    trained: dict[str, Any] = {}
    if batch is not None and batch.advantages is not None:
        values = batch.advantages[row]
        values = values[batch.mask[row]] if values.dim() else values[None]
        advantage = float(values.mean()) if len(values) else None
        trained = {"advantage": advantage, "kept": batch.keep is None or bool(batch.keep[row])}
    return {
        "uid": r.prompt.uid,
        "group": r.group,
        "prompt": r.prompt.text,
        "completion": r.text,
        "tokens": len(r.ids),
        "finish": r.finish,
        "reward": r.reward,
        "correct": r.correct,
        "scores": r.scores,
        **trained,
        "version": r.version,
        **turn_records(r),
        **({"turn_scores": r.turn_scores} if r.turn_scores else {}),
        **({"variant": r.variant.name} if r.variant else {}),
        **({"trajectory": r.trajectory, "part": r.part} if r.trajectory is not None else {}),
        **({"nodes": [node._asdict() for node in r.nodes]} if r.nodes else {}),
        **({"role": r.call.role, **call_records(r)} if r.call else {}),
        **({"sampled_in_step": r.stored.step} if r.stored else {}),
        **({"loss_prompt_ids": list(r.loss_ids)} if r.loss_ids is not None else {}),
        **({"images": [thumbnail_url(image) for image in r.images]} if r.images else {}),
        "segments": [{"kind": s.kind, "ids": list(s.ids)} for s in r.segments],
    }


def known_mean(values: Tensor) -> float | None:
    """Return the mean of the values that are not NaN; None if all are."""
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None

"""Losses, advantages, KL terms and filters as other tools name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.recipe.foreign.draft import Draft
from posttrain.recipe.foreign.source import Given

_RL_LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss.aggregation": "seq_mean_token_mean"},
    "dapo": {"loss.aggregation": "token_mean"},
    "bnpo": {"loss.aggregation": "local_token_mean"},
    "dr_grpo": {"loss.aggregation": "fixed"},
    "cispo": {"loss.use": "cispo", "loss.aggregation": "token_mean"},
}
_PAIR_LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "dpo": {},
    "ipo": {"loss.use": "ipo"},
    "robust": {"loss.variant": "robust"},
    "orpo": {"loss.use": "orpo"},
    "simpo": {"loss.use": "simpo"},
    "kto": {"loss.use": "kto"},
    "nca_pair": {"loss.use": "nca_pair"},
    "sppo_hard": {"loss.use": "sppo", "loss.targets": "hard"},
}


def _loss_type(draft: Draft, given: Given, _: str) -> None:
    names = given.value if isinstance(given.value, list) else [given.value]
    known = {"rl": _RL_LOSSES, "dpo": _PAIR_LOSSES}.get(draft.stage, {})
    if draft.stage == "dpo" and len(names) == 2 and names[1] == "sft":
        weights = draft.get("loss_weights", default=[1.0, 1.0])
        draft.put("loss.nll_weight", float(weights[1]) / float(weights[0]), draft.origin(given.key))
        names = names[:1]
    if draft.at("algorithm") == names[0] or (draft.stage == "sft" and names[0] in ("nll", "chunked_nll")):
        return
    if len(names) != 1 or names[0] not in known:
        kind = {"rl": "loss", "dpo": "pair_loss"}.get(draft.stage, "token_weight")
        draft.leave(given, f"`posttrain methods list --kind {kind}` shows the losses")
        return
    for path, value in known[names[0]].items():
        draft.put(path, value, draft.origin(given.key))
    if names[0] == "cispo" and (cap := draft.get("epsilon_high")) is not None:
        draft.put("loss.ratio_max", float(cap), draft.origin("epsilon_high"))


_ESTIMATORS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "group_norm": {},
    "dr_grpo": {"advantage.scale": "none"},
    "gae": {"algorithm": "ppo"},
    "rloo": {"advantage.use": "rloo"},
    "reinforce": {"advantage.use": "reinforce_pp"},
    "reinforce_plus_plus": {"advantage.use": "reinforce_pp"},
    "reinforce_baseline": {"advantage.use": "reinforce_pp_baseline"},
    "reinforce_plus_plus_baseline": {"advantage.use": "reinforce_pp_baseline"},
}


def _estimator(draft: Draft, given: Given, _: str) -> None:
    if str(given.value) not in _ESTIMATORS:
        draft.leave(given, "`posttrain methods list --kind advantage` shows how rewards become advantages")
        return
    for path, value in _ESTIMATORS[str(given.value)].items():
        draft.put(path, value, draft.origin(given.key))


def _verl_loss(draft: Draft, given: Given, _: str) -> None:
    if given.value in ("gspo", "cispo"):
        draft.replace("loss.use", given.value, draft.origin(given.key))
    elif given.value != "vanilla":
        draft.leave(given, "`posttrain methods list --kind loss` shows the losses")


_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3", "abs": "abs"}


def _kl(draft: Draft, given: Given, where: str, coef: str, kind: str, plain: str) -> None:
    """verl's two KL terms: one coefficient, one estimator, and where it counts."""
    if given.value is not True:
        return
    if draft.at("kl.coef") is not None:
        draft.leave(given, f"there is one KL term, and {draft.at('kl.where')} has it")
        return
    draft.put(
        "kl.coef", float(draft.get(coef, default=0.001)), draft.origin(coef) or f"{draft.foreign.table.tool}'s default"
    )
    draft.put("kl.where", where, draft.origin(given.key))
    name = str(draft.get(kind, default=plain))
    draft.put("kl.use", _KL.get(name.rstrip("+"), "k3"), draft.origin(kind) or f"{draft.foreign.table.tool}'s default")
    if name not in _KL:
        draft.note(f"the KL estimator {name} is written as kl.use {draft.at('kl.use')}")


def _verl_kl_loss(draft: Draft, given: Given, _: str) -> None:
    actor = "actor_rollout_ref.actor"
    _kl(draft, given, "loss", f"{actor}.kl_loss_coef", f"{actor}.kl_loss_type", "low_var_kl")


def _verl_kl_reward(draft: Draft, given: Given, _: str) -> None:
    _kl(draft, given, "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl")


def _kl_in_loss(draft: Draft, given: Given, _: str) -> None:
    if draft.get("algo.kl.init_coef"):
        draft.put("kl.where", "loss" if given.value is True else "reward", draft.origin(given.key))


def _clip_pair(draft: Draft, given: Given, _: str) -> None:
    low, high = given.value
    draft.replace("loss.clip_low", float(low), draft.origin(given.key))
    draft.replace("loss.clip_high", float(high), draft.origin(given.key))


def _critic_lr(draft: Draft, given: Given, _: str) -> None:
    if draft.get("algorithm.adv_estimator") == "gae":
        draft.put("critic.lr", given.value, draft.origin(given.key))
    else:
        draft.leave(given, "this advantage has no critic")


def _dynamic_sampling(draft: Draft, given: Given, _: str) -> None:
    origin = draft.origin(given.key)
    draft.put("keep.use", "dynamic_sampling", origin)
    metric = draft.get("algorithm.filter_groups.metric")
    if metric in ("score", "seq_reward", "seq_final_reward"):
        draft.put("keep.metric", "reward", draft.origin("algorithm.filter_groups.metric"))
    most = draft.get("algorithm.filter_groups.max_num_gen_batches", "max_resample_times", default=10)
    draft.put("rollout.max_gen_batches", int(most) if int(most) > 0 else 10, origin)


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "clip_pair": _clip_pair,
    "critic_lr": _critic_lr,
    "dynamic_sampling": _dynamic_sampling,
    "estimator": _estimator,
    "kl_in_loss": _kl_in_loss,
    "loss_type": _loss_type,
    "verl_kl_loss": _verl_kl_loss,
    "verl_kl_reward": _verl_kl_reward,
    "verl_loss": _verl_loss,
}

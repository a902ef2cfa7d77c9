"""Conversion of losses, advantages, KL terms and filters of other tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from posttrain.recipe import presets
from posttrain.recipe.foreign import words
from posttrain.recipe.foreign.draft import Draft, Leaf
from posttrain.recipe.foreign.source import Given


def _loss_type(draft: Draft, given: Given, _: str) -> None:
    """Convert the name of a loss. A DPO loss together with `sft` becomes a negative log-likelihood term."""
    names = given.value if isinstance(given.value, list) else [given.value]
    known: dict[str, dict[str, Any]] = words.values("losses").get(draft.stage, {})
    of_dpo = draft.stage == "dpo" and "loss.use" not in known.get(names[0], {"loss.use": ""})
    if of_dpo and len(names) == 2 and names[1] == "sft":
        weights = draft.get("loss_weights", "dpo_loss_weights", default=[1.0, 1.0])
        draft.set_default("loss.nll_weight", float(weights[1]) / float(weights[0]), draft.origin(given.key))
        draft.set_default("loss.nll_reduction", "token", draft.origin(given.key))
        names = names[:1]
    if draft.at("algorithm") == names[0]:
        return
    if draft.at("algorithm") == "cpo" and names[0] not in ("sigmoid", "simpo"):
        names = ["cpo", *names]  # its `ipo` has no reference and a likelihood term
    if len(names) != 1 or names[0] not in known:
        kind = {"rl": "loss", "dpo": "pair_loss"}.get(draft.stage, "token_weight")
        _require_choice(draft, given, "objective.use" if draft.stage == "sft" else "loss.use", kind, names)
        return
    for path, value in known[names[0]].items():
        draft.set_default(path, value, draft.origin(given.key))
    _put_arguments(draft, names[0])
    if names[0] == "cispo":  # without epsilon_high, the ratio is limited to epsilon
        draft.set_default("loss.ratio_max", 0.2, f"epsilon, {draft.foreign.table.tool}'s default")


def _put_arguments(draft: Draft, name: str) -> None:
    """Convert the keys of the other tool that only the loss or estimator of this name reads."""
    for path, keys in words.values("arguments").get(name, {}).items():
        if (value := draft.get(*keys)) is not None:
            draft.replace(path, value if isinstance(value, bool) else float(value), draft.origin(*keys))


def _require_choice(draft: Draft, given: Given, target: str, kind: str, names: Sequence[Any] | None = None) -> None:
    """Write an unknown objective of the other tool under its own name, so that the recipe is invalid until the user
    chooses a replacement. Leaving it out would silently make the run a different experiment."""
    names = names or (given.value if isinstance(given.value, list) else [given.value])
    draft.leave(given, f"not offered under this name; `posttrain methods list --kind {kind}` shows what is")
    draft.replace(target, "+".join(map(str, names)), draft.origin(given.key))


def _rpo(draft: Draft, given: Given, target: str) -> None:
    """Convert the weight of TRL's (and derived tools') mean negative log-prob over all chosen tokens of a batch."""
    draft.set_default(target, given.value, draft.origin(given.key))
    draft.set_default("loss.nll_reduction", "token", draft.origin(given.key))


def _divergence(draft: Draft, given: Given, _: str) -> None:
    """TRL: convert the f-divergence of f-DPO."""
    origin = draft.origin(given.key)
    divergences = words.values("divergences")
    if given.value not in divergences:
        _require_choice(draft, given, "loss.divergence", "pair_loss")
        return
    draft.set_default("loss.use", "f_dpo", origin)
    draft.set_default("loss.divergence", divergences[given.value], origin)
    coef = draft.get("f_alpha_divergence_coef", default=0.5)
    if given.value == "alpha_divergence":
        draft.set_default("loss.alpha", 1 - float(coef), f"1 - f_alpha_divergence_coef {coef}")


def _label_smoothing(draft: Draft, given: Given, target: str) -> None:
    draft.set_default(target, given.value, draft.origin(given.key))
    if draft.at("algorithm") != "cpo" and draft.get("loss_type", default="sigmoid") in ("sigmoid", ["sigmoid"]):
        draft.note("TRL's `sigmoid` does not read label_smoothing; here it makes DPO conservative (cDPO)")


# stage -> key with one default in all tools, that default, and the losses for which ours is another
_SHARED_DEFAULTS = {
    "dpo": ("loss.beta", 0.1, ("nca_pair", "sppo")),
    "rl": ("loss.clip_low", 0.2, ("gspo", "gmpo", "dppo")),
}


def complete_loss(draft: Draft) -> None:
    """Write the tools' beta or clip where the file gives none and ours depends on the loss."""
    key, value, losses = _SHARED_DEFAULTS.get(draft.stage, ("", 0.0, ()))
    if draft.at("loss.use") in losses:
        draft.set_default(key, value, f"{draft.foreign.table.tool}'s default")
    if draft.at("algorithm") == "orpo" and draft.foreign.table.name == "trl":
        draft.note(
            "TRL's ORPO also trains on the prompts, and takes the mean over all tokens of a batch; here the mean over"
            " the tokens of each answer"
        )
    _complete_simpo(draft)


def _complete_simpo(draft: Draft) -> None:
    """Complete SimPO: our margin is a multiple of beta, the other tools' is an absolute number, and the default of beta
    differs."""
    if "simpo" not in (draft.at("loss.use"), draft.at("algorithm")):
        return
    tool = draft.foreign.table.tool
    draft.set_default("loss.beta", 0.1, f"{tool}'s default")
    margin, beta = float(draft.get("simpo_gamma", default=0.5)), float(draft.at("loss.beta"))
    if beta:
        draft.set_default(
            "loss.gamma_beta_ratio", margin / beta, f"{draft.origin('simpo_gamma') or 'simpo_gamma 0.5'} / beta"
        )
    likelihood = draft.get("pref_ftx" if draft.foreign.table.name == "llamafactory" else "cpo_alpha")
    if likelihood is None:
        # In TRL SimPO is a loss of CPO, whose likelihood weight is 1.
        likelihood = 0.0 if draft.foreign.table.name == "llamafactory" else 1.0
    draft.values["loss"].pop("nll_weight", None)
    if likelihood:
        origin = draft.origin("cpo_alpha", "pref_ftx") or f"cpo_alpha, {tool}'s default"
        draft.set_default("loss.sft_weight", float(likelihood), origin)


def _entropy_bonus(draft: Draft, given: Given, _: str) -> None:
    """Add an entropy term to the regularisers of the preset, because a list replaces the preset's list."""
    preset = draft.at("algorithm")
    terms: Any = presets.preset(str(preset)).choices.get("regularisers", []) if preset in presets.names() else []
    entropy = {"use": Leaf("entropy_bonus", draft.origin(given.key)), "coef": Leaf(float(given.value), "")}
    if draft.foreign.table.name == "trl":  # a mean over tokens with every loss
        entropy["aggregation"] = Leaf("token_mean", "")
    draft.values["regularisers"] = [
        *({key: Leaf(value, f"of {preset}" if key == "use" else "") for key, value in term.items()} for term in terms),
        entropy,
    ]


def _verl_clip(draft: Draft, given: Given, target: str) -> None:
    """verl: convert clip_ratio, which verl reads only if clip_ratio_low, 0.2 by default, is null."""
    if (low := draft.get(f"{given.key}_low")) is not None:
        draft.leave(given, f"verl reads {given.key.rpartition('.')[2]}_low in its place, {low}")
        return
    draft.set_default(target, given.value, draft.origin(given.key))


def _engine_correction(draft: Draft, given: Given, _: str) -> None:
    """Convert the correction of vLLM's samples to a `tis` correction. TRL and axolotl apply it whenever they use
    vLLM."""
    section = given.key.removesuffix("vllm_importance_sampling_correction")  # prefix `trl.` in axolotl's files
    if given.value is not True or draft.get(f"{section}use_vllm") is not True:
        return
    of = f"{section}vllm_importance_sampling_"
    named = draft.get(f"{of}mode", default="sequence_mask")
    if named not in (known := words.values("corrections")):
        draft.leave(given, f"mode {named} is not known: write `corrections: [{{use: tis, level: ..., mode: ...}}]`")
        return
    bound = next((key for key in (f"{of}clip_max", f"{of}cap") if key in draft.foreign.given), "")
    unbounded = draft.foreign.table.name == "trl" and bound and _read_key(draft, bound) is None  # null: no bound
    high = None if unbounded else float(draft.get(bound, default=3.0))
    low = draft.get(f"{of}clip_min")
    values = {**known[named], "clip_max": high, **({"clip_min": float(low)} if low is not None else {})}
    _append(draft, "corrections", given, "tis", values)
    if _read_key(draft, f"{section}loss_type") == "vespo":
        draft.note(
            f"{draft.foreign.table.tool} multiplies the ratio of trainer and engine into vespo's ratio of the row; here"
            " `tis` multiplies the loss"
        )


def _read_key(draft: Draft, key: str) -> Any:
    """Return the value of a key that another function converts."""
    return draft.foreign.given[key].value if key in draft.foreign.given else None


def _append(draft: Draft, key: str, given: Given, use: str, params: dict[str, Any]) -> None:
    """Append a component to one of the recipe's lists."""
    entry = {"use": Leaf(use, draft.origin(given.key)), **{name: Leaf(value, "") for name, value in params.items()}}
    draft.values.setdefault(key, []).append(entry)


def _off_policy_mask(draft: Draft, given: Given, _: str) -> None:
    _append(draft, "corrections", given, "off_policy_seq_mask", {"threshold": float(given.value)})


def _high_entropy(draft: Draft, given: Given, _: str) -> None:
    _append(draft, "select", given, "high_entropy_tokens", {"rho": float(given.value)})


def _kl_ratio(draft: Draft, given: Given, _: str) -> None:
    """TRL: convert the importance weight of the KL term, which is on by default."""
    if not draft.get("beta"):
        draft.leave(given, "without beta there is no KL term")
        return
    draft.set_default("kl.use", "k3_is", draft.origin(given.key))
    if _read_key(draft, "importance_sampling_level") == "sequence":
        draft.note("TRL weights the KL of a token by the ratio of its row; `kl.use: k3_is` by the token's own ratio")


def _estimator(draft: Draft, given: Given, _: str) -> None:
    known = words.values("estimators")
    if str(given.value) not in known:
        _require_choice(draft, given, "advantage.use", "advantage")
        return
    for path, value in known[str(given.value)].items():
        draft.set_default(path, value, draft.origin(given.key))
    _put_arguments(draft, str(given.value))
    if given.value == "gdpo":
        _name_components(draft)
    if given.value == "gpg":
        draft.note(
            "verl's `gpg` also multiplies advantages by the step's rows over its rows with a reward other than 0"
        )


def _name_components(draft: Draft) -> None:
    """verl: convert the reward components of GDPO, entries of the dict that a reward function returns, and their
    weights."""
    keys = ("algorithm.gdpo_reward_keys", "algorithm.gdpo_reward_weights")
    names, weights = (draft.get(key, default=[]) for key in keys)
    if not isinstance(names, list) or not names:
        return
    for number, name in enumerate(names):
        weight = float(weights[number]) if number < len(weights) else 1.0
        draft.replace(f"advantage.weights.{name}", weight, draft.origin(*keys))
    draft.note(f"advantage `gdpo` normalises each reward by itself: give `rewards` with the names {', '.join(names)}")


def _verl_loss(draft: Draft, given: Given, _: str) -> None:
    known = words.values("verl_losses")
    if given.value not in known:
        _require_choice(draft, given, "loss.use", "loss")
        return
    for path, value in known[given.value].items():
        draft.replace(path, value, draft.origin(given.key))
    _put_arguments(draft, f"verl_{given.value}")
    if given.value == "cispo":
        _bound_ratio(draft)
    if given.value == "clip_cov":
        keys = {"share": "clip_cov_ratio", "low": "clip_cov_lb", "high": "clip_cov_ub"}
        values = {name: draft.get(f"{given.key.removesuffix('loss_mode')}{key}") for name, key in keys.items()}
        _append(draft, "select", given, "clip_cov", {name: float(v) for name, v in values.items() if v is not None})


def _bound_ratio(draft: Draft) -> None:
    """verl: convert the clip of CISPO, offsets from 1, to bounds of the ratio; a lower bound of 0 or less is none."""
    actor = "actor_rollout_ref.actor."
    for side, sign, bound in (("low", -1, "min"), ("high", 1, "max")):
        keys = (f"{actor}clip_ratio_{side}", f"{actor}clip_ratio")
        limit = 1 + sign * float(draft.get(*keys, default=0.2))
        used = next((key for key in keys if _read_key(draft, key) is not None), None)
        origin = f"1 {'+' if sign > 0 else '-'} {draft.origin(used) if used else 'clip_ratio 0.2'}"
        draft.replace(f"loss.ratio_{bound}", limit if limit > 0 else None, origin)


def _verl_norm_len(draft: Draft, given: Given, _: str) -> None:
    mode = _read_key(draft, "actor_rollout_ref.actor.loss_agg_mode")
    if mode == "seq-mean-token-sum-norm":
        draft.set_default("loss.norm_len", given.value, draft.origin(given.key))
    else:
        draft.leave(given, "verl reads it with loss_agg_mode seq-mean-token-sum-norm")


_BYPASS = (
    "with bypass_mode verl's ratio is pi / mu of each update: write `loss: decoupled_ppo` or `corrections: [minirl]`"
)


def _verl_weights(draft: Draft, given: Given, _: str) -> None:
    """verl: convert importance weights of the engine's samples; a threshold LOW_HIGH masks, a number truncates."""
    section = given.key.removesuffix("rollout_is")
    if _read_key(draft, f"{section}bypass_mode") is True:
        draft.leave(given, _BYPASS)
        return
    low, _, high = str(draft.get(f"{section}rollout_is_threshold", default=2.0)).rpartition("_")
    bounds = {"clip_min": float(low), "clip_max": float(high)} if low else {"clip_max": float(high)}
    params = {"level": given.value, "mode": "mask" if low else "truncate", **bounds}
    _append(draft, "corrections", given, "tis", params)


def _verl_rejection(draft: Draft, given: Given, _: str) -> None:
    """verl: convert a rejection of tokens or rows by the ratio of engine to trainer, the inverse of ours."""
    section = given.key.removesuffix("rollout_rs")
    level = words.values("rejections").get(given.value)
    if _read_key(draft, f"{section}bypass_mode") is True:
        draft.leave(given, _BYPASS)
    elif level is None:
        draft.leave(given, "`select: engine_ratio` rejects by the ratio of a token, of a row or by its geometric mean")
    elif _read_key(draft, f"{section}rollout_is") is not None:
        draft.leave(given, "a ratio to the engine is corrected once, by `tis` of rollout_is: write its `mode: mask`")
    else:
        low, _, high = str(draft.get(f"{section}rollout_rs_threshold")).rpartition("_")
        bounds = {"clip_min": 1 / float(high), "clip_max": 1 / float(low) if low else float(high)}
        _append(draft, "select", given, "engine_ratio", {"level": level, **bounds})


def _kl(draft: Draft, given: Given, where: str, coef: str, kind: str, plain: str) -> None:
    """Convert one of verl's two KL terms: coefficient, estimator, and whether it is in the loss or in the reward."""
    if given.value is not True:
        draft.leave(given, f"not read as true or false: write `kl: {{coef: 0.001, where: {where}}}` for a KL term")
        return
    if draft.at("kl.coef") is not None:
        draft.leave(given, f"there is one KL term, and {draft.at('kl.where')} has it")
        return
    draft.set_default(
        "kl.coef", float(draft.get(coef, default=0.001)), draft.origin(coef) or f"{draft.foreign.table.tool}'s default"
    )
    draft.set_default("kl.where", where, draft.origin(given.key))
    name = str(draft.get(kind, default=plain))
    if where == "reward":
        name = name.rstrip("+")  # which only changes the gradient
    draft.set_default(
        "kl.use",
        words.values("kl").get(name) or words.values("kl").get(name.rstrip("+"), "k3"),
        draft.origin(kind) or f"{draft.foreign.table.tool}'s default",
    )
    if name not in words.values("kl"):
        draft.note(f"the KL estimator {name} is written as kl.use {draft.at('kl.use')}")


def _verl_kl_loss(draft: Draft, given: Given, _: str) -> None:
    actor = "actor_rollout_ref.actor"
    _kl(draft, given, "loss", f"{actor}.kl_loss_coef", f"{actor}.kl_loss_type", "low_var_kl")


def _verl_kl_reward(draft: Draft, given: Given, _: str) -> None:
    _kl(draft, given, "reward", "algorithm.kl_ctrl.kl_coef", "algorithm.kl_penalty", "kl")


def _kl_in_loss(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert the place of the KL term. In the reward, it is added to the tokens after the group's
    baseline."""
    if not draft.get("algo.kl.init_coef"):
        return
    draft.set_default("kl.where", "loss" if given.value is True else "reward", draft.origin(given.key))
    if given.value is not True and _read_key(draft, "algo.advantage.estimator") not in ("gae", "reinforce"):
        draft.note(
            "OpenRLHF subtracts the KL of a token and of all later ones from the token's advantage, after the baseline;"
            " here the KL of the row is a part of the reward that the group compares"
        )


def _openrlhf_correction(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert the weights of vLLM's samples: `tis` truncates them, `icepop` drops tokens out of the bounds,
    `seq-mask-tis` drops rows whose geometric mean is out of the bounds."""
    section = "algo.advantage.is_correction_"
    kind = _read_key(draft, f"{section}type") or "tis"
    if kind not in ("tis", "icepop", "seq-mask-tis") or _read_key(draft, "actor.policy_loss_type") == "gspo":
        draft.leave(given, "write `corrections: [{use: tis}]`: `level` and `mode` as in `posttrain methods show tis`")
        return
    draft.get(f"{section}type")
    bounds = draft.get(f"{section}threshold", default=[0.5, 5.0])
    low, high = map(float, bounds if isinstance(bounds, list) else (0.0, bounds))  # older versions: one upper bound
    arguments: dict[str, Any]
    if kind == "seq-mask-tis":
        arguments = {"level": "token", "clip_max": None, "row_min": low, "row_max": high}
    else:
        mode = "truncate" if kind == "tis" else "mask"
        arguments = {"level": "token", "mode": mode, "clip_min": low, "clip_max": high}
    _append(draft, "corrections", given, "tis", arguments)


def _clip_pair(draft: Draft, given: Given, _: str) -> None:
    low, high = given.value
    draft.replace("loss.clip_low", float(low), draft.origin(given.key))
    draft.replace("loss.clip_high", float(high), draft.origin(given.key))


def _critic_lr(draft: Draft, given: Given, _: str) -> None:
    if draft.get("algorithm.adv_estimator", "algo.advantage.estimator") == "gae":
        draft.set_default("critic.lr", given.value, draft.origin(given.key))
    else:
        draft.leave(given, "this advantage has no critic")


def _openrlhf_loss(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert the policy loss; its mean is over tokens, with gspo over rows."""
    if given.value not in ("ppo", "gspo"):
        _require_choice(draft, given, "loss.use", "loss")
        return
    origin = draft.origin(given.key)
    if given.value == "gspo":
        draft.set_default("loss.use", "gspo", origin)
    draft.set_default("loss.aggregation", "seq_mean_token_mean" if given.value == "gspo" else "token_mean", origin)


def _swift_estimator(draft: Draft, given: Given, _: str) -> None:
    """ms-swift: convert the advantage; other than GRPO's, by default the KL term is in the reward.

    Its reinforce_plus_plus is GRPO's advantage unless it scales by the batch, which is the default.
    """
    if given.value not in ("rloo", "reinforce_plus_plus"):
        _require_choice(draft, given, "advantage.use", "advantage")
        return
    origin = draft.origin(given.key)
    if given.value == "rloo":
        draft.set_default("advantage.use", "rloo", origin)
    elif str(_read_key(draft, "scale_rewards") or "batch") == "batch":
        draft.get("scale_rewards")
        draft.set_default("advantage.use", "reinforce_pp_baseline", origin)
        draft.note(
            "ms-swift divides the centred rewards by their deviation over the rows; `reinforce_pp_baseline` takes mean"
            " and deviation over the trained tokens, where long rows count more"
        )
    if _read_key(draft, "kl_in_reward") is None:
        _put_kl_in_reward(draft, f"with advantage_estimator {given.value}")


def _swift_kl(draft: Draft, given: Given, _: str) -> None:
    if given.value is True:
        _put_kl_in_reward(draft, draft.origin(given.key))
    else:
        draft.set_default("kl.where", "loss", draft.origin(given.key))


def _put_kl_in_reward(draft: Draft, origin: str) -> None:
    """ms-swift: write the KL of the reward, the plain difference of log-probs; the loss has k3, our default."""
    draft.set_default("kl.where", "reward", origin)
    draft.set_default("kl.use", "k1", origin)


def _swift_correction(draft: Draft, given: Given, _: str) -> None:
    """ms-swift: convert the weights of vLLM's samples, whose ratio of a row is the geometric mean."""
    bound = float(draft.get("rollout_importance_sampling_threshold", default=2.0))
    arguments: dict[str, dict[str, Any]] = {
        "token_truncate": {"level": "token", "mode": "truncate", "clip_max": bound},
        "token_mask": {"level": "token", "mode": "mask", "clip_max": bound},
        "sequence_truncate": {"level": "geometric", "mode": "truncate", "clip_max": bound},
        "sequence_mask": {"level": "token", "clip_max": None, "row_max": bound},
    }
    if given.value in arguments:
        _append(draft, "corrections", given, "tis", arguments[given.value])
    else:
        draft.leave(given, f"known are {', '.join(arguments)}")


def _ratio_level(draft: Draft, given: Given, _: str) -> None:
    """Convert the level of the ratio: GSPO, or with `sequence_token` its form with gradients by token."""
    if given.value not in ("sequence", "sequence_token"):
        _require_choice(draft, given, "loss.use", "loss")
        return
    draft.set_default("loss.use", "gspo", draft.origin(given.key))
    if given.value == "sequence_token" and draft.at("loss.use") == "gspo":
        draft.set_default("loss.level", "token", draft.origin(given.key))


def _dynamic_sampling(draft: Draft, given: Given, _: str) -> None:
    origin = draft.origin(given.key)
    draft.set_default("keep.use", "dynamic_sampling", origin)
    metric = draft.get("algorithm.filter_groups.metric")
    if metric in ("score", "seq_reward", "seq_final_reward"):
        draft.set_default("keep.metric", "reward", draft.origin("algorithm.filter_groups.metric"))
    most = draft.get("algorithm.filter_groups.max_num_gen_batches", "max_resample_times", default=10)
    draft.set_default("rollout.max_gen_batches", int(most) if int(most) > 0 else 10, origin)


TRANSFORMS: dict[str, Callable[[Draft, Given, str], None]] = {
    "clip_pair": _clip_pair,
    "critic_lr": _critic_lr,
    "divergence": _divergence,
    "dynamic_sampling": _dynamic_sampling,
    "engine_correction": _engine_correction,
    "entropy_bonus": _entropy_bonus,
    "high_entropy": _high_entropy,
    "estimator": _estimator,
    "kl_in_loss": _kl_in_loss,
    "kl_ratio": _kl_ratio,
    "loss_type": _loss_type,
    "off_policy_mask": _off_policy_mask,
    "openrlhf_correction": _openrlhf_correction,
    "openrlhf_loss": _openrlhf_loss,
    "ratio_level": _ratio_level,
    "rpo": _rpo,
    "smoothing": _label_smoothing,
    "swift_correction": _swift_correction,
    "swift_estimator": _swift_estimator,
    "swift_kl": _swift_kl,
    "verl_clip": _verl_clip,
    "verl_kl_loss": _verl_kl_loss,
    "verl_kl_reward": _verl_kl_reward,
    "verl_loss": _verl_loss,
    "verl_norm_len": _verl_norm_len,
    "verl_rejection": _verl_rejection,
    "verl_weights": _verl_weights,
}

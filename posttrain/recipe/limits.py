"""The ranges of numbers in a recipe: of the schema's counts, and of the arguments of components.

A formula takes what it is given. What a recipe may write is here, so that a number without a meaning (a clip below 0,
a share above 1) is refused with its line. Merge methods have mergekit's ranges, and are not in this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST = 10**9  # of a count for which no smaller limit is known
LARGEST = 1e30  # of any number: beyond it products leave float32
DIGITS = 100  # characters of a number

_SHARE = {"gt": 0, "le": 1}
_UNIT = {"ge": 0, "le": 1}
_POSITIVE = {"gt": 0}
_NOT_NEGATIVE = {"ge": 0}
_COUNT = {"ge": 1, "le": MOST}
_COUNT_OR_NONE = {"ge": 0, "le": MOST}

# argument, or KIND.argument, or KIND/COMPONENT.argument -> its limits; the longest key that fits decides
ARGUMENTS: dict[str, Mapping[str, float]] = {
    **dict.fromkeys(("eps", "tol", "ddof", "clip_high", "clip_min", "ratio_min", "nll_weight"), _NOT_NEGATIVE),
    **dict.fromkeys(("sft_weight", "desirable_weight", "undesirable_weight"), _NOT_NEGATIVE),
    **dict.fromkeys(("clip", "clip_eps", "clip_max", "ratio_max", "cap", "huber", "horizon", "tau"), _POSITIVE),
    **dict.fromkeys(("max_length", "max_weight", "weight_max", "rm_scale", "learning_rate"), _POSITIVE),
    **dict.fromkeys(("every", "min_group", "bundle_size", "stride", "max_len", "block", "total_steps"), _COUNT),
    **dict.fromkeys(("n_batch", "n_final", "n_query"), _COUNT),
    "clip_low": _UNIT,
    "correction.clip_low": _NOT_NEGATIVE,
    "dual_clip": {"gt": 1},
    **dict.fromkeys(("regulariser/perturbed_kl.noise", "regulariser/masked_kl.ratio"), _UNIT),
    "regulariser/masked_kl.patch": _COUNT,
    "label_smoothing": {"ge": 0, "lt": 1},
    **dict.fromkeys(("advantage.gamma", "advantage.lam", "explore_frac"), _UNIT),
    **dict.fromkeys(("select.rho", "select.keep", "select/rorecomp.alpha"), _SHARE),
    **dict.fromkeys(("low_frac", "token_frac", "ema_alpha"), _SHARE),
    **dict.fromkeys(("pair_loss.beta", "pair_loss.eta"), _POSITIVE),
    **dict.fromkeys(("sampler.n_min", "sampler.n_max", "sampler.per_round", "sampler.divisor"), _COUNT),
    **dict.fromkeys(("sampler.window", "sampler.k", "sampler.value_steps", "sampler.interval"), _COUNT),
    **dict.fromkeys(("sampler.active", "sampler.zero_limit", "sampler.max_limit", "sampler.min_keep"), _COUNT),
    **dict.fromkeys(("sampler.warmup_steps", "sampler/gdro.history_len"), _COUNT_OR_NONE),
    "sampler/scaler.history_len": {"ge": 2, "le": MOST},
    "sampler.candidate_factor": {"ge": 1, "le": 1000},  # times as many prompts are read by the model
    **dict.fromkeys(("sampler.rounds", "sampler.least", "sampler.shortest"), _COUNT),
    "sampler/by_task.above": {"ge": 0, "lt": 1},
    "sampler/by_task.slack": {"ge": 1},
    **dict.fromkeys(("sampler.eta", "sampler.dual_lr", "sampler.explore", "sampler.z", "sampler.gain"), _NOT_NEGATIVE),
    **dict.fromkeys(("sampler/scaler.alpha", "sampler.beta", "sampler/taco.threshold"), _NOT_NEGATIVE),
    **dict.fromkeys(("sampler.temperature", "sampler.value_lr"), _POSITIVE),
    **dict.fromkeys(("sampler.slope_scale", "sampler.age_scale"), _POSITIVE),
    **dict.fromkeys(("sampler.gamma", "sampler.hysteresis", "sampler.target", "sampler.low", "sampler.high"), _UNIT),
    **dict.fromkeys(("sampler.ema", "sampler.ema_beta", "sampler/next_level.threshold"), _SHARE),
    "sampler.earlier": {"ge": 0, "lt": 1},
    "sampler/xrpo.alpha": {"gt": 0, "lt": 1},
    **dict.fromkeys(("prompt_variants.noise", "prompt_variants.reroll_threshold"), _NOT_NEGATIVE),
    **dict.fromkeys(("prompt_variants.w_min", "prompt_variants.w_max", "prompt_variants.target"), _UNIT),
    **dict.fromkeys(("prompt_variants.guided", "prompt_variants.fallback", "prompt_variants.similarity"), _UNIT),
    **dict.fromkeys(("prompt_variants.shortest", "prompt_variants.longest"), _UNIT),
    **dict.fromkeys(("prompt_variants.ema", "prompt_variants.keep_ratio"), _SHARE),
    "prompt_variants.temperature": _POSITIVE,
    **dict.fromkeys(("prompt_variants.evolve_every", "prompt_variants.store", "prompt_variants.k"), _COUNT),
    **dict.fromkeys(("prompt_variants.cuts", "prompt_variants.max_tokens"), _COUNT),
    **dict.fromkeys(("prompt_variants.start_step", "prompt_variants.protected"), _COUNT_OR_NONE),
    "prompt_variants.rounds": {"ge": 1, "le": 32},  # those of one prompt in one step (MAX_ROUNDS)
    "prompt_variants.max_retries": {"ge": 0, "le": 31},
}


def of_argument(kind: str, component: str, argument: str) -> dict[str, Any]:
    """The limits of a component's argument, as keywords of pydantic's Field."""
    if kind == "merge":
        return {}
    names = (f"{kind}/{component}.{argument}", f"{kind}.{argument}", argument)
    return dict(next((ARGUMENTS[name] for name in names if name in ARGUMENTS), {}))

"""Ranges of the numbers of components; values outside are refused with their key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipe import limits
from posttrain.recipe.load import load_dict

BASE: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "x"},
    "rewards": [{"use": "math.accuracy"}],
    "run": {"steps": 1},
}
# Numbers without a range: any value has a meaning, such as a reward, a difference of rewards or a signed weight.
ANY = {
    "advantage": {"beta_norm.reward_max", "beta_norm.reward_min", "copo.b", "decoupled_turns.coef", "decs.r_plus"}
    | {"decs.r_zero", "mc_actions.illegal", "meta_reasoning.weight"},
    "advantage_transform": {"effective_rank.weight"},
    "controller": {"cosine.high", "cosine.low", "grpo_d.high", "grpo_d.low", "safe.base", "safe.kd", "safe.ki"}
    | {"safe.kp"},
    "factor": {"adora.correct_threshold", "negative_scale.base", "negative_scale.coef"},
    "group_loss": {"gdc.baseline"},
    "group_reward": {"difficulty_budget.hard", "difficulty_budget.medium", "difficulty_tag.length_weight"}
    | {
        "difficulty_tag.tag_weight",
        "gated.otherwise",
        "hybrid.rm_center",
        "hybrid.w_fmt",
        "hybrid.w_rm",
        "hybrid.w_rule",
    }
    | {"kimi_length.weight", "remaining_length.weight", "thurstone.weight"},
    "keep": {"reward_band.high", "reward_band.low"},
    "pair_loss": {"f_dpo.alpha", "inpo.target", "mnpo.target", "simpo.gamma_beta_ratio"},
    "regulariser": {"forward_kl.reward_max", "forward_kl.reward_min"},
    "replay": {"success.mean_max", "success.success_min"},
    "sampler": {"curriculum_stage.unseen", "self_curation.solved_value"},
    "select": {"clip_cov.high", "clip_cov.low"},
    "shape": {"mcts.unfinished"},
}

OTHERS = {"merge", "task"}  # ranges of mergekit; arguments of a data source, which checks them itself


def problems(**changes: Any) -> str:
    """Return the error of a recipe, "" if there is none."""
    base = {key: value for key, value in BASE.items() if key != "rewards" or changes.get("stage", "rl") == "rl"}
    try:
        load_dict({**base, **changes}, base_dir=Path.cwd(), where="r")
    except RecipeError as error:
        return str(error)
    return ""


def test_only_numbers_have_ranges() -> None:
    """A name in arguments.yaml may be that of a text of another component."""
    texts = [
        f"{kind}/{name}.{argument}"
        for kind, all_ in registry.load_index().items()
        for name, entry in all_.items()
        for argument, (annotation, *_) in entry["params"].items()
        if annotation.split(" ")[0] not in ("int", "float") and limits.argument_limits(kind, name, argument)
    ]
    assert texts == []


@pytest.mark.parametrize("kind", sorted(registry.load_index().keys() - OTHERS))
def test_every_number_has_a_range(kind: str) -> None:
    without = {
        f"{name}.{argument}"
        for name, entry in registry.load_index()[kind].items()
        for argument, (annotation, *_) in entry["params"].items()
        if annotation.split(" ")[0] in ("int", "float") and not limits.argument_limits(kind, name, argument)
    }
    assert without == ANY.get(kind, set())


@pytest.mark.parametrize(
    ("key", "name", "argument", "value"),
    [
        ("sampler", "curriculum_stage", "temperature", 0),
        ("sampler", "gdro", "n_min", 0),
        ("sampler", "pcl", "candidate_factor", 10**9),
        ("sampler", "self_curation", "divisor", 0),
        ("sampler", "taco", "interval", 0),
        ("sampler", "xrpo", "per_round", 0),
        ("prompt_variants", "guided_retry", "max_retries", 99),
        ("prompt_variants", "trace_prefix", "longest", 1.5),
        ("advantage", "riskpo", "beta", -0.5),
        ("loss", "ppo_ewma", "decay", 1.0),
        ("replay", "recent", "fraction", 1.0),
        ("rollout.shape", "mcts", "width", 0),
        ("rollout.workflow", "self_judge", "samples", -1),
    ],
)
def test_number_outside_its_range_is_refused(key: str, name: str, argument: str, value: float) -> None:
    component = {"use": name, argument: value}
    section, _, nested = key.partition(".")
    assert f"{key}.{argument}" in problems(**{section: {nested: component} if nested else component})


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sampler": {"use": "gdro", "n_min": 5, "n_max": 3}}, "sampler.n_max: 3 is less than n_min 5"),
        ({"sampler": {"use": "taco", "low": 0.8}}, "sampler.high: 0.75 is less than low 0.8"),
        ({"prompt_variants": {"use": "difficulty_hint", "w_min": 0.9}}, "prompt_variants.w_max: 0.8 is less"),
        ({"prompt_variants": {"use": "hint_on_failure", "ratios": [0.5, 1.5]}}, "prompt_variants.ratios: [0.5, 1.5]"),
        ({"prompt_variants": {"use": "hint_on_failure", "ratios": [0.5, 0.25]}}, "[0.5, 0.25] are not in rising order"),
        ({"prompt_variants": {"use": "solution_prefix", "fractions": []}}, "prompt_variants.fractions: []"),
        ({"prompt_variants": {"use": "instructions", "pool": []}}, "prompt_variants.pool: has no text"),
        (
            {"rollout": {"shape": "chunks"}},
            "shape.keep_tail: it and keep_head leave later chunks no token: 4096",
        ),
        ({"rollout": {"shape": "summaries", "max_new_tokens": 512}}, "shape.answer_tokens: a summary of 512 of 512"),
        ({"rollout": {"shape": {"use": "budgets", "budgets": [9, 8]}}}, "rollout.shape.budgets: [9, 8]"),
        ({"rollout": {"shape": {"use": "budgets", "budgets": [8, 600]}}}, "a thought of 600 tokens is longer"),
        (
            {"algorithm": "adactrl"},
            "`difficulty_tag` reads `tag`, and no reward is called so\n"
            '  hint: add the reward of preset adactrl: {"use": "efficiency.mode", "name": "tag", "weight": 0.0}',
        ),
        ({"data": {"source": "x", "select": {}}}, "data.select: does nothing without a rule"),
        ({"prompt_variants": {"use": "trace_prefix", "mixture": [0, 0]}}, "prompt_variants.mixture: [0.0, 0.0]"),
        ({"prompt_variants": {"use": "guided_retry", "user": "Go: {hint}"}}, "prompt_variants.user: has no {prompt}"),
        ({"prompt_variants": {"use": "templates", "own": {"mine": "Go"}}}, "prompt_variants.own.mine: has no {prompt}"),
    ],
)
def test_inconsistent_numbers_are_refused(changes: dict[str, Any], told: str) -> None:
    assert told in problems(**changes)


def test_arguments_of_user_defined_components_are_not_range_checked() -> None:
    own = {"use": "mine.py:kind", "ratios": 5, "mixture": "x", "user": "Go", "own": [1]}
    assert problems(prompt_variants=own, advantage={"use": "mine.py:a", "bundle_size": "x"}) == ""


CASES: list[dict[str, Any]] = [
    {"loss": {"use": "gspo", "clip_low": 0.2, "clip_high": 0.2}},
    {"stage": "dpo", "loss": {"use": "dpo", "label_smoothing": 0.5}},
    {"stage": "dpo", "loss": {"use": "simpo", "variant": "hinge", "label_smoothing": 0.1}},
    {"stage": "dpo", "loss": {"use": "mnpo", "weights": [1.0]}, "anchors": {"history": ["a", "b"]}},
    {"stage": "dpo", "loss": {"use": "kto", "desirable_weight": 0.0, "undesirable_weight": 0.0}},
    {"stage": "sft", "objective": {"use": "pear", "clip_log": [1.0, 0.0], "behavior_model": "tiny"}},
    {"stage": "sft", "objective": {"use": "pear", "clip_ratio": [1.0, 0.0], "behavior_model": "tiny"}},
    {"advantage": {"use": "riskpo", "bundle_size": 5}},
    {"advantage": {"use": "pass_k_training", "k": 9}},
    {"advantage": {"use": "channels", "channels": []}},
    {"advantage": {"use": "per_turn", "min_group": 9}},
    {"keep": {"use": "reward_band", "low": 0.5, "high": 0.1}},
    {"keep": {"use": "balanced_difficulty_filter", "t_low": 0.8, "t_high": 0.2}},
    {"select": [{"use": "clip_cov", "low": 6.0}]},
    {"select": [{"use": "engine_ratio", "clip_min": 3.0}]},
    {"corrections": [{"use": "tis", "row_min": 2.0, "row_max": 1.0}]},
    {"loss": {"use": "cispo", "ratio_min": 3.0, "ratio_max": 1.0}},
    {"factors": [{"use": "duration", "column": "seconds", "floor": 5.0, "cap": 1.0}]},
    {"advantage": {"use": "beta_norm", "reward_min": 1.0}},
    {"loss": {"use": "guide", "value": 2.0}},
    {"sampler": {"use": "xrpo", "n_min": 5, "n_max": 3}},
    {"sampler": {"use": "taco", "low": 0.8}},
    {"sampler": {"use": "gdro", "n_min": 5, "n_max": 3}},
    {"prompt_variants": {"use": "trace_prefix", "shortest": 0.9, "longest": 0.1}},
    {"prompt_variants": {"use": "difficulty_hint", "w_min": 0.9}},
    {"prompt_variants": {"use": "templates", "names": [], "own": {}}},
    {"prompt_variants": {"use": "instructions", "pool": []}},
    {"prompt_variants": {"use": "hint_on_failure", "ratios": [0.5, 1.5]}},
    {"prompt_variants": {"use": "hint_on_failure", "ratios": [0.5, 0.25]}},
    {"prompt_variants": {"use": "solution_prefix", "fractions": []}},
    {"prompt_variants": {"use": "solution_prefix", "fractions": [0.5, 0.25]}},
    {"group_rewards": [{"use": "truncation_tiers", "thresholds": [0.2, 0.4]}]},
    {"rollout": {"shape": "chunks"}},
    {"rollout": {"shape": "summaries", "max_new_tokens": 512}},
    {"rollout": {"shape": {"use": "budgets", "budgets": [9, 8]}}},
    {"rollout": {"shape": {"use": "budgets", "budgets": [8, 600]}}},
]


@pytest.fixture(scope="module")
def errors_of_cases() -> str:
    return "\n".join(problems(**case) for case in CASES)


@pytest.mark.parametrize(("argument", "row"), [(key, row) for key, rows in limits.REFUSED.items() for row in rows])
def test_every_condition_of_arguments_yaml_refuses_one_of_the_cases(
    argument: str, row: list[str], errors_of_cases: str
) -> None:
    key = argument.rpartition(".")[2]
    assert re.search(f"{key}: " + re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(row[1])), errors_of_cases)

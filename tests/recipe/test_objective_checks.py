"""Recipes that would silently do nothing, or cannot work, are refused with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipe import catalogue, needs
from posttrain.recipe.load import load_dict
from posttrain.recipe.objective_checks import stale_notes
from posttrain.recipe.rl_stage import OBJECTIVE

BASE: dict[str, Any] = {
    "stage": "rl",
    "model": {"path": "tiny"},
    "data": {"source": "x"},
    "rewards": [{"use": "math.accuracy"}],
    "run": {"steps": 1},
}


def problems(**changes: Any) -> str:
    """Return the error of a recipe, "" if there is none."""
    try:
        load_dict({**BASE, **changes}, base_dir=Path.cwd(), where="r")
    except RecipeError as error:
        return str(error)
    return ""


TWO = {"minibatches": 2}
IN_REWARD = {"use": "k1", "coef": 0.1, "where": "reward"}
PARTED = {
    "use": "channels",
    "channels": [{"rewards": {"accuracy": 1.0}}, {"rewards": {"correct": 1.0}}],
    "separate": True,
}
SUMMED = {**PARTED, "separate": False}


STORED = {"engine": "stored", "group_size": 1}
BUNDLES = {"use": "riskpo", "bundle_size": 4}
CHANGE = {"use": "stages", "values": [1, 2], "until": [5]}
CASES: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
    ({"regularisers": ["llds"]}, "does nothing with one update", {"batch": TWO}),
    ({"algorithm": "llds", "batch": {"minibatches": 1}}, "does nothing with one update", {"batch": TWO}),
    (
        {"eval": {"data": {"source": "y"}, "every": 1, "rewards": [{"use": "a.one"}, {"use": "b.one"}]}},
        "eval.rewards.0: 2 rewards are called `one`",
        {"eval": None},
    ),
    (
        {"advantage": {"use": "riskpo", "bundle_size": 5}},
        "32 prompts a step cannot be divided into bundles of 5",
        {"rollout": {"prompts_per_step": 30}},
    ),
    (
        {"advantage": {"use": "gdpo", "conditions": {"acuracy": {"on": "corect"}}}},
        "advantage.conditions: `gdpo` reads `acuracy`",
        {"advantage": {"use": "gdpo", "conditions": {"accuracy": {"on": "correct"}}}},
    ),
    (
        {"advantage": {**SUMMED, "channels": [{"rewards": {"accuracy": 1.0}, "among": {"on": "corect"}}]}},
        "advantage.channels.0.among.on: `channels` reads `corect`",
        {"advantage": SUMMED},
    ),
    ({"advantage": "remax", "rollout": STORED}, "rollout.engine stored samples nothing", {"advantage": "reward"}),
    (
        {"advantage": "remax", "rollout": {"shape": "chunks", "max_new_tokens": 8192}},
        "which is a single completion",
        {"advantage": "trajectory"},
    ),
    (
        {"advantage": "remax", "prompt_variants": "templates"},
        "`prompt_variants` change prompts",
        {"advantage": "group"},
    ),
    ({"advantage": "remax", "replay": "ssb"}, "stored rollouts have none", {"advantage": "group"}),
    (
        {"advantage": "remax", "rollout": {"staleness": 1, "partial": True, "engine": "vllm"}, "corrections": ["tis"]},
        "continues those of earlier steps",
        {"advantage": "group"},
    ),
    ({"rollout": {"group_size": 1}}, "there is only 1", {"rollout": {"group_size": 2}}),
    (
        {"keep": "dynamic_sampling", "group_rewards": ["length_zscore"]},
        "drops the all-correct groups",
        {"keep": {"use": "dynamic_sampling", "metric": "reward"}},
    ),
    (
        {"keep": ["some_right", "mixed"], "group_rewards": [{"use": "remaining_length", "max_length": 9}]},
        "keep.1.use: `mixed` drops the all-correct groups, needed by `remaining_length`",
        {"keep": "some_right"},
    ),
    (
        {"keep": "balanced_difficulty_filter", "group_rewards": ["length_zscore"]},
        "`balanced_difficulty_filter` drops the all-correct groups, needed by `length_zscore`",
        {"keep": {"use": "balanced_difficulty_filter", "t_high": 1}},
    ),
    ({"corrections": ["tis", "minirl"]}, "both correct", {"corrections": ["tis"]}),
    ({"corrections": ["tis"], "loss": "decoupled_ppo"}, "both correct", {"corrections": []}),
    ({"corrections": ["tis"], "loss": "copg"}, "there are no tokens to weight", {"corrections": []}),
    ({"loss": "rl_plus"}, "rollouts mixed with given solutions", {"loss": "cispo"}),
    ({"advantage": "agent"}, "rollouts of calls by role", {"advantage": "group"}),
    ({"regularisers": ["value"]}, "no component makes them", {"advantage": "gae"}),
    ({"critic": {"lr": 1e-3}}, "no component reads a critic", {"advantage": "gae"}),
    (
        {"loss": "disco", "batch": {"minibatches": 64}, "rollout": {"prompts_per_step": 32}},
        "needs whole groups in a minibatch",
        {"batch": {"minibatches": 32}},
    ),
    ({"loss": {"use": "pacs", "aggregation": "token_mean"}}, "does nothing: loss `pacs`", {"loss": "pacs"}),
    (
        {"controllers": {"kl.cof": "grpo_d"}},
        "is not a number that can change",
        {"controllers": {"kl.coef": "grpo_d"}},
    ),
    ({"controllers": {"loss.aggregation": "grpo_d"}}, "is not a number that can change", {"controllers": {}}),
    (
        {"controllers": {"rollout.max_new_tokens": {"use": "stages", "values": [256, 1024], "until": [5]}}},
        "goes up to 1024",
        {"rollout": {"max_new_tokens": 1024}},
    ),
    ({"kl": {"use": "k1"}, "controllers": {"kl.coef": "grpo_d"}}, "k1 in the loss", {"kl": {"use": "k2"}}),
    ({"controllers": {"kl.coef": "adaptive_kl"}}, "kl.coef is 0: it stays 0", {"kl": {"coef": 0.01}}),
    (
        {"controllers": {"regularisers.0.coef": "safe"}, "regularisers": ["kl_old"], "batch": TWO},
        "nothing computes it: it never changes regularisers.0.coef",
        {"kl": {"coef": 0.01}},
    ),
    (
        {"advantage": "per_turn", "scoring": {"split": "lines"}, "rollout": {"group_size": 4}},
        "gives groups of fewer than 5 completions no advantage, and a prompt has 4",
        {"rollout": {"group_size": 5}},
    ),
    ({"loss": "copg", "factors": ["adora"]}, "reads rewards or correctness", {"loss": "clip"}),
    (
        {"loss": "oreo", "advantage_transforms": ["novelty"]},
        "reads rewards or correctness",
        {"advantage_transforms": []},
    ),
    ({"loss": "pacs", "advantage": "rloo"}, "advantage: does nothing", {"advantage": "group"}),
    ({"loss": "gdc", "kl": IN_REWARD}, "reads no advantages", {"kl": {"coef": 0.1}}),
    ({"advantage": "gdpo", "kl": IN_REWARD}, "reads single rewards", {"advantage": "group"}),
    ({"loss": "disco", "group_rewards": ["kimi_length"]}, "reads correctness alone", {"loss": "copg"}),
    ({"advantage": PARTED}, "channel 1 is separate", {"regularisers": ["channel_clip"]}),
    ({"advantage": PARTED}, "no loss uses it", {"loss": "clip_channels"}),
    ({"advantage": SUMMED, "regularisers": ["channel_clip"]}, "in the loss already", {"regularisers": []}),
    ({"advantage": "copo", "regularisers": ["channel_clip"]}, "has no separate channel 1", {"regularisers": []}),
    (
        {"advantage": "copo", "loss": "clip_channels", "advantage_transforms": ["novelty"]},
        "reads each channel separately",
        {"loss": "clip"},
    ),
    (
        {"advantage": {"use": "riskpo", "bundle_size": 4}, "keep": "dynamic_sampling"},
        "`riskpo` needs all groups of a step",
        {"rollout": {"max_gen_batches": 5}},
    ),
    (
        {"loss": "direct_advantage", "scoring": {"split": "lines"}},
        "reads a critic that was trained separately",
        {"critic": {"path": "c"}},
    ),
    (
        {"loss": "decoupled_ppo", "advantage": "reward", "rollout": STORED},
        "whose log-probs are unknown",
        {"loss": "reinforce"},
    ),
    (
        {"advantage": BUNDLES, "rollout": {"shape": "chunks", "max_new_tokens": 8192}},
        "the number of rows of a shape or workflow varies",
        {"advantage": "trajectory"},
    ),
    ({"advantage": BUNDLES, "sampler": "xrpo"}, "sampler `xrpo` makes groups of several sizes", {"sampler": "taco"}),
    (
        {"advantage": BUNDLES, "sampler": "self_curation"},
        "sampler `self_curation` leaves some out",
        {"sampler": "taco"},
    ),
    (
        {"replay": "ssb", "advantage": "gae"},
        "stored rows carry only their advantages, and `gae` reads values",
        {"replay": None},
    ),
    (
        {"keep": "kl_rollback", "sampler": "taco", "kl": {"coef": 0.01}, "rollout": {"max_gen_batches": 2}},
        "which are computed when all rollouts are complete",
        {"rollout": {}},
    ),
    (
        {"regularisers": ["value"], "advantage": "gae", "critic": {"path": "c"}},
        "such a critic is frozen, and `value`",
        {"critic": {}},
    ),
    (
        {"controllers": {"rollout.temperature": CHANGE}, "corrections": ["tis"], "rollout": {"staleness": 1}},
        "drives rollouts that are sampled before the step",
        {"rollout": {}},
    ),
    (
        {"controllers": {"rollout.temperature": CHANGE}, "replay": "success"},
        "stored log-probs were computed at another temperature",
        {"replay": None},
    ),
    (
        {"controllers": {"rollout.max_turns": CHANGE}},
        "drives nothing without `tools` or an `environment`",
        {"tools": ["calculator"]},
    ),
    (
        {"controllers": {"loss.clip_low": {**CHANGE, "until": [5, 5]}}},
        "controllers.loss.clip_low: 2 values and until [5, 5]",
        {"controllers": {"loss.clip_low": CHANGE}},
    ),
    (
        {"controllers": {"loss.clip_low": {"use": "equal_stages", "values": []}}},
        "has no value",
        {"controllers": {"loss.clip_low": {"use": "equal_stages", "values": [0.2]}}},
    ),
]


@pytest.mark.parametrize(("changes", "told", "right"), CASES)
def test_recipe_is_refused_with_the_reason_and_the_hint_fixes_it(
    changes: dict[str, Any], told: str, right: dict[str, Any]
) -> None:
    assert told in problems(**changes)
    assert problems(**{**changes, **right}) == ""


@pytest.fixture(scope="module")
def errors_of_cases() -> str:
    return "\n".join(problems(**changes) for changes, _, _ in CASES)


@pytest.mark.parametrize(
    "row",
    [row for rows in (*needs.REFUSED.values(), needs.REFUSED_CONTROLLERS) for row in rows],
    ids=lambda row: row[0],
)
def test_every_condition_of_needs_yaml_refuses_one_of_the_cases(row: list[str], errors_of_cases: str) -> None:
    assert re.search(re.sub(r"\\\{[^}]*\\\}", ".*", re.escape(row[1])), errors_of_cases)


@pytest.mark.parametrize("need", [*needs.LACKS, *needs.MAKERS])
def test_component_without_a_provider_of_its_needs_is_refused(need: str) -> None:
    """Each component of the objective that needs it is refused if it stands alone in a recipe."""
    text = f"needs {need}: {needs.LACKS[need]}" if need in needs.LACKS else f"reads {need}, and no component makes them"
    refused = 0
    for entry in catalogue.list_entries():
        described = registry.load_index().get(entry["kind"], {}).get(entry["name"], {"needs": []})
        place = catalogue.KINDS[entry["kind"]][1] if entry["kind"] != "preset" else ""
        if need in described["needs"] and place in OBJECTIVE:
            assert f"`{entry['name']}` {text}" in problems(**{place: entry["recipe"][place]})
            refused += 1
    assert refused


def test_preset_choice_made_unused_by_the_user_is_refused() -> None:
    """The error is at `algorithm`, which the user wrote."""
    assert problems(algorithm="llds", batch={"minibatches": 1}).startswith("r  regularisers.0.use:")


def test_keep_accepts_one_filter_or_several(tmp_path: Path) -> None:
    one = load_dict({**BASE, "keep": "mixed"}, base_dir=tmp_path, where="r").recipe
    two = load_dict({**BASE, "keep": ["mixed", "some_right"]}, base_dir=tmp_path, where="r").recipe
    assert [k.use for k in one.keeps] == ["mixed"] and [k.use for k in two.keeps] == ["mixed", "some_right"]
    assert [key for key, _ in two.components()][:3] == ["keep.0", "keep.1", "advantage"]


def test_overrides_reach_into_lists_and_short_forms(tmp_path: Path) -> None:
    values = {**BASE, "factors": ["adora"], "corrections": [{"use": "tis"}]}
    loaded = load_dict(
        values, base_dir=tmp_path, where="r", overrides=["factors.0.w_tas=2.0", "corrections.0.clip_max=3.0"]
    )
    assert loaded.recipe.factors[0].params["w_tas"] == 2.0
    assert loaded.recipe.corrections[0].params["clip_max"] == 3.0


def test_batch_arithmetic_of_a_recipe(tmp_path: Path) -> None:
    values = {**BASE, "regularisers": [{"use": "kl_old", "coef": 0.5}], "batch": TWO}
    recipe = load_dict(values, base_dir=tmp_path, where="r").recipe
    found = recipe.controllable_numbers()
    assert found["regularisers.0.coef"] == 0.5 and found["loss.clip_low"] == 0.2 and found["rollout.group_size"] == 8
    assert "loss.clip_high" not in found, "null is no number"


BETWEEN = "rollouts are sampled between two updates, and no time is saved"


@pytest.mark.parametrize(
    ("rollout", "others", "told"),
    [
        ({"staleness": 0, "engine": "vllm"}, {}, []),
        ({"staleness": 1, "engine": "vllm"}, {}, []),
        ({"staleness": 1}, {}, [f" with rollout.engine transformers: {BETWEEN}"]),
        ({"staleness": 2, "engine": "vllm", "vllm": {"sleep": True}}, {}, [f" with rollout.vllm.sleep: {BETWEEN}"]),
        (
            {"staleness": 2, "engine": "vllm"},
            {},
            [" without rollout.partial: rollouts are older than with 1, and time is saved only with slow rewards"],
        ),
        ({"staleness": 2, "engine": "vllm", "partial": True}, {}, []),
        (
            {"staleness": 2, "engine": "vllm"},
            {"opponent": {"ema": 0.1}, "group_rewards": ["versus_opponent"]},
            [f" with an opponent: {BETWEEN}"],
        ),
        (
            {"staleness": 1, "engine": "vllm"},
            {"loss": "copg", "corrections": []},
            [": loss `copg` does not weight rollouts by the policy that sampled them"],
        ),
    ],
)
def test_notes_on_stale_rollouts(
    rollout: dict[str, Any], others: dict[str, Any], told: list[str], tmp_path: Path
) -> None:
    values = {**BASE, "rollout": rollout, "corrections": ["tis"], **others}
    recipe = load_dict(values, base_dir=tmp_path, where="r").recipe
    assert stale_notes(recipe) == [f"rollout.staleness {rollout['staleness']}{text}" for text in told]

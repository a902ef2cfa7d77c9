"""Every component of the index that an `rl` recipe may name, through the command line on `tiny`.

Two steps: the component is called, a step's loss or gradient differs from a run without it, its statistics are in the
metrics, the weights change, and a run resumed after the first step equals an unbroken one. The recipe follows from the
component's declared needs; NUMBERS holds arguments without a default, and replacements of defaults for long answers.
Components named by a preset are also trained in test_presets.py. Of the others, the first of each kind runs in every
test run, the remaining ones with `make test-slow`: each takes some seconds.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain import registry
from posttrain.batch import Correction, GroupLoss, TokenLoss
from posttrain.errors import RecipeError
from posttrain.recipe import presets
from posttrain.recipe.load import load_dict
from posttrain.recipe.needs import MAKERS, SAMPLERS, given_by
from posttrain.recipe.stages import RlRecipe
from posttrain.train import rl
from posttrain.train.objective import BoundComponent
from tests.preset_objectives import preset_recipe

from .families import save_family

Values = dict[str, Any]
PLACES = {
    **{"group_reward": "group_rewards", "keep": "keep", "advantage": "advantage", "factor": "factors"},
    **{
        "advantage_transform": "advantage_transforms",
        "credit_assignment": "credit_assignment",
        "select": "select",
        "correction": "corrections",
        "loss": "loss",
    },
    **{"group_loss": "loss", "kl": "kl", "regulariser": "regularisers", "controller": "controllers"},
}
LISTS = ("group_rewards", "factors", "advantage_transforms", "select", "corrections", "regularisers")
ENTRIES = {
    (kind, name): entry
    for kind, all_ in registry.load_index().items()
    if kind in PLACES
    for name, entry in all_.items()
}

NUMBERS: dict[str, Values] = {
    "pass_k_training": {"k": 2},
    "channels": {"channels": [{"rewards": {"digits": 1.0}}, {"rewards": {"lower": 1.0}}]},
    "decoupled_turns": {"tool": "lower"},
    "gated": {"gate": {"on": "lower", "min": 1.0}},
    "decs": {"max_length": 10.0},
    "remaining_length": {"max_length": 10.0},
    "truncation_tiers": {"target_lengths": [8.0, 4.0]},
    "capo": {"learning_rate": 1e-2},
    "clip_cov": {"share": 0.5, "low": 0.0},
    "d3s": {"n_query": 4, "token_frac": 0.5},
    "stages": {"values": [0.3, 0.6], "until": [1]},
    "equal_stages": {"values": [0.3, 0.6], "every": 1},
    "cosine": {"low": 0.1, "high": 0.6},
    "adaptive_kl": {"horizon": 24.0},
    "redundancy": {"beta": 1.0, "necessary": "rewards/digits/mean", "solved": "rewards/lower/mean"},
    "remix_convex": {"complement": True},
    "riskpo": {"bundle_size": 3},
    "per_turn": {"min_group": 2},
    "difficulty_budget": {"easy_budget": 4.0, "hard_budget": 8.0},
    "tis": {"clip_max": 1.0},
    "engine_ratio": {"clip_max": 1.05},
    "off_policy_seq_mask": {"threshold": 1e-3},
    "k1": {"where": "reward"},
    "prompt_gdro": {"mode": "paper", "eta": 50.0},
}

SAMPLER_NUMBERS: dict[str, Values] = {"taco": {"threshold": 0.2}}

SCRIPT = '''
from posttrain.verify.contract import per_turn

def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def lower(completion):
    return float(completion[:1].islower())

@per_turn
def first_digits(completion, parts):
    return [float(part[:1].isdigit()) for part in parts]

class Echo:
    """An environment of two turns that pays for digits."""
    def reset(self, row): self.turn = 0
    def step(self, text):
        self.turn += 1
        return "again", self.turn == 2, float(any(c.isdigit() for c in text))
    def actions(self): return ["a", "7"]
    def score(self): return 0.0
    def close(self): pass
'''
# In a separate file, because reward workers import no torch.
SHAPE = """
from posttrain.shapes.protocol import Row

async def halves(asked):
    (first,) = await asked.sample([asked.prompt], 5)
    (second,) = await asked.sample([(*asked.prompt, *first.ids)], 5)
    return [Row(asked.prompt, (first.segment,), "stop"), Row(asked.prompt, (second.segment,), "stop")]
"""
FLOW = """
async def two(row, call):
    first = await call("planner")
    await call("executor", first.text, parent=first)
"""
LOSS = """
import torch
from posttrain.batch import TokenLoss

def nothing(batch, logp):
    return TokenLoss(torch.zeros_like(logp))
"""


def missing_needs(entry: Mapping[str, Any]) -> set[str]:
    """Return the component's needs that no recipe provides."""
    given = given_by().union(*SAMPLERS.values())
    return set(entry["needs"]) - given


def by_preset() -> set[tuple[str, str]]:
    """Return the components named by presets of rl."""
    sections = [section for name in presets.names("rl") for _, section in preset_recipe(name).components()]
    return {(registry.find_kind(section.kinds, section.use), section.use) for section in sections}


WITHIN = [key for key, entry in ENTRIES.items() if not missing_needs(entry)]
COVERED = by_preset()
FIRST = {kind: (kind, name) for kind, name in reversed(WITHIN) if (kind, name) not in COVERED}.values()
REACHED = [pytest.param(*k, id="-".join(k), marks=() if k in FIRST else pytest.mark.slow) for k in WITHIN]


def test_every_kind_is_in_the_recipe_or_listed() -> None:
    # the remaining kinds: test_prompt_variants.py, test_prompt_sampler.py, test_rollout_shapes.py, test_replay.py,
    # test_workflows.py
    others = {"pair_loss", "token_weight", "merge", "task", "prompt_variants", "sampler", "shape", "replay", "workflow"}
    assert {*PLACES, *others} == registry.load_index().keys()
    assert set(PLACES.values()) <= RlRecipe.model_fields.keys() and len(REACHED) > 80


def test_missing_needs_are_refused_with_the_reason(tmp_path: Path) -> None:
    """Every formula has rollouts that provide its needs; without them it is refused with the reason."""
    assert {key: missing_needs(entry) for key, entry in ENTRIES.items() if missing_needs(entry)} == {}
    values = recipe_with("advantage", "agent")
    values["rollout"].pop("workflow")
    with pytest.raises(RecipeError, match="`agent` needs agent_ids: rollouts of calls by role"):
        load_dict(values, base_dir=tmp_path, where="test")


def named_by(entry: Mapping[str, Any]) -> list[str]:
    """Return the reward components and columns that the component reads by default."""
    kinds = ("str", "Column", "RewardName", "ScoreName")
    texts = [described[1] for described in entry["params"].values() if described[0].startswith(kinds)][:9]
    return [text for text in texts if text and text.replace("_", "").isalpha()]


def base(entry: Mapping[str, Any]) -> Values:
    """Return a recipe that provides the component's needs, without the component."""
    needs = set(entry["needs"])
    values: Values = {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 6, "group_size": 4, "max_new_tokens": 10, "stop": ["e", "a", "o"]},
        "rewards": [
            {"use": "parts.py:digits", "correct": True},
            {"use": "parts.py:lower", "weight": 0.1},
            *({"use": "parts.py:lower", "name": name, "weight": 0} for name in named_by(entry)),
        ],
        "scoring": {"workers": 1, "correct_at": 0.15},
        "advantage": "group",
        "loss": "reinforce",
        "kl": {"use": "k3", "coef": 0.05},
        "batch": {"minibatches": 2},
        "optim": {"lr": 1e-2, "max_grad_norm": None},
        "run": {"steps": 2, "save_every": 1},
    }
    defaults = {str(described[1]) for described in entry["params"].values() if len(described) > 1}
    if any("necessary_prefix" in text for text in defaults):
        values["rewards"].append({"use": "efficiency.necessary_prefix", "weight": 0})
    if needs & {"turn_states", "edge_ids", "mc_values", "legal_returns"}:
        simulated = {"simulations": 2} if needs & {"mc_values", "legal_returns"} else {}
        values["environment"] = {"use": "parts.py:Echo", **simulated}
        turns = 1 if "legal_returns" in needs else 2
        values["rollout"] |= {"group_size": 8, "max_turns": turns, "turn_tokens": 1, "max_new_tokens": 60}
        if "edge_ids" in needs:  # some turns are equal, and lead to different rewards
            values["rollout"] |= {"temperature": 0.3, "prompts_per_step": 18}
        values["rewards"].append({"use": "environment.steps"})
    elif needs & {"turn_ids", "token_rewards", "turn_scores"}:
        values["scoring"]["split"] = "lines"
        by_turn = [name for name in named_by(entry) if name.startswith("meta_")] or ["first_digits"]
        values["rewards"] = [r for r in values["rewards"] if r.get("name") not in by_turn]
        values["rewards"] += [{"use": "parts.py:first_digits", "name": name} for name in by_turn]
    for sampler, given in SAMPLERS.items():
        if needs & given:
            values["sampler"] = {"use": sampler, **SAMPLER_NUMBERS.get(sampler, {})}
    if needs & {"masked_logp", "perturbed_logp"}:
        values |= {"model": {"path": "tiny-vision"}, "data": {"source": "task:find_square", "size": 24}}
    if "router_loss" in needs:
        values["model"]["path"] = "moe"
    if "rollout_logp" in needs:  # for rollouts that are one update old; a user component may weight them
        values["rollout"]["staleness"] = 1
        values["regularisers"] = [{"use": "losses.py:nothing", "coef": 0.0}]
    if needs & given_by("solutions", "mixed_solutions"):
        values["solutions"] = {"in_group": "external" in needs}
        values["rollout"]["max_new_tokens"] = 16
    if needs & given_by("hints"):
        begun = {"use": "difficulty_hint", "trained": True}  # completions begin with tokens of the hint
        values["prompt_variants"] = begun if "hint_mask" in needs else {"use": "hint_on_failure", "ratios": [0.5]}
    if needs & given_by("workflow"):
        values["rollout"]["workflow"] = "flows.py:two"
    elif needs & given_by("shape"):
        exits = {"use": "serial_exit", "num_exits": 3, "inducer": "!", "answer_tokens": 4}
        budgets = {"use": "budgets", "budgets": [3, 7], "num_answers": 2, "closing": "!", "answer_tokens": 4}
        own = budgets if "part_ids" in needs else "shapes.py:halves"
        values["rollout"]["shape"] = exits if "correct" in needs else own
    if needs & given_by("windows"):
        values["rollout"]["shape"] = {"use": "windows", "window": 6}
    if needs & given_by("tree"):
        values["rollout"]["shape"] = {"use": "mcts", "segment_tokens": 3, "width": 3, "max_depth": 3, "paths": 3}
    if needs & given_by("opponent"):
        values["opponent"] = {"ema": 0.5}
    if "frozen_critic" in needs:
        values["critic"] = {"path": "critic"}
    for made in sorted(needs & {"channels", "returns"}):
        maker = MAKERS[made][0]
        values["advantage"] = {"use": maker, **NUMBERS.get(maker, {})}
    return values


def recipe_with(kind: str, name: str) -> Values:
    values, key = base(ENTRIES[kind, name]), PLACES[kind]
    if name == "channel_clip":
        values["advantage"]["separate"] = True
    section = {"use": name, **NUMBERS.get(name, {})}
    if key == "controllers":  # statistics of one step may be stored in the second and drive the third
        return {**values, key: {"kl.coef": section}, "run": {"steps": 3, "save_every": 1}}
    if key == "kl":
        section["coef"] = 0.5
        if "divergence" in ENTRIES[kind, name]["needs"]:
            section["reference"] = "moe"
    return {**values, key: [section] if key in LISTS else section}


def recipe_without(kind: str, name: str) -> Values:
    """Return the recipe without the component, or with another one if the section is required."""
    values = base(ENTRIES[kind, name])
    if kind == "kl":
        values["kl"]["coef"] = 0.0
    elif kind == "advantage":
        values["advantage"] = "group" if name == "reward" else "reward"
        if "finished" in ENTRIES[kind, name]["needs"]:
            values["advantage"] = {"use": name, "whiten": False, "gamma": 0.5}
        if "part_ids" in ENTRIES[kind, name]["needs"]:  # some rows have no reward of their own
            values["advantage"] = {"use": name, "baseline": "none"}
    elif (kind, name) == ("loss", "reinforce"):
        values["loss"] = "cispo"
    values.get("environment", {}).pop("simulations", None)
    if not values.get("solutions", {}).get("in_group"):
        values.pop("solutions", None)
    return {key: value for key, value in values.items() if key not in ("opponent", "critic")}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rewards, rows with numeric columns, and a trained critic."""
    folder = tmp_path_factory.mktemp("parts")
    (folder / "parts.py").write_text(SCRIPT)
    (folder / "losses.py").write_text(LOSS)
    (folder / "shapes.py").write_text(SHAPE)
    (folder / "flows.py").write_text(FLOW)
    save_family("qwen3_moe", folder / "moe")
    columns = sorted({name for entry in ENTRIES.values() for name in named_by(entry)})
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(24):
            numbers = {name: 1.0 + (i + len(name)) % 5 for name in columns}
            texts = {"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i), "solution": f"add {i}\nso {2 * i}"}
            file.write(json.dumps({**numbers, **texts}) + "\n")
    return folder


class Calls:
    """Records the functions called since training started, and the names of their statistics."""

    def __init__(self) -> None:
        self.keys: set[str] = set()
        self.stats: dict[str, set[str]] = {}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen = Calls()
    call, train = BoundComponent.__call__, rl.train

    def recording(self: BoundComponent, *args: Any) -> Any:
        result = call(self, *args)
        seen.keys.add(self.key)
        if isinstance(result, TokenLoss | GroupLoss | Correction):
            seen.stats.setdefault(self.key, set()).update(result.stats)
        return result

    def from_here(*args: Any) -> Any:
        seen.__init__()  # type: ignore[misc]
        return train(*args)

    monkeypatch.setattr(BoundComponent, "__call__", recording)
    monkeypatch.setattr(rl, "train", from_here)
    return seen


def ran(cli: Any, folder: Path, values: Values, *options: str) -> list[Values]:
    """Return the metrics of a run in `folder`, with its recipe beside it."""
    recipe = folder.with_suffix(".yaml")
    recipe.write_text(json.dumps(values))  # JSON is YAML
    cli.run("rl", str(recipe), "--output", str(folder), *options)
    return cli.rows_of(folder)


@pytest.fixture(scope="module")
def without() -> dict[str, list[Values]]:
    """Return metrics of runs without a component, cached by recipe: many components share one."""
    return {}


def weights(run: Path, step: int) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors")}


@pytest.mark.parametrize(("kind", "name"), REACHED)
def test_component_is_called_changes_the_step_and_resumes_exactly(
    kind: str, name: str, cli: Any, home: Path, calls: Calls, without: dict[str, list[Values]]
) -> None:
    entry, run = ENTRIES[kind, name], home / f"{kind}-{name}"
    lacks = [k for k, described in entry["params"].items() if len(described) == 1 and k not in NUMBERS.get(name, {})]
    assert not lacks, f"NUMBERS in this file lacks {lacks} of {kind} `{name}`, which have no default"
    if "frozen_critic" in entry["needs"] and not (home / "critic").exists():
        ran(cli, home / "critic", {**base(ENTRIES["loss", "critic"]), "loss": "critic"})
    rows = ran(cli, run, recipe_with(kind, name))

    place = "controllers" if kind == "controller" else f"{PLACES[kind]}.0" if PLACES[kind] in LISTS else PLACES[kind]
    assert kind == "controller" or place in calls.keys, f"{place} was never called; called: {sorted(calls.keys)}"
    shown = calls.stats.get(place, set()) | ({"control/kl.coef"} if kind == "controller" else set())
    shown |= {f"rewards/{name}/mean"} if kind == "group_reward" else set()
    assert all(shown <= row.keys() for row in rows), (shown, rows[0].keys())
    assert all(math.isfinite(row["loss"]) and row["updates"] > 0 for row in rows)
    last = len(rows)
    assert weights(run, last - 1) != weights(run, last)

    other = recipe_without(kind, name) | {"run": recipe_with(kind, name)["run"]}
    if (text := json.dumps(other)) not in without:
        without[text] = ran(cli, home / f"without-{len(without)}", other)
    pairs = [(row[key], o[key]) for row, o in zip(rows, without[text], strict=True) for key in ("loss", "grad_norm")]
    assert any(mine != pytest.approx(others, rel=1e-3, abs=1e-5) for mine, others in pairs), (
        f"with {kind} `{name}` loss and gradient are those of a run without it: if its defaults do nothing on so small"
        " a model, write values that act into NUMBERS of this file"
    )

    shutil.rmtree(run / "checkpoints" / f"step-{last:08d}")
    (run / "summary.json").unlink()
    assert ran(cli, run, recipe_with(kind, name), "--resume") == rows

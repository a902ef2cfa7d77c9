"""Prompt samplers in the training loop: sampled prompts, exact resuming, and updates from a step's results."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, RolloutBatch
from posttrain.curriculum.protocol import Group, Plan, Pool
from posttrain.errors import DataError, RecipeError, RunError
from posttrain.recipe.load import load_dict
from posttrain.recipe.objective_checks import band_notes
from posttrain.run import checkpoints
from posttrain.train.prompt_sampler import StepSampler, with_outcomes

from .conftest import merge_sections
from .test_rollout_source import recipe, run, use  # noqa: F401  fixtures
from .versioned_engine import VersionedEngine

Values = dict[str, Any]
Make = Callable[..., Any]

GDRO: Values = {"use": "gdro", "history_len": 4, "hysteresis": 0.0}
SAMPLERS: dict[str, Values] = {
    "curriculum_stage": {"sampler": {"use": "curriculum_stage", "boundaries": [0.5, 1.0], "temperature": 0.3}},
    "gdro": {"sampler": GDRO, "factors": ["prompt_gdro"]},
    "variance": {"sampler": {**GDRO, "allocation": "variance", "n_max": 6}},
    "xrpo": {"sampler": {"use": "xrpo", "rounds": 3}},
    "self_curation": {"sampler": "self_curation"},
    "pcl": {"sampler": {"use": "pcl", "warmup_steps": 1, "metric": "reward"}},
    "taco": {
        "sampler": {"use": "taco", "interval": 2, "z": 0.0},
        "keep": "kl_rollback",
        "kl": {"coef": 0.01},
    },
    "own": {"sampler": {"use": "mine.py:Reversed", "extra": 1}},
}
OWN = """
from dataclasses import dataclass
from posttrain.curriculum.protocol import Plan, Sampler

@dataclass(frozen=True, kw_only=True)
class Reversed(Sampler):
    '''Backwards through the data, one rollout more for each prompt that was right last time.'''
    extra: int = 1

    def start(self, pool):
        return {"right": []}

    def propose(self, state, request, pool):
        first = request.step * request.prompts
        prompts = [len(pool) - 1 - (first + n) % len(pool) for n in range(request.prompts)]
        return Plan(prompts, [request.group_size + self.extra * (pool.uids[n] in state["right"]) for n in prompts])

    def update(self, state, groups, pool, *, step, planned):
        return {"right": [group.uid for group in groups if (group.pass_rate or 0) > 0]}
"""


@pytest.fixture
def make(recipe: Make, tmp_path: Path) -> Make:  # noqa: F811
    """Return a function that builds a recipe of six steps with groups of 4 on 24 prompts."""
    (tmp_path / "mine.py").write_text(OWN)

    def made(**changes: Any) -> Any:
        base = {"rollout": {"group_size": 4, **changes.pop("rollout", {})}}
        return recipe(**merge_sections(base, changes))

    return made


def load_samples(folder: Path) -> list[Values]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


CASES = [
    *((name, 0) for name in SAMPLERS),
    *((name, 2) for name in ("curriculum_stage", "gdro", "xrpo", "self_curation", "taco")),
]


@pytest.mark.parametrize(("name", "staleness"), CASES)
def test_killed_run_resumes_exactly(
    make: Make,
    run: Any,  # noqa: F811
    use: Any,  # noqa: F811
    tmp_path: Path,
    name: str,
    staleness: int,
) -> None:
    """In the middle of an epoch, with the sampler's state; also with rollouts of later steps in progress."""
    made = make(**SAMPLERS[name], rollout={"staleness": staleness}, run={"samples_per_step": 99})
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.001))
    straight = run("straight", made)
    shutil.copytree(tmp_path / "straight", tmp_path / "killed")
    for step in range(4, 7):
        shutil.rmtree(checkpoints.folder_for(tmp_path / "killed" / "checkpoints", step))
    assert run("killed", made, resume=True) == straight
    assert load_samples(tmp_path / "killed") == load_samples(tmp_path / "straight")
    states = [
        json.loads((checkpoints.folder_for(tmp_path / n / "checkpoints", 6) / "state.json").read_text())["sampler"]
        for n in ("straight", "killed")
    ]
    assert states[0] == states[1]


def test_rollouts_are_allocated_unequally_within_the_budget(make: Make, run: Any, use: Any) -> None:  # noqa: F811
    """XRPO: every prompt gets n_min, the others go where rewards differ; the step has the rows of equal groups."""
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.0))
    rows = run("run", make(**SAMPLERS["xrpo"]))
    assert {row["rollout/rows"] for row in rows} == {12}
    assert min(row["sampler/smallest_group"] for row in rows) >= 2
    assert any(row["sampler/largest_group"] > row["sampler/smallest_group"] for row in rows)


def test_prompts_solved_by_greedy_decoding_are_not_trained_on(make: Make, run: Any, use: Any) -> None:  # noqa: F811
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.0))
    rows = run("run", make(**SAMPLERS["self_curation"], run={"samples_per_step": 99}))
    assert all(row["sampler/measured"] >= 3 and 1 <= row["sampler/prompts"] <= 3 for row in rows)
    assert any(row["sampler/greedy_solved"] > 0 for row in rows), "some prompt of the run is solved"
    assert all(row["rollout/rows"] == 4 * row["sampler/prompts"] for row in rows)


def test_user_defined_sampler(make: Make, run: Any, use: Any, tmp_path: Path) -> None:  # noqa: F811
    use(lambda tokenizer: VersionedEngine(tokenizer, slowest=0.0))
    run("run", make(**SAMPLERS["own"], run={"samples_per_step": 99}))
    first = [row for row in load_samples(tmp_path / "run") if row["step"] == 1]
    assert {number for number in range(24) if any(f"{number}+{number}=" in row["prompt"] for row in first)} >= {21, 22}
    assert all(f"{number}+{number}=" not in row["prompt"] for row in first for number in (10, 15, 20))


# --- results of a step ---


def test_groups_have_their_losses_and_kl() -> None:
    groups = [Group(4, "a", (1.0, 0.0), (1.0, 0.0), group=0), Group(5, "b", (0.0,), (0.0,), group=1)]
    groups += [Group(6, "c", (1.0,), (1.0,), group=7), Group(4, "a", (1.0,), (1.0,), measured=True)]
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 0, 1]),
        mask=torch.tensor([[1, 1], [1, 0], [1, 1]]).bool(),
        old_logp=torch.tensor([[0.0, 0.0], [-1.0, 9.0], [-1.0, -1.0]]),
        ref_logp=torch.tensor([[0.0, 0.0], [0.0, -9.0], [-1.0, -1.0]]),
    )
    keep, losses = torch.tensor([True, True, False]), torch.tensor([0.5, -1.0, torch.nan])
    found = with_outcomes(groups, batch, keep, losses)
    assert [group.kept for group in found] == [True, False, False, False]
    assert [group.loss for group in found] == [-0.25, None, None, None]
    assert found[0].kl == pytest.approx((2.718281828 - 2) / 3) and found[1].kl == 0.0


class Proposes:
    """Proposes one fixed plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def start(self, _: Pool) -> Values:
        return {}

    def places(self, prompts: int) -> int:
        return prompts

    def propose(self, *_: Any) -> Plan:
        return self.plan

    def update(self, *_: Any, **__: Any) -> Values:
        return {"no JSON": {1, 2}}


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (Plan([0], [2, 2]), "1 prompts, 2 rollout counts"),
        (Plan([0, 1, 2], [2, 2, 2]), "3 prompts, but a step takes 2"),
        (Plan([0, 9], [2, 2]), "prompt 9, but prompts are numbered from 0 to 4"),
        (Plan([0, 1], [2, -1]), "rollouts \\[2, -1\\]"),
        (Plan([0, 1], [2, 2.0]), "rollouts \\[2, 2.0\\]"),
        (Plan([0, 1], [2, 0]), "a prompt without rollouts"),
        (Plan([0, 1], [2, 2], bins=[1]), "1 bins"),
    ],
)
def test_invalid_plan_raises(make: Make, plan: Plan, told: str) -> None:
    settings = make(rollout={"prompts_per_step": 2}).rollout
    source = StepSampler.from_recipe(make(), [_prompt(n) for n in range(5)], 6)
    object.__setattr__(source, "sampler", Proposes(plan))
    with pytest.raises(RunError, match=f"sampler `uniform`: .*{told}") as error:
        source.propose({}, 2, settings, 0)
    assert "step 3" in str(error.value)
    with pytest.raises(RunError, match="cannot be written as JSON"):
        source.update({}, [], 0)


def _prompt(n: int) -> Any:
    from posttrain.batch import Prompt

    return Prompt(f"p{n}", {"difficulty": n / 5}, "", (1,))


# --- refused settings ---


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sampler": "xrpo", "rollout": {"group_size": 1}}, "divides the rollouts of a step among prompts"),
        ({"sampler": "pcl", "rollout": {"staleness": 1}}, "hidden states of prompts while its weights may be changing"),
        ({"sampler": "gdro", "loss": "disco"}, "has one value per group"),
        ({"factors": ["prompt_gdro"]}, "a sampler that bins prompts"),
        ({"keep": "kl_rollback", "kl": {"coef": 0.1}}, "a sampler that sets it"),
        (
            {"sampler": "taco", "keep": "kl_rollback", "kl": {"coef": 0.1}, "rollout": {"max_gen_batches": 3}},
            "computed when all rollouts are complete",
        ),
        ({"sampler": "curriculum_stage", "rollout": {"engine": "stored", "group_size": 1}}, "nothing is sampled"),
        ({"sampler": "xrpo", "opponent": {}, "group_rewards": ["versus_opponent"]}, "the opponent answers once"),
        ({"sampler": "gdro", "algorithm": "riskpo"}, "needs groups of equal size"),
        ({"sampler": {"use": "xrpo", "rounds": 1}}, "rounds 1"),
        ({"sampler": {"use": "xrpo", "n_min": 4, "n_max": 2}}, "n_max 2 is less than n_min 4"),
        ({"sampler": {"use": "curriculum_stage", "boundaries": [0.9, 0.1]}}, "rising"),
        ({"sampler": {"use": "gdro", "edges": [0.5, 0.5]}}, "between 0 and 1"),
        ({"sampler": "uniformm"}, "did you mean `uniform`"),
        ({"sampler": {"use": "xrpo", "aplha": 0.1}}, "alpha"),
    ],
)
def test_incompatible_settings_are_refused(make: Make, changes: Values, told: str) -> None:
    with pytest.raises(RecipeError) as error:
        make(**changes)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("sampler", "told"),
    [
        ({"use": "mine.py:Reversed", "more": 1}, "no argument more"),
        ({"use": "mine.py:dataclass"}, "no method `start`"),
        ({"use": "mine.py:Sampler"}, "no method `propose`"),
    ],
)
def test_inconsistent_arguments_are_refused(make: Make, sampler: Values, told: str) -> None:
    from posttrain.errors import UserError

    with pytest.raises((UserError, TypeError), match=told):
        StepSampler.from_recipe(make(sampler=sampler), [_prompt(n) for n in range(5)], 6)


def test_difficulty_band_with_few_possible_rates_is_noted(make: Make) -> None:
    keep = {"use": "balanced_difficulty_filter", "t_low": 0.3, "t_high": 0.7}
    (note,) = band_notes(make(keep=keep))
    assert note == "keep: of the pass rates of 4 rollouts, 2/4 lie between 0.3 and 0.7"
    assert band_notes(make(keep=keep, rollout={"group_size": 8})) == [] == band_notes(make())


@pytest.mark.parametrize(
    ("difficulties", "boundaries", "told"),
    [
        ([0.0, 0.1, 0.2, 0.3], [0.3, 1.0], []),
        ([0.1, 0.5, 0.9, 1.0], [0.2], ["3 of 4 prompts have a `difficulty` above the last boundary 0.2"]),
        ([0.7, 0.8, 0.9, 1.0], [0.3, 1.0], ["stage 0 has no prompt (difficulty <= 0.3), and draws from all"]),
    ],
)
def test_unreachable_prompts_and_empty_stages_are_noted(
    make: Make, difficulties: list[float], boundaries: list[float], told: list[str]
) -> None:
    sampler = {"use": "curriculum_stage", "column": "difficulty", "boundaries": boundaries}
    prompts = [Prompt(f"p{n}", {"difficulty": value}, "", (1,)) for n, value in enumerate(difficulties)]
    notes = StepSampler.from_recipe(make(sampler=sampler), prompts, 4).notes()
    assert len(notes) == len(told) and all(want in note for want, note in zip(told, notes, strict=True))


def test_difficulties_outside_the_scale_raise_with_their_range(make: Make) -> None:
    prompts = [Prompt(f"p{n}", {"difficulty": n}, "", (1,)) for n in range(1, 6)]
    with pytest.raises(DataError, match=r"`difficulty` is 1 to 5: 4 of 5 prompts are outside of 0 to 1") as error:
        StepSampler.from_recipe(make(sampler={"use": "curriculum_stage", "column": "difficulty"}), prompts, 4)
    assert "(difficulty - 1) / 4" in str(error.value)


def test_curriculum_stage_is_a_metric(make: Make) -> None:
    sampler = {"use": "curriculum_stage", "column": "difficulty", "boundaries": [0.3, 0.6, 1.0]}
    source = StepSampler.from_recipe(make(sampler=sampler), [_prompt(n) for n in range(5)], 6)
    stages = [source.metrics(source.update(None, [], step), [])["sampler/stage"] for step in range(6)]
    assert stages == [0, 0, 1, 1, 2, 2]


def test_missing_difficulty_column_raises(tmp_path: Path) -> None:
    sampler = {"use": "curriculum_stage", "column": "difficulty", "boundaries": [0.3, 1.0]}
    base = {"stage": "rl", "model": {"path": "tiny"}, "data": {"source": "x.jsonl"}, "rewards": ["math.accuracy"]}
    loaded: Any = load_dict(
        {**base, "sampler": sampler, "rollout": {"prompts_per_step": 2}, "run": {"steps": 4}},
        base_dir=tmp_path,
        where="t",
    ).recipe
    source = StepSampler.from_recipe(loaded, [_prompt(n) for n in range(5)], 4)
    easy = source.propose(None, 0, loaded.rollout, 0)
    assert sorted(easy.prompts) == [0, 1] and list(easy.rollouts) == [8, 8]
    last = [n for start in range(0, 40, 2) for n in source.propose(None, 3, loaded.rollout, start).prompts]
    assert set(last) == set(range(5))

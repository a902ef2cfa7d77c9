"""Workflows: prompts of each role, the rows that the calls become, their groups and rewards by role; also resumed
from a checkpoint.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.advantage.segments import normalize_role_calls
from posttrain.batch import Prompt, Rollout, RolloutBatch
from posttrain.errors import RecipeError, UserError
from posttrain.models import load as models
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import generate_shaped
from posttrain.rollout.engine import GenerationBatch
from posttrain.train.workflow import workflow_of
from posttrain.workflows.protocol import fill
from tests.scripted_engines import ConcurrentScriptedEngine, ScriptedEngine

from .conftest import Seen

Values = dict[str, Any]

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def helped(completion, workflow):
    """A critique earns what the answer after it has of digits."""
    if workflow.mine.role != "critic":
        return None
    (after,) = workflow.children("refiner")
    assert workflow.mine.text == completion and workflow.parent.role == "actor"
    return sum(c.isdigit() for c in after.text) / max(after.tokens, 1)
'''
WORKFLOWS = """
import asyncio
from posttrain.registry import register
from posttrain.workflows.protocol import Learned

async def debate(row, call, *, words: str = "You are {side}. Debate: "):
    first = await call("pro", words.format(side="pro") + row["prompt"], max_tokens=4)
    second = await call("con", [{"role": "system", "content": "No."}, {"role": "user", "content": first.answer}])
    second.note["round"] = 1
    second.parent = first
    await call.reply(second, "What else?", max_tokens=3)

async def gathered(row, call):
    await asyncio.gather(call("left"), call("right"))

async def fails(row, call):
    return row["prompt"] / 2

async def silent(row, call):
    pass

async def badly_named(row, call):
    await call("the solver")

def no_coroutine(row, call):
    pass

class Notes:
    # A solver is shown the newest note, and a writer writes one; the notes of the step before are trained on again.

    late = ("writer",)

    def __init__(self, *, most: int = 3):
        self.most = most

    async def run(self, row, call):
        known = (call.memory or {}).get("notes", [])
        said = await call("solver", row["prompt"] + (known[-1]["text"] if known else ""), max_tokens=6)
        (grade,) = await call.grade([said])
        said.note["graded"] = grade.reward
        await call("writer", "Note: " + said.text, parent=said, max_tokens=5)

    def learn(self, memory, outcomes, step):
        for outcome in outcomes:
            (said,) = outcome.by("solver")
            assert said.reward == said.note["graded"] and said.row is None
        notes = (memory or {}).get("notes", [])
        again = [(note["row"], 1.0 - n) for n, note in enumerate(notes)]
        fresh = [{"text": made.text, "row": made.row} for one in outcomes for made in one.by("writer")]
        return Learned({"notes": (notes + fresh)[-self.most:]}, again, {"notes/known": len(notes)})

class Forgetful:
    async def run(self, row, call):
        await call("solver")
"""
NOTES = {"use": "./flows.py:Notes", "max_prompt_tokens": 300}
CRITIQUE = {"use": "critique_refine", "critiques": 3, "max_prompt_tokens": 300}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "flows.py").write_text(WORKFLOWS)
    rows = [{"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values_of(workflow: Any, **changes: Any) -> Values:
    rollout = {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 8, **changes.pop("rollout", {})}
    return {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {**rollout, **({"workflow": workflow} if workflow else {})},
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.2},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2, "samples_per_step": 40},
        **changes,
    }


def generate(workflow: Any, script: Any, home: Path, n: int = 1, *, concurrent: bool = False) -> list[Rollout]:
    """Generate the rollouts of one prompt, `1+1=?`, with an engine whose completions are scripted."""
    recipe = load_dict(values_of(workflow), base_dir=home, where="test").recipe
    assert isinstance(recipe, RlRecipe) and recipe.rollout.workflow is not None
    tokenizer = models.load_tokenizer(recipe.model, home)
    ids = tuple(tokenizer("<|user|>1+1=?<|assistant|>")["input_ids"])
    prompt = Prompt("a", {"uid": "a", "prompt": "1+1=?", "answer": "2"}, "", ids)
    shape = workflow_of(recipe, recipe.rollout.workflow, tokenizer, [prompt])
    engine = ConcurrentScriptedEngine(script, tokenizer) if concurrent else ScriptedEngine(script, tokenizer)
    sampling = recipe.rollout.model_copy(update={"max_new_tokens": 16})
    return generate_shaped(
        engine, shape, GenerationBatch([prompt], n, sampling, 1, [0]), group_stride=100, grade=lambda _: [], metrics={},
    )  # fmt: skip


def test_each_critique_is_a_row_with_its_prompt(home: Path) -> None:
    """An answer, three critiques of it and three refined answers: seven rows, and the prompt of each role."""
    tokenizer = models.load_tokenizer(load_dict(values_of(CRITIQUE), base_dir=home, where="test").recipe.model, home)
    written = iter(["3", "no", "yes", "so", "2", "3", "4"])
    found = generate(CRITIQUE, lambda *_: next(written), home)
    assert [r.call.role for r in found if r.call] == ["actor", *["critic"] * 3, *["refiner"] * 3]
    assert [r.call.calls[n].parent for n, r in enumerate(found) if r.call] == [None, 0, 0, 0, 1, 2, 3]
    assert [r.text for r in found] == ["3", "no", "yes", "so", "2", "3", "4"]
    assert [r.group for r in found] == [0, 100, 100, 100, 200, 200, 200], "by role, critiques by their answer"
    shown = tokenizer.decode(found[5].prompt.ids)
    assert "1+1=?" in shown and "Critique:\nyes" in shown and "Answer:\n3" in shown
    assert all(r.trajectory == 0 and r.logps == (-1.0,) * len(r.ids) for r in found)


def test_calls_are_grouped_by_role_and_prompt(home: Path) -> None:
    found = generate(CRITIQUE, {"a": ["7"]}, home, n=2)
    groups: dict[str, list[int]] = {}
    for rollout in found:
        assert rollout.call is not None
        groups.setdefault(rollout.call.role, []).append(rollout.group)
    assert {role: len(set(mine)) for role, mine in groups.items()} == {"actor": 1, "critic": 2, "refiner": 1}
    assert len({group for mine in groups.values() for group in mine}) == 4
    assert all(group % 100 == 0 for mine in groups.values() for group in mine), "all of the first prompt"


def test_untrained_roles_give_no_rows_and_are_reported(home: Path) -> None:
    found = generate({**CRITIQUE, "train": ["critic"]}, {"a": ["7"]}, home)
    assert [r.part for r in found] == [0, 1, 2]
    assert {len(r.call.calls) for r in found if r.call} == {7} and [r.call.number for r in found if r.call] == [1, 2, 3]


@pytest.mark.parametrize("concurrent", [False, True])
def test_reply_continues_the_same_row_and_is_not_trained_on(home: Path, concurrent: bool) -> None:
    """A user's workflow: a role with its own system message, a token limit, a note, and a turn after a reply."""
    tokenizer = models.load_tokenizer(load_dict(values_of(CRITIQUE), base_dir=home, where="test").recipe.model, home)
    first, second = generate("./flows.py:debate", lambda *_: "abcdef", home, concurrent=concurrent)
    assert first.call and second.call and (first.call.role, second.call.role) == ("pro", "con")
    assert first.text == "abcd" and first.finish == "length"
    assert tokenizer.decode(first.prompt.ids).endswith("<|user|>You are pro. Debate: 1+1=?<|assistant|>")
    assert "No.<|user|>abcd<|assistant|>" in tokenizer.decode(second.prompt.ids)
    said = second.call.calls[1]
    assert (said.parent, said.note, said.parts, said.shown) == (0, {"round": 1}, ("abcdef", "abc"), ("What else?",))
    assert [s.kind for s in second.segments] == ["model", "tool", "model"]
    assert tokenizer.decode(second.segments[1].ids) == "<|user|>What else?<|assistant|>"
    assert second.loss_mask == (True,) * 7 + (False,) * len(second.segments[1].ids) + (True,) * 3


def test_gathered_calls_are_recorded_in_order(home: Path) -> None:
    written = iter(["1", "2"])
    found = generate("./flows.py:gathered", lambda *_: next(written), home)
    assert [(r.call.role, r.text) for r in found if r.call] == [("left", "1"), ("right", "2")]


def test_rollout_ends_if_a_prompt_has_no_room(home: Path) -> None:
    """The refiner's prompt has the answer and the critique, the critic's only the answer: calls made before are
    rows.
    """
    found = generate({**CRITIQUE, "max_prompt_tokens": 150, "critic": "{answer}"}, {"a": ["7" * 9]}, home)
    assert [r.call.role for r in found if r.call] == ["actor", *["critic"] * 3]
    with pytest.raises(RecipeError, match=r"the prompt of the first call has \d+ tokens"):
        generate({"use": "./flows.py:debate", "max_prompt_tokens": 1, "words": "x" * 40}, {"a": ["7"]}, home)


def test_only_the_critic_is_trained_and_is_rewarded_for_the_refinement(
    ran: Callable[..., list[Values]], seen: Seen
) -> None:
    """Rows are critiques; each is compared with the critiques of the same answer; the reward reads the refined
    answer.
    """
    rewards = [{"use": "rewards.py:helped", "roles": ["critic"]}, {"use": "rewards.py:digits", "weight": 0}]
    metrics = ran(
        values_of({**CRITIQUE, "train": ["critic"]}, rewards=rewards, advantage={"use": "group", "scale": "none"})
    )
    assert any(row["grad_norm"] > 0 for row in metrics)
    assert all(row["roles/refiner/calls"] == 3.0 and row["roles/critic/reward"] is not None for row in metrics)
    assert any(row["roles/critic/advantages"] > 0 for row in metrics) and "roles/actor/reward" not in metrics[0]
    for rollouts, batch in zip(seen.rollouts, seen.batches, strict=True):
        assert len(rollouts) == 24 and {r.call.role for r in rollouts if r.call} == {"critic"}
        assert batch.roles == ("critic",) and batch.mask.sum() == sum(len(r.ids) for r in rollouts)
        for group in batch.group_ids.unique():
            mine = (batch.group_ids == group).nonzero()[:, 0].tolist()
            rewards_of = [rollouts[n].reward for n in mine]
            assert len(mine) == 3 and len({rollouts[n].trajectory for n in mine}) == 1
            for n, reward in zip(mine, rewards_of, strict=True):
                call = rollouts[n].call
                (after,) = [one for one in call.calls if one.parent == call.number]
                assert reward == pytest.approx(sum(c.isdigit() for c in after.text) / after.tokens)
                found = float(batch.advantages.reshape(len(batch), -1)[n].max())
                wanted = reward - sum(rewards_of) / 3
                assert found == pytest.approx(wanted, abs=1e-6) or float(batch.advantages[n].min()) == pytest.approx(
                    wanted, abs=1e-6
                )


def test_reward_reads_the_last_text_of_a_role(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """A critique is scored by the answer refined from it, the actor by the last answer of the rollout."""
    rewards = [{"use": "rewards.py:digits", "reads": "refiner", "correct": True}]
    ran(values_of({**CRITIQUE, "critiques": 2}, rewards=rewards, run={"steps": 1}))
    assert {r.call.role for r in seen.rollouts[0] if r.call} == {"actor", "critic", "refiner"}
    for rollout in seen.rollouts[0]:
        assert rollout.call is not None
        last = rollout.call.calls[{0: 4, 1: 3, 2: 4, 3: 3, 4: 4}[rollout.call.number]]
        assert rollout.reward == pytest.approx(sum(c.isdigit() for c in last.text) / last.tokens)


def test_deferred_calls_are_trained_on_in_a_later_step(
    ran: Callable[..., list[Values]], home: Path, seen: Seen
) -> None:
    """Calls of a late role are not rows of their step: in the next step, three of them are added, with the
    advantages 1, 0 and -1 that `learn` assigned and with their log-probs from sampling; solvers are shown the
    newest.
    """
    metrics = ran(values_of(NOTES))
    assert [row["notes/known"] for row in metrics] == [0, 3, 3] and all(row["grad_norm"] > 0 for row in metrics)
    first, second, _ = seen.batches
    assert first.replayed is None and first.roles == ("solver",) and len(first) == 8
    assert second.replayed is not None and second.replayed.tolist() == [False] * 8 + [True] * 3
    assert second.advantages is not None and second.advantages[8:].tolist() == [1.0, 0.0, -1.0]
    assert second.old_logp is not None and second.rollout_logp is not None
    assert second.old_logp[8:][second.mask[8:]].tolist() == pytest.approx(
        second.rollout_logp[8:][second.mask[8:]].tolist()
    )
    assert (second.versions[8:] == 0)[second.mask[8:]].all() and (second.versions[:8] == 1)[second.mask[:8]].all()
    kept = json.loads((home / "run" / "summary.json").read_text())["ledger"]["tokens"]["kept"]
    assert 0 < kept <= 3 * 8 * 5, "writers' tokens, at most five a call"
    newest = [r.call.calls[1].text for r in seen.rollouts[0] if r.call][-1]
    assert all(newest in r.prompt.text for r in seen.rollouts[1] if r.call), "as the first step ended"


@pytest.mark.parametrize(("name", "message"), [("Forgetful", "a class without `learn`")])
def test_class_without_learn_is_refused(home: Path, cli: Any, name: str, message: str) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(f"./flows.py:{name}")))
    with pytest.raises(BaseException, match=message):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


@pytest.mark.parametrize("staleness", [0, 1])
def test_workflow_memory_is_resumed(ran: Callable[..., list[Values]], home: Path, staleness: int) -> None:
    correct = {"corrections": [{"use": "tis"}]} if staleness else {}
    values = values_of(NOTES, rollout={"staleness": staleness}, **correct)
    whole = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in ran(values)]
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    again = ran(values, "run", "--resume")
    assert [{k: v for k, v in row.items() if not k.startswith("time/")} for row in again] == whole
    assert whole[-1]["notes/known"] == 3


@pytest.mark.parametrize("staleness", [0, 1])
def test_run_with_workflow_resumes_exactly(ran: Callable[..., list[Values]], home: Path, staleness: int) -> None:
    """With staleness, the rows of the next steps are in the checkpoint, with their roles."""
    correct = {"corrections": [{"use": "tis"}]} if staleness else {}
    rewards = [{"use": "rewards.py:helped", "roles": ["critic"]}, {"use": "rewards.py:digits", "roles": ["actor"]}]
    values = values_of({**CRITIQUE, "train": ["critic", "actor"]}, rollout={"staleness": staleness}, **correct)
    whole = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in ran({**values, "rewards": rewards})]
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    again = ran({**values, "rewards": rewards}, "run", "--resume")
    assert [{k: v for k, v in row.items() if not k.startswith("time/")} for row in again] == whole


def test_plan_counts_the_workflow_calls(home: Path, cli: Any) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(CRITIQUE)))
    assert re.search(r"rows of a rollout that fills its limits\s+7", cli.run("plan", str(home / "run.yaml")))


def test_data_inspect_shows_the_prompt_of_each_role(home: Path, cli: Any) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of({**CRITIQUE, "train": ["critic", "refiner"]})))
    shown = cli.run("data", "inspect", str(home / "run.yaml"), "--rows", "1")
    assert "critic: " in shown and "Here is a problem and somebody's answer." in shown
    assert "refiner: " in shown and "actor: " not in shown
    assert "critique_refine: actor, critic, refiner; trained on: critic, refiner" in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fails", "flows.py:.*TypeError: unsupported operand"),
        ("silent", "made no call"),
        ("badly_named", "calls the role 'the solver'"),
        ("no_coroutine", "is no coroutine function"),
    ],
)
def test_invalid_workflow_is_named(home: Path, cli: Any, name: str, message: str) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(f"./flows.py:{name}")))
    with pytest.raises(BaseException, match=message):
        cli.run("rl", str(home / "run.yaml"), "--output", str(home / "run"))


@pytest.mark.parametrize(
    ("workflow", "changes", "message"),
    [
        ({**CRITIQUE, "train": ["critc"]}, {}, "(?s)calls no `critc`.*did you mean `critic`"),
        (CRITIQUE, {"rewards": [{"use": "math.accuracy", "roles": ["actor"]}]}, "no reward is for them"),
        (CRITIQUE, {"rewards": [{"use": "math.accuracy", "reads": "judge"}]}, "calls no `judge`"),
        (
            {**CRITIQUE, "train": ["critic"]},
            {"rewards": [{"use": "math.accuracy"}, {"use": "length.cosine", "roles": ["actor"]}]},
            "no call of actor is trained on",
        ),
        (None, {"rewards": [{"use": "math.accuracy", "roles": ["actor"]}]}, "does nothing without `rollout.workflow`"),
        (CRITIQUE, {"advantage": "from_role"}, "calls no `planner`"),
        (CRITIQUE, {"tools": [{"use": "calculator"}]}, "a rollout continues with their replies"),
        (CRITIQUE, {"replay": "success"}, r"rollout of several rows \(`rollout.shape`, `rollout.workflow`\)"),
        (CRITIQUE, {"rollout": {"max_gen_batches": 2}, "keep": "mixed"}, "are roles, and refilling counts prompts"),
        (CRITIQUE, {"rollout": {"shape": {"use": "serial_exit"}}}, "each decide what a rollout is"),
    ],
)
def test_unsupported_combinations_are_refused_with_the_reason(
    home: Path, workflow: Any, changes: Values, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        load_dict(values_of(workflow, **changes), base_dir=home, where="test")


def test_planner_advantage_applies_to_all_calls_of_its_rollout() -> None:
    """Two rollouts of a prompt, planners with rewards 1 and 0: +-1/2 over the std of 1/sqrt 2, also for executors,
    of which the first rollout has two; a third rollout has no planner.
    """
    batch = RolloutBatch(
        group_ids=torch.tensor([0, 1, 1, 1, 0, 1]),
        mask=torch.ones(6, 2, dtype=torch.bool),
        rewards=torch.tensor([1.0, 9.0, -9.0, 5.0, 0.0, 7.0], dtype=torch.float64),
        trajectory_ids=torch.tensor([4, 4, 4, 6, 5, 5]),
        step_ids=torch.tensor([0, 1, 2, 0, 0, 1]),
        agent_ids=torch.tensor([1, 0, 0, 0, 1, 0]),
        roles=("executor", "planner"),
    )
    half = 0.5**0.5
    found = normalize_role_calls(batch, eps=0.0)
    assert found.tolist() == pytest.approx([half, half, half, 0.0, -half, -half])
    with pytest.raises(UserError, match="no call of a role `judge`"):
        normalize_role_calls(batch, role="judge")


def test_latex_braces_are_preserved_in_a_prompt() -> None:
    assert fill(r"\frac{1}{2} {answer} {x}", answer=r"\boxed{ {x} }", x="7") == r"\frac{1}{2} \boxed{ {x} } 7"


def test_workflow_can_await_other_things_than_the_engine(home: Path) -> None:
    (home / "waits.py").write_text(
        "import asyncio\nasync def waits(row, call):\n    await asyncio.sleep(0.01)\n    await call('one')\n"
    )
    assert [r.text for r in generate("./waits.py:waits", {"a": ["7"]}, home, n=3)] == ["7"] * 3

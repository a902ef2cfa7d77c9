"""Published systems of several roles through the command line on `tiny`, three steps each, with scripted texts that
trigger the central mechanism: prompts, refusals, rewards and advantages by role.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from posttrain.batch import Rollout, RolloutBatch
from posttrain.train import assemble, rl
from tests.scripted_engines import ScriptedEngine

pytestmark = pytest.mark.slow
Values = dict[str, Any]
Told = Callable[[str, int], str]  # (prompt text, number of earlier requests with this kind of prompt) -> completion
DOCUMENTS = ["Oslo lies in Norway.", "Bergen lies in Norway too.", "Rome lies in Italy.", "Bonn lies on the Rhine."]
ROWS = [{"prompt": f"{i}+{i}=?", "answer": str(2 * i)} for i in range(2, 10)]
CITIES = [{"prompt": "Where does Oslo lie?", "answer": "Norway", "documents": DOCUMENTS} for _ in range(8)]


class Run:
    """Training rows and metrics of three steps of a preset."""

    def __init__(self) -> None:
        self.metrics: list[Values] = []
        self.rollouts: list[list[Rollout]] = []
        self.batches: list[RolloutBatch] = []

    def rows(self, step: int) -> list[tuple[Rollout, float]]:
        """Return (rollout, its advantage) of a step."""
        batch = self.batches[step]
        assert batch.advantages is not None
        values = batch.advantages.reshape(len(batch), -1)
        return [(r, float(values[n][values[n].abs().argmax()])) for n, r in enumerate(self.rollouts[step])]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, cli: Any, tmp_path: Path) -> Callable[..., Run]:
    """Factory of runs: three steps of `algorithm: NAME` on the rows. told: words of a prompt -> its completion."""

    def start(name: str, rows: list[Values], told: Mapping[str, Told], **changes: Any) -> Run:
        found, update, batch_of = Run(), rl.update, rl.batch_of

        def make_engine(_: Any, loaded: Any, **__: Any) -> ScriptedEngine:
            counts = {words: itertools.count() for words in told}

            def script(prompt: Any, sample: int) -> str:
                del sample
                text = loaded.tokenizer.decode(list(prompt.ids))
                words = next(words for words in told if words in text)
                return told[words](text, next(counts[words]))

            return ScriptedEngine(script, loaded.tokenizer, window=2048)

        def batched(ctx: Any, rollouts: list[Rollout], state: Any) -> RolloutBatch:
            found.rollouts.append(list(rollouts))
            return batch_of(ctx, rollouts, state)

        def updated(ctx: Any, batch: RolloutBatch, sequences: Any, *rest: Any) -> Any:
            found.batches.append(batch.to("cpu"))
            return update(ctx, batch, sequences, *rest)

        monkeypatch.setattr(assemble, "make_engine", make_engine)
        monkeypatch.setattr(rl, "batch_of", batched)
        monkeypatch.setattr(rl, "update", updated)
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        rollout = {"prompts_per_step": 2, "max_new_tokens": 200, **changes.pop("rollout", {})}
        values: Values = {
            "stage": "rl",
            "algorithm": name,
            "model": {"path": "tiny"},
            "data": {"source": "rows.jsonl"},
            "rollout": rollout,
            "scoring": {"workers": 1},
            "optim": {"lr": 1e-3},
            "run": {"steps": 3, "samples_per_step": 40},
            **changes,
        }
        rollout.setdefault("workflow", {})["max_prompt_tokens"] = 1500
        (tmp_path / "r.yaml").write_text(json.dumps(values))
        cli.run("rl", str(tmp_path / "r.yaml"), "--output", str(tmp_path / "run"))
        found.metrics = cli.rows_of(tmp_path / "run")
        assert len(found.metrics) == 3 and any(row["grad_norm"] > 0 for row in found.metrics)
        return found

    return start


def numbers(*values: str) -> Told:
    """Return these texts one after the other."""
    return lambda _, n: values[n % len(values)]


def test_critics_are_rewarded_for_the_refined_answer(run: Callable[..., Run]) -> None:
    """Critique-RL: right answers of the actor are judged; a right verdict is 0.2 + 1 if the refined answer is right.

    Only critiques are trained on, each compared with those of the same answer.
    """
    told = {
        "Solve the problem again": numbers(*(f"<answer>{n}</answer>" for n in (4, 0, 4, 4, 0))),
        "Check the answer": numbers(
            *(f"Correctness of the final answer: {word}" for word in ("Correct", "Wrong", "Correct"))
        ),
        "+": numbers("<answer>4</answer>"),
    }
    rows = [{"prompt": "2+2=?", "answer": "4"}] * 4
    found = run("critique_rl", rows, told, rewards=[{"use": "roles.critique", "roles": ["critic"]}])
    for step, metrics in enumerate(found.metrics):
        assert metrics["roles/refiner/calls"] == 4.0 and "roles/refiner/reward" not in metrics
        assert {r.call.role for r, _ in found.rows(step) if r.call} == {"critic"}
        assert {1.2, -1.0} <= {r.reward for r, _ in found.rows(step)} <= {1.2, 0.2, -1.0}
        assert all(advantage >= 0 for r, advantage in found.rows(step) if r.reward == 1.2)
        assert all(advantage < 0 for r, advantage in found.rows(step) if r.reward == -1.0)
        assert {len({r.group for r, _ in found.rows(step)})} == {2}, "one for each answer"


def test_rejected_solver_retries_and_advantages_are_by_role(run: Callable[..., Run]) -> None:
    """Dr. MAS: every call of a rollout gets the correctness of the last answer."""
    told = {
        "Is the solution right?": numbers("Verdict: reject", "Verdict: approve", "Verdict: approve"),
        "A verifier has rejected it": lambda text, n: (
            f"\\boxed{{{sum(map(int, text.split('+')[0][-1:])) * 2 - n % 2}}}"
        ),
        "=?": numbers("\\boxed{1}"),
    }
    found = run("dr_mas", ROWS, told, rewards=[{"use": "math.accuracy", "reads": "solver"}])
    for step, metrics in enumerate(found.metrics):
        assert 1 < metrics["roles/solver/calls"] < 2
        by_trajectory: dict[Any, set[Any]] = {}
        groups: dict[int, set[str]] = {}
        for rollout, _ in found.rows(step):
            assert rollout.call is not None
            by_trajectory.setdefault(rollout.trajectory, set()).add(rollout.reward)
            groups.setdefault(rollout.group, set()).add(rollout.call.role)
        assert all(len(rewards) == 1 for rewards in by_trajectory.values())
        assert all(len(roles) == 1 for roles in groups.values()) and len(groups) == 4
    assert {r.reward for step in range(3) for r, _ in found.rows(step)} == {0.0, 1.0}


def test_executors_get_the_advantage_of_their_planner(run: Callable[..., Run]) -> None:
    """CoDA: tasks run in separate contexts, with searches; the planner sees only the answers."""
    told = {
        "[1]": numbers("<refine>Norway</refine><answer>Norway</answer>"),
        "Do the task": numbers("<think>x</think><search>Oslo</search>"),
        "giving tasks": lambda text, n: (
            f"<think>y</think><answer>{('Norway', 'Rome')[n % 2]}</answer>"
            if text.count("<task>") > 1
            else "<think>x</think><task>Where is Oslo?</task>"
        ),
    }
    found = run("coda", CITIES, told, rewards=[{"use": "roles.planner_executors"}], rollout={"group_size": 4})
    for step in range(3):
        rows = found.rows(step)
        planners = {r.trajectory: a for r, a in rows if r.call and r.call.role == "planner"}
        executors = [(r, a) for r, a in rows if r.call and r.call.role == "executor"]
        assert len(planners) == 8 and len(executors) == 8 and len({round(a, 4) for a in planners.values()}) == 2
        for rollout, advantage in executors:
            assert advantage == pytest.approx(planners[rollout.trajectory])
            assert [s.kind for s in rollout.segments] == ["model", "tool", "model"]
            assert rollout.call and rollout.call.calls[1].shown[0].startswith("[1] Oslo lies in Norway.")
            assert rollout.call.calls[0].shown == ("Norway",)
        assert all(metrics["rewards/planner_executors/refine/mean"] == 1.0 for metrics in found.metrics)


def test_generator_and_critic_split_the_reward(run: Callable[..., Run]) -> None:
    """RLAC: only the named check is run; a critic that names an unknown check gets nothing."""
    checks = [{"text": "It greets.", "pattern": "hello"}, {"text": "It has a number.", "pattern": "[0-9]"}]
    rows = [{"prompt": f"Write to {name}.", "checks": checks} for name in ("Ann", "Bob", "Cy", "Di")]
    told = {
        "Which check does the output fail?": numbers(*(f"<failure>{n}</failure>" for n in (1, 2, 7))),
        "Write to": numbers("hello", "7", "hello 7"),
    }
    found = run("rlac", rows, told, rewards=[{"use": "roles.adversary"}])
    seen = set()
    for step in range(3):
        rows_ = found.rows(step)
        for rollout, _ in rows_:
            assert rollout.call is not None
            critics = [r for r, _ in rows_ if r.trajectory == rollout.trajectory and r.call and r.call.role == "critic"]
            if rollout.call.role == "generator":
                assert rollout.reward == pytest.approx(1 - sum(r.reward or 0.0 for r in critics) / 2)
                seen.add(rollout.reward)
        assert {r.call.role for r, a in rows_ if r.call and a} == {"generator", "critic"}, "both are trained"
    assert len(seen) > 1


def test_trace_below_the_threshold_is_cut_and_continued(run: Callable[..., Run]) -> None:
    """Search-R2: the trimmer names step 2, so the search of step 1 and its results stay and are not trained on
    again; all three roles get the reward of the last trace.
    """
    told = {
        "first bad one": numbers("<step>2</step>"),
        "Does it hold together": numbers("<score>0.2</score>", "<score>0.9</score>"),
        "[1]": numbers("<answer>Rome</answer>", "<answer>Norway</answer>", "<answer>Norway</answer>"),
        "Answer the question": numbers("<search>Oslo</search>"),
    }
    found = run("search_r2", CITIES, told, rewards=[{"use": "qa.search_r2", "reads": "actor"}])
    cut = 0
    for step in range(3):
        by_trajectory: dict[Any, set[Any]] = {}
        for rollout, _ in found.rows(step):
            assert rollout.call is not None
            by_trajectory.setdefault(rollout.trajectory, set()).add(rollout.reward)
            said = rollout.call.calls[rollout.call.number]
            if said.role == "actor" and said.parent is not None:
                cut += 1
                assert rollout.call.calls[said.parent].role == "trimmer"
                assert [s.kind for s in rollout.segments] == ["injected", "injected", "model"]
                assert said.parts[0] == "<search>Oslo</search>" and len(said.shown) == 1
        assert all(len(rewards) == 1 for rewards in by_trajectory.values())
    rewards = {r.reward for step in range(3) for r, _ in found.rows(step)}
    assert cut > 3 and 0.0 in rewards and max(rewards) > 1.0, "a right answer earns more than 1 for what was found"


def test_proposed_question_is_checked_before_it_is_solved(run: Callable[..., Run]) -> None:
    """Search self-play: a question that contains its answer, and one after a single search, are refused, and the
    proposer gets the penalty; an accepted question is solved three times, and the proposer gets the share of
    failures.
    """
    good = "<question>In which country of Europe does the city of Oslo lie today, please?</question>"
    bad = "<question>Is Norway the country in which the old city of Oslo lies?</question>"

    def propose(text: str, n: int) -> str:
        if text.count("<|assistant|>") < 3:
            return f"<search>{('Oslo', 'lies')[text.count('[1]')]}</search>"
        return (good, bad, good, good)[n % 4]

    told = {
        "Answer the question by the passages": numbers("<answer>Norway</answer>", "<answer>Norway</answer>", "no"),
        "Write a question whose answer is": propose,
        "Question: In which country": numbers("<answer>Norway</answer>", "<answer>Rome</answer>", "I do not know"),
    }
    rewards = [
        {"use": "roles.proposer", "roles": ["proposer"], "params": {"format_penalty": -1.0}},
        {"use": "roles.right_answer", "roles": ["solver"]},
    ]
    workflow = {"use": "proposer_solver", "solvers": 3, "train": ["proposer", "solver"], "pool": 0}
    found = run(
        "search_self_play", CITIES, told, rewards=rewards, rollout={"prompts_per_step": 4, "workflow": workflow}
    )
    refused, accepted = set(), 0
    for step in range(3):
        for rollout, advantage in found.rows(step):
            assert rollout.call is not None and rollout.call.role != "checker"
            said = rollout.call.calls[rollout.call.number]
            if said.role != "proposer":
                continue
            assert advantage == pytest.approx(rollout.reward), "REINFORCE: it stands alone in its group"
            solvers = [one for one in rollout.call.calls if one.role == "solver"]
            if said.note["refused"]:
                refused.add(said.note["refused"])
                assert rollout.reward == -1.0 and not solvers
            else:
                accepted += 1
                assert len(solvers) == 3 and 0 <= (rollout.reward or 0) <= 1
    assert {"holds its answer", "cannot be answered"} <= refused and accepted > 2


def test_solvers_get_an_earlier_question_if_one_is_refused(run: Callable[..., Run]) -> None:
    """Search self-play: the second step refuses everything.

    Its solvers get the question accepted in the first step, with the documents and the answer of that row; the
    proposer gets only the penalty. Once the pool is empty there are no solver calls.
    """
    good = "<question>In which country of Europe does the city of Oslo lie today, please?</question>"

    def propose(text: str, _: int) -> str:
        if text.count("<|assistant|>") < 3:
            return f"<search>{('Oslo', 'lies')[text.count('[1]')]}</search>"
        return good if "answer is: Norway" in text else "<question>Where?</question>"

    told = {
        "Answer the question by the passages": numbers("<answer>Norway</answer>"),
        "Write a question whose answer is": propose,
        "Question: In which country": numbers(*(f"<answer>{land}</answer>" for land in ("Norway", "Italy", "Italy"))),
    }
    italy = {"prompt": "Where does Rome lie?", "answer": "Italy", "documents": DOCUMENTS}
    workflow = {"use": "proposer_solver", "solvers": 4, "train": ["proposer", "solver"], "pool_steps": 2}
    changes = {
        "rollout": {"prompts_per_step": 2, "workflow": workflow},
        "data": {"source": "rows.jsonl", "shuffle": False},
    }
    rewards = [
        {"use": "roles.proposer", "roles": ["proposer"], "params": {"format_penalty": -1.0}},
        {"use": "roles.solver", "roles": ["solver"]},
    ]
    found = run("search_self_play", [*CITIES[:2], *[italy] * 4], told, rewards=rewards, **changes)
    assert [row["pool/asked"] for row in found.metrics] == [0, 2, 0]
    assert [row["pool/questions"] for row in found.metrics] == [2, 0, 0]
    proposers = [r.reward for r, _ in found.rows(1) if r.call and r.call.role == "proposer"]
    solvers = [(r, a) for r, a in found.rows(1) if r.call and r.call.role == "solver"]
    assert proposers == [-1.0, -1.0] and len(solvers) == 8
    assert {r.reward for r, _ in solvers if "Norway" in r.text} == {1.0}, "by the answer of the row that it came from"
    assert {r.reward for r, _ in solvers if "Italy" in r.text} == {0.0} and any(a for _, a in solvers)
    assert {r.call.role for r, _ in found.rows(2) if r.call} == {"proposer"}


def test_policy_is_trained_as_judge_and_scored_by_its_judgements(run: Callable[..., Run]) -> None:
    """URPO: three kinds of rows in a step.

    A judgement of candidates gets its rank agreement, a verifiable answer 1 or 0, an open answer the policy's score
    / 10, from the second step on.
    """
    rows: list[Values] = [
        {"prompt": "2+2=?", "answer": "4", "candidates": None, "scores": None},
        {"prompt": "Which is best?", "answer": None, "candidates": ["good", "fair", "bad"], "scores": [3, 2, 1]},
        {"prompt": "Tell me something.", "answer": None, "candidates": None, "scores": None},
    ]

    def judge(_: str, n: int) -> str:
        order = (9, 5, 1) if n % 2 else (1, 5, 9)
        return "\n".join(f"{i}: <score>{score}</score>" for i, score in enumerate(order, 1))

    told = {
        "How good is each answer": judge,
        "2+2": numbers("<answer>4</answer>", "<answer>5</answer>"),
        "": numbers("a", "b", "c"),
    }
    rewards = [{"use": "roles.self_judged", "params": {"warmup": 1}}]
    workflow = {"use": "self_judge", "samples": 3}
    found = run("urpo", rows, told, rewards=rewards, rollout={"prompts_per_step": 3, "workflow": workflow})
    for step in range(3):
        earned: dict[str, list[Any]] = {}
        for rollout, _ in found.rows(step):
            assert rollout.call is not None
            kind = str(rollout.prompt.row["prompt"])[:5]
            earned.setdefault(f"{kind} {rollout.call.role}", []).append(rollout.reward)
        assert set(earned["2+2=? player"]) == {0.0, 1.0}
        assert set(earned["Which judge"]) == {1.0, -1.0}
        assert sorted(earned["Tell  player"], key=str) == ([None] * 3 if step == 0 else [0.1, 0.5, 0.9])
        assert earned["Tell  judge"] == [None]


def test_filler_lowers_the_reward_and_all_three_roles_are_trained(run: Callable[..., Run]) -> None:
    """SCMA: half of the thought has score 1, so the right answer gets 1 - 0.2 * that share; if the segmenter has
    changed the text, nothing is subtracted.
    """
    thought = "Hm, let me see. It is \\boxed{4}"
    told = {
        "How important is each segment": numbers("1: <score>1</score>\n2: <score>5</score>"),
        "Cut the following text": numbers("Hm, let me see. <seg>It is \\boxed{4}", "Hm. <seg>It is \\boxed{4}"),
        "+": numbers(thought, thought, "\\boxed{5}"),
    }
    found = run("scma", [{"prompt": "2+2=?", "answer": "4"}] * 4, told, rewards=[{"use": "roles.segment_importance"}])
    whole = len("Hm, let me see. ") / len(thought)
    for step in range(3):
        assert sorted({r.reward for r, _ in found.rows(step)}) == pytest.approx([0.0, 1 - 0.2 * whole, 1.0])
        trained = {r.call.role for r, a in found.rows(step) if r.call and a}
        assert trained == {"reasoner", "segmenter", "scorer"}


def test_lesson_is_shown_and_its_writer_is_rewarded_for_its_effect(run: Callable[..., Run]) -> None:
    """Complementary RL: plain attempts are sometimes right.

    Attempts that see the good lesson are right, so its writer has the advantage 1 in the step that shows it, and (1
    + 1)^-1/2 in the next. Guided and plain attempts are each compared only with their own kind.
    """
    told = {
        "Which lesson would help": numbers("<add>Add the digits, then carry.</add>"),
        "What was learnt": numbers("\\boxed{8}"),
        "=?": numbers(*(f"\\boxed{{{n}}}" for n in (8, 0, 0, 0, 8, 0, 0))),
    }
    rows = [{"prompt": f"{'4 + 4'}=?{' ' * n}", "answer": "8"} for n in range(6)]
    found = run("complementary_rl", rows, told, rewards=[{"use": "math.accuracy"}])
    assert [row["experience/shown"] for row in found.metrics] == [0, 8, 8]
    assert "roles/guided/reward" not in found.metrics[0] and found.metrics[1]["roles/guided/reward"] == 1.0
    paid = []
    for step in range(1, 3):
        rows_ = found.rows(step)
        of_role = {name: [(r, a) for r, a in rows_ if r.call and r.call.role == name] for name in ("actor", "guided")}
        assert all(a == 0 for _, a in of_role["guided"]), "all are right"
        for rollout, advantage in of_role["actor"]:
            own = [r.reward or 0.0 for r, _ in of_role["actor"] if r.group == rollout.group]
            assert len(own) == 4 and advantage == pytest.approx((rollout.reward or 0.0) - sum(own) / 4)
        assert all("Add the digits, then carry." in r.prompt.text for r, _ in of_role["guided"])
        batch, count = found.batches[step], len(rows_)
        assert batch.replayed is not None and batch.advantages is not None
        paid.append([round(a, 4) for a in batch.advantages[count:].tolist()])
    assert (
        paid[0]
        and set(paid[0]) == {1.0}
        and set(paid[1]) <= {1.0, round(0.5**0.5, 4)}
        and round(0.5**0.5, 4) in paid[1]
    )


def test_refused_passages_leave_the_context_but_stay_in_the_record(run: Callable[..., Run]) -> None:
    """ReSeek: the first search finds nothing useful and is refused.

    The second row has a sentence in its place, nothing of the first is trained on twice, and the reward still sees
    both judgements: 1 + 0.1 + 0.02 if the answer is right, -0.025 + 0.02 if it is wrong.
    """
    told = {
        "Norway": numbers("<judge>Yes</judge><answer>Norway</answer>", "<judge>Yes</judge><answer>Italy</answer>"),
        "Bonn lies": numbers("<judge>No</judge> Again: <search>Oslo</search>"),
        "Question: Where does": numbers("<search>Rhine</search>"),
    }
    rewards = [{"use": "qa.reseek", "reads": "searcher", "correct": True}]
    rows = [{**row, "documents": [DOCUMENTS[0], *DOCUMENTS[2:]]} for row in CITIES]
    found = run("reseek", rows, told, rewards=rewards, rollout={"group_size": 2})
    for step in range(3):
        by_rollout: dict[Any, list[tuple[Rollout, float]]] = {}
        for rollout, advantage in found.rows(step):
            by_rollout.setdefault(rollout.trajectory, []).append((rollout, advantage))
        assert len(by_rollout) == 4
        for (first, a), (second, b) in by_rollout.values():
            assert [s.kind for s in first.segments] == ["model", "tool", "model"]
            assert [s.kind for s in second.segments] == ["injected"] * 3 + ["tool", "model"]
            assert second.segments[0].ids == first.segments[0].ids and second.segments[2].ids == first.segments[2].ids
            assert second.segments[1].ids != first.segments[1].ids
            assert second.call and second.call.calls[1].shown == (
                "[1] Bonn lies on the Rhine.",
                "[1] Oslo lies in Norway.",
            )
            right = "<answer>Norway" in second.text
            assert first.reward == second.reward == pytest.approx(1.12 if right else -0.005)
            assert a == b and (a == 0 or (a > 0) is right)
    assert {a > 0 for step in range(3) for _, a in found.rows(step)} == {True, False}

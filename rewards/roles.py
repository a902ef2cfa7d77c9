"""Rewards of calls by role: for `rollout.workflow`. Each reads who said what from the argument `workflow`.

rewards:
  - {use: roles.right_answer, roles: [solver]}              # maths or words; the others judge answers by it
  - {use: roles.critique, roles: [critic]}                  # workflow critique_refine: verdict and refined answer
  - {use: roles.proposer, roles: [proposer]}                # proposer_solver: how often the solvers fail
  - {use: roles.solver, roles: [solver]}                    # the same: by the answer of the question that was asked
  - {use: roles.adversary}                                  # generator_critic: the named check, column `checks`
  - {use: roles.self_judged}                                # self_judge: by the policy's own judgement
  - {use: roles.planner_executors}                          # planner_executors: answer, form and refined passages
  - {use: roles.segment_importance}                         # segment_scores: filler of the thought
  - {use: roles.won}                                        # werewolf: whether the speaker's side won

Without a workflow, as for held-out prompts, all but the first are None.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from posttrain.verify import efficiency, math, self_play
from posttrain.verify import reasoning as pure
from posttrain.verify.agents import planner_executor_reward
from posttrain.verify.code import passes, program_in
from posttrain.verify.code_tests import read_test
from posttrain.verify.extract import Extractor, after_think, last_tag
from posttrain.verify.extract import extract as find_answer
from posttrain.verify.text import golds_of
from posttrain.verify.workflow import Workflow

EXTRACT: tuple[Extractor, ...] = ("answer_tag", "boxed", "last_number")


def right_answer(completion: str, answer: Any, *, extract: Sequence[Extractor] = EXTRACT) -> float | None:
    """1 if the answer that `extract` finds first is the gold, as the maths verifier sees it or, of words, by exact
    match; else 0. None without a gold. The other rewards of this file call an answer right by the same rule."""
    golds = golds_of(answer)
    if not golds:
        return None
    found = find_answer(after_think(completion), extract)
    return float(found is not None and found != "" and pure.same_maths(found, golds))


def critique(
    completion: str,
    workflow: Workflow,
    answer: Any,
    *,
    discrimination: Sequence[float] = (0.2, -1.0),
    refine_values: Sequence[float] = (1.0, 0.0, 1.0, 0.0),
    extract: Sequence[Extractor] = EXTRACT,
) -> dict[str, float | None] | None:
    """Of a critique in `critique_refine`: its verdict and the answer refined by it (Critique-RL, stage 2).

    A wrong or missing verdict earns discrimination[1]; else discrimination[0] + refine_values of the original and the
    refined answer: both right, only the original, only the refined, neither. None without a gold, and of other roles.
    Logged parts: judged_right, original, refined.
    """
    original = workflow.parent
    if workflow.mine.role != "critic" or original is None:
        return None
    right = right_answer(original.text, answer, extract=extract)
    refined = [right_answer(one.text, answer, extract=extract) or 0.0 for one in workflow.children("refiner")]
    if right is None:
        return None
    after = sum(refined) / len(refined) if refined else None
    found = pure.critique(completion, right, after, stage=2, discrimination=discrimination, refine_values=refine_values)
    return {
        "reward": found["reward"],
        "judged_right": float(found["judged_right"]),
        "original": right,
        "refined": after,
    }


def proposer(
    completion: str,
    workflow: Workflow,
    answer: Any,
    *,
    mode: Literal["one_minus_acc", "intermediate", "format_only"] = "one_minus_acc",
    format_penalty: float = 0.0,
    left: float = 0.0,
    right: float = 1.0,
    extract: Sequence[Extractor] = EXTRACT,
) -> dict[str, float] | None:
    """Of a question in `proposer_solver`: how often its solvers fail (search self-play, 2510.18821).

    With s the share of right solvers: one_minus_acc 1 - s; intermediate 4 (left + s)(right - s) for 0 < s < 1, else 0;
    format_only 1. A refused question earns format_penalty. None of other roles. Logged parts: refused, success.
    """
    if workflow.mine.role != "proposer":
        return None
    solvers = workflow.children("solver")
    scores = [right_answer(one.text, answer, extract=extract) or 0.0 for one in solvers]
    asked = not workflow.mine.note.get("refused", "not asked") and bool(solvers)
    found = self_play.score_proposals(
        [scores], [asked], mode=mode, format_penalty=format_penalty, left=left, right=right
    )
    return {
        "reward": found.proposer_rewards[0],
        "refused": float(not asked),
        "success": found.success_rate[0] if asked else 0.0,
    }


def solver(completion: str, workflow: Workflow, answer: Any, *, extract: Sequence[Extractor] = EXTRACT) -> float | None:
    """Of a solver in `proposer_solver`: `right_answer`, where the gold of an earlier question is that of its own row
    (the call's note `answer`). None of other roles and without a gold."""
    if workflow.mine.role != "solver":
        return None
    return right_answer(completion, workflow.mine.note.get("answer", answer), extract=extract)


def adversary(
    completion: str,
    workflow: Workflow,
    checks: Sequence[Mapping[str, Any]] | None,
    *,
    timeout_s: float = 5.0,
    memory_mb: int = 512,
    allow_unsandboxed: bool = False,
) -> dict[str, float] | None:
    """Of a generator and the critics that name a check which its output fails: RLAC (2511.01758).

    Column `checks`: {"text", "pattern"} (a regular expression that the output must match somewhere) or {"text",
    "input", "output"} (what the output's last Python block must print). An output that survives the named check earns
    1, else the critic; the generator gets the mean over its critics. A critic that names no check earns 0. None without
    checks and of other roles. Logged part: checkable.
    """
    role = workflow.mine.role
    output = workflow.mine if role == "generator" else workflow.parent
    if not checks or output is None or role not in ("generator", "critic"):
        return None
    critics = [workflow.mine] if role == "critic" else workflow.children("critic")
    if not critics:
        return None
    named = [_named_check(one.answer, checks) for one in critics]
    limits = {"seconds": timeout_s, "memory_mb": memory_mb, "allow_unsandboxed": allow_unsandboxed}
    passed = [0.0 if check is None else float(_survives(output.answer, check, limits)) for check in named]
    valid = [float(check is not None) for check in named]
    found = self_play.adversarial_rewards([passed], [valid])
    side = found.generator[0] if role == "generator" else found.critic[0]
    return {"reward": sum(side) / len(side), "checkable": sum(valid) / len(valid)}


def _named_check(text: str, checks: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The check whose number a critic names last; None if there is none of that number."""
    found = last_tag(text, "failure") or ""
    number = int(found) if re.fullmatch(r"\s*\d{1,4}\s*", found) else 0
    return checks[number - 1] if 1 <= number <= len(checks) else None


def _survives(output: str, check: Mapping[str, Any], limits: Mapping[str, Any]) -> bool:
    if "pattern" in check:
        return re.search(check["pattern"], output) is not None
    program = program_in(output)
    return program is not None and passes(program, read_test(check), **limits)


def self_judged(
    completion: str,
    workflow: Workflow,
    step: int,
    answer: Any = None,
    scores: Sequence[float] | None = None,
    *,
    warmup: int = 50,
    extract: Sequence[Extractor] = EXTRACT,
) -> float | None:
    """Of a policy that answers and judges in `self_judge`: URPO (2507.17515), rebuilt from its abstract.

    Judgements of a row's candidates: Kendall's tau with the gold order of column `scores`. Answers of a row with
    `answer`: 1 if right, else 0. Answers of other rows: the policy's own score / 10, from step `warmup` on; None before
    it, and where a score cannot be read. None for such a row's judgement.
    """
    role = workflow.mine.role
    if role == "judge":
        return None if not scores else _self_judged_rewards(workflow.mine.note, scores).judge_rewards[0]
    if role != "player":
        return None
    if answer is not None:
        return right_answer(completion, answer, extract=extract)
    judge = workflow.last("judge")
    if judge is None or step < warmup or None in judge.note["scores"]:
        return None
    return _self_judged_rewards(judge.note, ()).player_rewards[workflow.by("player").index(workflow.mine)]


def _self_judged_rewards(note: Mapping[str, Any], truth: Sequence[float]) -> self_play.Judged:
    return self_play.self_judged_rewards([note["scores"]], truth, note["scores"])


def planner_executors(
    completion: str, workflow: Workflow, answer: str | Sequence[str] | None, *, refine_bonus: float = 0.5
) -> dict[str, float] | None:
    """6 F1 - 3 of the planner's answer, the forms of planner and executors, and refine_bonus where a gold stands in a
    refine block: CoDA. The same for all calls of a rollout; None without a gold or a planner.

    Logged parts: f1, planner_format, executor_format, refine.
    """
    plan = workflow.last("planner")
    if plan is None or answer is None:
        return None
    return planner_executor_reward(
        plan.text, [one.text for one in workflow.by("executor")], answer, refine_bonus=refine_bonus
    )


def segment_importance(
    completion: str,
    workflow: Workflow,
    answer: Any,
    *,
    weight: float = 0.2,
    max_score: float = 5,
    extract: Sequence[Extractor] = EXTRACT,
) -> dict[str, float | None] | None:
    """1 - weight * (share of filler in the thought) for a right answer, 0 for a wrong one: SCMA (2601.21919).

    Reconstructed; for `segment_scores`, the same for all three roles. Lengths are in characters. None without a gold or
    a reasoner. Logged parts: right, filler.
    """
    thought, scored = workflow.last("reasoner"), workflow.last("scorer")
    right = None if thought is None else right_answer(thought.text, answer, extract=extract)
    if right is None:
        return None
    segments = [] if scored is None else scored.note["segments"]
    lengths, scores = [len(text) for text, _ in segments], [score for _, score in segments]
    filler = efficiency.segment_penalty(lengths, scores, max_score=max_score)
    reward = efficiency.segment_reward(right, lengths, scores, weight=weight, max_score=max_score)
    return {"reward": reward, "right": right, "filler": filler}


def setup() -> None:
    """Called once in each worker, outside the time limit of a call."""
    math.prepare()


_ANSWERED = {"role": "actor", "text": "It is \\boxed{4}."}


def _critic_row(verdict: str, after: str) -> dict[str, Any]:
    text = f"Correctness of the final answer: {verdict}"
    refined = {"role": "refiner", "text": f"<answer>{after}</answer>", "parent": 1}
    return {"answer": "4", "workflow": [_ANSWERED, {"role": "critic", "text": text, "parent": 0}, refined]}


def _proposer_row(*answers: str, refused: str = "") -> dict[str, Any]:
    asked = {"role": "proposer", "text": "<question>?</question>", "note": {"refused": refused}}
    solvers = [{"role": "solver", "text": f"<answer>{text}</answer>", "parent": 0} for text in answers]
    return {"answer": "4", "workflow": [asked, *solvers]}


_SOLVER = {"role": "solver", "text": "<answer>4</answer>"}
_CHECKS = [{"text": "It says hello.", "pattern": "(?i)hello"}, {"text": "It has a number.", "pattern": "[0-9]"}]


def _self_judge_row(mine: int, answers: Sequence[str], scores: Sequence[float | None]) -> dict[str, Any]:
    players = [{"role": "player", "text": text, "mine": n == mine} for n, text in enumerate(answers)]
    judge = {"role": "judge", "text": "scores", "parent": 1, "note": {"scores": list(scores)}}
    return {"workflow": [*players, judge], "step": 50}


def _checklist_row(critic: str, text: str) -> dict[str, Any]:
    calls = [{"role": "generator", "text": text}, {"role": "critic", "text": critic, "parent": 0}]
    return {"checks": _CHECKS, "workflow": calls}


_JUDGED = {"role": "judge", "text": "", "note": {"scores": [8, 6, 4]}, "mine": True}
_PLAN = "<think>a</think><task>look</task>\n<think>b</think><answer>Oslo</answer>"
_DONE = "<think>a</think><search>x</search>\n<refine>Oslo lies there</refine><answer>Oslo</answer>"
_WORK = [{"role": "planner", "text": _PLAN}, {"role": "executor", "text": _DONE, "parent": 0}]


def _scored_calls(segments: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [
        {"role": "reasoner", "text": "Hm. \\boxed{4}", "mine": True},
        {"role": "scorer", "text": "", "note": {"segments": segments}},
    ]


def won(completion: str, workflow: Workflow) -> float | None:
    """1 if the side of the player who was asked won the game (note `won`), else 0. None for a speech that was not said,
    a game that did not end, and without one."""
    del completion
    note = workflow.mine.note
    return float(note["won"]) if "won" in note and note.get("said", True) else None


def _played_game(**note: Any) -> dict[str, Any]:
    return {"workflow": [{"role": "seer", "text": "It is 3.", "note": note}]}


EXAMPLES = {
    "right_answer": [
        ("It is \\boxed{4}.", {"answer": "4"}, 1.0),
        ("<answer>Oslo</answer>", {"answer": ["oslo", "Christiania"]}, 1.0),
        ("<answer>5</answer>", {"answer": "4"}, 0.0),
        ("", {"answer": "4"}, 0.0),
        ("4", {"answer": None}, None),
    ],
    "critique": [
        ("Correctness of the final answer: Correct", _critic_row("Correct", "4"), {"reward": 1.2, "refined": 1.0}),
        ("Correctness of the final answer: Correct", _critic_row("Correct", "5"), 0.2),
        ("Correctness of the final answer: Wrong", _critic_row("Wrong", "4"), -1.0),
        ("", {"answer": "4"}, None),
    ],
    "proposer": [
        ("<question>?</question>", _proposer_row("4", "5", "5", "5"), {"reward": 0.75, "refused": 0.0}),
        ("<question>?</question>", _proposer_row("4", "4"), 0.0),
        ("<question>?</question>", _proposer_row("4", "5"), 1.0, {"mode": "intermediate"}),
        ("<question>?</question>", _proposer_row(refused="length"), -1.0, {"format_penalty": -1.0}),
        ("", {"answer": "4"}, None),
    ],
    "solver": [
        ("<answer>4</answer>", {"answer": "4", "workflow": [_SOLVER]}, 1.0),
        ("<answer>4</answer>", {"answer": "5", "workflow": [_SOLVER]}, 0.0),
        ("<answer>4</answer>", {"answer": "5", "workflow": [{**_SOLVER, "note": {"answer": "4"}}]}, 1.0),
        ("", {"answer": "4"}, None),
    ],
    "adversary": [
        ("<failure>2</failure>", _checklist_row("<failure>2</failure>", "Hello!"), 1.0),
        ("<failure>1</failure>", _checklist_row("<failure>1</failure>", "Hello!"), 0.0),
        ("Hello!", _checklist_row("<failure>2</failure>", "Hello!"), 0.0),
        ("Hello!", _checklist_row("It is dull.", "Hello!"), {"reward": 1.0, "checkable": 0.0}),
        ("", {"checks": _CHECKS}, None),
    ],
    "self_judged": [
        ("", {"workflow": [_JUDGED], "step": 0, "scores": [3, 2, 1]}, 1.0),
        ("", {"workflow": [_JUDGED], "step": 0, "scores": [2, 3, 1]}, 1 / 3),
        ("<answer>4</answer>", {**_self_judge_row(0, ["<answer>4</answer>", "5"], []), "answer": "4"}, 1.0),
        ("b", _self_judge_row(1, ["a", "b"], [2, 7]), 0.7),
        ("b", {**_self_judge_row(1, ["a", "b"], [2, 7]), "step": 49}, None),
        ("b", _self_judge_row(1, ["a", "b"], [2, None]), None),
    ],
    "planner_executors": [
        (_PLAN, {"answer": "Oslo", "workflow": _WORK}, {"reward": 5.5, "f1": 1.0, "refine": 1.0}),
        (_PLAN, {"answer": "Bergen", "workflow": _WORK}, -1.0),
        ("", {"answer": "Oslo"}, None),
    ],
    "segment_importance": [
        (
            "Hm. \\boxed{4}",
            {"answer": "4", "workflow": _scored_calls([["Hm. ", 1], ["\\boxed{4}", 5]])},
            1 - 0.2 * 4 / 13,
        ),
        ("Hm. \\boxed{4}", {"answer": "5", "workflow": _scored_calls([["Hm. \\boxed{4}", 5]])}, 0.0),
        ("", {"answer": "4"}, None),
    ],
    "won": [
        ("It is 3.", _played_game(won=True, said=True), 1.0),
        ("It is 3.", _played_game(won=False), 0.0),
        ("It is 3.", _played_game(won=True, said=False), None),
        ("It is 3.", _played_game(), None),
        ("", {}, None),
    ],
}

_ROWS = [{"prompt": f"What is {i} + 7?", "answer": str(i + 7)} for i in range(11, 15)]
ROWS = {
    **{name: {"rows": _ROWS, "correct": "math.accuracy"} for name in EXAMPLES},
    "right_answer": _ROWS,
    "adversary": {"rows": [{**row, "checks": _CHECKS} for row in _ROWS], "correct": "math.accuracy"},
}

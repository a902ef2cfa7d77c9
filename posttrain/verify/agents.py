"""Rewards for agents' steps, turns and programs, from records of what happened. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain.verify.extract import last_tag, tag_contents
from posttrain.verify.text import contains, golds_of, word_f1

META_TAGS = ("planning", "explore", "reflection", "monitor")
_BLOCK = re.compile(r"<(planning|explore|reflection|monitor|action)>((?:[^<]|<(?!/?\1>))*+)</\1>")


class Step(NamedTuple):
    """A parsed step: its tag (`none` if malformed), its action ("" if malformed), and whether it is valid."""

    tag: str
    action: str
    valid: bool


def read_step(text: str, available: bool) -> Step:
    """Parse a step: a non-blank meta tag, then a non-blank action; anything else gives the tag `none`, not valid."""
    blocks = _BLOCK.findall(text)
    if len(blocks) != 2 or blocks[1][0] != "action" or blocks[0][0] == "action":
        return Step("none", "", False)
    (tag, content), (_, action) = blocks
    if not content.strip() or not action.strip():
        return Step("none", "", False)
    return Step(tag, action.strip(), bool(available))


def meta_rewards(steps: Sequence[Step], success: bool) -> list[float]:
    """Compute the meta-reasoning reward of each step of an episode (RLVMR).

    planning: 1 if the episode succeeds. explore: 1 if the step is valid and its action differs from all earlier valid
    steps. reflection: 1 if the previous step was not valid and had a different action (an invalid step without action
    precedes the first step). monitor, none: 0.
    """
    rewards, done, before = [], set(), Step("none", "", False)
    for step in steps:
        earned = {
            "planning": bool(success),
            "explore": step.valid and step.action not in done,
            "reflection": not before.valid and step.action != before.action,
        }
        rewards.append(float(earned.get(step.tag, False)))
        if step.valid:
            done.add(step.action)
        before = step
    return rewards


def tag_numbers(steps: Sequence[Step]) -> list[int]:
    """Encode the tags as numbers, as the advantage `meta_reasoning` reads them; -1 for none."""
    return [META_TAGS.index(step.tag) if step.tag in META_TAGS else -1 for step in steps]


def episode_steps(episodes: Sequence[Mapping[str, Any]]) -> list[list[Step]]:
    """Parse the steps of episodes [{"steps": [{"text", "available"}, ...]}, ...]."""
    return [[read_step(step["text"], bool(step["available"])) for step in episode["steps"]] for episode in episodes]


def turn_score(hits: Sequence[Sequence[float]], weights: Sequence[float]) -> float:
    """Compute a turn's checklist score: weights of the criteria met at any of its steps / all weights (CM2).

    hits: one row per criterion, one cell per step. A turn that was not reached has no steps and scores 0.
    """
    total = sum(weights)
    held = sum(weight for weight, row in zip(weights, hits, strict=True) if any(row))
    return held / total if total else 0.0


def milestones_passed(log: str, milestones: Sequence[str]) -> int:
    """Count the distinct milestones that occur in the log of a program."""
    return sum(mark in log for mark in dict.fromkeys(milestones) if mark)


def partial_credit(
    valid: bool, grade: float | None, matches: float, lower_is_better: bool = False, *, fail: float = -10.0,
    per_match: float = 0.1,
) -> float:  # fmt: skip
    """Return the grade of a gradable result, negated if lower is better; otherwise fail + per_match * matches.

    A grade of None counts as 0. Keep grades above fail + per_match * milestones, or a failure may beat a result.
    """
    if not valid:
        return fail + per_match * matches
    return (-1.0 if lower_is_better else 1.0) * (grade or 0.0)


def submission_reward(
    log: str, checkpoints: Sequence[str], score: float | None = None, *, base: float = -10.0, credit: float = 0.1
) -> dict[str, float]:
    """Score a program: {"reward", "matched"}; its score if it has one, else credit for checkpoints in its log."""
    matched = milestones_passed(log, checkpoints)
    reward = partial_credit(score is not None, score, matched, fail=base, per_match=credit)
    return {"reward": reward, "matched": float(matched)}


def persona_faithfulness(
    p_relevant: Sequence[float], p_entail: Sequence[float], p_contradict: Sequence[float], *, average: bool = False
) -> dict[str, Any]:
    """Compute the expected number of persona statements that a reply respects (APC): {"reward", "per_statement"}.

    A statement is respected if relevant and entailed, or if neither relevant nor contradicted. average: return the mean
    instead of the sum. Raises ValueError for a number outside [0, 1].
    """
    for p in (*p_relevant, *p_entail, *p_contradict):
        if not 0 <= p <= 1:
            raise ValueError(f"{p} is not a probability")
    each = [
        (1 - relevant) * (1 - against) + relevant * entailed
        for relevant, entailed, against in zip(p_relevant, p_entail, p_contradict, strict=True)
    ]
    total = sum(each)
    return {"reward": total / len(each) if average and each else total, "per_statement": each}


def planner_executor_reward(
    planner: str, executors: Sequence[str], answer: str | Sequence[str], *, refine_bonus: float = 0.5
) -> dict[str, float]:
    """Score a planner and the executors of its tasks (CoDA).

    Returns {"reward", "f1", "planner_format", "executor_format", "refine"}.

    reward: 6 f1 - 3 + planner_format + executor_format + refine_bonus * refine. f1: of the planner's last answer.
    planner_format: 1 if think, task and answer occur and each opens as often as it closes; executor_format: mean over
    executors of the same for think, search, refine and answer, 0 without executors. refine: 1 if a gold answer occurs
    in a refine block.
    """
    golds = golds_of(answer)
    found = last_tag(planner, "answer")
    f1 = 0.0 if found is None else word_f1(found, golds)
    formats = [_has_balanced_tags(text, ("think", "search", "refine", "answer")) for text in executors]
    blocks = [block for text in executors for block in tag_contents(text, "refine")]
    parts = {
        "f1": f1,
        "planner_format": float(_has_balanced_tags(planner, ("think", "task", "answer"))),
        "executor_format": sum(formats) / len(formats) if formats else 0.0,
        "refine": float(any(contains(block, golds) for block in blocks)),
    }
    bonus = refine_bonus * parts["refine"]
    return {**parts, "reward": 6 * f1 - 3 + parts["planner_format"] + parts["executor_format"] + bonus}


def _has_balanced_tags(text: str, tags: Sequence[str]) -> bool:
    """Return whether each tag occurs and opens as often as it closes."""
    return all(text.count(f"<{tag}>") == text.count(f"</{tag}>") > 0 for tag in tags)

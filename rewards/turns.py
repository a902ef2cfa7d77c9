"""Rewards by turn: what a turn of the model, or a step of its only turn, earns by itself.

rewards:
  - use: math.accuracy
  - use: turns.failed_calls       # with tools: the turn of a failed call pays for it (GiGPO's invalid actions)
  - use: turns.repeats            # a turn that says what an earlier one said; without turns with `scoring.split: lines`
    weight: 0.1
advantage: gigpo                  # or another that credits turns; for others the sum of the turns counts

RLVMR (2507.22844), for `advantage: meta_reasoning`: a turn is one of <planning> <explore> <reflection> <monitor>, then
<action>, none of them blank.

rewards:
  - use: environment.score
  - use: turns.meta_tag
    weight: 0
  - use: turns.meta_reward
    weight: 0
"""

from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.verify import agents
from posttrain.verify.contract import per_turn


@per_turn
def failed_calls(
    completion: str, parts: Sequence[str], tool_calls: Sequence[Mapping[str, Any]] | None, *, penalty: float = 0.1
) -> list[float] | None:
    """-penalty for a turn with a call that failed or could not be read, else 0; None where no tool was offered.

    GiGPO (2505.10978) takes 0.1 off the reward of an invalid action.
    """
    if tool_calls is None:
        return None
    failed = {call["turn"] for call in tool_calls if call["kind"] != "ok"}
    return [-penalty if turn in failed else 0.0 for turn in range(len(parts))]


@per_turn
def repeats(completion: str, parts: Sequence[str]) -> list[float]:
    """-1 for a part that an earlier one has said in the same words, 0 for others. Blanks and cases are equal."""
    said: set[str] = set()
    scores = []
    for part in parts:
        words = " ".join(part.lower().split())
        scores.append(-1.0 if words in said else 0.0)
        said.add(words)
    return scores


@per_turn
def meta_tag(completion: str, parts: Sequence[str], actions: Sequence[str] | None = None) -> list[float]:
    """The kind of each turn: 0 planning, 1 explore, 2 reflection, 3 monitor, -1 for a turn without the form."""
    return [float(number) for number in agents.tag_numbers(_steps(parts, actions))]


@per_turn
def meta_reward(
    completion: str, parts: Sequence[str], correct: bool | None, actions: Sequence[str] | None = None
) -> list[float] | None:
    """What each turn is worth for its kind; None where nobody knows if the whole succeeded.

    planning: 1 if it did. explore: 1 for a valid action that no valid turn had before. reflection: 1 if the turn before
    was not valid and had another action. An action is valid if it is in the column `actions`, all are without one.
    """
    return None if correct is None else agents.meta_rewards(_steps(parts, actions), correct)


def _steps(parts: Sequence[str], actions: Sequence[str] | None) -> list[agents.Step]:
    steps = [agents.read_step(part, True) for part in parts]
    return [step._replace(valid=step.valid and (actions is None or step.action in actions)) for step in steps]


_CALLS = [{"turn": 0, "kind": "malformed"}, {"turn": 1, "kind": "ok"}]

_EPISODE = (
    "<planning>first</planning><action>go</action>\n<explore>new</explore><action>look</action>\n"
    "<reflection>no</reflection><action>go</action>\nstop"
)

EXAMPLES = {
    "failed_calls": [
        ("a\nb\nc", {"parts": ["a", "b", "c"], "tool_calls": _CALLS}, [-0.1, 0.0, 0.0]),
        ("a\nb\nc", {"parts": ["a", "b", "c"], "tool_calls": _CALLS}, -1.0, {"penalty": 1.0}),
        ("", {"parts": [""], "tool_calls": []}, [0.0]),
        ("a", {"parts": ["a"], "tool_calls": None}, None),
    ],
    "repeats": [
        ("So 4.\nso  4.\n5", {"parts": ["So 4.\n", "so  4.\n", "5"]}, [0.0, -1.0, 0.0]),
        ("", {"parts": [""]}, [0.0]),
    ],
    "meta_tag": [
        (_EPISODE, {"parts": _EPISODE.split("\n")}, [0.0, 1.0, 2.0, -1.0]),
        ("", {"parts": [""]}, [-1.0]),
    ],
    "meta_reward": [
        (_EPISODE, {"parts": _EPISODE.split("\n"), "correct": True}, [1.0, 1.0, 0.0, 0.0]),
        (_EPISODE, {"parts": _EPISODE.split("\n"), "correct": False, "actions": ["go"]}, [0.0, 0.0, 1.0, 0.0]),
        ("", {"parts": [""], "correct": False}, [0.0]),
        ("", {"parts": [""], "correct": None}, None),
    ],
}

_BESIDE = {"rows": [{"prompt": "What is 2 + 2?", "answer": "4"}], "correct": "math.accuracy"}
ROWS = dict.fromkeys(EXAMPLES, _BESIDE)

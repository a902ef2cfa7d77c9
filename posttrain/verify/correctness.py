"""Selection of the component that decides whether an answer is correct. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from posttrain.recipe.reward_sections import Reward
from posttrain.verify.load import LoadedReward


def problems(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> Iterator[tuple[str, str, str]]:
    """Yield (key below the list, problem, hint) if no component can decide correctness."""
    able = [position for position, reward in enumerate(rewards) if "correct" not in reward.built_ins]
    for position, (section, reward) in enumerate(zip(sections, rewards, strict=True)):
        if section.correct and position not in able:
            what = f"reward {reward.name} reads `correct`, so it cannot decide what is correct"
            yield f"{position}.correct", what, "mark a reward that judges the answer itself"
    if rewards and not able:
        names = ", ".join(reward.name for reward in rewards)
        what = f"rewards {names} read `correct`, but no reward decides it"
        yield "0.use", what, "add e.g. {use: math.accuracy, weight: 0, correct: true}"


def position(sections: Sequence[Reward], rewards: Sequence[LoadedReward]) -> int:
    """Return the index of the correctness component: the marked one, else the first that does not read `correct`.

    A judge or a canary is chosen only if there is no other component.
    """
    marked = [index for index, section in enumerate(sections) if section.correct]
    able = [index for index, reward in enumerate(rewards) if "correct" not in reward.built_ins]
    return marked[0] if marked else min(able, key=lambda i: (sections[i].canary, rewards[i].is_judge, i))


def can_judge(section: Reward, reward: LoadedReward) -> bool:
    """Return whether the correctness component has anything to compare an answer with.

    That is data, the prompt, feedback of an environment, or a model's opinion.

    A component that reads only the completion, such as a character count, is trusted only if the recipe marks it with
    `correct: true`.
    """
    asked = {"prompt", "messages", "world_score", "turn_rewards", "tool_calls", "transcript"} & set(reward.built_ins)
    asked |= {"prompts"} & set(reward.built_ins) if not reward.all_columns else set()
    return section.correct or reward.reads_data or reward.is_judge or bool(asked)

"""Sections of rewards: the reward functions, and how they are run. Does not import torch."""

from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.recipe.limits import MAX_COUNT
from posttrain.recipe.section import Idle, NamedSection, OnNone, Refused, Section, Share, Workers


class Condition(Section):
    """Condition under which a reward counts: the score of another reward."""

    on: str = Field(description="name of another reward")
    min: float = Field(1.0, description="minimum score of the other reward; below it this reward is 0")


LOGGED = Idle("not weight", "with weight 0: such a reward is only logged", "write a `weight`, or remove it", note=True)

NO_ROLES = Idle(
    "not rollout.workflow", "without `rollout.workflow`: there are no roles", "remove it, or write `rollout.workflow`"
)


class Reward(NamedSection):
    """One reward component."""

    use: str = Field(description="script.function of a shipped reward (math.accuracy), or file.py:function")
    name: str | None = Field(None, description="name in metrics; default: the name of the function")
    weight: float = Field(1.0, description="weight in the sum of rewards; 0 = log only")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    correct: Annotated[
        bool,
        Refused(
            "canary and correct",
            "correctness decides which groups are kept, so a canary must not define it",
            "leave `correct: true` to a reward that is trained on",
        ),
    ] = Field(False, description="this reward decides whether an answer is correct (default: the first reward)")
    on_none: Annotated[OnNone, LOGGED] = Field(
        "auto", description="what a score of None (does not apply) means for the row"
    )
    clip: Annotated[
        Annotated[list[float], Field(min_length=2, max_length=2)] | None,
        LOGGED,
        Refused(
            "clip.0 > clip.1", "clip [{clip.0}, {clip.1}] is empty: it is [low, high]", "write [{clip.1}, {clip.0}]"
        ),
        Refused(
            "clip.0 >= clip.1 and not clip.0 > clip.1",
            "clip [{clip.0}, {clip.1}] makes every score {clip.0}: there is nothing to learn from",
            "write [low, high] with low below high",
        ),
    ] = Field(None, description="[low, high]: range to which the score is clipped before weighting")
    condition: Condition | None = Field(None, description="count only if another reward reaches a minimum score")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="wall-clock limit of a call; default: 10, for a judge the value of its script"
    )
    roles: Annotated[Annotated[list[str], Field(min_length=1)] | None, NO_ROLES] = Field(
        None, description="with rollout.workflow: the roles whose calls it scores; default: all"
    )
    reads: Annotated[str | None, NO_ROLES] = Field(
        None,
        description="with rollout.workflow: the role whose last text it scores, as the reward of a team; "
        "default: the call itself",
    )
    canary: Annotated[bool, Refused("canary and weight", "a canary is never trained on", "write `weight: 0`")] = Field(
        False, description="never trained on (weight 0): raises an alarm if it falls while the trained reward rises"
    )


class Scoring(Section):
    """Execution of reward functions."""

    workers: Workers = Field(2, description="worker processes")
    correct_at: float = Field(1.0, description="an answer is correct if the correctness reward is at least this")
    max_error_rate: Share = Field(
        0.1,
        description="stop if a larger share of a reward's calls fails or times out, over the last 400 "
        "prompts; immediately if all calls fail",
    )
    max_bad_gold: Annotated[Share, Idle("stage != rl|eval", "in {stage}, where no gold is audited", note=True)] = Field(
        0.05, description="refuse to start if the gold answer does not score best on a larger share of rows"
    )
    memory_mb: Annotated[int, Field(ge=64, le=MAX_COUNT)] | None = Field(
        4096, description="memory limit of a worker process, in MB; a call that needs more fails; null = no limit"
    )
    split: Annotated[
        Literal["lines", "paragraphs"] | None,
        Idle("acts", "with `tools` or an `environment`: the parts are the model's turns"),
    ] = Field(None, description="how a single-turn completion is divided into steps, for rewards by turn (`@per_turn`)")
    canary_window: Annotated[
        int,
        Field(ge=5),
        Idle(
            "stage != generate and rewards and not rewards.canary",
            "without a canary",
            "write `canary: true` in a reward of weight 0",
        ),
        Idle("stage != rl", "in {stage}, which has no steps", note=True),
    ] = Field(20, description="number of steps over which canaries are compared")

"""The sections of rewards: which there are, and how they are run. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from posttrain.recipe.limits import MOST
from posttrain.recipe.section import Idle, NamedSection, OnNone, Refused, Section, Share, Workers


class Condition(Section):
    """When a component counts."""

    on: str = Field(description="name of another reward")
    min: float = Field(1.0, description="its least score for the component to count; below it the component is 0")


LOGGED = Idle("not weight", "with weight 0: such a reward is only logged", "write a `weight`, or remove it", note=True)

NO_ROLES = Idle(
    "not rollout.workflow", "without `rollout.workflow`: there are no roles", "remove it, or write `rollout.workflow`"
)


class Reward(NamedSection):
    """One reward component."""

    use: str = Field(description="script.function of a shipped reward (math.accuracy), or file.py:function")
    name: str | None = Field(None, description="name in metrics; default: the function's")
    weight: float = Field(1.0, description="0 = log only")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    correct: Annotated[
        bool,
        Refused(
            "canary and correct",
            "what is correct decides which groups are kept, so a canary must not say it",
            "leave `correct: true` to a reward that is trained on",
        ),
    ] = Field(False, description="this component says whether an answer is right (default: the first)")
    on_none: Annotated[OnNone, LOGGED] = Field("auto", description="what a None (does not apply) means for the row")
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
    ] = Field(None, description="[low, high] of the score before it is weighted")
    condition: Condition | None = Field(None, description="count only where another reward says so")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="wall clock a call; default: 10, of a judge what its script says"
    )
    roles: Annotated[Annotated[list[str], Field(min_length=1)] | None, NO_ROLES] = Field(
        None, description="with rollout.workflow: the roles whose calls it is for; default: all"
    )
    reads: Annotated[str | None, NO_ROLES] = Field(
        None,
        description="the same: the role whose last text it reads, as the reward of a team; default: the call's own",
    )
    canary: Annotated[bool, Refused("canary and weight", "a canary is never trained on", "write `weight: 0`")] = Field(
        False, description="never trained on (weight 0): an alarm when it falls while the trained reward rises"
    )


class Scoring(Section):
    """How rewards are run."""

    workers: Workers = Field(2, description="worker processes")
    correct_at: float = Field(1.0, description="an answer is right when the correctness component is at least this")
    max_error_rate: Share = Field(
        0.1,
        description="stop when more calls of a component than this fail or time out, over the newest 400 prompts; "
        "at once when all do",
    )
    max_bad_gold: Annotated[Share, Idle("stage != rl|eval", "in {stage}, where no gold is audited", note=True)] = Field(
        0.05, description="refuse to start when gold does not score best on more rows than this"
    )
    memory_mb: Annotated[int, Field(ge=64, le=MOST)] | None = Field(
        4096, description="memory of a worker process; a call that needs more fails; null = no limit"
    )
    split: Annotated[
        Literal["lines", "paragraphs"] | None,
        Idle("acts", "with `tools` or an `environment`: the parts are the model's turns"),
    ] = Field(None, description="how a completion of one turn is divided into steps, for rewards by turn (`@per_turn`)")
    canary_window: Annotated[
        int,
        Field(ge=5),
        Idle(
            "stage != generate and rewards and not rewards.canary",
            "without a canary",
            "write `canary: true` in a reward of weight 0",
        ),
        Idle("stage != rl", "in {stage}, which has no steps", note=True),
    ] = Field(20, description="steps over which canaries are watched")

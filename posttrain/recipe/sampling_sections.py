"""Sampling parameters: temperature, truncation of the distribution, lengths, turns. Does not import torch."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from posttrain.recipe.section import Count, Idle, Positive, Refused, Section

Temperature = Annotated[float, Field(ge=0, le=1000)]
ONE_TURN = Idle("not acts", "without `tools` or an `environment`")
STORED = Idle("engine = stored", "with rollout.engine stored: nothing is sampled", note=True)
GREEDY = Idle(
    "temperature = 0 and not controllers.rollout.temperature",
    "at temperature 0, which takes the most likely token",
    "remove it, or write a temperature above 0",
    note=True,
)
NO_LOGP = "vLLM then reports no log-probs of the policy, and {} rollouts cannot be weighted"


def cut_distribution(cut: str) -> tuple[Refused, Refused]:
    """Return the marks of `top_p` and `top_k`, which truncate vLLM's distribution when `cut` holds: rollouts that are
    trained on later need log-probs."""
    old = f"staleness and engine = vllm and {cut} and weighs_behavior"
    return (
        Refused(old, NO_LOGP.format("old"), "remove it, or write `rollout.staleness: 0`"),
        Refused(f"replay and engine = vllm and {cut}", NO_LOGP.format("stored"), "remove it, or `replay`"),
    )


class Sampling(Section):
    """Sampling parameters of completions."""

    @property
    def interruptible(self) -> bool:
        """Return whether a sync may interrupt completions, which then continue with the new weights."""
        return False

    temperature: Annotated[
        Temperature,
        Refused(
            "temperature = 0 and group_size > 1",
            "0 gives a prompt the same completion every time",
            "write a temperature above 0",
        ),
        Refused(
            "temperature = 0 and samples > 1",
            "0 gives a prompt the same completion every time; {samples} samples are asked for",
            "write a temperature above 0, or ask for 1 sample",
        ),
        Refused(
            "temperature = 0 and stage = eval and eval.samples > 1",
            "0 gives a prompt the same completion every time; {eval.samples} samples are asked for",
            "write a temperature above 0, or ask for 1 sample",
        ),
        Refused(
            "temperature = 0 and tree in shape.needs",
            "the branches of `{shape.use}` would all be the same",
            "write a number above 0",
        ),
    ] = Field(1.0, description="0 = greedy")
    top_p: Annotated[float, Field(gt=0, le=1), STORED, GREEDY, *cut_distribution("top_p < 1")] = Field(
        1.0, description="sample from the most likely tokens with this total probability; 1 = all"
    )
    top_k: Annotated[Count, STORED, GREEDY, *cut_distribution("top_k > 0 and top_p = 1")] = Field(
        0, description="sample from this many most likely tokens; 0 = all tokens"
    )
    max_new_tokens: Positive = Field(512, description="maximum completion length")
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        STORED,
        Refused(
            "partial and stop",
            "a stop string split by a weight sync would be missed",
            "leave out rollout.partial, or end answers by the EOS token",
        ),
    ] = Field(default_factory=list, description="stop strings that end a completion, besides EOS")
    max_turns: Annotated[
        Positive,
        ONE_TURN,
        Refused(
            "legal_returns in advantage.needs and max_turns > 1",
            "`{advantage.use}` compares actions in one state, and after a turn the rollouts of a group differ in state",
            "write 1, and let `reset` begin in the row's state",
        ),
    ] = Field(8, description="with tools or an environment: maximum number of the model's turns")
    turn_tokens: Annotated[Positive | None, ONE_TURN] = Field(
        None,
        description="with tools or an environment: maximum length of a turn; default: max_new_tokens, the "
        "limit of all turns and replies together",
    )
    reply_tokens: Annotated[Positive, ONE_TURN] = Field(
        512,
        description="with tools or an environment: maximum length of the tools' reply to a turn; longer "
        "replies are truncated",
    )
    rollout_seconds: Annotated[Annotated[float, Field(gt=0)] | None, ONE_TURN] = Field(
        None, description="with tools or an environment: no new turn starts this long after the start of the rollout"
    )

    @model_validator(mode="after")
    def _can_divide(self) -> Self:
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"temperature {self.temperature:g} overflows when logits are divided by it: write 0")
        return self

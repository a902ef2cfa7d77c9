"""Sections of preference learning: pair losses, pair selection and reward models. Does not import torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.section import ComponentSection, Idle, ModelName, NonNegative, Positive, Refused, Section


class PairLossSection(ComponentSection):
    """The preference loss."""

    kinds: ClassVar = ("pair_loss",)
    use: str = "dpo"

    @property
    def reads(self) -> set[str]:
        """Needs of the loss, without the reference if its arguments disable it."""
        return self.needs - ({"ref_logp"} if self.params.get("reference_free") else set())


class OnlineKl(Section):
    """KL to the starting policy on the policy's own answers to the pairs' prompts, added to the preference loss."""

    coef: Annotated[float, Field(gt=0)] = Field(1e-3, description="coefficient of the KL; 1e-4 to 1e-2 is usual")
    samples: Positive = Field(1, description="answers sampled per prompt in each step")
    baseline: Annotated[
        Literal["none", "rloo"],
        Refused(
            "baseline = rloo and samples = 1",
            "`baseline: rloo` compares the answers to a prompt",
            "write `samples` of 2 or more",
        ),
    ] = Field(
        "none",
        description="rloo: subtract the mean KL of the prompt's other answers, which reduces the variance of "
        "the estimate",
    )
    max_new_tokens: Positive = Field(256, description="maximum length of an answer")


class PairRules(Section):
    """Treatment of pairs from which nothing can be learned. They are always counted and reported by row."""

    bad: Literal["drop", "error"] = Field(
        "drop", description="pairs with equal sides, an empty side or no prompt: drop them, or stop with an error"
    )
    max_gap: Annotated[
        Annotated[float, Field(ge=1)] | None,
        Idle(
            "labels in loss.needs", "with loss {loss.use}, whose rows are answers with labels and no pairs", note=True
        ),
    ] = Field(
        None,
        description="pairs whose longer side has more than this many times the tokens of the shorter one also "
        "count as bad",
    )


class Anchors(Section):
    """Other policies that the preference loss reads, as models (path or `stage:NAME`). Their log-probs of every pair
    are computed once, one model after the other, before the policy is loaded."""

    reference: Annotated[
        ModelName | None, Idle("not ref_logp in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(None, description="reference model; default: the policy as loaded")
    previous: Annotated[
        ModelName | None, Idle("not prev_logp in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(None, description="policy that generated the pairs (dno, inpo, p3o_pair); default: the policy as loaded")
    history: Annotated[
        list[ModelName], Idle("not history in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(default_factory=list, description="earlier policies, newest first (mnpo)")


NO_MIXTURE = Idle("use != mixture", "with {use}", "write `use: mixture`, or remove it")


HEAD_A_LABEL = ("label_regression", "soft_label")


class RewardObjective(Section):
    """Training targets of a reward model's heads, and the columns they are read from."""

    use: Literal["bradley_terry", "mixture", "label_regression", "soft_label", "gaussian"] = Field(
        "bradley_terry",
        description="bradley_terry: each head ranks all pairs; mixture: the users are divided among heads; "
        "label_regression: one head per label; soft_label: the same for probabilities from 0 to "
        "1, with cross-entropy; gaussian: heads that predict mean and deviation of one label",
    )
    heads: Positive | None = Field(
        None,
        description="number of heads; default: 1 (bradley_terry), 2 (mixture), 5 (gaussian); with labels: one "
        "per label",
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="share of the rows that each head sees, sampled per head, so that the heads of one model differ",
    )
    center_coef: Annotated[NonNegative, Idle("not pairs", "with {use}, which learns from labels")] = Field(
        0.01, description="coefficient that pulls the sum of a pair's scores to 0 (pairs)"
    )
    best_response: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Idle("use != bradley_terry", "with {use}", "write `use: bradley_terry`, or remove it"),
    ] = Field(
        None,
        description="the `kl.coef` of the rl stages: the pairs are answers of a policy optimized against "
        "`model.path`, and the gradient accounts for how the policy responds to the new rewards "
        "(PARL); each prompt needs several pairs",
    )
    margin: Annotated[
        str | None, Refused("margin and use != bradley_terry", "`margin` is for bradley_terry", "remove it")
    ] = Field(None, description="column with the margin by which chosen must exceed rejected (pairs)")
    labels: Annotated[
        list[str],
        Refused(
            f"use = {'|'.join(HEAD_A_LABEL)} and not labels or use = {'|'.join(HEAD_A_LABEL)} and heads",
            "{use} has a head for each of `labels`",
            "name them, and leave `heads` out",
        ),
        Refused(
            "use = gaussian and labels < 1 or use = gaussian and labels > 1",
            "gaussian learns one label",
            "name its column in `labels`",
        ),
        Refused(
            "pairs and labels",
            f"`labels` are for {', '.join(HEAD_A_LABEL)} and gaussian; {{use}} learns from pairs",
            "remove them",
        ),
    ] = Field(default_factory=list, description="columns with numbers, one per head; may be null")
    user: Annotated[str | None, Refused("user and use != mixture", "`user` is for mixture", "remove it")] = Field(
        None, description="column with the user who stated the preference (mixture); default: each pair is a user"
    )
    rounds: Annotated[Positive, NO_MIXTURE] = Field(5, description="how often users are reassigned to heads (mixture)")
    soft: Annotated[bool, NO_MIXTURE] = Field(
        False, description="weight heads by their posterior probability instead of using the best one (mixture)"
    )
    holdout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of the rows held out of training, on which the report is computed"
    )

    @property
    def pairs(self) -> bool:
        """Whether rows are pairs; otherwise they are answers with labels."""
        return self.use in ("bradley_terry", "mixture")

    @property
    def count(self) -> int:
        """Number of heads."""
        fixed = {"bradley_terry": 1, "mixture": 2, "gaussian": 5}
        return len(self.labels) if self.use in HEAD_A_LABEL else self.heads or fixed[self.use]

"""The sections of what is learnt from preferences: pairs and reward models. No torch here."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.section import ComponentSection, Idle, ModelName, NonNegative, Positive, Refused, Section


class PairLossSection(ComponentSection):
    """The preference loss."""

    kinds: ClassVar = ("pair_loss",)
    idle_arguments: ClassVar = {
        "dpo": {
            "nll_reduction": Idle("nll_weight = 0", "with nll_weight 0", "write `nll_weight`, or remove it", note=True)
        },
        "f_dpo": {"alpha": Idle("divergence = js|forward_kl|reverse_kl", "with divergence {divergence}", note=True)},
    }
    use: str = "dpo"

    @property
    def reads(self) -> set[str]:
        """Its needs, without the reference where its arguments say so."""
        return self.needs - ({"ref_logp"} if self.params.get("reference_free") else set())


class OnlineKl(Section):
    """The KL to the starting policy on the policy's own answers to the pairs' prompts, added to the preference loss."""

    coef: Annotated[float, Field(gt=0)] = Field(1e-3, description="its weight; 1e-4 to 1e-2 is usual")
    samples: Positive = Field(1, description="answers to a prompt, in each step")
    baseline: Annotated[
        Literal["none", "rloo"],
        Refused(
            "baseline = rloo and samples = 1",
            "`baseline: rloo` compares the answers to a prompt",
            "write `samples` of 2 or more",
        ),
    ] = Field(
        "none", description="rloo: less the mean KL of a prompt's other answers, which makes the estimate steadier"
    )
    max_new_tokens: Positive = Field(256, description="longest answer")


class PairRules(Section):
    """What becomes of pairs from which nothing can be learned. They are counted and told by row in any case."""

    bad: Literal["drop", "error"] = Field("drop", description="pairs with equal sides, an empty side or no prompt")
    max_gap: Annotated[
        Annotated[float, Field(ge=1)] | None,
        Idle(
            "labels in loss.needs", "with loss {loss.use}, whose rows are answers with labels and no pairs", note=True
        ),
    ] = Field(None, description="pairs whose longer side has more than this times the tokens of the other are bad too")


class Anchors(Section):
    """Other policies that the preference loss reads, as models (path or `stage:NAME`): the log-probs of every pair are
    computed once, one model after the other, before the policy is loaded."""

    reference: Annotated[
        ModelName | None, Idle("not ref_logp in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(None, description="the reference; default: the policy as it is loaded")
    previous: Annotated[
        ModelName | None, Idle("not prev_logp in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(
        None, description="the policy that the pairs were sampled from (dno, inpo, p3o_pair); default: as it is loaded"
    )
    history: Annotated[
        list[ModelName], Idle("not history in loss.reads and not loss.is_function", ": {loss.use} does not read it")
    ] = Field(default_factory=list, description="earlier policies, the newest first (mnpo)")


NO_MIXTURE = Idle("use != mixture", "with {use}", "write `use: mixture`, or remove it")


HEAD_A_LABEL = ("label_regression", "soft_label")


class RewardObjective(Section):
    """What the heads of a reward model learn, and from which columns."""

    use: Literal["bradley_terry", "mixture", "label_regression", "soft_label", "gaussian"] = Field(
        "bradley_terry",
        description="bradley_terry: each head ranks all pairs; mixture: heads divide the users among them; "
        "label_regression: a head a label; soft_label: the same for chances from 0 to 1, by cross-entropy; gaussian: "
        "heads with a mean and a deviation each, of one label",
    )
    heads: Positive | None = Field(
        None, description="default: 1 (bradley_terry), 2 (mixture), 5 (gaussian); of labels: one a label"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the rows that each head sees, drawn for each: makes heads of one model differ"
    )
    center_coef: Annotated[NonNegative, Idle("not pairs", "with {use}, which learns from labels")] = Field(
        0.01, description="pull of the pair's summed scores to 0 (pairs)"
    )
    best_response: Annotated[
        Annotated[float, Field(gt=0)] | None,
        Idle("use != bradley_terry", "with {use}", "write `use: bradley_terry`, or remove it"),
    ] = Field(
        None,
        description="the `kl.coef` of the rl stages: the pairs are answers of the policy that has optimised "
        "`model.path`, and the loss has the gradient of how it will answer to the new rewards (PARL); each prompt "
        "needs several pairs",
    )
    margin: Annotated[
        str | None, Refused("margin and use != bradley_terry", "`margin` is for bradley_terry", "remove it")
    ] = Field(None, description="column with the score that chosen must be ahead by (pairs)")
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
    ] = Field(default_factory=list, description="columns with numbers, one a head; may be null")
    user: Annotated[str | None, Refused("user and use != mixture", "`user` is for mixture", "remove it")] = Field(
        None, description="column that says who preferred (mixture); default: each pair is one"
    )
    rounds: Annotated[Positive, NO_MIXTURE] = Field(
        5, description="how often users are assigned to heads anew (mixture)"
    )
    soft: Annotated[bool, NO_MIXTURE] = Field(
        False, description="weigh heads by how likely they are instead of the best one (mixture)"
    )
    holdout: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.1, description="share of the rows kept out of training, which the report is about"
    )

    @property
    def pairs(self) -> bool:
        """Rows are pairs; otherwise answers with labels."""
        return self.use in ("bradley_terry", "mixture")

    @property
    def count(self) -> int:
        """Number of heads."""
        fixed = {"bradley_terry": 1, "mixture": 2, "gaussian": 5}
        return len(self.labels) if self.use in HEAD_A_LABEL else self.heads or fixed[self.use]

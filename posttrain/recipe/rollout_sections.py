"""Sections of what a step of rl samples: rollouts, their shapes and workflows. Does not import torch."""

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.section import ComponentSection, Idle, Positive, Refused, Width

ONE_SET_OF_WEIGHTS = (
    "with `rollout.vllm.merge_adapter` the engine has one set of weights for all roles",
    "remove `merge_adapter`: vLLM computes each request with its adapter",
)
ONE_ADAPTER = (
    "a vLLM server has one adapter for all roles",
    "remove `rollout.vllm.server`: vLLM next to the trainer has several",
)
STORED_ROWS = "rollout.engine stored trains on the rows' completions"
MOVING = "is for rollouts that are sampled while the trainer changes its weights"
UNWEIGHED = "no component compares the policy with the one that sampled them"
WEIGH = "write `corrections: [{use: tis}]`, or `loss: decoupled_ppo`"


def _refuse_beside(key: str) -> tuple[Refused, ...]:
    """Return the marks of what cannot be combined with rollouts of several rows, made by a shape or a workflow."""
    return (
        Refused(f"{key} and engine = stored", "rollout.engine stored samples nothing"),
        Refused(f"{key} and acts", "with `tools` or an `environment` a rollout continues with their replies"),
        Refused(f"{key} and prompt_variants", "`prompt_variants` also change the start of a rollout"),
        Refused(f"{key} and opponent", "the opponent's answers are single completions"),
        Refused(f"{key} and replay", "`replay` stores single rows, and a rollout has several"),
        Refused(f"{key} and solutions.in_group", "a given solution is one row"),
        Refused(
            f"{key} and rounds in sampler.needs", "sampler `{sampler.use}` samples a prompt again in a further round"
        ),
        Refused(f"{key} and limits in sampler.needs", "sampler `{sampler.use}` limits single completions and turns"),
        Refused(f"{key} and scoring.split", "`scoring.split` divides single completions"),
    )


# Needs of shapes whose rollouts have several answers, or no answer within their step.
SEVERAL_ANSWERS = {"own_group", "parts", "tree", "goes_on", "grades", "world"}


class RolloutShape(ComponentSection):
    """How a rollout consists of several requests, and which rows of it are trained on."""

    kinds: ClassVar = ("shape",)

    def may(self, word: str) -> bool:
        """Return whether the shape declares `word` in its `needs`."""
        return word in self.needs

    @property
    def has_one_answer(self) -> bool:
        """Whether a rollout is known to have one answer, its only scored row; false for a user's function."""
        return bool(self.index_entry) and not self.needs & SEVERAL_ANSWERS


class ShapedSampling(Sampling):
    """Sampling parameters of completions, and their shape."""

    shape: Annotated[
        RolloutShape | None,
        Refused("shape.index_entry and not shape.has_one_answer", "a rollout of `{shape.use}` has several answers"),
        Refused("shape and acts", "with `tools` or an `environment` a completion continues with their replies"),
        Refused("shape and tree", "`tree` decides what is sampled for a prompt"),
        Refused("shape and workflow", "`workflow` decides what is sampled for a prompt"),
        Refused("shape and search", "`search` makes one completion of steps"),
    ] = Field(
        None,
        description="answer in several requests, as the policy was trained: chunks, summaries, "
        "shuffled_options, or your own function with one scored row; default: one completion",
    )


class PlayWorkflow(ComponentSection):
    """A rollout that consists of calls by role."""

    kinds: ClassVar = ("workflow",)
    max_prompt_tokens: Positive | None = Field(
        None,
        description="maximum prompt length of a call; a rollout ends before a call with a longer prompt; "
        "default: the data's longest + 2 * max_new_tokens + 512",
    )

    def may(self, word: str) -> bool:
        """Return whether the workflow declares `word` in its `needs`."""
        return word in self.needs


class Workflow(PlayWorkflow):
    """A rollout that consists of calls by role, some of which are trained on."""

    train: Annotated[list[str], Field(min_length=1)] | None = Field(
        None, description="roles whose calls are trained on: [critic]; default: all"
    )
    adapters: Annotated[
        dict[str, str],
        Refused("adapters and not model.lora", "the model is trained without adapters", "write `model.lora`"),
        Refused("adapters and engine = vllm and vllm.merge_adapter", *ONE_SET_OF_WEIGHTS),
        Refused("adapters and engine = vllm and vllm.server", *ONE_ADAPTER),
    ] = Field(
        default_factory=dict,
        description="adapter of `model.lora.adapters` for each role: {refiner: actor}; default: the adapter "
        "named like the role, else the first. `base`, for roles that are not trained: the base "
        "model without an adapter",
    )

    def adapter_of(self, role: str, several: Sequence[str]) -> str | None:
        """Return the adapter that answers for a role; None for the only adapter."""
        return self.adapters.get(role, role if role in several else next(iter(several), None))

    @property
    def roles(self) -> list[str]:
        """Roles that the workflow may call; [] if unknown, as for a user's function."""
        return list(self.index_entry.get("roles", []))

    @property
    def late(self) -> list[str]:
        """Roles whose calls are trained on in later steps, with rewards that the workflow assigns."""
        return list(self.index_entry.get("late", []))


class Rollout(EngineSection, Sampling):
    """Sampling of one step: prompts_per_step x group_size completions."""

    @property
    def interruptible(self) -> bool:
        """See `Sampling.interruptible`."""
        return self.partial

    engine: Annotated[
        Literal["transformers", "vllm", "stored"],
        Refused("engine = stored and acts", f"{STORED_ROWS}; with `tools` or an `environment` they must be sampled"),
    ] = Field(  # type: ignore[assignment]
        "transformers",
        description="engine that generates completions; stored: nothing is sampled, the rows' own completions "
        "are trained on",
    )
    prompts_per_step: Annotated[int, Field(gt=0, le=1_000_000)] = Field(32, description="prompts per step")
    group_size: Annotated[
        Width,
        Refused("engine = stored and group_size > 1", f"{STORED_ROWS}, and a row has one", "write 1"),
        Refused(
            "groups in sampler.needs and group_size = 1",
            "`{sampler.use}` divides the rollouts of a step among prompts, and each prompt has only 1",
            "write 2 or more",
        ),
        Refused(
            "groups in replay.needs and group_size = 1",
            "`{replay.use}` joins a group, and each rollout is alone",
            "write 2 or more",
        ),
    ] = Field(8, description="completions per prompt, the group of group-relative methods")
    max_gen_batches: Annotated[
        Positive,
        Idle("not keeps", "without `keep`: it refills the groups that `keep` drops", "add `keep: dynamic_sampling`"),
        Refused("engine = stored and max_gen_batches > 1", f"{STORED_ROWS}: none are sampled again", "remove it"),
        Refused(
            "max_gen_batches > 1 and own_group in shape.needs",
            "the groups of `{shape.use}` are rollouts, and refilling counts prompts",
            "write 1",
        ),
        Refused(
            "max_gen_batches > 1 and workflow",
            "the groups of `{workflow.use}` are roles, and refilling counts prompts",
            "write 1",
        ),
        Refused(
            "max_gen_batches > 1 and replay.replaces",
            "failed groups are replaced by other prompts before a stored rollout can join them",
            "write 1",
        ),
    ] = Field(
        1,
        description="maximum number of generation rounds per step; > 1 refills groups that `keep` drops "
        "(dynamic sampling)",
    )
    staleness: Annotated[
        int,
        Field(ge=0, le=8),
        Refused(
            "staleness = 1 and not loss.is_group_loss and not weighs_behavior",
            f"the rollouts are an update old, and {UNWEIGHED}",
            WEIGH,
        ),
        Refused(
            "staleness > 1 and not loss.is_group_loss and not weighs_behavior",
            f"the rollouts are {{staleness}} updates old, and {UNWEIGHED}",
            WEIGH,
        ),
        Refused("engine = stored and staleness", f"{STORED_ROWS}: nothing is sampled ahead", "remove it"),
        Refused(
            "staleness and values in sampler.needs",
            "`{sampler.use}` reads the policy's hidden states of prompts while its weights may be changing",
            "write 0",
        ),
    ] = Field(
        0,
        description="updates between sampling and training: with k, the rollouts of step t+k are started in "
        "step t and sampled during training if the engine can (vLLM without vllm.sleep)",
    )
    partial: Annotated[
        bool,
        Refused(
            "partial and staleness = 0 or partial and engine != vllm",
            MOVING,
            "write `staleness` (1 to 8) and `engine: vllm` too, or leave it out",
        ),
        Refused(
            "partial and staleness and engine = vllm and vllm.sleep and not vllm.server",
            f"{MOVING}, and with vllm.sleep the engine sleeps then",
            "leave out one of them",
        ),
        Refused(
            "partial and opponent",
            "the opponent samples with the policy's weights, so rollouts are sampled between two updates",
            "leave it out",
        ),
    ] = Field(
        False,
        description="with staleness: rollouts that are unfinished when an update ends are paused and "
        "continued with the new weights; long ones may then take as many steps as staleness "
        "allows",
    )
    shape: Annotated[
        RolloutShape | None,
        *_refuse_beside("shape"),
        Refused("goes_on in shape.needs and staleness", "unfinished rollouts continue with the newest weights"),
        Refused(
            "goes_on in shape.needs and sampler.use != uniform",
            "sampler `{sampler.use}` learns from a prompt's rollouts, and these end in different steps",
        ),
        Refused(
            "goes_on in shape.needs and keep", "`keep` compares a prompt's rollouts, and these end in different steps"
        ),
        Refused(
            "goes_on in shape.needs and group_rewards", "`group_rewards` compare rollouts that end in different steps"
        ),
        Refused("goes_on in shape.needs and loss.mask_truncated", "`loss.mask_truncated` drops what has not ended"),
        Refused(
            "world in shape.needs",
            "`{shape.use}` plays in an environment, whose turns rl samples one after the other",
            "write it as `tree` of a generate stage, and train on its paths",
        ),
    ] = Field(
        None,
        description="rollouts of several requests: cuts, chunks, summaries, trees; default: one completion, one row",
    )
    workflow: Annotated[
        Workflow | None,
        *_refuse_beside("workflow"),
        Refused("workflow and shape", "`rollout.shape` and `rollout.workflow` each decide what a rollout is"),
    ] = Field(None, description="rollouts of several calls by role, such as a critic and a planner; each call is a row")

    @property
    def several_rows(self) -> RolloutShape | Workflow | None:
        """The shape or workflow that makes several rows per rollout, or None."""
        return self.workflow if self.shape is None else self.shape

"""The sections of what generates: sampling, engines, tools and environments. No torch here."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from posttrain.errors import count_noun
from posttrain.recipe.section import ComponentSection, Count, Idle, NamedSection, Positive, Refused, Section, Width

VLLM_CHUNK = (
    4096  # sequences of an evaluation: long chunks keep vLLM's batch full, and a stop loses one of them at most
)
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what every vLLM from 0.22 to 0.32 has kernels for
Temperature = Annotated[float, Field(ge=0, le=1000)]


ONE_SET_OF_WEIGHTS = (
    "with `rollout.vllm.merge_adapter` the engine has one set of weights for all roles",
    "remove `merge_adapter`: vLLM computes each request with its adapter",
)
ONE_ADAPTER = (
    "a vLLM server has one adapter for all roles",
    "leave out `rollout.vllm.server`: vLLM beside the trainer has several",
)
STORED = Idle("engine = stored", "with rollout.engine stored: nothing is sampled", note=True)
GREEDY = Idle(
    "temperature = 0 and not controllers.rollout.temperature",
    "at temperature 0, which takes the likeliest token",
    "remove it, or write a temperature above 0",
    note=True,
)
STORED_ROWS = "rollout.engine stored trains on the rows' completions"
MOVING = "is for rollouts that are drawn while the trainer changes its weights"
NO_LOGP = "vLLM then reports no log-probs of the policy, and {} rollouts cannot be weighed"
UNWEIGHED = "no component compares the policy with the one that drew them"
WEIGH = "write `corrections: [{use: tis}]`, or `loss: decoupled_ppo`"


def cut_distribution(cut: str) -> tuple[Refused, Refused]:
    """The marks of `top_p` and `top_k`, which cut vLLM's distribution where `cut` holds: rollouts that are trained on
    later must have log-probs."""
    old = f"staleness and engine = vllm and {cut} and weighs_behaviour"
    return (
        Refused(old, NO_LOGP.format("old"), "remove it, or write `rollout.staleness: 0`"),
        Refused(f"replay and engine = vllm and {cut}", NO_LOGP.format("stored"), "remove it, or `replay`"),
    )


ONE_TURN = Idle("not acts", "without `tools` or an `environment`")


class Sampling(Section):
    """How completions are drawn."""

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
        1.0, description="the likeliest tokens that have this share; 1 = all"
    )
    top_k: Annotated[Count, STORED, GREEDY, *cut_distribution("top_k > 0 and top_p = 1")] = Field(
        0, description="0 = all tokens"
    )
    max_new_tokens: Positive = Field(512, description="longest completion")
    stop: Annotated[
        list[Annotated[str, Field(min_length=1)]],
        STORED,
        Refused(
            "partial and stop",
            "a stop string that a sync divides would not be seen",
            "leave out rollout.partial, or end answers by the EOS token",
        ),
    ] = Field(default_factory=list, description="texts that end a completion, besides EOS")
    max_turns: Annotated[
        Positive,
        ONE_TURN,
        Refused(
            "legal_returns in advantage.needs and max_turns > 1",
            "`{advantage.use}` compares actions in one state, and behind a turn the rollouts of a group are in others",
            "write 1, and let `reset` begin in the row's state",
        ),
    ] = Field(8, description="with tools or an environment: turns of the model at most")
    turn_tokens: Annotated[Positive | None, ONE_TURN] = Field(
        None, description="the same: longest turn; default: max_new_tokens, which holds all turns and replies"
    )
    reply_tokens: Annotated[Positive, ONE_TURN] = Field(
        512, description="the same: longest reply of a turn's tools, cut behind it"
    )
    rollout_seconds: Annotated[Annotated[float, Field(gt=0)] | None, ONE_TURN] = Field(
        None, description="the same: no further turn begins after this much time since the rollout began"
    )

    @model_validator(mode="after")
    def _can_divide(self) -> Self:
        if 0 < self.temperature < 1e-3:
            raise ValueError(f"temperature {self.temperature:g} overflows when logits are divided by it: write 0")
        return self


MAX_PIXELS = 1 << 20  # of an image that a tool or an environment returns


class Tool(NamedSection):
    """Something that the model can call: a function of a file, a shipped tool by name, or a command."""

    use: str | None = Field(
        None, description="a shipped tool (calculator, crop, python, sql, search), or file.py:function"
    )
    command: str | None = Field(None, description="instead of use: a command that reads the model's input from stdin")
    name: str | None = Field(None, description="as the model calls it; default: the function's")
    description: str | None = Field(None, description="of a command, for the model")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword-only arguments of the function")
    timeout_s: Annotated[float, Field(gt=0)] = Field(5.0, description="wall clock a call")
    max_chars: Positive = Field(4000, description="longest answer; the rest is cut and told")
    max_pixels: Positive = Field(MAX_PIXELS, description="of an image that it returns; a larger one is made smaller")

    @model_validator(mode="after")
    def _one_thing(self) -> Tool:
        if bool(self.use) == bool(self.command):
            raise ValueError("give either `use` or `command`")
        if self.command and self.params:
            raise ValueError("a command has no `params`: write its arguments behind it")
        if self.use and self.description:
            raise ValueError("`description` is for a command: a function has its docstring")
        return self


class Environment(Section):
    """What the model acts in, turn by turn: a class with reset(row), step(text), score() and close()."""

    use: str = Field(description="file.py:Class, `gym` for tasks of reasoning-gym, or `screen` for task:screen")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")
    timeout_s: Annotated[float, Field(gt=0)] = Field(10.0, description="wall clock a step, or of a state's simulations")
    max_pixels: Positive = Field(MAX_PIXELS, description="of an image that a step shows; a larger one is made smaller")
    simulations: Annotated[
        Count,
        Idle(
            "not mc_values in advantage.needs and not legal_returns in advantage.needs and not advantage.is_function",
            ": nothing reads what states are worth",
            "write `advantage: mc_critic` or `mc_actions`, or 0",
        ),
    ] = Field(
        0,
        description="random plays from the state before each turn, for advantage mc_critic; behind each legal "
        "action of the first state, for mc_actions; needs a method actions()",
    )
    horizon: Annotated[
        Positive, Idle("not simulations", "without `environment.simulations`", "write `environment.simulations`")
    ] = Field(200, description="steps of such a play at most")


ADDRESS = re.compile(r"http://[^/\s:@]+:\d+/?")


def _or_its_addresses(schema: dict[str, Any]) -> None:
    own = dict(schema)
    schema.clear()
    urls = {"type": "array", "items": {"type": "string"}, "description": "short for `urls: [...]`"}
    schema["anyOf"] = [urls, {"type": "string", "description": "short for `file: FILE`"}, own]


class Server(Section):
    """vLLM in processes of its own, each with its own GPU, instead of beside the trainer on the trainer's. A list is
    short for `urls`, a text for `file`."""

    model_config = ConfigDict(json_schema_extra=_or_its_addresses)

    urls: list[str] = Field(
        default_factory=list,
        description="processes of `posttrain serve`, here or on other machines: [http://node2:8100]; all training "
        "processes use all of them",
    )
    file: str | None = Field(
        None,
        description="or a file of such addresses, one a line, that is read again at every sync: servers may come and "
        "go while the run goes on",
    )
    devices: list[Count] = Field(
        default_factory=list,
        description="or GPUs of this machine, one process on each, which the run starts and ends itself: [1]; a GPU "
        "that is named twice has two engines",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="longest silence of a server that was asked for something"
    )

    @model_validator(mode="before")
    @classmethod
    def _addresses_alone(cls, value: Any) -> Any:
        if isinstance(value, list):
            return {"urls": value}
        if isinstance(value, str):
            return {"urls": [value]} if ADDRESS.fullmatch(value) else {"file": value}
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Server:
        if sum(map(bool, (self.urls, self.devices, self.file))) != 1:
            raise ValueError("give one of `urls`, `file` and `devices`")
        for url in self.urls:
            if not ADDRESS.fullmatch(url):
                raise ValueError(f"`{url}` is no address of a server: write http://HOST:PORT")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("a server is named twice")
        return self


class Vllm(Section):
    """Settings of the vLLM engine."""

    gpu_memory: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="share of the GPU's memory for an engine's weights and KV cache; default: 0.3 beside the trainer, "
        "0.9 with `server`, divided by the engines of a GPU",
    )
    engines: Annotated[
        Positive, Idle("server", "with `server`", "name a GPU several times in `server.devices`, or start more servers")
    ] = Field(
        1,
        description="vLLM processes beside each trainer, which share the requests and the GPU: with a small model and "
        "hundreds of sequences a decoding step waits for vLLM's scheduler, which takes one core of the CPU each",
    )
    max_model_len: Annotated[
        Positive | None,
        Refused(
            "engine = vllm and max_model_len <= max_new_tokens",
            "{max_model_len} has no room for a prompt and {max_new_tokens} new tokens",
            "write a larger one",
        ),
        Refused(
            "engine = vllm and max_model_len <= sampling.max_new_tokens",
            "{max_model_len} has no room for a prompt and {sampling.max_new_tokens} new tokens",
            "write a larger one",
        ),
    ] = Field(None, description="prompt + completion; default: what the data needs")
    enforce_eager: bool = Field(False, description="start faster, generate slower")
    sleep: Annotated[
        bool,
        Idle("server", "with `server`, which has its own GPU, and nothing to hand over"),
        Idle("stage != rl and engine = vllm", "in {stage}: nothing else wants the engine's memory", note=True),
    ] = Field(False, description="free the engine's memory during the update")
    merge_adapter: Annotated[
        bool, Idle("stage = rl and not model.lora", "without an adapter", "remove it, or train one: `model.lora`")
    ] = Field(
        False,
        description="with LoRA: add the adapter to the base's weights at every sync; else the adapter is pushed alone, "
        "and the engine computes it apart, which is exact but slower",
    )
    server: Annotated[
        Server | None, Idle("engine != vllm", "with {.engine} {engine}", "write `engine: vllm` beside it")
    ] = Field(None, description="generate on other GPUs or machines")
    tensor_parallel: Positive = Field(1, description="GPUs of one engine, each with a part of every weight (`server`)")

    @property
    def share(self) -> float:
        """`gpu_memory` or its default."""
        whole = 0.9 if self.server else 0.3
        return whole / self.engines_a_gpu if self.gpu_memory is None else self.gpu_memory

    @property
    def engines_a_gpu(self) -> int:
        """The most that the run starts on one GPU."""
        return max(Counter(itertools.chain(*self.places)).values(), default=1) if self.server else self.engines

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The GPUs of each engine that the run starts itself."""
        size, devices = self.tensor_parallel, self.server.devices if self.server else []
        return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]

    @property
    def servers(self) -> int:
        """Engines apart from the trainer, 0 without; a file of them may change, and counts as one."""
        return (len(self.places or self.server.urls) or 1) if self.server else 0

    @model_validator(mode="after")
    def _room(self) -> Self:
        twice = next((place for place in self.places if len(set(place)) < len(place)), None)
        if twice is not None:
            raise ValueError(f"server.devices names a GPU twice for one engine: {', '.join(map(str, twice))}")
        if self.share * self.engines_a_gpu > 1:
            raise ValueError(
                f"gpu_memory {self.gpu_memory} is an engine's share, and {self.engines_a_gpu} of them have the same GPU"
            )
        return self


class EngineSection(Section):
    """What generates."""

    engine: Literal["transformers", "vllm"] = Field("transformers", description="what generates")
    batch_size: Annotated[
        Positive,
        Idle(
            f"engine = vllm and stage = rl or engine = vllm and stage != harness and batch_size <= {VLLM_CHUNK}",
            "with {.engine} vllm, which fills its own batches",
            note=True,
        ),
        STORED,
    ] = Field(512, description="sequences generated together (transformers)")
    vllm: Annotated[
        Vllm,
        Idle(
            "engine != vllm",
            "with {.engine} {engine}",
            "write `engine: vllm` beside it, or remove it",
            note=True,
            below=True,
        ),
    ] = Field(default_factory=Vllm)

    @model_validator(mode="after")
    def _whole_engines(self) -> Self:
        size, server = self.vllm.tensor_parallel, self.vllm.server
        if size > 1 and (server is None or self.engine != "vllm"):
            raise ValueError("vllm.tensor_parallel needs `engine: vllm` and `vllm.server`: beside the trainer it is 1")
        if server is not None and len(server.devices) % size:
            raise ValueError(
                f"vllm.server.devices names {count_noun(len(server.devices), 'GPU')}; with vllm.tensor_parallel: {size}"
                f" it must be a multiple of {size}"
            )
        return self


def _refuse_beside(key: str) -> tuple[Refused, ...]:
    """What cannot stand beside rollouts of several rows, which a shape or a workflow makes."""
    return (
        Refused(f"{key} and engine = stored", "rollout.engine stored samples nothing"),
        Refused(f"{key} and acts", "with `tools` or an `environment` a rollout goes on by their replies"),
        Refused(f"{key} and prompt_variants", "`prompt_variants` also decide what a rollout begins with"),
        Refused(f"{key} and opponent", "the opponent's answers are single completions"),
        Refused(f"{key} and replay", "`replay` draws single rows, and a rollout has several"),
        Refused(f"{key} and solutions.in_group", "a given solution is one row"),
        Refused(
            f"{key} and rounds in sampler.needs", "sampler `{sampler.use}` draws a prompt again in a further round"
        ),
        Refused(f"{key} and limits in sampler.needs", "sampler `{sampler.use}` limits single completions and turns"),
        Refused(f"{key} and scoring.split", "`scoring.split` divides single completions"),
    )


# What shapes say in their `needs` whose rollouts have several answers, or none in their step.
SEVERAL_ANSWERS = {"own_group", "parts", "tree", "goes_on", "grades", "world"}


class RolloutShape(ComponentSection):
    """How a rollout is made of several requests, and which rows it is trained as."""

    kinds: ClassVar = ("shape",)

    def may(self, word: str) -> bool:
        """Whether the shape says so in its `needs`."""
        return word in self.needs

    @property
    def has_one_answer(self) -> bool:
        """Whether a rollout is known to come to one answer, its only scored row; of a user's function nobody knows."""
        return bool(self.described) and not self.needs & SEVERAL_ANSWERS


class ShapedSampling(Sampling):
    """How completions are drawn, and what each is made of."""

    shape: Annotated[
        RolloutShape | None,
        Refused("shape.described and not shape.has_one_answer", "a rollout of `{shape.use}` has several answers"),
        Refused("shape and acts", "with `tools` or an `environment` a completion goes on by their replies"),
        Refused("shape and tree", "`tree` says what grows behind a prompt"),
        Refused("shape and workflow", "`workflow` says what is asked behind a prompt"),
        Refused("shape and search", "`search` makes one completion of steps"),
    ] = Field(
        None,
        description="answers in several requests, as the policy was trained: chunks, summaries, shuffled_options, or a "
        "function of your own with one scored row; default: one completion",
    )


class PlayWorkflow(ComponentSection):
    """Calls by role that a rollout consists of."""

    kinds: ClassVar = ("workflow",)
    max_prompt_tokens: Positive | None = Field(
        None,
        description="longest prompt of a call; a rollout whose next call has a longer one ends before it; default: the "
        "data's longest + 2 * max_new_tokens + 512",
    )

    def may(self, word: str) -> bool:
        """Whether the workflow says so in its `needs`."""
        return word in self.needs


class Workflow(PlayWorkflow):
    """Calls by role that a rollout consists of, and which of them are rows of the trained batch."""

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
        description="which adapter of `model.lora.adapters` answers for a role: {refiner: actor}; default: that of the "
        "role's own name, else the first. `base`, for roles that are not trained: the base without an adapter",
    )

    def adapter_of(self, role: str, several: Sequence[str]) -> str | None:
        """Which of a model's adapters answers for a role; None = the only one."""
        return self.adapters.get(role, role if role in several else next(iter(several), None))

    @property
    def roles(self) -> list[str]:
        """The roles that the workflow may call; [] where nobody knows, as of a function of the user."""
        return list(self.described.get("roles", []))

    @property
    def late(self) -> list[str]:
        """The roles whose calls are trained on in later steps, by what the workflow says that they have earned."""
        return list(self.described.get("late", []))


class Rollout(EngineSection, Sampling):
    """One step's samples: prompts_per_step x group_size completions."""

    engine: Annotated[
        Literal["transformers", "vllm", "stored"],
        Refused("engine = stored and acts", f"{STORED_ROWS}; with `tools` or an `environment` they must be sampled"),
    ] = Field(  # type: ignore[assignment]
        "transformers", description="stored: nothing is sampled; the rows' own completions are trained on"
    )
    prompts_per_step: Annotated[int, Field(gt=0, le=1_000_000)] = Field(32, description="prompts that a step draws")
    group_size: Annotated[
        Width,
        Refused("engine = stored and group_size > 1", f"{STORED_ROWS}, and a row has one", "write 1"),
        Refused(
            "groups in sampler.needs and group_size = 1",
            "`{sampler.use}` divides the rollouts of a step among prompts, and there is 1 for each",
            "write 2 or more",
        ),
        Refused(
            "groups in replay.needs and group_size = 1",
            "`{replay.use}` joins a group, and a rollout stands alone",
            "write 2 or more",
        ),
    ] = Field(8, description="completions of one prompt, the group of group-relative methods")
    max_gen_batches: Annotated[
        Positive,
        Idle("not keeps", "without `keep`: it refills the groups that `keep` drops", "add `keep: dynamic_sampling`"),
        Refused("engine = stored and max_gen_batches > 1", f"{STORED_ROWS}: none are drawn anew", "remove it"),
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
            "groups that failed are replaced by other prompts before a stored rollout could join them",
            "write 1",
        ),
    ] = Field(
        1,
        description="generation rounds a step at most; > 1 refills groups that `keep` drops (dynamic sampling)",
    )
    staleness: Annotated[
        int,
        Field(ge=0, le=8),
        Refused(
            "staleness = 1 and not loss.is_group_loss and not weighs_behaviour",
            f"the rollouts are an update old, and {UNWEIGHED}",
            WEIGH,
        ),
        Refused(
            "staleness > 1 and not loss.is_group_loss and not weighs_behaviour",
            f"the rollouts are {{staleness}} updates old, and {UNWEIGHED}",
            WEIGH,
        ),
        Refused("engine = stored and staleness", f"{STORED_ROWS}: nothing is drawn ahead", "remove it"),
        Refused(
            "staleness and values in sampler.needs",
            "`{sampler.use}` reads the policy's hidden states of prompts while its weights may be changing",
            "write 0",
        ),
    ] = Field(
        0,
        description="updates between sampling and training: with k the rollouts of step t+k are begun in step t, and "
        "drawn while it trains where the engine can (vLLM without vllm.sleep)",
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
            "the opponent answers where the policy's weights stand, and rollouts are drawn between two updates",
            "leave it out",
        ),
    ] = Field(
        False,
        description="with staleness: rollouts still drawn when an update ends are paused and go on with its weights; "
        "long ones may then take as many steps as staleness says",
    )
    shape: Annotated[
        RolloutShape | None,
        *_refuse_beside("shape"),
        Refused("goes_on in shape.needs and staleness", "rollouts that have not ended go on with the newest weights"),
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
    ] = Field(None, description="rollouts that go on: cuts, chunks, summaries, trees; default: one completion, one row")
    workflow: Annotated[
        Workflow | None,
        *_refuse_beside("workflow"),
        Refused("workflow and shape", "`rollout.shape` and `rollout.workflow` each decide what a rollout is"),
    ] = Field(None, description="rollouts of several calls by role: a critic's, a planner's; each call is a row")

    @property
    def several_rows(self) -> RolloutShape | Workflow | None:
        """What makes several rows of a rollout, if anything does."""
        return self.workflow if self.shape is None else self.shape

"""The sections of recipes: keys, types, defaults and help. Those of merging and of evaluation have files of their own
(`merge_sections.py`, `eval_sections.py`). No torch here.

Lengths are in tokens, times in seconds, rates in shares of 1 unless a key says otherwise.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from posttrain.recipe.section import (
    ComponentSection,
    CriticName,
    DataName,
    ModelName,
    OnNone,
    Section,
    TemplateName,
)

Positive = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Lora(Section):
    """A low-rank adapter; the base stays frozen and serves as the reference policy."""

    rank: Positive = 16
    alpha: Positive = Field(32, description="scale: the adapter's output is multiplied by alpha / rank")
    dropout: Share = 0.0
    targets: str | list[str] = Field("all-linear", description="module names, or all-linear")


class Model(Section):
    """Which weights, and how they are trained."""

    path: ModelName = Field(description="a directory, a hub id, a .gguf file, `tiny`, or `stage:NAME` in a pipeline")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of products and of frozen weights; auto: bfloat16 on a GPU, float32 on a CPU;"
        " float16 (rl): trainer and vLLM agree better",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    lora: Lora | None = Field(None, description="train a LoRA adapter instead of all weights")
    quantize: Literal["nf4"] | None = Field(None, description="4-bit weights (bitsandbytes); training them needs lora")
    attention: Literal["auto", "eager", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    shard: bool = Field(
        False,
        description="full training with --gpus N: each GPU keeps a part of weights, gradients and moments (FSDP2)",
    )
    compile: bool = Field(False, description="torch.compile the layers for training: a minute once, then faster steps")
    offload_reference: bool = Field(
        False, description="full training: the frozen reference waits in host memory while it is not read"
    )
    chat_template: TemplateName | None = Field(None, description="a Jinja file that replaces the tokenizer's template")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")


class Source(Section):
    """Where rows come from."""

    source: DataName | None = Field(
        None,
        description="a .jsonl/.json/.csv/.parquet file, a datasets directory, a hub id, gym:TASK, file.py:function, or "
        "accepted:EVAL_RUN (its right completions)",
    )
    split: str = "train"
    config: str | None = Field(None, description="hub configuration name")
    size: Positive | None = Field(None, description="rows to take (gym and functions: rows to make)")
    skip: Annotated[int, Field(ge=0)] = Field(0, description="rows to leave out first, e.g. those trained on elsewhere")
    seed: int = Field(0, description="seed of generated rows (gym and functions)")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the gym task or function")
    columns: dict[str, str] = Field(default_factory=dict, description="our column name: the file's column name")
    weight: Annotated[float, Field(gt=0)] = Field(1.0, description="share in a mixture")


class Data(Source):
    """Rows, how they become tokens, and which tokens are trained on."""

    mix: list[Source] | None = Field(None, description="several sources with weights, instead of source")
    system: str | None = Field(None, description="system message put before every prompt that has none")
    prompt_template: str | None = Field(None, description="a user message with {column} fields, instead of `prompt`")
    chat: bool = Field(True, description="render with the chat template; false: prompt and completion as plain text")
    train_on: Literal["completion", "assistant", "all"] = Field(
        "completion", description="completion: the last assistant turn; assistant: every assistant turn"
    )
    thought_dropout: Share = Field(
        0.0, description="share of rows whose first thought (<think>...</think>) is emptied, once and for all"
    )
    max_length: Positive | None = Field(None, description="longest sequence (RL: longest prompt)")
    overlong: Literal["drop", "truncate_prompt", "error", "keep"] = Field(
        "drop", description="what happens to rows over max_length"
    )
    shuffle: bool = True

    @model_validator(mode="after")
    def _one_source(self) -> Data:
        if (self.source is None) == (self.mix is None):
            raise ValueError("give either `source` or `mix`")
        return self


class Sampling(Section):
    """How completions are drawn."""

    temperature: NonNegative = Field(1.0, description="0 = greedy")
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = Field(0, description="0 = all tokens")
    max_new_tokens: Positive = 512
    stop: list[str] = Field(default_factory=list, description="texts that end a completion, besides EOS")
    max_turns: Positive = Field(8, description="with tools or an environment: turns of the model at most")
    turn_tokens: Positive | None = Field(
        None, description="the same: longest turn; default: max_new_tokens, which holds all turns and replies"
    )
    reply_tokens: Positive = Field(512, description="the same: longest reply of a turn's tools, cut behind it")
    rollout_seconds: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same: no further turn begins after this much time since the rollouts began"
    )


class Tool(Section):
    """Something that the model can call: a function of a file, a shipped tool by name, or a command."""

    use: str | None = Field(None, description="a shipped tool (calculator, python, sql, search), or file.py:function")
    command: str | None = Field(None, description="instead of use: a command that reads the model's input from stdin")
    name: str | None = Field(None, description="as the model calls it; default: the function's")
    description: str | None = Field(None, description="of a command, for the model")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword-only arguments of the function")
    timeout_s: Annotated[float, Field(gt=0)] = Field(5.0, description="wall clock a call")
    max_chars: Positive = Field(4000, description="longest answer; the rest is cut and told")

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

    use: str = Field(description="file.py:Class, or `gym` for tasks of reasoning-gym")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the class")
    timeout_s: Annotated[float, Field(gt=0)] = Field(10.0, description="wall clock a step, or of a state's simulations")
    simulations: Annotated[int, Field(ge=0)] = Field(
        0, description="random plays from the state before each turn, for advantage mc_critic; needs a method actions()"
    )
    horizon: Positive = Field(200, description="steps of such a play at most")


class Server(Section):
    """vLLM in processes of its own, each with its own GPU, instead of beside the trainer on the trainer's."""

    urls: list[str] = Field(
        default_factory=list,
        description="processes of `posttrain serve`, here or on other machines: [http://node2:8100]; they share the "
        "prompts",
    )
    devices: list[Annotated[int, Field(ge=0)]] = Field(
        default_factory=list,
        description="or GPUs of this machine, one process on each, which the run starts and ends itself: [1]",
    )
    timeout_s: Annotated[float, Field(gt=0)] = Field(
        600.0, description="longest silence of a server that was asked for something"
    )

    @model_validator(mode="after")
    def _one_place(self) -> Server:
        if bool(self.urls) == bool(self.devices):
            raise ValueError("give either `urls` or `devices`")
        for url in self.urls:
            if not re.fullmatch(r"http://[^/\s:@]+:\d+/?", url):
                raise ValueError(f"`{url}` is no address of a server: write http://HOST:PORT")
        if len(set(self.devices)) < len(self.devices) or len(set(self.urls)) < len(self.urls):
            raise ValueError("a server is named twice")
        return self


class Vllm(Section):
    """Settings of the vLLM engine."""

    gpu_memory: Share | None = Field(
        None,
        description="share of the GPU's memory for weights and KV cache; default: 0.3 beside the trainer, 0.9 with "
        "`server`",
    )
    max_model_len: Positive | None = Field(None, description="prompt + completion; default: what the data needs")
    enforce_eager: bool = Field(False, description="start faster, generate slower")
    sleep: bool = Field(False, description="free the engine's memory during the update")
    merge_adapter: bool = Field(
        False,
        description="with LoRA: add the adapter to the base's weights at every sync; else the adapter is pushed alone, "
        "and the engine computes it apart, which is exact but slower",
    )
    server: Server | None = Field(None, description="generate on other GPUs or machines")
    tensor_parallel: Positive = Field(1, description="GPUs of one engine, each with a part of every weight (`server`)")

    @property
    def share(self) -> float:
        """`gpu_memory` or its default."""
        return (0.9 if self.server else 0.3) if self.gpu_memory is None else self.gpu_memory

    @property
    def places(self) -> list[tuple[int, ...]]:
        """The GPUs of each engine that the run starts itself."""
        size, devices = self.tensor_parallel, self.server.devices if self.server else []
        return [tuple(devices[at : at + size]) for at in range(0, len(devices), size)]


class EngineSection(Section):
    """What generates."""

    engine: Literal["transformers", "vllm"] = "transformers"
    batch_size: Positive = Field(512, description="sequences generated together (transformers)")
    vllm: Vllm = Field(default_factory=Vllm)

    @model_validator(mode="after")
    def _whole_engines(self) -> Self:
        size, server = self.vllm.tensor_parallel, self.vllm.server
        if size > 1 and (server is None or self.engine != "vllm"):
            raise ValueError("vllm.tensor_parallel needs `engine: vllm` and `vllm.server`: beside the trainer it is 1")
        if server is not None and len(server.devices) % size:
            raise ValueError(
                f"vllm.server.devices names {len(server.devices)} GPUs, which engines of {size}"
                " (vllm.tensor_parallel) do not divide"
            )
        return self


class Rollout(EngineSection, Sampling):
    """One step's samples: prompts_per_step x group_size completions."""

    engine: Literal["transformers", "vllm", "stored"] = Field(  # type: ignore[assignment]
        "transformers", description="stored: nothing is sampled; the rows' own completions are trained on"
    )
    prompts_per_step: Positive = 32
    group_size: Positive = Field(8, description="completions of one prompt, the group of group-relative methods")
    max_gen_batches: Positive = Field(
        1,
        description="generation rounds a step at most; > 1 refills groups that `keep` drops (dynamic sampling)",
    )
    staleness: Annotated[int, Field(ge=0, le=1)] = Field(
        0,
        description="updates between sampling and training: 1 draws the next rollouts while this step trains (with "
        "vllm.server)",
    )
    partial: bool = Field(
        False,
        description="with staleness 1: rollouts still drawn when an update ends are paused and go on with its weights",
    )


class Condition(Section):
    """When a component counts."""

    on: str = Field(description="name of another reward")
    min: float = Field(1.0, description="its least score for the component to count; below it the component is 0")


class Reward(Section):
    """One reward component."""

    use: str = Field(description="script.function of a shipped reward (math.accuracy), or file.py:function")
    name: str | None = Field(None, description="name in metrics; default: the function's")
    weight: float = Field(1.0, description="0 = log only")
    params: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")
    correct: bool = Field(False, description="this component says whether an answer is right (default: the first)")
    on_none: OnNone = Field("auto", description="what a None (does not apply) means for the row")
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = Field(
        None, description="[low, high] of the score before it is weighted"
    )
    condition: Condition | None = Field(None, description="count only where another reward says so")
    timeout_s: Annotated[float, Field(gt=0)] | None = Field(
        None, description="wall clock a call; default: 10, of a judge what its script says"
    )
    canary: bool = Field(
        False, description="never trained on (weight 0): an alarm when it falls while the trained reward rises"
    )


class Scoring(Section):
    """How rewards are run."""

    workers: Positive = Field(2, description="worker processes")
    correct_at: float = Field(1.0, description="an answer is right when the correctness component is at least this")
    max_error_rate: Share = Field(
        0.1, description="stop when more calls of a component than this fail or time out in a step"
    )
    max_bad_gold: Share = Field(
        0.05, description="refuse to start when gold does not score best on more rows than this"
    )
    memory_mb: Positive | None = Field(
        None, description="memory of a worker process; a call that needs more fails; null = no limit"
    )
    split: Literal["lines", "paragraphs"] | None = Field(
        None, description="how a completion of one turn is divided into steps, for rewards by turn (`@per_turn`)"
    )
    canary_window: Annotated[int, Field(ge=5)] = Field(20, description="steps over which canaries are watched")


class GroupReward(ComponentSection):
    """A reward of a whole group: it makes new rewards from those of the rows, their components and lengths."""

    kinds: ClassVar = ("group_reward",)


class Keep(ComponentSection):
    """Which groups or rows stay in the batch."""

    kinds: ClassVar = ("keep",)


class Advantage(ComponentSection):
    """How rewards become advantages: the normaliser."""

    kinds: ClassVar = ("advantage",)
    use: str = "group"


class Factor(ComponentSection):
    """A factor on the advantages of each row."""

    kinds: ClassVar = ("factor",)


class Bonus(ComponentSection):
    """New advantages from those that there are."""

    kinds: ClassVar = ("bonus",)


class Spread(ComponentSection):
    """How a row's advantage is divided among its turns or tokens."""

    kinds: ClassVar = ("spread",)


class Select(ComponentSection):
    """Which rows and tokens are trained on."""

    kinds: ClassVar = ("select",)


class CorrectionSection(ComponentSection):
    """A weight or mask against the difference between the engine's and the trainer's log-probs."""

    kinds: ClassVar = ("correction",)


Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "fixed", "local_token_mean"]


class Loss(ComponentSection):
    """The policy loss and how its token matrix becomes one number."""

    kinds: ClassVar = ("loss", "group_loss")
    use: str = "clip"
    aggregation: Aggregation = "seq_mean_token_mean"
    norm_len: Positive | None = Field(None, description="constant length of `fixed`; default: max_new_tokens")
    count_empty_rows: bool = Field(True, description="rows without trained tokens stay in the row count")
    mask_truncated: bool = Field(False, description="completions that hit the limit carry no loss")


class Kl(ComponentSection):
    """Distance to the reference policy. coef 0 = no reference model at all."""

    kinds: ClassVar = ("kl",)
    use: str = "k3"
    coef: NonNegative = 0.0
    where: Literal["loss", "reward"] = "loss"
    reference: ModelName | None = Field(
        None, description="a model to measure against, such as a teacher; default: the policy that training starts from"
    )


class Regulariser(ComponentSection):
    """A term added to the loss."""

    kinds: ClassVar = ("regulariser",)
    coef: float = Field(1.0, description="it is multiplied by this")
    aggregation: Aggregation | None = Field(None, description="default: that of the loss")


class Controller(ComponentSection):
    """What drives one number of the recipe over the run."""

    kinds: ClassVar = ("controller",)


class Critic(Section):
    """The value head: a linear layer on the policy's last hidden states, which it does not change."""

    lr: Annotated[float, Field(gt=0)] = Field(1e-5, description="learning rate of the value head")
    path: CriticName | None = Field(
        None,
        description="a run whose value head was trained before (`loss: critic`), on the model that this run starts "
        "from: it stays as it is, and reads the reference's hidden states",
    )

    @model_validator(mode="after")
    def _stays(self) -> Critic:
        if self.path and "lr" in self.model_fields_set:
            raise ValueError("a critic with a `path` is not trained: remove `lr`")
        return self


class Opponent(Section):
    """A slow copy of the policy to play against: its answers to a step's prompts are what the policy's must beat."""

    ema: Annotated[float, Field(gt=0, le=1)] = Field(
        0.01, description="share of the way to the policy that it goes after each step; 1 = the policy itself"
    )
    samples: Positive = Field(1, description="its answers to a prompt")


class PairLossSection(ComponentSection):
    """The preference loss."""

    kinds: ClassVar = ("pair_loss",)
    use: str = "dpo"


class OnlineKl(Section):
    """The KL to the starting policy on the policy's own answers to the pairs' prompts, added to the preference loss."""

    coef: Annotated[float, Field(gt=0)] = Field(1e-3, description="its weight; 1e-4 to 1e-2 is usual")
    samples: Positive = Field(1, description="answers to a prompt, in each step")
    baseline: Literal["none", "rloo"] = Field(
        "none", description="rloo: less the mean KL of a prompt's other answers, which makes the estimate steadier"
    )
    max_new_tokens: Positive = Field(256, description="longest answer")

    @model_validator(mode="after")
    def _has_others(self) -> OnlineKl:
        if self.baseline == "rloo" and self.samples == 1:
            raise ValueError("`baseline: rloo` compares the answers to a prompt: write `samples` of 2 or more")
        return self


class PairRules(Section):
    """What becomes of pairs from which nothing can be learned. They are counted and told by row in any case."""

    bad: Literal["drop", "error"] = Field("drop", description="pairs with equal sides, an empty side or no prompt")
    max_gap: Annotated[float, Field(ge=1)] | None = Field(
        None, description="pairs whose longer side has more than this times the tokens of the other are bad too"
    )


class Anchors(Section):
    """Other policies that the preference loss reads, as models (path or `stage:NAME`): the log-probs of every pair are
    computed once, one model after the other, before the policy is loaded."""

    reference: ModelName | None = Field(None, description="the reference; default: the policy as it is loaded")
    previous: ModelName | None = Field(
        None, description="the policy that the pairs were sampled from (dno, inpo, p3o_pair); default: as it is loaded"
    )
    history: list[ModelName] = Field(default_factory=list, description="earlier policies, the newest first (mnpo)")


class RewardObjective(Section):
    """What the heads of a reward model learn, and from which columns."""

    use: Literal["bradley_terry", "mixture", "label_regression", "gaussian"] = Field(
        "bradley_terry",
        description="bradley_terry: each head ranks all pairs; mixture: heads divide the users among them; "
        "label_regression: a head a label; gaussian: heads with a mean and a deviation each, of one label",
    )
    heads: Positive | None = Field(
        None, description="default: 1 (bradley_terry), 2 (mixture), 5 (gaussian); label_regression: one a label"
    )
    share: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the rows that each head sees, drawn for each: makes heads of one model differ"
    )
    center_coef: NonNegative = Field(0.01, description="pull of the pair's summed scores to 0 (pairs)")
    margin: str | None = Field(None, description="column with the score that chosen must be ahead by (pairs)")
    labels: list[str] = Field(default_factory=list, description="columns with numbers, one a head; may be null")
    user: str | None = Field(None, description="column that says who preferred (mixture); default: each pair is one")
    rounds: Positive = Field(5, description="how often users are assigned to heads anew (mixture)")
    soft: bool = Field(False, description="weigh heads by how likely they are instead of the best one (mixture)")
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
        return len(self.labels) if self.use == "label_regression" else self.heads or fixed[self.use]

    @model_validator(mode="after")
    def _fits(self) -> RewardObjective:
        if self.use == "label_regression" and (not self.labels or self.heads):
            raise ValueError("label_regression has a head for each of `labels`: name them, and leave `heads` out")
        if self.use == "gaussian" and len(self.labels) != 1:
            raise ValueError("gaussian learns one label: name its column in `labels`")
        if self.pairs and self.labels:
            raise ValueError(f"`labels` are for label_regression and gaussian; {self.use} learns from pairs")
        unread = {"margin": "bradley_terry", "user": "mixture"}
        for key, reader in unread.items():
            if getattr(self, key) and self.use != reader:
                raise ValueError(f"`{key}` is for {reader}")
        return self


class SftObjective(ComponentSection):
    """How much each trained token counts: weights in one sum of negative log-probs."""

    kinds: ClassVar = ("token_weight",)
    use: str = "ce"
    divide_by: Literal["tokens", "weights"] | None = Field(
        None, description="what the sum of a step is divided by; default: weights for action_aware, else trained tokens"
    )
    behavior_model: ModelName | None = Field(
        None, description="pear: the model that wrote the data; its log-probs are computed once and kept in the run"
    )
    neftune: NonNegative = Field(
        0.0, description="noise on the input embeddings while training: alpha, 5 is usual; smaller with packing"
    )

    @property
    def divisor(self) -> str:
        """`tokens` or `weights`."""
        return self.divide_by or ("weights" if self.use == "action_aware" else "tokens")


class Optim(Section):
    """Optimiser and learning rate. Warm-up is linear, counted in optimiser steps."""

    use: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = Field(
        "adamw",
        description="8-bit moments (bitsandbytes) need a quarter of the memory; paged: they leave a GPU that is full",
    )
    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: list[float] = Field(default_factory=lambda: [0.9, 0.999], min_length=2, max_length=2)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.0
    schedule: Literal["constant", "linear", "cosine", "stable_decay"] = Field(
        "constant", description="stable_decay: constant, then down to min_lr in the last decay_steps"
    )
    decay_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="stable_decay: default a tenth of the steps"
    )
    min_lr: NonNegative | None = Field(None, description="stable_decay: the last learning rate; default lr / 10")
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0


class SftOptim(Optim):
    """The optimiser, with the usual learning rate of supervised fine-tuning."""

    lr: Annotated[float, Field(gt=0)] = 1e-5


class DpoOptim(Optim):
    """The optimiser, with the usual learning rate of preference optimisation."""

    lr: Annotated[float, Field(gt=0)] = 5e-7


class RewardOptim(Optim):
    """The optimiser, with the usual learning rate of a full reward model (LoRA: 1e-4)."""

    lr: Annotated[float, Field(gt=0)] = 1e-5


class RlBatch(Section):
    """How a step's rollouts are divided for the update."""

    minibatches: Positive = Field(1, description="optimiser updates an epoch")
    epochs: Positive = Field(1, description="passes over the rollouts")
    micro_tokens: Positive = Field(16384, description="tokens (prompt + completion) of one forward pass at most")


class TrainBatch(Section):
    """Rows of one optimiser step, and of one forward pass."""

    size: Positive = Field(32, description="rows (pairs) an optimiser step")
    micro_size: Positive | None = Field(None, description="rows a forward pass; default: size; must divide size")
    packing: bool = Field(False, description="put short rows behind each other in one sequence (sft)")

    @model_validator(mode="after")
    def _divides(self) -> TrainBatch:
        if self.micro_size and self.size % self.micro_size:
            raise ValueError(f"micro_size {self.micro_size} does not divide size {self.size}")
        return self


class Run(Section):
    """How long, where to, and what is kept."""

    output: str | None = Field(None, description="run directory; default: runs/RECIPE/TIME-HASH")
    seed: int = 0
    steps: Positive | None = Field(None, description="optimiser steps (RL: rollout batches)")
    epochs: Positive | None = Field(None, description="passes over the data, instead of steps")
    save_every: Positive | None = Field(None, description="steps between checkpoints; default: only at the end")
    keep_checkpoints: Positive = Field(2, description="complete checkpoints to keep")
    log_every: Positive = 1
    keep_rollouts: Annotated[int, Field(ge=0)] = Field(
        1, description="steps whose rollouts are kept as numbers, the newest ones, for `posttrain whatif`"
    )
    samples_per_step: Annotated[int, Field(ge=0)] = Field(4, description="rollouts written to samples.jsonl a step")
    max_minutes: Annotated[float, Field(gt=0)] | None = Field(None, description="stop cleanly after this much training")
    hang_minutes: Annotated[float, Field(gt=0)] | None = Field(
        5.0,
        description="stop, with the stacks of all threads in logs/, when a phase of a step takes longer than this and "
        "than 10 times its median (6 times this while it has none); null = never",
    )

    @model_validator(mode="after")
    def _one_length(self) -> Run:
        if self.steps and self.epochs:
            raise ValueError("give either `steps` or `epochs`: remove one of them, or write null for it")
        return self

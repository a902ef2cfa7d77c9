"""Rollouts, one by one and as a batch of tensors. Row: a dataset record. Prompt: what is sampled from. Rollout: one
trajectory, token in, token out. RolloutBatch: the numeric batch that advantages and losses read.

Shapes: N rows (rollouts), T completion tokens of the longest row. Groups are marked by `group_ids` and may differ in
size: nothing here is ever reshaped to [prompts, group_size].
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray
from torch import Tensor

from posttrain.images import Image

FinishReason = Literal["stop", "length"]
TRAINED = ("model", "given")  # kinds of segments that are trained on
CPU = torch.device("cpu")
T = TypeVar("T")


@dataclass(frozen=True)
class PromptImages:
    """The images of a prompt, or of a reply within a rollout, in the order in which its tokens show them. short_ids:
    its tokens with one an image, as the chat template writes them, which vLLM is given. length: of its tokens as the
    model gets them."""

    shown: tuple[Image, ...]
    short_ids: tuple[int, ...]
    length: int

    def shorten(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens of the prompt and of what follows it, with one token an image."""
        return self.short_ids + ids[self.length :]


def join_images(parts: Sequence[tuple[tuple[int, ...], PromptImages | None]]) -> PromptImages | None:
    """The images of tokens that stand one after another; None if there are none. parts: tokens with their images."""
    if all(images is None for _, images in parts):
        return None
    return PromptImages(
        tuple(image for _, images in parts if images for image in images.shown),
        _concatenate(images.shorten(ids) if images else ids for ids, images in parts),
        sum(len(ids) for ids, _ in parts),
    )


@dataclass(frozen=True)
class Prompt:
    """What is sampled from: a data row and its rendered tokens. `uid` is stable across runs and resumes."""

    uid: str
    row: Mapping[str, Any]  # the record with all its columns (rewards read them)
    text: str  # rendered with the chat template, generation prompt included
    ids: tuple[int, ...]  # tokens of `text`, exactly as the model gets them: an image has one for each of its features
    images: PromptImages | None = None
    adapter: str | None = None  # that answers it, of a model with several; None = the first, `base` = none

    @property
    def shown(self) -> tuple[Image, ...]:
        """Its images, in order."""
        return () if self.images is None else self.images.shown


@dataclass(frozen=True)
class Variant:
    """What some rollouts of a prompt are sampled from in place of the plain prompt, and what the loss sees of it.

    name: as metrics and samples.jsonl call it. system: the system message, None = the data's own. user: the last user
    message, in which `{prompt}` stands for what the data has there, and the names of `fills` for their texts (`ask`
    fills them in one pass, so that a text that holds such a name stays as it is). prefill: text that the answer begins
    with and that belongs to the prompt: neither a reward nor the loss sees it. begin: tokens that the answer begins
    with, such as a part of a solution; rewards read them, and max_new_tokens counts only what is sampled after them.
    begin_is: `prompt` = a part of the state, where no row has a loss; `untrained` = a part of the completion that is
    not trained on; `trained` = one that is. loss_on: the prompt under which the trained pass computes log-probs, the
    sampled or the plain one; `old_logp` is always under the sampled one. hinted: whether the rows count as hinted.
    replaces: the earlier rollouts of the prompt leave the step. apart: the rollouts are a group of their own. columns:
    more columns of the data row, for rewards. note: what the kind's `learn` wants to know again; JSON-able.
    """

    name: str = "plain"
    system: str | None = None
    user: str = "{prompt}"
    fills: Mapping[str, str] = field(default_factory=dict)
    prefill: str = ""
    begin: tuple[int, ...] = ()
    begin_is: Literal["prompt", "untrained", "trained"] = "prompt"
    loss_on: Literal["sampled", "plain"] = "sampled"
    hinted: bool = False
    replaces: bool = False
    apart: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)
    note: Mapping[str, Any] = field(default_factory=dict)

    def ask(self, question: str) -> str:
        """The last user message, about what the data asks there."""
        texts = {**self.fills, "prompt": question}
        names = "|".join(map(re.escape, texts))
        return re.sub(rf"\{{({names})\}}", lambda found: texts[found[1]], self.user)


class Elsewhere(Sequence[Any]):
    """The tokens of a segment that another rank has: how many they are. Whoever reads one has forgotten to ask for it
    (`train.own_rows`)."""

    def __init__(self, count: int) -> None:
        self._length = count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        raise LookupError("these tokens are on another rank")


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one origin: sampled by the model; a reply of a tool; `injected`, put there and not trained on;
    `given`, put there and trained on. `logps` are the engine's, or None; `images` those that a reply shows. `ids` are
    `Elsewhere`, and text, log-probs, versions and images are missing, while another rank has the rollout."""

    kind: Literal["model", "tool", "injected", "given"]
    ids: tuple[int, ...]
    logps: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None  # policy version that sampled each token; None = the rollout's
    images: PromptImages | None = None


class Node(NamedTuple):
    """A node of a tree of rollouts, as a segment of one of its paths. number: the same in all paths through it; value:
    what the search says that it is worth; visits: how often the search came through it."""

    number: int
    value: float
    visits: float = 0.0


CallKind = Literal["ok", "error", "timeout", "malformed", "unknown"]


@dataclass(frozen=True)
class ToolCall:
    """A call that the model wrote, and the text that it got back. kind: what came of it; `error`: the tool raised.
    seconds: that the tool worked, without waiting for a free worker; None if it was not called. images: that it
    returned, one for each PLACE in the result, until they have become a segment's."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    kind: CallKind = "ok"
    seconds: float | None = field(default=None, compare=False)
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One turn of the model. text: what it wrote, without special tokens; reply: what was shown to it next, None after
    its last turn; reward: an environment's for this turn; mc_value: what random plays from the state before it earned;
    returns: what each legal action of that state returns, where that is measured, and action: which of them it was.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    reply: str | None = None
    reward: float | None = None
    mc_value: float | None = None
    returns: Mapping[str, float] = field(default_factory=dict)
    action: str | None = None
    seconds: float | None = field(default=None, compare=False)  # of its slowest call, or the environment's step


class Said(NamedTuple):
    """One call of a workflow, as rewards and samples.jsonl have it. parent: the place of the call that it goes on from,
    None = the data's prompt. tokens: that it wrote. note: what the workflow tells rewards of it; values of JSON. parts,
    shown: of a call that was replied to, the texts of its turns, and what was shown between them."""

    role: str
    text: str
    parent: int | None = None
    finish: FinishReason = "stop"
    tokens: int = 0
    note: Mapping[str, Any] = {}
    parts: Sequence[str] = ()
    shown: Sequence[str] = ()


@dataclass(frozen=True)
class WorkflowCall:
    """Which call of a workflow a row is. calls: all of its rollout. number: its place among them. compared: which calls
    are its group: `role`, those of its role for the same prompt; `parent`, of these the ones with the same parent. cut:
    the rollout ended because the prompt of a further call had no room."""

    calls: tuple[Said, ...]
    number: int
    compared: Literal["role", "parent"] = "role"
    cut: bool = False

    @property
    def role(self) -> str:
        """Who was asked."""
        return self.calls[self.number].role


@dataclass(frozen=True)
class Stored:
    """What a replayed rollout was stored with. step: that sampled it, from 0. logps: of its completion's tokens, by the
    trainer's policy at the start of that step (the engine's, where that was not measured). advantages: as assigned
    within its group then; one for the row, or one a token."""

    step: int
    logps: tuple[float, ...]
    advantages: tuple[float, ...] = ()


@dataclass
class Rollout:
    """One completion of one prompt. `scores` holds every reward component by name; None = does not apply."""

    prompt: Prompt
    group: int  # rollouts of one prompt in one step share it
    segments: tuple[Segment, ...]
    text: str  # completion decoded without special tokens
    finish: FinishReason  # stop = ended by itself (EOS or stop string), length = hit the limit
    version: int  # policy version that began it; see `versions`
    scores: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None  # weighted sum of scores; None = unscored
    correct: bool | None = None  # by the component that the recipe marks as correctness
    turns: tuple[Turn, ...] = ()  # with tools or an environment: one a model segment, in order
    ended: str = ""  # with them, why it ended: answer, done, turns, tokens, time, error
    world_score: float | None = None  # what its environment says of the whole
    # Of rewards by turn, where there are any: the token that ends each part, name -> each part's score, and their
    # weighted sum, which is a part of `reward`.
    part_ends: tuple[int, ...] = ()
    turn_scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    against: tuple[float | None, ...] = ()  # rewards of the opponent's answers to the prompt
    variant: Variant | None = None  # what was sampled from in place of the data's prompt; None = the prompt itself
    loss_ids: tuple[int, ...] | None = None  # prompt tokens of the trained pass; None = those of `prompt`
    bin: int | None = None  # that the prompt sampler put its prompt into
    # Of rollouts of several rows (`rollout.shape`, `rollout.workflow`): the number of the rollout, None = this row is
    # all of it; the row's place in it; whether rewards read the row; which call of a workflow it is.
    trajectory: int | None = None
    part: int = 0
    scored: bool = True
    nodes: tuple[Node, ...] = ()  # of a path through a tree (`rollout.shape`): the node of each segment
    unfinished: bool = False  # it goes on in the next step
    older: int = 0  # completion tokens that earlier steps have sampled
    ends: tuple[int, ...] = ()  # the token that ends each part, where the shape divides the row; -1: before its first
    call: WorkflowCall | None = None
    stored: Stored | None = None  # of a rollout of an earlier step that is replayed; None = fresh

    @property
    def ids(self) -> tuple[int, ...]:
        return _concatenate(s.ids for s in self.segments)

    @property
    def length(self) -> int:
        """Completion tokens."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def sampled_length(self) -> int:
        """Completion tokens that the model wrote."""
        return sum(len(s.ids) for s in self.segments if s.kind == "model")

    @property
    def is_here(self) -> bool:
        """Whether this rank has its tokens and its text."""
        return not any(isinstance(s.ids, Elsewhere) for s in self.segments)

    @property
    def is_given(self) -> bool:
        """Whether it is a solution that the data bring: the policy has sampled nothing of it."""
        return bool(self.segments) and all(s.kind == "given" for s in self.segments)

    @property
    def tool_seconds(self) -> float | None:
        """That its tools or its environment worked, turn by turn; None if they never did."""
        known = [turn.seconds for turn in self.turns if turn.seconds is not None]
        return sum(known) if known else None

    @property
    def sampled(self) -> tuple[int, ...]:
        """The tokens that the model wrote; `ids` without those that a tool or a hint put there."""
        return _concatenate(s.ids for s in self.segments if s.kind == "model")

    @property
    def trained(self) -> tuple[bool, ...]:
        """Per completion token: sampled, or given to be trained on (True), or put there to be read (False)."""
        return _concatenate((s.kind in TRAINED,) * len(s.ids) for s in self.segments)

    def by_segment(self, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        """A value for each segment, at all its tokens."""
        return np.repeat(values, [len(segment.ids) for segment in self.segments])

    @property
    def images(self) -> tuple[Image, ...]:
        """The images that stand in prompt and completion, in order."""
        own = (self.prompt.images, *(s.images for s in self.segments))
        return tuple(image for images in own if images is not None for image in images.shown)

    def images_within(self, count: int) -> tuple[Image, ...]:
        """Those of the prompt and of whole segments among the first `count` tokens of the completion."""
        found, end = list(self.prompt.shown), 0
        for segment in self.segments:
            end += len(segment.ids)
            if end <= count and segment.images is not None:
                found += segment.images.shown
        return tuple(found)

    @property
    def logps(self) -> tuple[float, ...]:
        """Per completion token: the engine's log-prob, NaN where it reported none."""
        nan = float("nan")
        return _concatenate(s.logps if s.logps is not None else (nan,) * len(s.ids) for s in self.segments)

    @property
    def versions(self) -> tuple[int, ...]:
        """Per completion token: the policy version that sampled it, or under which it was put there."""
        return _concatenate(s.versions or (self.version,) * len(s.ids) for s in self.segments)


def _concatenate(parts: Iterable[Sequence[T]]) -> tuple[T, ...]:
    joined = [tuple(part) for part in parts]
    return joined[0] if len(joined) == 1 else tuple(itertools.chain.from_iterable(joined))  # most rollouts have one


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Fields of a `RolloutBatch` that only some recipes fill: where a component's `needs` name one, or where rollouts
    carry what it is made of."""

    opponent_rewards: Tensor | None = None  # [N,M] of the opponent's answers to the row's prompt, NaN = unscored
    answer_ids: Tensor | None = None  # [N] int64, equal answers share a number within the batch, -1 = no answer
    finished: Tensor | None = None  # [N] bool, the rollout has ended; others go on in the next step
    new_tokens: Tensor | None = None  # [N,T] bool, sampled in this step
    part_ids: Tensor | None = None  # [N,T] int64, number of the part that a token belongs to, as a shape divides rows
    turn_ids: Tensor | None = None  # [N,T] int64, number of the turn that a token belongs to, from 0
    token_rewards: Tensor | None = None  # [N,T] reward by token; None = the row's reward at its last trained token
    turn_rewards: Tensor | None = None  # [N,T] what of the row's reward a turn earned, at the turn's last token
    turn_scores: Mapping[str, Tensor] = field(default_factory=dict)  # reward by turn -> [N,T], at the turn's last token
    turn_states: Tensor | None = None  # [N,T] int64, turns of a group that begin in the same state share a number
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], numbers of the data row, NaN = none
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # component -> the recipe's weight; {} = unknown
    channels: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], advantages with a loss of their own
    # Workflows and environments, where a row is one call or one step of a trajectory:
    agent_ids: Tensor | None = None  # [N] int64, the role that made the call: its place in `roles`
    roles: tuple[str, ...] = ()
    prompt_ids: Tensor | None = None  # [N] int64, calls of one prompt of the data, whatever their roles and groups
    trajectory_ids: Tensor | None = None  # [N] int64
    trajectory_tokens: Tensor | None = None  # [N] int64, trained tokens of all rows of the trajectory
    step_ids: Tensor | None = None  # [N] int64, order of the steps within their trajectory
    state_ids: Tensor | None = None  # [N] int64, equal or similar states of the environment share a number
    node_ids: Tensor | None = None  # [N,T] int64, node of a tree that a token belongs to; paths of a tree share them
    node_values: Tensor | None = None  # [N,T] what the search says that the token's node is worth
    edge_ids: Tensor | None = None  # [N,T] int64, turns that do the same in the same state share a number
    dones: Tensor | None = None  # [N] bool, the episode ended with this step
    hinted: Tensor | None = None  # [N] bool, the completion continues a hint
    hint_mask: Tensor | None = None  # [N,T] bool, tokens of the completion that are the hint's, trained on or not
    answer_mask: Tensor | None = None  # [N,T] bool, tokens of the final answer, None = not marked
    external: Tensor | None = None  # [N,T] bool, tokens of a given solution that the policy did not sample
    expert_logp: Tensor | None = None  # [N,T] of an expert answer by the old policy, by position; NaN = past its end
    returns: Tensor | None = None  # [N,T] what a critic learns, from the advantage function
    # What the policy pass adds only where a component needs it, at rollout time and without gradient:
    entropy: Tensor | None = None  # [N,T] nats
    values: Tensor | None = None  # [N,T] critic; the old values of a clipped value loss
    mc_values: Tensor | None = None  # [N,T] mean return of the environment's own rollouts from the token's turn
    legal_returns: Tensor | None = None  # [N,K] of each legal action of the first turn's state, NaN = it has fewer
    action_ids: Tensor | None = None  # [N] int64, which of them the first turn was, -1 = none
    answer_logp: Tensor | None = None  # [N,S] mean log-prob of the data's answer before each turn, NaN = past the last
    prompt_logp: Tensor | None = None  # [N,P] log-probs of the prompt's tokens
    prompt_mask: Tensor | None = None  # [N,P] bool, False = padding or a token without a log-prob
    hidden: Tensor | None = None  # [N,T,H] last hidden state of the policy, of the position that predicts the token
    ref_hidden: Tensor | None = None  # [N,T,H] the same of the reference
    topk_logp: Tensor | None = None  # [N,T,K] the K largest log-probs, falling
    topk_chosen: Tensor | None = None  # [N,T,K] bool, the sampled token among them
    old_vocab_mean_logp: Tensor | None = None  # [N,T] mean of the log-probs over the vocabulary
    opponent_logp: Tensor | None = None  # [N,T] of the slow copy of the policy
    prox_logp: Tensor | None = None  # [N,T] of a moving average of the policy's weights, from before the first update
    masked_logp: Tensor | None = None  # [N,T] of the policy when it is shown the row's images with parts taken away
    perturbed_logp: Tensor | None = None  # [N,T] the same when it is shown the images with noise
    tempered_ref_logp: Tensor | None = None  # [N,T] sampled token's log-prob under softmax(power * reference logits)
    # The same of the current policy, with gradient; filled for a loss or regulariser that needs it:
    new_values: Tensor | None = None  # [N,T] critic
    vocab_mean_logp: Tensor | None = None  # [N,T]
    divergence: Tensor | None = None  # [N,T] from the reference, over the vocabulary
    new_entropy: Tensor | None = None  # [N,T] nats
    router_loss: Tensor | None = None  # [N] load-balancing loss of a mixture of experts over a row's tokens
    replayed: Tensor | None = None  # [N] bool, rows of earlier steps; None = all are fresh
    bins: Tensor | None = None  # [N] int64, bin that the prompt sampler put the row's prompt into
    sampler_state: Mapping[str, Any] = field(default_factory=dict)  # what the prompt sampler knows before the step


@dataclass(frozen=True)
class RolloutBatch(Extras):
    """The numeric side of N rollouts. Cells with mask 0 may hold anything and must never matter.

    These fields every step of RL has, or computes on its way to the loss; rare ones are in `Extras`.
    """

    group_ids: Tensor  # [N] int64
    mask: Tensor  # [N,T] bool, True = trained on (not padding, not tool output); never the attention mask
    rewards: Tensor | None = None  # [N] float, NaN = could not be scored
    components: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], NaN = does not apply
    correct: Tensor | None = None  # [N] float 0/1, NaN = unknown
    truncated: Tensor | None = None  # [N] bool, hit the length limit
    old_logp: Tensor | None = None  # [N,T] trainer's log-probs at rollout time; None = equal to logp (one update)
    rollout_logp: Tensor | None = None  # [N,T] what the engine reported, NaN = not reported
    versions: Tensor | None = None  # [N,T] int32, policy version that sampled each token, as rollout_logp is of it
    ref_logp: Tensor | None = None  # [N,T] frozen reference
    advantages: Tensor | None = None  # [N] or [N,T], constant for the gradient
    keep: Tensor | None = None  # [N] bool, rows that stay in the loss; None = all
    selected: Tensor | None = None  # [N,T] bool, tokens that have a policy-gradient term; None = all trained ones
    lengths: Tensor | None = None  # [N] int64, completion tokens that the model sampled
    step: int = 0  # finished steps of the run
    total_steps: int = 1  # planned steps of the run
    memory: Mapping[str, Any] = field(default_factory=dict)  # component name -> what it remembers from the last step

    def __len__(self) -> int:
        return int(self.group_ids.shape[0])

    def select(self, rows: Tensor | Sequence[int]) -> RolloutBatch:
        """The batch of these rows (index or boolean mask [N]); every tensor field is cut alike."""
        rows = rows if isinstance(rows, Tensor) else on_device(rows, self.group_ids.device)
        return self._map(lambda x: x[rows])

    def to(self, device: torch.device | str) -> RolloutBatch:
        return self._map(lambda x: x.to(device))

    def replace(self, **changes: Any) -> RolloutBatch:
        return dataclasses.replace(self, **changes)

    def _map(self, f: Any) -> RolloutBatch:
        changed: dict[str, Any] = {}
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                changed[item.name] = f(value)
            elif isinstance(value, Mapping):
                changed[item.name] = {k: f(v) if isinstance(v, Tensor) else v for k, v in value.items()}
        return dataclasses.replace(self, **changed)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the cells of each row where mask [N,T] is True, [N,T] -> [N]; 0 for an empty row."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def pad_rows(
    values: Sequence[Sequence[float] | NDArray[Any]], width: int, fill: float | bool, dtype: DTypeLike
) -> Tensor:
    """Rows of different length as one tensor [N,width], `fill` after each."""
    out = np.full((len(values), width), fill, dtype)
    for row, own in zip(out, values, strict=True):
        row[: len(own)] = own
    return torch.from_numpy(out)


def ranges(counts: Sequence[int], starts: Sequence[int] | None = None) -> Tensor:
    """The numbers start, start + 1, ... of several runs one after another, so many of each; they start at 0 unless
    `starts` says where."""
    many = torch.tensor(counts, dtype=torch.long)
    first = torch.zeros_like(many) if starts is None else torch.tensor(starts, dtype=torch.long)
    return torch.arange(int(many.sum())) + (first - (many.cumsum(0) - many)).repeat_interleave(many)


def on_device(
    numbers: Sequence[float | bool] | Tensor, device: torch.device = CPU, dtype: torch.dtype = torch.long
) -> Tensor:
    """The numbers as a tensor, without waiting for what a GPU still computes, as `torch.tensor(..., device=)` does. A
    list goes by way of numpy, which reads a step's tokens ten times as fast."""
    found = (numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers))).to(dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

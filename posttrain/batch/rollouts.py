"""Rollouts as objects and as a batch of tensors.

Row: a dataset record. Prompt: the tokens to sample from. Rollout: one trajectory, token in, token out. RolloutBatch:
the numeric batch that advantages and losses read.

Shapes: N rows (rollouts), T completion tokens of the longest row. Groups are marked by `group_ids` and may differ in
size, so nothing is ever reshaped to [prompts, group_size].
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
    """Images of a prompt, or of a reply within a rollout, in the order in which the tokens show them. short_ids: the
    tokens with one token per image, as the chat template writes them and vLLM expects them. length: number of tokens as
    the model gets them (several per image)."""

    shown: tuple[Image, ...]
    short_ids: tuple[int, ...]
    length: int

    def shorten(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the prompt's tokens and those that follow, with one token per image."""
        return self.short_ids + ids[self.length :]


def join_images(parts: Sequence[tuple[tuple[int, ...], PromptImages | None]]) -> PromptImages | None:
    """Concatenate the images of consecutive token sequences, given as (tokens, images); None if there are none."""
    if all(images is None for _, images in parts):
        return None
    return PromptImages(
        tuple(image for _, images in parts if images for image in images.shown),
        _concatenate(images.shorten(ids) if images else ids for ids, images in parts),
        sum(len(ids) for ids, _ in parts),
    )


@dataclass(frozen=True)
class Prompt:
    """Sampling input: a data row and its rendered tokens. `uid` is stable across runs and resumes."""

    uid: str
    row: Mapping[str, Any]  # the record with all its columns (rewards read them)
    text: str  # rendered with the chat template, generation prompt included
    ids: tuple[int, ...]  # tokens of `text`, exactly as the model gets them: an image has one token per feature
    images: PromptImages | None = None
    adapter: str | None = None  # the adapter to sample with, if the model has several; None = the first, `base` = none

    @property
    def shown(self) -> tuple[Image, ...]:
        """Images of the prompt, in order."""
        return () if self.images is None else self.images.shown


@dataclass(frozen=True)
class Variant:
    """What some rollouts of a prompt are sampled from in place of the plain prompt, and how the loss treats it.

    name: label in metrics and samples.jsonl. system: the system message, None = that of the data. user: template of the
    last user message: `{prompt}` is replaced by the data's message and each name of `fills` by its text (`ask` does so
    in one pass, so a text that contains such a name is not filled again). prefill: text at the start of the answer that
    belongs to the prompt: neither rewards nor the loss see it. begin: tokens at the start of the answer, such as a part
    of a solution; rewards read them, and max_new_tokens counts only the tokens sampled after them. begin_is: `prompt` =
    part of the state, without loss in any row; `untrained` = part of the completion that is not trained on; `trained` =
    part of the completion that is. loss_on: the prompt, sampled or plain, under which the training pass computes
    log-probs; `old_logp` is always under the sampled prompt. hinted: whether the rows are marked as `hinted`. replaces:
    earlier rollouts of the prompt are removed from the step. apart: the rollouts form their own group. columns: extra
    data columns for rewards. note: JSON values that are handed back to the kind's `learn`.
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
        """Return the last user message for the data's question: `user` with `{prompt}` and `fills` replaced."""
        texts = {**self.fills, "prompt": question}
        names = "|".join(map(re.escape, texts))
        return re.sub(rf"\{{({names})\}}", lambda match: texts[match[1]], self.user)


class RemoteTokens(Sequence[Any]):
    """Placeholder for the tokens of a segment that another rank holds; knows only their number. Reading a token raises
    LookupError: the caller forgot to fetch the tokens (`train.own_rows`)."""

    def __init__(self, count: int) -> None:
        self._length = count

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        raise LookupError("these tokens are on another rank")


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one origin: `model` = sampled; `tool` = a tool's reply; `injected` = inserted and not
    trained on; `given` = inserted and trained on. `logps` are the engine's, or None; `images` are those that a reply
    shows. While another rank holds the rollout, `ids` is `RemoteTokens`, and text, log-probs, versions and images are
    missing."""

    kind: Literal["model", "tool", "injected", "given"]
    ids: tuple[int, ...]
    logps: tuple[float, ...] | None = None
    versions: tuple[int, ...] | None = None  # policy version that sampled each token; None = the rollout's
    images: PromptImages | None = None


class Node(NamedTuple):
    """A node of a tree of rollouts, for one segment of a path. number: node id, equal in all paths through the node;
    value: the search's value estimate; visits: the search's visit count."""

    number: int
    value: float
    visits: float = 0.0


CallKind = Literal["ok", "error", "timeout", "malformed", "unknown"]


@dataclass(frozen=True)
class ToolCall:
    """A tool call that the model wrote, and the text returned to the model. kind: outcome; `error` = the tool raised.
    seconds: run time of the tool, without the wait for a free worker; None if it was not called. images: those that the
    tool returned, one for each PLACE in the result; () once they belong to a segment."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    kind: CallKind = "ok"
    seconds: float | None = field(default=None, compare=False)
    images: tuple[Image, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One turn of the model. text: what the model wrote, without special tokens; reply: what the model was shown next,
    None after the last turn; reward: the environment's reward for this turn; mc_value: mean return of random plays from
    the state before the turn; returns: the return of each legal action in that state, if computed; action: the legal
    action that the turn was.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()
    reply: str | None = None
    reward: float | None = None
    mc_value: float | None = None
    returns: Mapping[str, float] = field(default_factory=dict)
    action: str | None = None
    seconds: float | None = field(default=None, compare=False)  # run time of its slowest call or the environment's step


class CallRecord(NamedTuple):
    """One call of a workflow, as rewards and samples.jsonl see it. parent: index of the call that it follows, None =
    the data's prompt. tokens: number of tokens sampled. note: JSON values that the workflow passes to rewards. parts,
    shown: of a call with replies, the texts of its turns and the replies between them."""

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
    """The workflow call that a row holds. calls: all calls of its rollout. number: index of this call. compared: the
    calls in its group: `role` = calls of the same role for the same prompt; `parent` = of these, calls with the same
    parent. cut: the rollout ended because the prompt of a further call did not fit."""

    calls: tuple[CallRecord, ...]
    number: int
    compared: Literal["role", "parent"] = "role"
    cut: bool = False

    @property
    def role(self) -> str:
        """Role that was called."""
        return self.calls[self.number].role


@dataclass(frozen=True)
class Stored:
    """Values that a replayed rollout was stored with. step: the step that sampled it, from 0. logps: log-probs of the
    completion tokens under the trainer's policy at the start of that step (the engine's, if those were not computed).
    advantages: as assigned within its original group; one for the row, or one per token."""

    step: int
    logps: tuple[float, ...]
    advantages: tuple[float, ...] = ()


@dataclass
class Rollout:
    """One completion of one prompt. `scores` holds every reward component by name; None = does not apply."""

    prompt: Prompt
    group: int  # group id within the step, shared by rollouts that are compared
    segments: tuple[Segment, ...]
    text: str  # completion decoded without special tokens
    finish: FinishReason  # stop = EOS or stop string, length = hit the limit
    version: int  # policy version that began it; see `versions`
    scores: dict[str, float | None] = field(default_factory=dict)
    reward: float | None = None  # weighted sum of scores; None = unscored
    correct: bool | None = None  # by the component that the recipe marks as correctness
    turns: tuple[Turn, ...] = ()  # with tools or an environment: one per model segment, in order
    ended: str = ""  # with turns, the reason why it ended: answer, done, turns, tokens, time, error
    world_score: float | None = None  # the environment's score of the whole rollout
    # Per-turn rewards, if any: last token of each part, component name -> score of each part, and weighted sums of
    # these scores, which are included in `reward`.
    part_ends: tuple[int, ...] = ()
    turn_scores: dict[str, tuple[float, ...]] = field(default_factory=dict)
    turn_rewards: tuple[float, ...] = ()
    against: tuple[float | None, ...] = ()  # rewards of the opponent's answers to the prompt
    greedy_reward: float | None = None  # reward of the greedy answer to the prompt; None = not asked for, or unscored
    variant: Variant | None = None  # what was sampled from in place of the data's prompt; None = the prompt itself
    loss_ids: tuple[int, ...] | None = None  # prompt tokens of the training pass; None = those of `prompt`
    bin: int | None = None  # bin that the prompt sampler assigned to its prompt
    # For rollouts of several rows (`rollout.shape`, `rollout.workflow`): id of the rollout (None = this row is all of
    # it), index of the row in it, whether rewards read the row, and the workflow call of the row (`call`).
    trajectory: int | None = None
    part: int = 0
    scored: bool = True
    nodes: tuple[Node, ...] = ()  # for a path through a tree (`rollout.shape`): the node of each segment
    unfinished: bool = False  # continues in the next step
    older: int = 0  # completion tokens sampled by earlier steps
    ends: tuple[int, ...] = ()  # last token of each part, if the shape divides the row; -1 = the part has no token here
    call: WorkflowCall | None = None
    stored: Stored | None = None  # set if the rollout is replayed from an earlier step; None = fresh

    @property
    def ids(self) -> tuple[int, ...]:
        return _concatenate(s.ids for s in self.segments)

    @property
    def length(self) -> int:
        """Number of completion tokens."""
        return sum(len(s.ids) for s in self.segments)

    @property
    def sampled_length(self) -> int:
        """Number of completion tokens that the model sampled."""
        return sum(len(s.ids) for s in self.segments if s.kind == "model")

    @property
    def is_local(self) -> bool:
        """Whether this rank holds the tokens and text of the rollout."""
        return not any(isinstance(s.ids, RemoteTokens) for s in self.segments)

    @property
    def is_given(self) -> bool:
        """Whether the completion is a solution from the data, with no token sampled by the policy."""
        return bool(self.segments) and all(s.kind == "given" for s in self.segments)

    @property
    def tool_seconds(self) -> float | None:
        """Total run time of tools or environment over all turns; None if they never ran."""
        known = [turn.seconds for turn in self.turns if turn.seconds is not None]
        return sum(known) if known else None

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """Tokens that the model sampled: `ids` without inserted tokens such as tool replies and hints."""
        return _concatenate(s.ids for s in self.segments if s.kind == "model")

    @property
    def loss_mask(self) -> tuple[bool, ...]:
        """Per completion token: True = trained on (sampled or given), False = context only."""
        return _concatenate((s.kind in TRAINED,) * len(s.ids) for s in self.segments)

    def by_segment(self, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
        """Repeat one value per segment over the tokens of the segment."""
        return np.repeat(values, [len(segment.ids) for segment in self.segments])

    @property
    def images(self) -> tuple[Image, ...]:
        """Images of prompt and completion, in order."""
        prompt_and_replies = (self.prompt.images, *(s.images for s in self.segments))
        return tuple(image for images in prompt_and_replies if images is not None for image in images.shown)

    def images_within(self, count: int) -> tuple[Image, ...]:
        """Return the images of the prompt and of the segments that end within the first `count` completion tokens."""
        images, end = list(self.prompt.shown), 0
        for segment in self.segments:
            end += len(segment.ids)
            if end <= count and segment.images is not None:
                images += segment.images.shown
        return tuple(images)

    @property
    def logps(self) -> tuple[float, ...]:
        """Per completion token: the engine's log-prob, NaN if not reported."""
        nan = float("nan")
        return _concatenate(s.logps if s.logps is not None else (nan,) * len(s.ids) for s in self.segments)

    @property
    def versions(self) -> tuple[int, ...]:
        """Per completion token: the policy version that sampled or inserted it."""
        return _concatenate(s.versions or (self.version,) * len(s.ids) for s in self.segments)


def _concatenate(parts: Iterable[Sequence[T]]) -> tuple[T, ...]:
    joined = [tuple(part) for part in parts]
    return joined[0] if len(joined) == 1 else tuple(itertools.chain.from_iterable(joined))  # most rollouts have one


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Fields of a `RolloutBatch` that only some recipes fill: those named by a component's `needs`, or made from data
    that only some rollouts carry."""

    opponent_rewards: Tensor | None = None  # [N,M] of the opponent's answers to the row's prompt, NaN = unscored
    greedy_rewards: Tensor | None = None  # [N] of the greedy answer to the row's prompt, NaN = unscored
    answer_ids: Tensor | None = None  # [N] int64, equal answers share a number within the batch, -1 = no answer
    finished: Tensor | None = None  # [N] bool, the rollout has ended; False = it continues in the next step
    new_tokens: Tensor | None = None  # [N,T] bool, sampled in this step
    part_ids: Tensor | None = None  # [N,T] int64, index of the token's part, if the shape divides rows into parts
    turn_ids: Tensor | None = None  # [N,T] int64, index of the token's turn, from 0
    token_rewards: Tensor | None = None  # [N,T] reward per token; None = the row's reward at its last trained token
    turn_rewards: Tensor | None = None  # [N,T] a turn's share of the row's reward, at the turn's last token
    turn_scores: Mapping[str, Tensor] = field(default_factory=dict)  # per-turn reward -> [N,T], at a turn's last token
    turn_states: Tensor | None = None  # [N,T] int64, turns of a group that begin in the same state share a number
    columns: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], numeric data column, NaN = missing
    reward_weights: Mapping[str, float] = field(default_factory=dict)  # component -> the recipe's weight; {} = unknown
    channels: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], advantages with separate losses
    # Workflows and environments, where a row is one call or one step of a trajectory:
    agent_ids: Tensor | None = None  # [N] int64, index in `roles` of the role that made the call
    roles: tuple[str, ...] = ()
    prompt_ids: Tensor | None = None  # [N] int64, equal for all calls of one data prompt, of any role and group
    trajectory_ids: Tensor | None = None  # [N] int64
    trajectory_tokens: Tensor | None = None  # [N] int64, trained tokens of all rows of the trajectory
    step_ids: Tensor | None = None  # [N] int64, order of the steps within their trajectory
    state_ids: Tensor | None = None  # [N] int64, equal or similar states of the environment share a number
    node_ids: Tensor | None = None  # [N,T] int64, tree node of the token; paths of a tree share nodes
    node_values: Tensor | None = None  # [N,T] the search's value of the token's node
    edge_ids: Tensor | None = None  # [N,T] int64, turns with the same action in the same state share a number
    dones: Tensor | None = None  # [N] bool, the episode ended with this step
    hinted: Tensor | None = None  # [N] bool, the completion continues a hint
    hint_mask: Tensor | None = None  # [N,T] bool, completion tokens that belong to the hint, trained on or not
    answer_mask: Tensor | None = None  # [N,T] bool, tokens of the final answer, None = not marked
    external: Tensor | None = None  # [N,T] bool, tokens of a given solution that the policy did not sample
    expert_logp: Tensor | None = None  # [N,T] log-prob of an expert answer under the old policy, NaN = past its end
    returns: Tensor | None = None  # [N,T] regression target of the critic, from the advantage function
    # Computed by the policy pass at rollout time, without gradient, only if a component needs them:
    entropy: Tensor | None = None  # [N,T] nats
    values: Tensor | None = None  # [N,T] critic values; the old values of a clipped value loss
    mc_values: Tensor | None = None  # [N,T] mean return of random plays from the state before the token's turn
    legal_returns: Tensor | None = None  # [N,K] return per legal action in the first turn's state, NaN = fewer than K
    action_ids: Tensor | None = None  # [N] int64, index in legal_returns of the first turn's action, -1 = none
    answer_logp: Tensor | None = None  # [N,S] mean log-prob of the data's answer before each turn, NaN = past the last
    prompt_logp: Tensor | None = None  # [N,P] log-probs of the prompt's tokens
    prompt_mask: Tensor | None = None  # [N,P] bool, False = padding or a token without a log-prob
    hidden: Tensor | None = None  # [N,T,H] last hidden state of the policy at the position that predicts the token
    ref_hidden: Tensor | None = None  # [N,T,H] last hidden state of the reference, at the same position
    topk_logp: Tensor | None = None  # [N,T,K] the K largest log-probs, in descending order
    topk_chosen: Tensor | None = None  # [N,T,K] bool, the sampled token among them
    old_vocab_mean_logp: Tensor | None = None  # [N,T] mean of the log-probs over the vocabulary
    opponent_logp: Tensor | None = None  # [N,T] log-prob under the slow copy of the policy
    prox_logp: Tensor | None = None  # [N,T] log-prob under the EMA of the policy's weights, before the first update
    masked_logp: Tensor | None = None  # [N,T] log-prob under the policy with parts of the row's images masked
    perturbed_logp: Tensor | None = None  # [N,T] log-prob under the policy with noise added to the row's images
    tempered_ref_logp: Tensor | None = None  # [N,T] sampled token's log-prob under softmax(power * reference logits)
    # Of the current policy, with gradient; filled for a loss or regulariser that needs them:
    new_values: Tensor | None = None  # [N,T] critic
    vocab_mean_logp: Tensor | None = None  # [N,T]
    divergence: Tensor | None = None  # [N,T] from the reference, over the vocabulary
    new_entropy: Tensor | None = None  # [N,T] nats
    router_loss: Tensor | None = None  # [N] load-balancing loss of a mixture of experts over a row's tokens
    replayed: Tensor | None = None  # [N] bool, rows of earlier steps; None = all rows are fresh
    bins: Tensor | None = None  # [N] int64, bin that the prompt sampler assigned to the row's prompt
    sampler_state: Mapping[str, Any] = field(default_factory=dict)  # state of the prompt sampler before the step


@dataclass(frozen=True)
class RolloutBatch(Extras):
    """N rollouts as tensors. Cells with mask 0 may hold anything and must never affect a result.

    Every RL step has these fields, or computes them on its way to the loss; rarer fields are in `Extras`.
    """

    group_ids: Tensor  # [N] int64
    mask: Tensor  # [N,T] bool, True = trained on (not padding, not tool output); never the attention mask
    rewards: Tensor | None = None  # [N] float, NaN = could not be scored
    components: Mapping[str, Tensor] = field(default_factory=dict)  # name -> [N], NaN = does not apply
    correct: Tensor | None = None  # [N] float 0/1, NaN = unknown
    truncated: Tensor | None = None  # [N] bool, hit the length limit
    old_logp: Tensor | None = None  # [N,T] trainer's log-probs at rollout time; None = equal to logp (one update)
    rollout_logp: Tensor | None = None  # [N,T] log-probs from the engine, NaN = not reported
    versions: Tensor | None = None  # [N,T] int32, policy version that sampled each token (and gave its rollout_logp)
    ref_logp: Tensor | None = None  # [N,T] frozen reference
    advantages: Tensor | None = None  # [N] or [N,T], constant for the gradient
    keep: Tensor | None = None  # [N] bool, rows that stay in the loss; None = all
    selected: Tensor | None = None  # [N,T] bool, tokens with a policy-gradient term; None = all trained tokens
    lengths: Tensor | None = None  # [N] int64, completion tokens that the model sampled
    step: int = 0  # finished steps of the run
    total_steps: int = 1  # planned steps of the run
    memory: Mapping[str, Any] = field(default_factory=dict)  # component name -> its state from the last step

    def __len__(self) -> int:
        return int(self.group_ids.shape[0])

    def select(self, rows: Tensor | Sequence[int]) -> RolloutBatch:
        """Return the batch restricted to rows (index or boolean mask [N]); every tensor field is indexed alike."""
        rows = rows if isinstance(rows, Tensor) else to_device(rows, self.group_ids.device)
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
    """Compute the mean of each row over the cells where mask [N,T] is True, [N,T] -> [N]; 0 for an empty row."""
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)


def pad_rows(
    values: Sequence[Sequence[float] | NDArray[Any]], width: int, fill: float | bool, dtype: DTypeLike
) -> Tensor:
    """Pad rows of different lengths with `fill` at the end; returns [N,width]."""
    out = np.full((len(values), width), fill, dtype)
    for row, row_values in zip(out, values, strict=True):
        row[: len(row_values)] = row_values
    return torch.from_numpy(out)


def concatenate_ranges(counts: Sequence[int], starts: Sequence[int] | None = None) -> Tensor:
    """Concatenate integer ranges: counts[i] consecutive numbers from starts[i] (default 0) for each i."""
    lengths = torch.tensor(counts, dtype=torch.long)
    first = torch.zeros_like(lengths) if starts is None else torch.tensor(starts, dtype=torch.long)
    return torch.arange(int(lengths.sum())) + (first - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)


def to_device(
    numbers: Sequence[float | bool] | Tensor, device: torch.device = CPU, dtype: torch.dtype = torch.long
) -> Tensor:
    """Copy numbers to a tensor on a device without the GPU synchronization of `torch.tensor(..., device=)`. A list goes
    through numpy, which reads a step's tokens ten times faster."""
    found = (numbers if isinstance(numbers, Tensor) else torch.from_numpy(np.array(numbers))).to(dtype)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found

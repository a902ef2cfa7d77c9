"""Tensor parallelism: the ranks of a group run the same tokens, each with its shard of the weights of every layer.

Which weights are sharded, and how, is transformers' plan of the architecture (`tp_plan`): a column-parallel linear
layer (weight sharded along its outputs) gives a part of the outputs; the row-parallel layer (sharded along its inputs)
that follows takes this part, and its outputs are all-reduced. Only the plan is taken from transformers. Layers run on
their shards as plain tensors, so that adapters, activation checkpointing and FSDP, which shards each shard once more,
work as they do on whole weights.

An adapter is replicated. In a sharded layer it multiplies with the slice that fits the layer's shard, so its gradient
is 0 outside of the slice, and the sum over the ranks (`data_parallel.sum_gradients`) is the gradient of the whole
adapter.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional

from posttrain.errors import ModelError
from posttrain.models.adapters import strip_base_layer
from posttrain.train.collectives import gather_last, local, own_last, reduce, sum_gradients_of, sum_parts
from posttrain.train.divided_head import VocabularyShard

GATHERED = ("colwise_gather_output", "colwise_rep")
COLUMNS = ("colwise", "packed_colwise", *GATHERED)
SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
ROWS = ("rowwise", *SPLIT_INPUT)
# A replicated weight that each rank applies to its own heads only, such as the norm of queries and keys: its gradient
# is all-reduced.
REPLICATED = "replicated_with_grad_allreduce"
EXPERTS, EMBEDDING = "moe_tp_experts", "embedding_rowwise"
# The down-projection of multi-head latent attention, replicated. Its outputs are the compressed keys and values, which
# enter a column-parallel layer, and the rotary part of the keys, which every rank's heads read without such a layer in
# between: the gradient of that part is all-reduced here.
MLA_DOWN = "mla_kv_a_proj"
STYLES = (*COLUMNS, *ROWS, REPLICATED, EXPERTS, EMBEDDING, MLA_DOWN)
TENSOR = "tensor"  # name of the mesh dimension
IS_PART = "posttrain_is_part"  # attribute of adapters' weights: ranks have different, partial gradients of them
VOCABULARY_SHARD = "posttrain_vocabulary_shard"  # attribute of sharded output heads
SHARD_INSTEAD = "write `shard` in place of `tensor`"
HEADS = ("num_attention_heads", "num_key_value_heads")

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Part:
    """How a weight is sharded: along dimension `dim`; packed weights along `dim` of each block.

    A packed weight consists of `groups` equal blocks one after another, such as the gate and the up projection.
    """

    dim: int
    groups: int = 1

    def of(self, whole: Tensor, rank: int, count: int) -> Tensor:
        """Return the shard of rank `rank` of `count` ranks."""
        pieces = [piece.chunk(count, self.dim)[rank] for piece in whole.chunk(self.groups, self.dim)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    @property
    def placement(self) -> Any:
        """The DTensor placement of this sharding."""
        return Shard(self.dim) if self.groups == 1 else _StridedShard(self.dim, split_factor=self.groups)


def plan_of(causal: Any, count: int) -> dict[str, str]:
    """Return the tensor-parallel style of each module and weight for `count` ranks, by name with layer indices as `*`.

    A head whose vocabulary cannot be divided evenly stays whole; embeddings tied to a divided head are divided with it.
    Raises ModelError for an architecture without a plan, and for a plan that posttrain cannot follow.
    """
    kind, present = causal.config.model_type, {wild_name(name) for name in _names(causal)}
    plan = {name: style for name, style in (getattr(causal, "tp_plan", None) or {}).items() if name in present}
    names = {module: strip_base_layer(name) for name, module in causal.named_modules()}
    head, embeddings = causal.get_output_embeddings(), causal.get_input_embeddings()
    if head is not None and names[head] in plan:
        if head.weight.shape[0] % count:
            del plan[names[head]]
        elif embeddings.weight is head.weight:
            plan[names[embeddings]] = EMBEDDING
    if not any(style in COLUMNS for name, style in plan.items() if "*" in name):
        raise ModelError(
            f"model.parallel.tensor: transformers has no plan of tensor parallelism for the layers of {kind}",
            hint=SHARD_INSTEAD,
        )
    if unknown := sorted({*plan.values()} - {*STYLES}):
        raise _not_followed(f"some layers of {kind} as `{unknown[0]}`")
    return plan


def check(causal: Any, count: int) -> None:
    """Raise ModelError if `count` ranks cannot divide a model as planned. Its weights may be on the meta device."""
    plan, text = plan_of(causal, count), causal.config.get_text_config()
    kind = causal.config.model_type
    if any(style == "colwise" and "att" in name for name, style in plan.items()):
        heads = {key: n for key in HEADS if isinstance(n := getattr(text, key, None), int)}
        for key, number in heads.items():
            if number % count:
                numbers = " and ".join(map(str, heads.values()))
                raise ModelError(
                    f"model.parallel.tensor: {count} GPUs cannot divide the {number} {key} of this {kind}",
                    hint=f"write a number that divides {numbers}",
                )
    for name, weight in causal.named_parameters():
        part = part_of_weight(strip_base_layer(name), weight, plan)
        if part is not None and weight.shape[part.dim] % (part.groups * count):
            raise ModelError(
                f"model.parallel.tensor: {count} GPUs cannot divide {name} {tuple(weight.shape)} of this {kind}",
                hint="write a smaller number",
            )


def part_of_weight(name: str, weight: Tensor, plan: Mapping[str, str]) -> Part | None:
    """Return how ranks shard a weight of the base; None if the weight is replicated."""
    module, _, leaf = name.rpartition(".")
    style = plan.get(wild_name(name)) or plan.get(wild_name(module))
    if style == EMBEDDING:
        return Part(0)
    if style in COLUMNS:
        return Part(max(weight.ndim - 2, 0), 2 if style == "packed_colwise" else 1)
    if style in ROWS and leaf != "bias":
        return Part(weight.ndim - 1)
    return None


def wild_name(name: str) -> str:
    """Return the name of a module or weight in the notation of plans: layer indices are `*`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _names(causal: nn.Module) -> Iterator[str]:
    for names in (causal.named_modules(), causal.named_parameters()):
        yield from (strip_base_layer(name) for name, _ in names)


class Divider:
    """Shards a model's weights over the ranks of `mesh`, and replaces its modules' `forward` by tensor-parallel
    ones.
    """

    def __init__(self, causal: Any, mesh: DeviceMesh) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.count = mesh.get_local_rank(), mesh.size()
        self.plan = plan_of(causal, self.count)
        self.head, self.text = causal.get_output_embeddings(), causal.config.get_text_config()
        self.entered: tuple[Any, Tensor] | None = None  # see `_enter`
        self.names = {id(module): strip_base_layer(name) for name, module in causal.named_modules()}

    def divide(self, modules: nn.Module) -> None:
        """Shard the weights of a part of the model: of a layer, or, after all layers, of the remaining modules."""
        made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied
        for module in modules.modules():
            for leaf, weight in module._parameters.items():
                if weight is None or isinstance(weight, DTensor) or id(module) not in self.names:
                    continue
                part = self._part(module, leaf, weight)
                if part is not None and weight not in made:
                    made[weight] = self._own(weight, part)
                module._parameters[leaf] = made.get(weight, weight)

    def _part(self, module: nn.Module, leaf: str, weight: Tensor) -> Part | None:
        return part_of_weight(f"{self.names[id(module)]}.{leaf}", weight, self.plan)

    def _own(self, weight: nn.Parameter, part: Part) -> nn.Parameter:
        own = part.of(weight.detach(), self.rank, self.count).contiguous()
        placed = DTensor.from_local(
            own, self.mesh, [part.placement], run_check=False, shape=weight.shape, stride=weight.stride()
        )
        return nn.Parameter(placed, weight.requires_grad)

    def connect(self, causal: nn.Module) -> None:
        """Replace the `forward` of sharded modules, including their adapters.

        The new ones compute with this rank's shards and all-reduce or all-gather what other modules need whole.
        """
        for name, module in list(causal.named_modules()):
            style, base = self.plan.get(wild_name(name)), base_layer(module)
            if style == EXPERTS:
                self._connect_experts(module, name)
            elif style == EMBEDDING:
                self._connect_embedding(module)
            elif style == MLA_DOWN:
                self._connect_mla_down(module)
            elif style == REPLICATED:
                self._connect_replicated(module)
            elif style in COLUMNS and isinstance(base, nn.Linear):
                self._connect_columns(module, base, style)
            elif style in ROWS and isinstance(base, nn.Linear):
                self._connect_rows(module, base, style)
            elif style is not None:
                raise _not_followed(f"a {type(module).__name__} ({name}) in parts")

    def _connect_columns(self, module: Any, base: nn.Linear, style: str) -> None:
        """Make a layer column-parallel: it computes this rank's part of the outputs.

        So does an adapter's B. Biases are included in both.
        """
        base.forward = lambda x: functional.linear(x, local(base.weight), local(base.bias))  # type: ignore[method-assign,assignment]
        self._use_own(module, "lora_B", Part(0, 2 if style == "packed_colwise" else 1))
        run = module.forward
        alone = style in GATHERED or module is self.head  # no row-parallel layer follows
        enter = partial(sum_gradients_of, group=self.group) if alone else self._enter

        def forward(x: Tensor, *args: Any, **keys: Any) -> Any:
            return run(enter(x), *args, **keys)

        module.forward = forward
        if style in GATHERED:
            module.forward = lambda x, *args, **keys: gather_last(forward(x, *args, **keys), self.group)
        if module is self.head:
            first = self.rank * (base.weight.shape[0] // self.count)
            setattr(module, VOCABULARY_SHARD, VocabularyShard(forward, self.group, first))

    def _connect_rows(self, module: Any, base: nn.Linear, style: str) -> None:
        """Make a layer row-parallel: its inputs are this rank's part, and its outputs are all-reduced.

        An adapter's A takes the same part. Each bias is added once: the layer's after the sum, an adapter's by the
        first rank.
        """
        base.forward = lambda x: functional.linear(x, local(base.weight))  # type: ignore[method-assign,assignment]
        self._use_own(module, "lora_A", Part(1))
        for linear in getattr(module, "lora_B", {}).values():
            if linear.bias is not None and self.rank:
                linear.forward = lambda x, w=linear: functional.linear(x, w.weight)
        run = module.forward

        def forward(x: Tensor, *args: Any, **keys: Any) -> Any:
            own = own_last(x, self.group) if style in SPLIT_INPUT else x
            out = sum_parts(run(own, *args, **keys), self.group)
            self.entered = None
            return out if base.bias is None else out + base.bias

        module.forward = forward

    def _enter(self, x: Tensor) -> Tensor:
        """`sum_gradients_of`, once for layers that read the same tensor: queries, keys and values, or gate and up.

        The result is cached until the row-parallel layer that follows has run. A result without gradient is not cached:
        a later pass with gradient on the same tensor would lose the gradient.
        """
        if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
            return sum_gradients_of(x, self.group)
        if self.entered is None or self.entered[0]() is not x:
            self.entered = (weakref.ref(x), sum_gradients_of(x, self.group))
        return self.entered[1]

    def _use_own(self, module: Any, name: str, part: Part) -> None:
        """Make an adapter's matrices of this name multiply with the slice that fits this rank's shard of the layer."""

        def own(tensor: Any) -> Any:
            return None if tensor is None else part.of(tensor, self.rank, self.count)

        for linear in getattr(module, name, {}).values():
            linear.forward = lambda x, w=linear: functional.linear(x, own(w.weight), own(w.bias))
        mark_parts(module)

    def _connect_mla_down(self, module: Any) -> None:
        run, rotary = module.forward, self.text.qk_rope_head_dim

        def forward(x: Tensor, *args: Any, **keys: Any) -> Tensor:
            compressed, rotary_keys = run(x, *args, **keys).tensor_split([-rotary], -1)
            return torch.cat([compressed, sum_gradients_of(rotary_keys, self.group)], -1)

        module.forward = forward

    def _connect_replicated(self, module: Any) -> None:
        run = module.forward

        def forward(*args: Any, **keys: Any) -> Any:
            weights = {name: sum_gradients_of(w, self.group) for name, w in module._parameters.items() if w is not None}
            return run_with(module, weights, run, *args, **keys)

        module.forward = forward

    def _connect_embedding(self, module: Any) -> None:
        """Make embeddings vocabulary-parallel: embeddings of other ranks' tokens are 0, and outputs are all-reduced."""
        run, size = module.forward, module.weight.shape[0] // self.count
        first = self.rank * size
        if module.padding_idx is not None:
            own = module.padding_idx - first
            module.padding_idx = own if 0 <= own < size else None

        def forward(ids: Tensor) -> Any:
            is_own = (ids >= first) & (ids < first + size)
            found = run_with(module, {"weight": local(module.weight)}, run, (ids - first).where(is_own, 0))
            return sum_parts(found * is_own[..., None], self.group)

        module.forward = forward

    def _connect_experts(self, module: Any, name: str) -> None:
        """Make each expert tensor-parallel: every rank runs its shard of every expert, on all tokens."""
        experts = base_layer(module)
        parts = {leaf: self._part(experts, leaf, weight) for leaf, weight in experts._parameters.items()}
        own = {leaf: partial(part.of, rank=self.rank, count=self.count) for leaf, part in parts.items() if part}
        if len(own) < len(parts):
            raise _not_followed(f"{type(experts).__name__} ({name}), some of whose weights are whole,")
        run = run_experts(module, own)

        def forward(hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            hidden, weights = (sum_gradients_of(x, self.group) for x in (hidden, weights))
            return sum_parts(run(hidden, index, weights), self.group)

        module.forward = forward


def run_experts(module: Any, own: Mapping[str, Callable[[Tensor], Tensor]]) -> Forward:
    """Return the forward of an experts' module on this rank's shards, with any adapters around it.

    own: by weight name, a function that returns this rank's part of what an adapter adds to the weight.
    """
    experts = base_layer(module)
    run, around = experts.forward, list[Any]()
    while module is not experts:
        around.append(module)
        mark_parts(module)
        module = module.base_layer

    def forward(*args: Any) -> Any:
        weights = {name: local(weight) for name, weight in experts._parameters.items() if weight is not None}
        for layer in around:
            for adapter in () if layer.disable_adapters else layer.active_adapters:
                if adapter in layer.lora_A:
                    name = layer.parameter_name
                    weights[name] = weights[name] + own[name](layer.get_delta_weight(adapter))
        return run_with(experts, weights, run, *args)

    return forward


def run_with(module: nn.Module, weights: Mapping[str, Tensor], run: Forward, *args: Any, **keys: Any) -> Any:
    """Call `run` with other tensors in place of the module's parameters."""
    saved = {name: module._parameters[name] for name in weights}
    module._parameters.update(weights)  # type: ignore[arg-type]  # plain tensors, which `run` accepts
    try:
        return run(*args, **keys)
    finally:
        module._parameters.update(saved)


def mark_parts(layer: Any) -> None:
    """Mark an adapter's weights as ones of which ranks have different, partial gradients (`IS_PART`)."""
    for name in ("lora_A", "lora_B"):
        for linear in getattr(layer, name, {}).values():
            for weight in linear.parameters():
                setattr(weight, IS_PART, True)


def vocabulary_shard(head: Any) -> VocabularyShard | None:
    """Return this rank's part of the vocabulary in an output head; None if the head is whole."""
    return getattr(head, VOCABULARY_SHARD, None)


def has_whole_gradient(weight: Tensor) -> bool:
    """Return whether each rank of a tensor-parallel group has the same, complete gradient of a replicated weight."""
    return not getattr(weight, IS_PART, False)


def find_differing_gradients(causal: nn.Module) -> list[str]:
    """Return the names of weights that are replicated in a tensor-parallel group but have different gradients there."""
    weights = {name: weight for name, weight in causal.named_parameters() if isinstance(weight, DTensor)}
    meshes = (weight.device_mesh for weight in weights.values())
    group = next(mesh for mesh in meshes if TENSOR in (mesh.mesh_dim_names or ())).get_group(TENSOR)
    differing = []
    for name, weight in weights.items():
        if weight.grad is not None and TENSOR not in (weight.device_mesh.mesh_dim_names or ()):
            gradient = local(weight.grad)
            spread = reduce(gradient, group, dist.ReduceOp.MAX) - reduce(gradient, group, dist.ReduceOp.MIN)
            if gradient.numel() and float(spread.abs().max()) > 0.05 * float(gradient.abs().max()):
                differing.append(name)
    return differing


def base_layer(module: Any) -> Any:
    """Return the module under the adapters of a module."""
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _not_followed(what: str) -> ModelError:
    return ModelError(
        f"transformers' plan of tensor parallelism runs {what}, which posttrain does not support", hint=SHARD_INSTEAD
    )

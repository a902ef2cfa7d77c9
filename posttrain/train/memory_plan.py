"""Memory plan of a recipe: predicted memory by phase, and changes that make it fit; measured peaks of a step.

Weights are never loaded: the model is built on the meta device from its configuration.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from posttrain.errors import RunError
from posttrain.models import load as models
from posttrain.models import vision
from posttrain.models.adapters import causal_of
from posttrain.models.quantize import find_quant_states
from posttrain.recipe import checks
from posttrain.recipe.rl_stage import BY_REFERENCE
from posttrain.recipe.sections import Lora, Model
from posttrain.recipe.stages import DpoRecipe, RewardModelRecipe, RlRecipe, SftRecipe
from posttrain.run.directory import RunDirectory
from posttrain.train import distributed
from posttrain.train.checkpoint import State
from posttrain.train.logprobs import CHUNK_CELLS
from posttrain.train.memory import GIB, Phases, Settings, Shape, kv_bytes, phases
from posttrain.train.mesh import shard_ranks
from posttrain.train.objective import Objective
from posttrain.train.policy import AT_ROLLOUT, TOP_K

Recipe = RlRecipe | SftRecipe | DpoRecipe | RewardModelRecipe
ASSUMED_GIB = 80  # assumed memory if there is no GPU


def shape_of(model: Any, lora: Lora | None) -> Shape:
    """Return the shape of a language model, with or without an adapter; weights may be loaded or on the meta device.

    A reward model has no head over the vocabulary.
    """
    base = causal_of(model)
    config = base.config.get_text_config()
    head = base.get_output_embeddings()  # None for a reward model
    matrices = {
        n: m for n, m in base.named_modules() if isinstance(m, nn.Linear) and m is not head and "lora_" not in n
    }
    # All experts of a layer are in one tensor.
    experts = {n: p for n, p in base.named_parameters() if p.dim() == 3 and "lora_" not in n}
    shared, packed = sum(p.numel() for p in experts.values()), find_quant_states(base)
    routed = _experts_a_token(config) if experts else 0
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    adapted = [m for n, m in matrices.items() if lora and _is_target(n.removesuffix(".base_layer"), lora.targets)]
    return Shape(
        parameters=sum(
            math.prod(packed[id(p)].shape) if id(p) in packed else p.numel()  # two 4-bit weights per byte
            for n, p in base.named_parameters()
            if "lora_" not in n
        ),
        linear=sum(m.in_features * m.out_features for m in matrices.values()) + shared,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads * size,
        kv_heads=(getattr(config, "num_key_value_heads", None) or heads) * size,
        intermediate=_width(config, routed) if experts else config.intermediate_size,
        vocabulary=(head or base.get_input_embeddings()).weight.shape[0],
        embeddings=base.get_input_embeddings().weight.numel(),
        adapter=max(1, len(lora.adapters or ())) * sum(lora.rank * (m.in_features + m.out_features) for m in adapted)
        if lora
        else 0,
        experts=shared,
        routed=routed / next(iter(experts.values())).shape[0] if experts else 1.0,
        experts_a_token=routed,
    )


def _experts_a_token(config: Any) -> int:
    """Return the number of routed experts per token."""
    found = (getattr(config, key, None) for key in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k"))
    return next((count for count in found if isinstance(count, int)), 1)


def _width(config: Any, routed: int) -> int:
    """Return the effective MLP width of a token's experts.

    The sum of their widths, plus a copy of the hidden state for each expert, which takes as much as half its size in
    width.
    """
    width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    shared = getattr(config, "shared_expert_intermediate_size", None) or width * (
        getattr(config, "n_shared_experts", 0) or 0
    )
    return int(routed * width + shared + routed * config.hidden_size // 2)


def _is_target(name: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or name.endswith(targets)
    return name.rpartition(".")[2] in targets


def settings_of(recipe: Recipe, shape: Shape, *, half: bool, longest: int, card: int, ranks: int = 1) -> Settings:
    """Derive memory settings from a recipe.

    longest: tokens of the longest prompt (rl) or row. card: bytes of the GPU, of which vLLM takes a share. ranks:
    training processes.
    """
    model = recipe.model
    common: dict[str, Any] = {
        "quantized": model.quantize is not None,
        "half": half,
        "checkpointing": bool(model.gradient_checkpointing),
        "attention_kept": model.gradient_checkpointing == "selective",
        "inputs_offloaded": model.activation_offloading,
        "compiled": model.compile,
        "half_weights": model.half_weights and half,
        "optimizer": recipe.optim.use,
        "optimizer_offloaded": recipe.optim.offload,
        "ranks": shard_ranks(model.divided, ranks) if model.divided and ranks > 1 else 1,
        **{key: getattr(model.divided, key) for key in ("context", "tensor", "expert") if model.divided and ranks > 1},
    }
    if not isinstance(recipe, RlRecipe):
        rows = recipe.batch.micro_size or recipe.batch.size
        pair = 2 if trains_on_pairs(recipe) else 1
        weighted = isinstance(recipe, SftRecipe) and recipe.objective.use != "ce"
        plain = isinstance(recipe, SftRecipe | DpoRecipe) and not weighted
        tokens = rows * pair * longest
        online = isinstance(recipe, DpoRecipe) and recipe.online_kl is not None
        copied = online and not shape.adapter
        return Settings(micro_tokens=tokens, plain_head=not weighted, trl_logits=plain, reference_copy=copied, **common)
    rollout = recipe.rollout
    needs = Objective.from_recipe(recipe).needs
    row, rows = longest + rollout.max_new_tokens, rollout.prompts_per_step * rollout.group_size
    # Opponent and proximal policy: float32 copies of the trained weights.
    followers = bool(recipe.opponent) + ("prox_logp" in needs)
    follower = 4 * (shape.adapter or shape.parameters) * followers
    settings = Settings(
        micro_tokens=min(max(recipe.batch.micro_tokens, row), math.ceil(rows / recipe.batch.minibatches) * row),
        reference_copy=bool(needs & set(BY_REFERENCE)) and not (shape.adapter and recipe.kl.reference is None),
        reference_offloaded=model.offload_reference,
        teacher=teacher_shape(recipe),
        plain_head=not needs & {"vocab_mean_logp", "new_entropy"},
        measured=rows * rollout.max_new_tokens * component_bytes(needs, shape.hidden) + follower,
        **common,
    )
    if rollout.engine == "stored" or (rollout.engine == "vllm" and rollout.vllm.server is not None):
        return settings  # no engine, or not on this GPU
    if rollout.engine == "vllm":
        vllm = rollout.vllm
        share = int(vllm.share * vllm.engines * card)
        return replace(settings, engine=share, engine_sleeps=vllm.sleep, engine_processes=vllm.engines * half)
    rows = min(rollout.batch_size, rows)  # decoded in one batch; its logits exist in three float32 copies
    engine = rows * (row * kv_bytes(shape, settings) + 12 * shape.vocabulary)
    engine += 4 * shape.parameters if model.divided else 0  # a second copy of the model
    return replace(settings, engine=engine, engine_sleeps=True)


def teacher_shape(recipe: RlRecipe) -> Shape | None:
    """Return the shape of the model `kl.reference`; None without one.

    Raises ModelError if its configuration cannot be read.
    """
    if recipe.kl.reference is None:
        return None
    section = recipe.model.model_copy(update={"path": recipe.kl.reference, "revision": None, "lora": None})
    return _frozen_shape(section.model_dump_json(), recipe.base_dir)


@functools.lru_cache(maxsize=4)
def _frozen_shape(section: str, base_dir: Path) -> Shape:
    return shape_of(_skeleton(Model.model_validate_json(section), base_dir), None)


def trains_on_pairs(recipe: Recipe) -> bool:
    """Return whether a data row becomes two rows of a forward pass."""
    return isinstance(recipe, DpoRecipe) or (isinstance(recipe, RewardModelRecipe) and recipe.objective.pairs)


def component_bytes(needs: Collection[str], hidden: int) -> int:
    """Return the GPU bytes per completion token of values that components need besides log-probs, for a whole step."""
    topk = 5 * TOP_K if {"topk_logp", "topk_chosen"} & set(needs) else 0  # a float32 and a flag per token
    numbers = len(set(needs) & {"values", "new_values", "old_vocab_mean_logp", "vocab_mean_logp", "entropy"})
    return topk + 4 * numbers + (4 * hidden if "hidden" in needs else 0)


def count_passes(recipe: RlRecipe) -> float:
    """Return the number of passes without gradient over a step's rollouts.

    Counts passes of the starting policy, of the reference, over prompts, over answers after each turn (one, as if
    rollouts had one turn), and with masked or noisy images. With several minibatches, the rows of the first need no
    pass of the starting policy (`update.update`).
    """
    needs, count = Objective.from_recipe(recipe).needs, recipe.batch.minibatches
    dropout = recipe.model.lora is not None and recipe.model.lora.dropout > 0
    many_updates = recipe.batch.epochs * count > 1
    for_all_rows = bool(needs & set(AT_ROLLOUT)) or (dropout and (many_updates or "rollout_logp" in needs))
    policy = 1.0 if for_all_rows else (count - 1) / count
    extra = ("prompt_logp", "answer_logp", "masked_logp", "perturbed_logp")
    return policy + bool(needs & set(BY_REFERENCE)) + len(needs & set(extra))


@dataclass(frozen=True)
class Machine:
    """Hardware that the recipe runs on, or would run on."""

    card: int  # bytes
    half: bool
    name: str
    ranks: int = 1  # number of processes, one GPU each

    @classmethod
    def here(cls, ranks: int | None = None) -> Machine:
        """Describe this machine. ranks: number of requested processes; default: the current world size."""
        ranks = ranks or distributed.world()
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            return cls(found.total_memory, True, found.name, ranks)
        return cls(ASSUMED_GIB * GIB, True, f"an assumed GPU of {ASSUMED_GIB} GiB (this machine has none)", ranks)


def predict_phases(recipe: Recipe, shape: Shape, longest: int, machine: Machine) -> Phases:
    """Predict memory by phase; `shape` may be that of another training mode (with or without adapter)."""
    half = machine.half and recipe.model.dtype != "float32" and recipe.model.device != "cpu"
    settings = settings_of(recipe, shape, half=half, longest=longest, card=machine.card, ranks=machine.ranks)
    return phases(shape, settings, chunk_cells=CHUNK_CELLS)


@dataclass(frozen=True)
class Edit:
    """One change of a recipe, and the resulting peak in bytes."""

    text: str
    peak: int
    recipe: Any


def edits(
    recipe: Recipe, shape: Shape, longest: int, machine: Machine, count: int = 3, at_least: int = 1
) -> list[Edit]:
    """Return changes that lower the peak by `at_least` bytes; changes that leave all results unchanged come first.

    Changes that conflict with the rest of the recipe are left out.
    """
    before, problems = predict_phases(recipe, shape, longest, machine).peak, checks.keys_with_problems(recipe)
    edits = []
    now = settings_of(recipe, shape, half=machine.half, longest=longest, card=machine.card)
    for key, change in _changes(recipe, shape, now.micro_tokens, machine.ranks):
        changed = with_key(recipe, key, change)
        peak = predict_phases(changed, shape, longest, machine).peak
        if before - peak >= at_least and checks.keys_with_problems(changed) <= problems:
            edits.append(Edit(f"{key}={_text(change)}", peak, changed))
    return edits[:count]


def _changes(recipe: Recipe, shape: Shape, micro_tokens: int, ranks: int) -> list[tuple[str, Any]]:
    """List candidate changes in the order of preference. micro_tokens: the actual tokens of a forward pass."""
    changes: list[tuple[str, Any]] = []
    if isinstance(recipe, RlRecipe):
        changes.append(("batch.micro_tokens", micro_tokens // 2))
    elif (rows := recipe.batch.micro_size or recipe.batch.size) > 1:
        changes.append(("batch.micro_size", max(n for n in range(1, rows // 2 + 1) if recipe.batch.size % n == 0)))
    if not recipe.model.gradient_checkpointing:
        changes.append(("model.gradient_checkpointing", True))
    elif not recipe.model.activation_offloading:
        changes.append(("model.activation_offloading", True))
    if ranks > 1 and not shape.adapter and not recipe.model.divided:
        changes.append(("model.shard", True))
    vllm = recipe.rollout.vllm if isinstance(recipe, RlRecipe) and recipe.rollout.engine == "vllm" else None
    on_other_gpus = vllm is not None and vllm.server is not None  # its memory is on other GPUs
    if vllm is not None and not on_other_gpus and not vllm.sleep:
        changes.append(("rollout.vllm.sleep", True))
    # Under an adapter, the frozen base is the reference, unless another model is.
    has_reference = isinstance(recipe, RlRecipe) and not (shape.adapter and recipe.kl.reference is None)
    if has_reference and not (recipe.model.offload_reference or recipe.model.divided):
        changes.append(("model.offload_reference", True))
    if vllm is not None and not on_other_gpus:
        changes.append(("rollout.vllm.gpu_memory", round(vllm.share / 2, 3)))
    elif isinstance(recipe, RlRecipe) and vllm is None:
        changes.append(("rollout.batch_size", max(1, recipe.rollout.batch_size // 2)))
    if isinstance(recipe, RlRecipe):
        changes.append(("rollout.max_new_tokens", recipe.rollout.max_new_tokens // 2))
    elif recipe.data.max_length:
        changes.append(("data.max_length", recipe.data.max_length // 2))
    if not shape.adapter and recipe.optim.use == "adamw" and not recipe.model.divided and not recipe.optim.offload:
        changes.append(("optim.offload", True))
        changes.append(("optim.use", "adamw_8bit"))
    if shape.adapter and recipe.model.quantize is None:
        changes.append(("model.quantize", "nf4"))
    return changes


def with_key(recipe: Any, key: str, value: Any) -> Any:
    """Return the recipe with one key changed."""
    head, _, rest = key.partition(".")
    return recipe.model_copy(update={head: with_key(getattr(recipe, head), rest, value) if rest else value})


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@contextmanager
def explain_out_of_memory(
    recipe: Recipe, model: Any, longest: int, state: State, directory: RunDirectory
) -> Iterator[None]:
    """Convert torch.OutOfMemoryError to a RunError that suggests changes.

    longest: tokens of the longest row, or prompt (rl).
    """
    try:
        yield
    except torch.OutOfMemoryError as cause:
        raise _out_of_memory(recipe, model, longest, state.step + 1, str(directory.path)) from cause


def _out_of_memory(recipe: Recipe, model: Any, longest: int, step: int, where: str) -> RunError:
    """Build the error, with three changes and their predicted peaks."""
    machine, shape = Machine.here(), shape_of(model, recipe.model.lora)
    before = predict_phases(recipe, shape, longest, machine)
    tried = [f"{e.text} ({e.peak / GIB:.1f} GiB)" for e in edits(recipe, shape, longest, machine)]
    less = f"any of these needs less: {'; '.join(tried)}; add it to the command and start a new run; " if tried else ""
    return RunError(
        f"step {step}: the GPU has no memory left",
        where=where,
        allowed=f"predicted peak of this recipe: {before.peak / GIB:.1f} GiB in the phase `{before.peak_phase}`, of "
        f"{machine.card / GIB:.1f} GiB on the card",
        hint=f"{less}`posttrain plan` shows all parts",
    )


def skeleton(recipe: Recipe) -> Any:
    """Build the recipe's model on the meta device. Raises ModelError if its configuration cannot be read."""
    return _skeleton(recipe.model, recipe.base_dir)


def _skeleton(section: Model, base_dir: Path) -> Any:
    config = models.config_of(section, base_dir)
    with torch.device("meta"):
        return vision.auto_class(config, section).from_config(config, trust_remote_code=section.trust_remote_code)


def peak_memory() -> dict[str, float]:
    """Return `memory/allocated_gib` and `memory/reserved_gib`, the peaks since the last call; {} without a GPU.

    Includes a colocated engine. Reserved is what the allocator holds: if it is far above allocated, memory is
    fragmented into blocks of sizes that are not requested again.
    """
    if not torch.cuda.is_available():
        return {}
    peaks = {
        "memory/allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "memory/reserved_gib": torch.cuda.max_memory_reserved() / GIB,
    }
    torch.cuda.reset_peak_memory_stats()
    return peaks

"""Conversions of another tool's keys beyond a new name and value. Each function takes the draft, the key and its
target, and writes values or records why there are none."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from posttrain.errors import count_noun
from posttrain.recipe.foreign import data_forms, objective_forms, reward_forms, run_forms, torchtune_forms
from posttrain.recipe.foreign.draft import Draft
from posttrain.recipe.foreign.source import Foreign, Given

Transform = Callable[[Draft, Given, str], None]

_ADAPTERS = ("lora", "qlora")
_SWITCHES = ("adapter", "finetuning_type", "tuner_type", "train_type")
_RANKS = ("ds.lora.rank", "lora_rank", "actor_rollout_ref.model.lora_rank", "model.lora_rank")


def trains_adapter(foreign: Foreign) -> bool:
    """Return whether the file trains a LoRA adapter instead of all weights."""
    given = {key: setting.value for key, setting in foreign.given.items()}
    if any(key in given for key in _SWITCHES):
        return any(given.get(key) in _ADAPTERS for key in _SWITCHES)
    if foreign.table.name in ("trl", "open_r1"):
        return given.get("use_peft") is True
    return any(isinstance(given.get(key), int) and given[key] > 0 for key in _RANKS)


def complete_adapter(draft: Draft) -> None:
    """Write the tool's default rank, alpha, dropout and targets of the adapter where the file gives none."""
    if not trains_adapter(draft.foreign) or draft.at("model.lora.continue"):  # an existing adapter has its own shape
        return
    shape = draft.foreign.table.lora
    origin = f"{draft.foreign.table.tool}'s default"
    draft.set_default("model.lora.rank", shape["rank"], origin)
    rank, alpha = draft.at("model.lora.rank"), shape["alpha"]
    if alpha == "twice":  # twice the rank: LLaMA-Factory
        alpha = 2 * rank if isinstance(rank, int) else 16
    draft.set_default("model.lora.alpha", alpha, origin)
    if shape["dropout"]:
        draft.set_default("model.lora.dropout", shape["dropout"], origin)
    if "targets" in shape and draft.at("model.lora.targets") is None:
        draft.set_default("model.lora.targets", shape["targets"], "PEFT's default for Llama, Mistral, Qwen and Gemma")
        draft.note("PEFT chooses modules by architecture where lora_target_modules is not set: see model.lora.targets")


def name_algorithm(draft: Draft) -> None:
    """Write `algorithm` if the tool's name of the method is the name of a preset."""
    foreign = draft.foreign
    for key in ("rl", "rlhf_type", "stage"):
        value = foreign.given[key].value if key in foreign.given else None
        if name := foreign.table.algorithms.get(str(value)):
            draft.set_default("algorithm", name, draft.origin(key))
    for word in foreign.command:
        for part in re.split(r"[./]", word):
            if (name := foreign.table.algorithms.get(part)) and part not in ("grpo",):
                draft.set_default("algorithm", name, f"the command {part}")


def _algorithm(draft: Draft, given: Given, _: str) -> None:
    if given.value == "gdpo":
        draft.set_default("advantage.use", "gdpo", draft.origin(given.key))
    if given.value == "pt":
        draft.set_default("data.train_on", "all", draft.origin(given.key))
        if draft.get("packing") is None:
            draft.set_default("batch.packing", True, f"{draft.origin(given.key)}, which packs")


def _boolean(draft: Draft, given: Given, target: str) -> None:
    if not target:
        draft.leave(given, f"stage {draft.stage} has no such key")
    elif given.value in (True, False):
        draft.set_default(target, given.value, draft.origin(given.key))
    else:
        draft.leave(given, f"`{target}` is true or false")


def _whole_number(draft: Draft, given: Given, target: str) -> None:
    if draft.stage == "rl" and target == "run.log_every":
        draft.leave(given, "rl writes every step")
    elif isinstance(given.value, int | float) and given.value >= 1:
        draft.set_default(target, int(given.value), draft.origin(given.key))
    else:
        draft.leave(given, f"`{target}` is a number of steps")


def _positive(draft: Draft, given: Given, target: str) -> None:
    """Convert a number; one below 1 switches the action off in the other tool, as leaving the key out does here."""
    if not isinstance(given.value, int):
        draft.leave(given, f"`{target}` is a number of steps")
    elif given.value > 0:
        draft.set_default(target, given.value, draft.origin(given.key))


def _list(draft: Draft, given: Given, target: str) -> None:
    value = given.value if isinstance(given.value, list) else [given.value]
    draft.set_default(target, [str(item) for item in value], draft.origin(given.key))


def _count_or_all(draft: Draft, given: Given, target: str) -> None:
    if not isinstance(given.value, int):
        draft.leave(given, f"`{target}` is a number")
    elif given.value > 0:
        draft.set_default(target, given.value, draft.origin(given.key))


def _rows_or_all(draft: Draft, given: Given, target: str) -> None:
    if isinstance(given.value, int) and given.value < 1_000_000:  # larger numbers mean all rows
        draft.set_default(target, given.value, draft.origin(given.key))
        draft.note(f"`{target}` is an error where the data has fewer rows; {draft.foreign.table.tool} then takes all")


def _epochs(draft: Draft, given: Given, target: str) -> None:
    if not isinstance(given.value, int | float) or given.value <= 0:
        draft.leave(given, "`run.epochs` is a whole number")
        return
    whole = math.ceil(given.value)
    if whole != given.value:
        draft.note(f"{given.key} {given.value} is {whole} here: epochs are whole; `run.steps` ends a run earlier")
    draft.set_default(target, whole, draft.origin(given.key))


def _share(draft: Draft, given: Given, target: str) -> None:
    """Write a number of steps, or a fraction of them below 1; if two keys give one each, the number takes effect."""
    value = given.value
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        write = draft.set_default if value < 1 else draft.replace
        write(target, value if value < 1 else int(value), draft.origin(given.key))
    elif value not in (0, -1):
        draft.leave(given, "`optim.warmup_steps` is a number of steps, or below 1 their share")


def _updates(draft: Draft, given: Given, target: str) -> None:
    """Convert a number of optimizer updates. A step of rl has batch.minibatches x batch.epochs updates."""
    if not isinstance(given.value, int | float) or given.value < 1:
        draft.leave(given, f"`{target}` is a number of steps")
        return
    updates = draft.updates_a_step()
    origin = draft.origin(given.key)
    draft.set_default(
        target, math.ceil(given.value / updates), f"{origin}; {updates} updates a step" if updates > 1 else origin
    )


def _steps_of_rl(draft: Draft, given: Given, target: str) -> None:
    """Convert a number of steps for verl and LLaMA-Factory, which change the learning rate once per step; `target`
    counts updates, or is a fraction below 1."""
    updates, value = draft.updates_a_step(), given.value
    if not isinstance(value, int) or value < 1:
        _share(draft, given, target)
        return
    origin = draft.origin(given.key)
    draft.replace(target, value * updates, f"{origin}: {value} steps of {updates} updates" if updates > 1 else origin)


def _targets(draft: Draft, given: Given, target: str) -> None:
    value = given.value
    names = [str(target_name) for target_name in value] if isinstance(value, list) else str(value).split(",")
    if any(name in ("all", "all-linear", "all_linear") for name in names):
        draft.set_default(target, "all-linear", draft.origin(given.key))
    elif all(re.fullmatch(r"[\w.]+", name) for name in names):
        draft.set_default(target, names, draft.origin(given.key))
    else:
        draft.leave(given, "`model.lora.targets` takes names of modules, not patterns")


def _all_linear(draft: Draft, given: Given, target: str) -> None:
    """axolotl: put adapters on all linear modules, regardless of other modules in the file."""
    if given.value is True:
        draft.replace(target, "all-linear", draft.origin(given.key))


def _lora_on(draft: Draft, given: Given, _: str) -> None:
    if given.value is not True and given.value not in _ADAPTERS:
        draft.leave(given, "an adapter is LoRA, or all weights are trained")
        draft.note(
            f"{given.key}: {given.value} is not offered: all weights are trained (`model.lora: {{}}` trains an adapter)"
        )


def _four_bit(draft: Draft, given: Given, _: str) -> None:
    if given.value not in (True, 4):
        draft.leave(given, "weights of other than 4 bits are not offered")
    elif not trains_adapter(draft.foreign):
        draft.leave(given, "4-bit weights are trained with an adapter only")
    else:
        draft.set_default("model.quantize", "nf4", draft.origin(given.key))


def _adapter_dir(draft: Draft, given: Given, _: str) -> None:
    value = given.value[0] if isinstance(given.value, list) and len(given.value) == 1 else given.value
    if not isinstance(value, str) or "," in value:
        draft.leave(given, "one adapter is trained on")
        return
    draft.replace("model.path", value, draft.origin(given.key))
    draft.set_default("model.lora.continue", True, draft.origin(given.key))
    draft.note(f"the base of the adapter {value} is the one that its adapter_config.json names")


def _no_dropout(draft: Draft, given: Given, _: str) -> None:
    """TRL: switch off the adapter's dropout, which TRL sets to 0 after it has made the adapter."""
    if not trains_adapter(draft.foreign):
        draft.leave(given, "dropout is as in the model's config.json")
    elif given.value is True:
        draft.replace("model.lora.dropout", 0.0, draft.origin(given.key))


def _cut_length(draft: Draft, given: Given, target: str) -> None:
    """Convert the length limit of a tool that truncates longer rows."""
    if not target:
        draft.leave(given, "write `data.max_length` for prompts and `rollout.max_new_tokens` for completions")
        return
    draft.set_default(target, given.value, draft.origin(given.key))
    if draft.stage != "reward_model" or draft.foreign.table.name != "trl":  # TRL's reward models drop longer rows
        rows = f"rows of more than {given.value} tokens"
        draft.note(f"{rows} are truncated by {draft.foreign.table.tool}; here they are dropped (data.overlong)")


def _tool_rounds(draft: Draft, given: Given, target: str) -> None:
    """TRL: convert the number of rounds of tool calls, each followed by a turn of the model, to the model's turns."""
    draft.set_default(target, int(given.value) + 1, f"{draft.origin(given.key)}, and the turn before the first call")


def _betas(draft: Draft, given: Given, _: str) -> None:
    if given.key == "adam_beta2" and draft.foreign.given.get("adam_beta1"):
        return
    pair = [draft.get("adam_beta1", default=0.9), draft.get("adam_beta2", default=0.999)]
    draft.set_default("optim.betas", pair, draft.origin("adam_beta1", "adam_beta2"))


def _batch(draft: Draft, given: Given, _: str) -> None:
    """Convert rows per GPU x accumulation x GPUs. In rl these are completions, which give prompts and updates per
    step."""
    rows = int(given.value)
    accumulated = draft.get("gradient_accumulation_steps", default=1)
    if accumulated == "to_16":  # ms-swift
        accumulated = max(1, math.ceil(16 / (rows * draft.gpus)))
    accumulated = int(accumulated)
    origin = f"{given.key} {rows} x gradient_accumulation_steps {accumulated} x {draft.gpus} GPU" + "s" * (
        draft.gpus > 1
    )
    if draft.foreign.gpus is None and draft.gpus == 1:
        draft.note("batches count rows per GPU: the recipe's are those of 1 GPU (`--gpus N` multiplies them)")
    if draft.stage != "rl":
        draft.set_default("batch.size", rows * accumulated * draft.gpus, origin)
        draft.set_default("batch.micro_size", rows, draft.origin(given.key))
        _note_packed_rows(draft, rows * accumulated * draft.gpus)
        return
    generated = draft.get("steps_per_generation")
    if generated is None and (whole := draft.get("generation_batch_size", "trl.generation_batch_size")) is not None:
        generated = max(1, int(whole) // (rows * draft.gpus))
    generated = int(generated or accumulated * int(draft.get("ppo_buffer_size", default=1)))
    completions = rows * generated * draft.gpus
    group = int(draft.get("num_generations", "trl.num_generations", default=8))
    prompts = max(1, completions // group)
    if prompts * group != completions:
        draft.note(f"{completions} completions per step are not a multiple of {group}: {prompts} prompts are used")
    draft.set_default("rollout.prompts_per_step", prompts, f"{origin} / {group} completions a prompt")
    if (updates := generated // accumulated) > 1:
        draft.set_default(
            "batch.minibatches", min(updates, prompts * group), f"{completions} completions, {updates} updates of them"
        )


def _note_packed_rows(draft: Draft, size: int) -> None:
    """Add a note if the tool packs rows: TRL, axolotl, LLaMA-Factory and ms-swift count packs per batch, posttrain
    rows."""
    packed = draft.get("packing", "sample_packing", default=False)
    if draft.stage != "sft" or packed in (False, "false", "False"):
        return
    length = draft.get("max_seq_length", "sequence_len", "max_length", "cutoff_len")
    tokens = f", up to {size * int(length)} tokens ({size} packs of {length})" if isinstance(length, int) else ""
    draft.note(
        f"batch.size counts rows: there an update had {count_noun(size, 'pack')} of many rows{tokens}; multiply"
        " batch.size by the rows of a pack (`posttrain plan` shows tokens per step) or lower optim.lr"
    )


def _global_batch(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert rows over all GPUs; in rl completions of rollout.batch_size prompts."""
    size, micro = int(given.value), int(draft.get("train.micro_batch_size", default=1))
    if draft.stage != "rl":
        draft.set_default("batch.size", size, draft.origin(given.key))
        if size % micro == 0:
            draft.set_default("batch.micro_size", micro, draft.origin("train.micro_batch_size"))
        return
    prompts = int(draft.get("rollout.batch_size", default=size))
    completions = prompts * int(draft.get("rollout.n_samples_per_prompt", default=1))
    draft.set_default("rollout.prompts_per_step", prompts, draft.origin("rollout.batch_size"))
    if completions > size:
        draft.set_default(
            "batch.minibatches", math.ceil(completions / size), f"{completions} completions / {given.key} {size}"
        )


def _megatron_batch(draft: Draft, given: Given, _: str) -> None:
    """Megatron-SWIFT: convert rows per update over all GPUs; in rl completions, of which a step has several updates."""
    size, micro = int(given.value), int(draft.get("micro_batch_size", default=1))
    if draft.stage != "rl":
        draft.set_default("batch.size", size, draft.origin(given.key))
        draft.set_default("batch.micro_size", micro, draft.origin("micro_batch_size"))
        _note_packed_rows(draft, size)
        return
    whole = draft.get("generation_batch_size")
    updates = int(draft.get("steps_per_generation", default=1 if whole is None else int(whole) // size))
    group = int(draft.get("num_generations", default=8))
    origin = f"{given.key} {size} x {count_noun(updates, 'update')} / {group} completions a prompt"
    draft.set_default("rollout.prompts_per_step", max(1, size * updates // group), origin)
    if updates > 1:
        draft.set_default("batch.minibatches", updates, draft.origin("steps_per_generation", "generation_batch_size"))


def _verl_batch(draft: Draft, given: Given, _: str) -> None:
    """verl: convert prompts (rl) or rows per step, and the mini-batch size to updates per step."""
    size = int(given.value)
    if draft.stage != "rl":
        draft.set_default("batch.size", size, draft.origin(given.key))
        micro = draft.get("data.micro_batch_size_per_gpu")
        if micro and size % int(micro) == 0:
            draft.set_default("batch.micro_size", int(micro), draft.origin("data.micro_batch_size_per_gpu"))
        return
    mini = int(draft.get("actor_rollout_ref.actor.ppo_mini_batch_size", default=size))
    draft.set_default("rollout.prompts_per_step", size, draft.origin(given.key))
    if size > mini:
        draft.set_default(
            "batch.minibatches", math.ceil(size / mini), f"train_batch_size {size} / ppo_mini_batch_size {mini}"
        )


def _openrlhf_length(draft: Draft, given: Given, _: str) -> None:
    """OpenRLHF: convert the length limit of a row; in rl it also bounds completions that have no limit of their own."""
    origin = draft.origin(given.key)
    if draft.stage != "rl":
        draft.set_default("data.max_length", given.value, origin)
        return
    completion = draft.get("rollout.max_new_tokens")
    if completion is None:
        draft.note(f"OpenRLHF's prompts and completions have {given.value} tokens together; here completions alone do")
    elif given.line:
        draft.set_default("rollout.vllm.max_model_len", given.value, origin)
    draft.set_default(
        "rollout.max_new_tokens", completion or given.value, draft.origin("rollout.max_new_tokens") or origin
    )


def _vllm_engines(draft: Draft, given: Given, _: str) -> None:
    if isinstance(given.value, int) and given.value > 0:
        draft.set_default("rollout.engine", "vllm", draft.origin(given.key))


def _swift_lr(draft: Draft, given: Given, target: str) -> None:
    value = given.value
    if value == "by_tuner":
        value = 1e-4 if trains_adapter(draft.foreign) else 1e-5
    draft.set_default(target, value, draft.origin(given.key))


def _text_not_file(draft: Draft, given: Given, target: str) -> None:
    if str(given.value).endswith((".txt", ".md")):
        place = draft.foreign.path.parent / str(given.value)
        if not place.is_file():
            draft.leave(given, f"`{target}` is the text itself")
            return
        draft.set_default(target, place.read_text(encoding="utf-8").strip(), draft.origin(given.key))
        return
    draft.set_default(target, str(given.value), draft.origin(given.key))


TRANSFORMS: dict[str, Transform] = {
    "adapter_dir": _adapter_dir,
    "all_linear": _all_linear,
    "algorithm": _algorithm,
    "batch": _batch,
    "betas": _betas,
    "count_or_all": _count_or_all,
    "cut_length": _cut_length,
    "epochs": _epochs,
    "four_bit": _four_bit,
    "global_batch": _global_batch,
    "list": _list,
    "megatron_batch": _megatron_batch,
    "no_dropout": _no_dropout,
    "lora_on": _lora_on,
    "openrlhf_length": _openrlhf_length,
    "positive": _positive,
    "rows_or_all": _rows_or_all,
    "share": _share,
    "steps_of_rl": _steps_of_rl,
    "swift_lr": _swift_lr,
    "targets": _targets,
    "text_not_file": _text_not_file,
    "tool_rounds": _tool_rounds,
    "truth": _boolean,
    "updates": _updates,
    "verl_batch": _verl_batch,
    "vllm_engines": _vllm_engines,
    "whole": _whole_number,
    **data_forms.TRANSFORMS,
    **objective_forms.TRANSFORMS,
    **reward_forms.TRANSFORMS,
    **run_forms.TRANSFORMS,
    **torchtune_forms.TRANSFORMS,
}

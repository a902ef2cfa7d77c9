"""Settings that do nothing because of other settings: one table of rules.

A rule is asked only about values that were written and differ from the default. If two keys contradict each other, the
recipe is refused. If the other key is a switch that people turn on the command line (`rollout.engine`,
`sampling.temperature`), the recipe is valid, and a note says before the run what has no effect. Keys that a stage never
reads are in its `unused`; what components need is in objective_checks.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from posttrain.errors import Problem
from posttrain.recipe import no_effect_rules as why
from posttrain.recipe.keys import own_keys
from posttrain.recipe.section import ComponentSection
from posttrain.recipe.tree import Node, follow, format_path

Path_ = tuple[str | int, ...]
Why = Callable[[Any, Any], str]  # (recipe, the section that holds the key) -> why it does nothing, "" where it acts


@dataclass(frozen=True)
class Rule:
    """keys: dotted; `*` stands for every place of a list or every key of a section. right: what to do instead."""

    keys: tuple[str, ...]
    idle: Why
    right: str = "remove it"
    note: bool = False


def _rule(keys: str, idle: Why, right: str = "remove it", *, note: bool = False) -> Rule:
    return Rule(tuple(keys.split()), idle, right, note)


_ACTING = "rollout.{0} sampling.{0}"
SOURCES = ("data", "data.mix.*", "eval.data")
MERGED = ("parameters", "models.*.parameters", "slices.*.parameters", "slices.*.sources.*.parameters")
TURNS = " ".join(_ACTING.format(key) for key in ("max_turns", "turn_tokens", "reply_tokens", "rollout_seconds"))

# Of the rules that hold at a place, the first one speaks.
RULES: tuple[Rule, ...] = (
    # data
    _rule(
        "data.split data.config data.skip data.seed data.params data.columns data.weight",
        why.beside_mixture,
        "write it in an entry of `data.mix`",
    ),
    _rule("data.overlong", why.no_max_length, "write `data.max_length`"),
    *(
        rule
        for at in SOURCES
        for rule in (
            _rule(f"{at}.params", why.takes_no_params),
            _rule(f"{at}.seed", why.made_of_nothing, note=True),
            _rule(f"{at}.split {at}.config", why.no_splits, note=True),
            _rule(f"{at}.config", why.only_hub, note=True),
        )
    ),
    _rule("data.weight", why.no_mixture, "write `data.mix`"),
    _rule("data.mix.*.weight", why.alone_in_mixture),
    _rule("data.train_on", why.no_turns, note=True),
    # model
    _rule("model.revision", why.no_hub_model),
    _rule("model.chat_template", why.plain_text, note=True),
    _rule("model.attention model.trust_remote_code", why.made_here, note=True),
    _rule("model.attention", why.vllm_attends, note=True),
    _rule("model.offload_reference", why.no_reference, note=True),
    # what generates
    _rule("rollout.vllm.server engine.vllm.server", why.not_vllm, "write `engine: vllm` beside it"),
    _rule("rollout.vllm.sleep engine.vllm.sleep", why.server_sleeps),
    _rule("rollout.vllm.merge_adapter", why.no_adapter, "remove it, or train one: `model.lora`"),
    _rule("rollout.vllm.* engine.vllm.*", why.not_vllm, "write `engine: vllm` beside it, or remove it", note=True),
    _rule("engine.vllm.sleep", why.nobody_waits, note=True),
    _rule("rollout.batch_size engine.batch_size", why.not_batched, note=True),
    _rule("rollout.top_p rollout.top_k rollout.stop", why.not_sampled, note=True),
    _rule(
        f"{_ACTING.format('top_p')} {_ACTING.format('top_k')}",
        why.greedy,
        "remove it, or write a temperature above 0",
        note=True,
    ),
    _rule("rollout.max_gen_batches", why.keeps_all, "add `keep: dynamic_sampling`"),
    _rule(TURNS, why.one_turn),
    _rule("tool_format tool_prompt tool_workers tool_memory_mb earlier_turns", why.one_turn),
    _rule("tool_format tool_prompt tool_memory_mb", why.no_calls, note=True),
    _rule("environment.simulations", why.no_state_values, "write `advantage: mc_critic`, or 0"),
    _rule("environment.horizon", why.no_simulations, "write `environment.simulations`"),
    # rewards
    _rule("scoring.split", why.real_turns),
    _rule("scoring.canary_window", why.no_canary, "write `canary: true` in a reward of weight 0"),
    _rule("scoring.canary_window best_of.scoring.canary_window search.scoring.canary_window", why.no_steps, note=True),
    *(
        _rule(f"{at}rewards.*.on_none {at}rewards.*.clip", why.not_summed, "write a `weight`, or remove it", note=True)
        for at in ("", "best_of.", "search.", "eval.")
    ),
    _rule("scoring.max_bad_gold best_of.scoring.max_bad_gold search.scoring.max_bad_gold", why.no_audit, note=True),
    _rule("scoring.*", why.no_rewards, "write `rewards`", note=True),
    # arguments of components
    _rule("advantage.eps advantage.ddof", why.argument("group", "scale", "none"), note=True),
    _rule("loss.nll_reduction", why.argument("dpo", "nll_weight", 0.0), "write `nll_weight`, or remove it", note=True),
    _rule("loss.alpha", why.argument("f_dpo", "divergence", "js", "forward_kl", "reverse_kl"), note=True),
    _rule("objective.block", why.argument("pear", "level", "token", "sequence"), note=True),
    # rl
    _rule("loss.norm_len", why.not_fixed, "write `aggregation: fixed`"),
    _rule("loss.count_empty_rows", why.counts_tokens),
    _rule("loss.mask_truncated", why.never_truncated, note=True),
    _rule("kl.reference", why.no_kl, "write `kl.coef`, or remove it"),
    _rule("critic", why.no_critic),
    # sft, dpo, reward models
    _rule("batch.packing", why.one_row, "write a larger `batch.micro_size`", note=True),
    _rule("optim.decay_steps optim.min_lr", why.not_decaying, "write `schedule: stable_decay`"),
    _rule("objective.behavior_model", why.no_behavior),
    _rule("anchors.reference", why.unread_anchor("ref_logp")),
    _rule("anchors.previous", why.unread_anchor("prev_logp")),
    _rule("anchors.history", why.unread_anchor("history")),
    _rule("pairs.max_gap", why.labelled_answers, note=True),
    _rule("objective.rounds objective.soft", why.no_mixture_of_heads, "write `use: mixture`, or remove it"),
    _rule("objective.center_coef", why.no_pairs),
    _rule(
        "eval.temperature eval.max_new_tokens eval.batch_size", why.no_completions, "write `n` and `rewards`", note=True
    ),
    # evaluation, pipelines, merges
    _rule("eval.aes eval.edges", why.no_baseline, "write `eval.baseline`"),
    _rule("eval.best_of", why.one_sample, "write `eval.samples`, e.g. 8", note=True),
    _rule("eval.stability", why.one_sample, "write `eval.samples`, e.g. 8", note=True),
    _rule("parallel", why.one_seed, "write `seeds`", note=True),
    _rule("parameters.k", why.averages("ema"), note=True),
    _rule("parameters.decay parameters.bias_correction", why.averages("last_k"), "write `mode: ema`", note=True),
    *(
        _rule(" ".join(f"{at}.{key}" for at in MERGED), why.not_read(key), note=True)
        for key in ("weight", "density", "normalize", "rescale")
    ),
    _rule(" ".join(f"{at}.int8_mask" for at in MERGED), why.of_mergekit, note=True),
    # run
    _rule("run.keep_checkpoints", why.one_checkpoint, "write `run.save_every`", note=True),
)


def find_contradictions(recipe: BaseModel) -> Iterator[tuple[str, str, str]]:
    """(key, what is wrong, what would be right) of each setting that contradicts another. One of `checks.CHECKS`."""
    for path, rule, reason in find_idle_settings(recipe):
        if not rule.note:
            yield format_path(path), f"does nothing{reason}", rule.right


def notes(recipe: BaseModel, tree: Node, prefix: Sequence[str | int] = ()) -> list[Problem]:
    """The settings that a recipe's user wrote and that are left aside, each with its line. What a preset chose may be
    idle beside what the user chose. `prefix` marks a stage of a pipeline."""
    told = []
    for path, rule, reason in find_idle_settings(recipe):
        node, depth = follow(tree, path)
        if rule.note and depth == len(path) and node.origin.kind in ("file", "command line"):
            mark = node.at_key.mark if node.mapping else node.origin.mark
            told.append(Problem(mark, f"{format_path([*prefix, *path])}: does nothing{reason}", hint=rule.right))
    return told


def find_idle_settings(recipe: BaseModel) -> Iterator[tuple[Path_, Rule, str]]:
    """(path, rule, why) of every idle setting: " with ...", ": ..." to be put behind `does nothing`; each path once."""
    seen: set[Path_] = set()
    for rule in RULES:
        for key in rule.keys:
            for path, section in places(recipe, key.split(".")):
                reason = "" if path in seen else rule.idle(recipe, section)
                if reason:
                    seen.add(path)
                    yield path, rule, reason if reason.startswith(":") else f" {reason}"


def places(section: Any, parts: Sequence[str], above: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """(path, the section that holds it) of every setting on a dotted key that was written and is not its default."""
    first, rest = parts[0], parts[1:]
    if isinstance(section, list):
        for position, entry in enumerate(section):
            yield from places(entry, rest, (*above, position))
    elif isinstance(section, BaseModel):
        names = {shown: name for name, field in type(section).model_fields.items() for shown in [field.alias or name]}
        for shown in names if first == "*" else [first] if first in own_keys(type(section)) else []:
            name = names[shown]
            value, field = getattr(section, name), type(section).model_fields[name]
            if rest and value is not None:
                yield from places(value, rest, (*above, shown))
            elif name in section.model_fields_set and value != field.get_default(call_default_factory=True):
                yield (*above, shown), section
        if isinstance(section, ComponentSection) and not rest and _chosen_argument(section, first):
            yield (*above, first), section


def _chosen_argument(section: ComponentSection, key: str) -> bool:
    """Whether the component in use takes the key, and was given another value than its default."""
    default = section.described.get("params", {}).get(key, ())[1:]
    value = section.params.get(key)
    return bool(default) and (list(value) if isinstance(value, tuple) else value) != default[0]

"""Why a setting does nothing: one function a reason, called through the table of no_effect.py.

Every function gets the recipe and the section that holds the key. It returns the end of the sentence "KEY: does
nothing ...", or "" if the setting does something. Stages are compared by name, since several share a section.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from posttrain.path_resolution import ROW_FILES, split_function
from posttrain.recipe import merging
from posttrain.recipe.objective_checks import BY_REFERENCE, active_components
from posttrain.recipe.rollout_sections import VLLM_CHUNK

PATHS = (".", "/", "~")
MADE = ("gym:", "task:", "accepted:")
BY_CRITIC = {"values", "new_values", "frozen_critic"}


# --- data


def beside_mixture(recipe: Any, data: Any) -> str:
    return "beside `data.mix`: it belongs to one source" if data.mix else ""


def no_max_length(recipe: Any, data: Any) -> str:
    return "" if data.max_length else "without `data.max_length`"


def takes_no_params(recipe: Any, source: Any) -> str:
    name = source.source
    if name is None or _is_generated(name) or _function(name):
        return ""
    return f"with {name}: only gym:, task:, accepted: and file.py:function take `params`"


def made_of_nothing(recipe: Any, source: Any) -> str:
    """Rows that are there need no seed; emptied thoughts are drawn with it."""
    name = source.source
    if name is None or name.startswith(("gym:", "task:")) or _function(name) or getattr(source, "thought_dropout", 0):
        return ""
    return f"with {name}: its rows are read, not made (`run.seed` decides their order)"


def no_splits(recipe: Any, source: Any) -> str:
    name = source.source
    rows_alone = name is not None and (_is_generated(name) or _function(name) or name.endswith(ROW_FILES))
    return f"with {name}, which has no splits and no configurations" if rows_alone else ""


def only_hub(recipe: Any, source: Any) -> str:
    local = source.source is not None and source.source.startswith(PATHS)
    return f"with {source.source}: only the hub has configurations" if local else ""


def no_mixture(recipe: Any, data: Any) -> str:
    return "without `data.mix`"


def alone_in_mixture(recipe: Any, source: Any) -> str:
    return "" if len(recipe.data.mix) > 1 else "in a mixture of one source"


def no_turns(recipe: Any, data: Any) -> str:
    return "with `data.chat: false`, which has no turns" if data.train_on == "assistant" and not data.chat else ""


def _is_generated(name: str) -> bool:
    return name.startswith(MADE)


def _function(name: str) -> bool:
    return split_function(name) is not None


# --- model


def no_hub_model(recipe: Any, model: Any) -> str:
    local = model.path == "tiny" or model.path.startswith(("stage:", *PATHS)) or model.path.endswith(".gguf")
    return f"with {model.path}: only models of the hub have revisions" if local else ""


def plain_text(recipe: Any, model: Any) -> str:
    """A trained model is saved with its template, whatever it was trained on."""
    idle = recipe.stage in ("eval", "generate") and not recipe.data.chat and not recipe.acts
    return "with `data.chat: false`" if idle else ""


def made_here(recipe: Any, model: Any) -> str:
    return "with tiny, which is made here" if model.path == "tiny" else ""


def vllm_attends(recipe: Any, model: Any) -> str:
    idle = recipe.stage in ("eval", "generate") and recipe.engine.engine == "vllm"
    return "with engine.engine vllm, which attends in its own way" if idle else ""


def no_reference(recipe: Any, model: Any) -> str:
    if recipe.stage != "rl" or recipe.kl.reference or recipe.critic.path or _own(recipe) or model.lora or model.shard:
        return ""
    reads = any(section.needs & {*BY_REFERENCE} for _, section in active_components(recipe))
    return "" if reads else "without a reference: `kl.coef` is 0"


# --- what generates


def not_vllm(recipe: Any, vllm: Any) -> str:
    return "" if _engine(recipe).engine == "vllm" else f"with {_at(recipe)}.engine {_engine(recipe).engine}"


def server_sleeps(recipe: Any, vllm: Any) -> str:
    return "with `server`, which has its own GPU, and nothing to hand over" if vllm.server else ""


def no_adapter(recipe: Any, vllm: Any) -> str:
    return "" if recipe.model.lora else "without an adapter"


def nobody_waits(recipe: Any, vllm: Any) -> str:
    return f"in {recipe.stage}: nothing else wants the engine's memory"


def not_batched(recipe: Any, engine: Any) -> str:
    if recipe.stage == "harness":  # likelihoods are the model's own, in batches
        return ""
    if engine.engine == "vllm" and (recipe.stage == "rl" or engine.batch_size <= VLLM_CHUNK):
        return f"with {_at(recipe)}.engine vllm, which fills its own batches"
    return f"with {_at(recipe)}.engine stored: nothing is sampled" if engine.engine == "stored" else ""


def not_sampled(recipe: Any, rollout: Any) -> str:
    return "with rollout.engine stored: nothing is sampled" if rollout.engine == "stored" else ""


def greedy(recipe: Any, sampling: Any) -> str:
    driven = "rollout.temperature" in getattr(recipe, "controllers", {})
    return "" if sampling.temperature or driven else "at temperature 0, which takes the likeliest token"


def keeps_all(recipe: Any, rollout: Any) -> str:
    return "" if recipe.keeps else "without `keep`: it refills the groups that `keep` drops"


def one_turn(recipe: Any, sampling: Any) -> str:
    return "" if recipe.acts else "without `tools` or an `environment`"


def no_calls(recipe: Any, _: Any) -> str:
    return "" if recipe.tools else "with an `environment`, which reads the model's text as it is"


def no_state_values(recipe: Any, environment: Any) -> str:
    reads = recipe.stage == "rl" and ("mc_values" in recipe.advantage.needs or _function(recipe.advantage.use))
    return "" if reads else ": nothing reads what states are worth"


def no_simulations(recipe: Any, environment: Any) -> str:
    return "" if environment.simulations else "without `environment.simulations`"


# --- rewards


def real_turns(recipe: Any, scoring: Any) -> str:
    acts = getattr(recipe, "acts", False)
    return "with `tools` or an `environment`: the parts are the model's turns" if acts else ""


def no_canary(recipe: Any, scoring: Any) -> str:
    return "" if not recipe.rewards or any(reward.canary for reward in recipe.rewards) else "without a canary"


def not_summed(recipe: Any, reward: Any) -> str:
    return "" if reward.weight else "with weight 0: such a reward is only logged"


def no_steps(recipe: Any, scoring: Any) -> str:
    return "" if recipe.stage == "rl" else f"in {recipe.stage}, which has no steps"


def no_audit(recipe: Any, scoring: Any) -> str:
    """`rl` audits gold before it starts, and `posttrain reward test` does for an eval."""
    idle = recipe.stage not in ("rl", "eval")
    return f"in {recipe.stage}, where no gold is audited" if idle else ""


def no_rewards(recipe: Any, scoring: Any) -> str:
    return "" if recipe.rewards else "without `rewards`"


# --- rl


def argument(use: str, other: str, *idle: object) -> Callable[[Any, Any], str]:
    """Of an argument that the component `use` leaves aside where its `other` one is among `idle`."""

    def reason(recipe: Any, section: Any) -> str:
        leaves_aside = section.use == use and section.params[other] in idle
        return f"with {other} {section.params[other]}" if leaves_aside else ""

    return reason


def not_fixed(recipe: Any, loss: Any) -> str:
    terms = [loss.aggregation, *(term.aggregation for term in recipe.regularisers)]
    return "" if "fixed" in terms else f"with aggregation {loss.aggregation}"


def counts_tokens(recipe: Any, loss: Any) -> str:
    if loss.aggregation == "local_token_mean":
        return "with aggregation local_token_mean, whose micro-batches weigh by all of their rows"
    terms = {loss.aggregation, *(term.aggregation for term in recipe.regularisers)} - {None}
    return "with aggregation token_mean, which counts no rows" if terms == {"token_mean"} else ""


def never_truncated(recipe: Any, loss: Any) -> str:
    return "with rollout.engine stored: no completion was cut" if recipe.rollout.engine == "stored" else ""


def no_kl(recipe: Any, kl: Any) -> str:
    return "" if recipe.has_kl else "while kl.coef is 0"


def no_critic(recipe: Any, _: Any) -> str:
    needs = {need for _, section in recipe.components() for need in section.needs}
    return "" if _own(recipe) or needs & BY_CRITIC else ": no component reads a critic's values"


def _own(recipe: Any) -> bool:
    """Whether a component is a function of the user, which may read anything."""
    return any(_function(section.use) for _, section in recipe.components())


# --- sft, dpo, reward models


def one_row(recipe: Any, batch: Any) -> str:
    return "with one row a forward pass" if (batch.micro_size or batch.size) == 1 else ""


def not_decaying(recipe: Any, optim: Any) -> str:
    return "" if optim.schedule == "stable_decay" else f"with schedule {optim.schedule}"


def no_behavior(recipe: Any, objective: Any) -> str:
    reads = "behavior_logp" in objective.needs or _function(objective.use)
    return "" if reads else f"with {objective.use}"


def unread_anchor(need: str) -> Callable[[Any, Any], str]:
    """Of a policy that a pair loss may read."""

    def reason(recipe: Any, anchors: Any) -> str:
        loss = recipe.loss
        free = need == "ref_logp" and loss.params.get("reference_free")
        reads = _function(loss.use) or (need in loss.needs and not free)
        return "" if reads else f": {loss.use} does not read it"

    return reason


def labelled_answers(recipe: Any, rules: Any) -> str:
    labels = "labels" in recipe.loss.needs
    return f"with loss {recipe.loss.use}, whose rows are answers with labels and no pairs" if labels else ""


def no_mixture_of_heads(recipe: Any, objective: Any) -> str:
    return "" if recipe.stage != "reward_model" or objective.use == "mixture" else f"with {objective.use}"


def no_pairs(recipe: Any, objective: Any) -> str:
    return "" if objective.pairs else f"with {objective.use}, which learns from labels"


# --- evaluation, pipelines, merges, run


def no_completions(recipe: Any, settings: Any) -> str:
    return "" if settings.n else "with eval.n 0: nothing is generated"


def no_baseline(recipe: Any, settings: Any) -> str:
    return "" if settings.baseline else "without a run to compare with"


def one_sample(recipe: Any, settings: Any) -> str:
    return "" if settings.samples > 1 else "with one completion a prompt"


def one_seed(recipe: Any, _: Any) -> str:
    return "" if len(recipe.seeds) > 1 else "with one seed"


def averages(mode: str) -> Callable[[Any, Any], str]:
    """Of a key of checkpoint_average that this mode leaves aside."""

    def reason(recipe: Any, parameters: Any) -> str:
        idle = recipe.merge_method == "checkpoint_average" and (parameters.mode or "last_k") == mode
        return f"with mode {mode}" if idle else ""

    return reason


def not_read(key: str) -> Callable[[Any, Any], str]:
    """Of a key that mergekit's files carry along for methods that do not read it. Ours have no such files."""

    def reason(recipe: Any, _: Any) -> str:
        method = recipe.merge_method
        return "" if key in merging.arguments_of(method) or method in merging.OURS else f"in {method}, as in mergekit"

    return reason


def of_mergekit(recipe: Any, parameters: Any) -> str:
    return ": it is a matter of mergekit's memory, not of the result"


def one_checkpoint(recipe: Any, run: Any) -> str:
    return "" if run.save_every else "without `run.save_every`: there is one checkpoint, at the end"


def _at(recipe: Any) -> str:
    return "rollout" if recipe.stage == "rl" else "engine"


def _engine(recipe: Any) -> Any:
    return getattr(recipe, _at(recipe))

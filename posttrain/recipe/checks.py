"""Checks that the schema cannot make: values that are valid alone and cannot work together.

Each check is a function of a recipe that yields (key, what is wrong, what would be right).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from posttrain.errors import Problem, did_you_mean
from posttrain.recipe import argument_checks, builder_keys, merging, no_effect, objective_checks, reward_checks
from posttrain.recipe import stages as st
from posttrain.recipe.objective_checks import Found
from posttrain.recipe.reward_sections import Reward
from posttrain.recipe.rollout_sections import LORA_RANKS
from posttrain.recipe.tree import Node, follow, format_path

Check = Callable[[Any], Found]


def run(recipe: st.Stage, tree: Node, prefix: Sequence[str | int] = ()) -> list[Problem]:
    """The problems of a recipe that fits the schema. `prefix`: the place of a pipeline's stage."""
    problems: list[Problem] = []
    for check in (*_checks_of(recipe), *(() if prefix else (_references,))):
        for key, what, right in check(recipe):
            path = _path(key)
            node, depth = follow(tree, path)
            if node.origin.kind == "preset":
                if check not in objective_checks.CHECKS:  # a paper's choice may be idle beside the user's
                    continue
                node, depth = follow(tree, ["algorithm"])
            mark = node.origin.mark if depth == len(path) and not node.mapping else node.at_key.mark
            problems.append(Problem(mark, f"{format_path([*prefix, *path])}: {what}", hint=right))
    return problems


def keys_with_problems(recipe: st.Stage) -> set[str]:
    """The keys that some check refuses."""
    return {key for check in _checks_of(recipe) for key, _, _ in check(recipe)}


def _checks_of(recipe: st.Stage) -> list[Check]:
    return [check for stage, checks in CHECKS.items() if isinstance(recipe, stage) for check in checks]


def _path(key: str) -> list[str | int]:
    """The parts of a dotted key. Under `controllers` the rest is one part: a key with dots, such as `kl.coef`."""
    if key.startswith("controllers."):
        return ["controllers", key.removeprefix("controllers.")]
    return [int(part) if part.isdigit() else part for part in key.split(".")] if key else []


def _length(recipe: Any) -> Found:
    if isinstance(recipe, st.SftRecipe | st.DpoRecipe | st.RlRecipe) and not (recipe.run.steps or recipe.run.epochs):
        yield "run", "says not how long to train", "write `run.steps` or `run.epochs`"


def _check_quantized(recipe: Any) -> Found:
    trains = isinstance(recipe, st.SftRecipe | st.DpoRecipe | st.RlRecipe)
    if trains and recipe.model.quantize and recipe.model.lora is None:
        yield "model.quantize", "4-bit weights cannot be trained themselves", "add `lora: {}` to `model`"


def _trained_on(recipe: Any) -> Found:
    lora = recipe.model.lora if isinstance(recipe, st.RewardModelRecipe) else None
    if lora and lora.continue_:
        what = "a reward model starts from a language model, into which an older adapter is merged"
        yield "model.lora.continue", what, "remove it"


def _half(recipe: Any) -> Found:
    trains = isinstance(recipe, st.SftRecipe | st.DpoRecipe | st.RewardModelRecipe)
    if trains and recipe.model.dtype == "float16":
        what = "training in float16 needs a scaled loss, which only rl has"
        yield "model.dtype", what, "write `bfloat16`, or `auto`"


def _adapted_head(recipe: st.SftRecipe | st.DpoRecipe) -> Found:
    """TRL multiplies by the weight of the output head itself, so that an adapter on it would not be trained."""
    targets = recipe.model.lora.targets if recipe.model.lora else []
    names = [targets] if isinstance(targets, str) else targets
    if any(name.rpartition(".")[2] in ("lm_head", "embed_out") for name in names):
        what = f"{recipe.verb} trains no adapter on the output head"
        yield "model.lora.targets", what, "remove it; `rl` and full training train the head"


def _offloaded_reference(recipe: st.RlRecipe) -> Found:
    if recipe.model.offload_reference and recipe.model.lora and not recipe.kl.reference:
        yield "model.offload_reference", "under LoRA the reference is the base itself, not a copy", "remove it"


def _check_eval(recipe: st.SftRecipe | st.DpoRecipe | st.RlRecipe) -> Found:
    """Evaluation while training."""
    settings = recipe.eval
    if settings is None:
        return
    if settings.metric and not (settings.keep_best or settings.patience):
        yield (
            "eval.metric",
            "does nothing: no checkpoint is chosen by it, and nothing stops by it",
            "write `keep_best: true` or `patience`, or remove it",
        )
    if isinstance(recipe, st.RlRecipe):
        if settings.metric == "loss":
            yield "eval.metric", "rl measures no validation loss", "write accuracy or reward"
        return
    if recipe.model.shard:
        yield (
            "eval",
            "a model that is divided among GPUs is not evaluated while it trains",
            "use `posttrain eval` after it",
        )
    if settings.n and not settings.rewards:
        yield "eval.rewards", "the completions need rewards", "write `rewards`, or n: 0 for the loss alone"
    if not settings.n and settings.rewards:
        yield "eval.rewards", "nothing is generated: n is 0", "write `n: 1`, or remove the rewards"
    if not settings.n and settings.metric in ("accuracy", "reward"):
        yield "eval.metric", "nothing is generated: n is 0", "write `metric: loss`, or `n: 1` and rewards"


def _check_compile(recipe: Any) -> Found:
    model = getattr(recipe, "model", None)
    if model is not None and model.compile and model.quantize:
        yield "model.compile", "4-bit weights are unpacked by kernels that no graph holds", "remove it"


def _halves(recipe: Any) -> Found:
    """Keys that cannot work beside model.half_weights."""
    if not isinstance(recipe, st.SftRecipe | st.DpoRecipe | st.RlRecipe) or not recipe.model.half_weights:
        return
    if recipe.model.lora:
        yield "model.half_weights", "an adapter's weights are few, and float32", "remove it"
    if recipe.model.shard:
        yield "model.half_weights", "a divided model computes in bfloat16 layer by layer already", "remove it"
    if recipe.model.dtype not in ("auto", "bfloat16"):
        yield "model.half_weights", f"it is for bfloat16, and model.dtype is {recipe.model.dtype}", "write bfloat16"
    if recipe.optim.use != "adamw":
        yield "optim.use", "8-bit moments were not proven beside model.half_weights", "write `optim.use: adamw`"
    if isinstance(recipe, st.RlRecipe) and recipe.opponent:
        yield "model.half_weights", "an opponent that follows slowly would be rounded in every step", "remove it"


def _check_sharded(recipe: Any) -> Found:
    """Keys that cannot work beside model.shard."""
    if not isinstance(recipe, st.SftRecipe | st.DpoRecipe | st.RlRecipe) or not recipe.model.shard:
        return
    if recipe.model.lora:
        yield "model.shard", "an adapter has next to nothing to divide", "remove it"
    if recipe.optim.use != "adamw":
        yield "optim.use", "8-bit moments cannot be divided among GPUs", "write `optim.use: adamw`"
    if recipe.model.compile:
        yield "model.compile", "was not proven together with model.shard", "remove one of the two"
    if recipe.model.dtype == "float16":
        yield "model.dtype", "float16 was not proven together with model.shard", "write bfloat16 or float32"
    if isinstance(recipe, st.RlRecipe) and recipe.kl.reference:
        yield "kl.reference", "a reference of its own is not divided among GPUs", "remove model.shard"
    if recipe.model.offload_reference:
        yield "model.offload_reference", "model.shard divides the reference as well", "remove it"
    if isinstance(recipe, st.RlRecipe) and recipe.rollout.engine == "vllm" and recipe.rollout.vllm.server:
        what = "a server takes whole weights from one process"
        yield "model.shard", what, "use vllm without `server`, or the transformers engine"


def _rewards(recipe: Any) -> Found:
    """Each list of rewards in itself."""
    for key, rewards in reward_lists(recipe):
        for place, what, right in reward_checks.problems(rewards):
            yield f"{key}.{place}", what, right
    if isinstance(recipe, st.RlRecipe) and not any(r.weight for r in recipe.rewards) and not recipe.kl.reference:
        yield "rewards", "every weight is 0: there is nothing to learn from", "give one a weight"  # a teacher is enough


def reward_lists(recipe: Any) -> Iterator[tuple[str, list[Reward]]]:
    """(key, rewards) of every list of rewards in a recipe."""
    for above in ("", "best_of", "search"):
        section = getattr(recipe, above, None) if above else recipe
        if rewards := getattr(section, "rewards", None):
            yield f"{above}.rewards" if above else "rewards", rewards


def _groups(recipe: st.RlRecipe) -> Found:
    if recipe.rollout.group_size > 1 and recipe.rollout.temperature == 0:
        yield "rollout.temperature", "0 gives a prompt the same completion every time", "write a temperature above 0"


def _idle_kl(recipe: st.RlRecipe) -> Found:
    """A `kl` section without a coefficient does nothing. Single keys that do nothing are in no_effect.py."""
    chosen = recipe.kl.model_fields_set
    if chosen - {"coef"} and not ("coef" in chosen or "kl.coef" in recipe.controllers):
        yield "kl", "does nothing while its coef is 0", "write `kl.coef`"
    if recipe.kl.reference and recipe.critic.path is not None:
        yield "kl.reference", "a critic that was trained apart reads the starting policy", "remove one of the two"


def _kl_place(recipe: st.RlRecipe) -> Found:
    """An estimator must have a useful gradient in the loss, and not differ by its gradient alone in the reward."""
    if not recipe.has_kl:
        return
    use, where = recipe.kl.use, recipe.kl.where
    if where == "loss" and use == "k1":
        yield "kl.use", "k1 in the loss has gradient 1 for every token, whatever the reference says", "use k2 or k3"
    if where == "reward" and use in ("k3_is", "k3_straight_through", "k1_straight_through"):
        yield "kl.use", f"{use} differs from {use[:2]} only in its gradient, and a reward has none", "use k1 or k3"


def _controlled_turns(recipe: st.RlRecipe) -> Found:
    """A controller of `max_turns` does nothing in rollouts of one turn."""
    if not recipe.acts and "rollout.max_turns" in recipe.controllers:
        yield "controllers.rollout.max_turns", "drives nothing without `tools` or an `environment`", "remove it"


def _seeds(recipe: st.PipelineRecipe) -> Found:
    for seed, times in Counter(recipe.seeds).items():
        if times > 1:
            yield "seeds", f"{seed} is given {times} times: the same run is no second one", "write other seeds"


def _eval_settings(recipe: Any) -> Found:
    if isinstance(recipe, st.EvalRecipe):
        for position, k in enumerate(recipe.eval.k):
            if k > recipe.eval.samples:
                what = f"pass@{k} needs {k} completions a prompt; eval.samples is {recipe.eval.samples}"
                yield f"eval.k.{position}", what, f"write `eval.samples: {k}` or more"
    samples = recipe.eval.samples if isinstance(recipe, st.EvalRecipe) else getattr(recipe, "samples", 1)
    sampling = getattr(recipe, "sampling", None)
    if sampling is not None and sampling.temperature == 0 and samples > 1:
        what = f"0 gives a prompt the same completion every time; {samples} samples are asked for"
        yield "sampling.temperature", what, "write a temperature above 0, or ask for 1 sample"


def _best_of(recipe: Any) -> Found:
    """What picks one of several completions must be a reward."""
    name = recipe.eval.best_of if isinstance(recipe, st.EvalRecipe) else None
    known = [*(reward_checks.reward_name(reward) for reward in getattr(recipe, "rewards", ())), "reward"]
    if name is not None and name not in known:
        right = did_you_mean(name, known) or f"{', '.join(known[:-1])}, or `reward` for their weighted sum"
        yield "eval.best_of", f"no reward is called `{name}`", right


def _windows(recipe: Any) -> Found:
    """What vLLM cannot be started with, whatever the model is."""
    engine = getattr(recipe, "rollout", None) or getattr(recipe, "engine", None)
    if engine is None or engine.engine != "vllm":
        return
    key, sampling = (
        ("rollout", engine) if hasattr(recipe, "rollout") else ("engine", getattr(recipe, "sampling", recipe))
    )
    length, new = engine.vllm.max_model_len, sampling.max_new_tokens
    if length is not None and new is not None and length <= new:
        what = f"{length} has no room for a prompt and {new} new tokens"
        yield f"{key}.vllm.max_model_len", what, "write a larger one"
    lora = recipe.model.lora
    if lora is not None and not engine.vllm.merge_adapter and lora.rank > LORA_RANKS[-1]:
        yield "model.lora.rank", f"{lora.rank} is more than vLLM serves, {LORA_RANKS[-1]}", "write a smaller one"


def _references(recipe: Any) -> Found:
    """`stage:NAME` is for pipelines only, where a path takes its place. Pipelines check it themselves."""
    paths = {"model.path": recipe.model.path} if hasattr(recipe, "model") else {}
    if isinstance(recipe, st.RlRecipe):
        paths |= {"kl.reference": recipe.kl.reference or "", "critic.path": recipe.critic.path or ""}
    if isinstance(recipe, st.DpoRecipe):
        named = recipe.anchors
        paths |= {"anchors.reference": named.reference or "", "anchors.previous": named.previous or ""}
        paths |= {f"anchors.history.{i}": path for i, path in enumerate(named.history)}
    if isinstance(recipe, st.MergeRecipe):
        paths = {f"models.{i}.model": m.model for i, m in enumerate(recipe.models)} | {"base_model": recipe.base_model}
        for i, piece in enumerate(recipe.slices):
            paths |= {f"slices.{i}.sources.{k}.model": source.model for k, source in enumerate(piece.sources)}
    for key, path in paths.items():
        if path and path.startswith("stage:"):
            yield key, f"`{path}` names a stage of a pipeline", "write the directory of the model"


def _objective(recipe: st.SftRecipe) -> Found:
    """Keys of sft's objective that are missing, or cannot work."""
    objective = recipe.objective
    if "behavior_logp" in objective.needs and objective.behavior_model is None:
        what = f"{objective.use} needs the log-probs of the model that wrote the data"
        yield "objective", what, "write `behavior_model`"
    if objective.divisor == "weights" and "logp" in objective.needs:
        what = f"the weights of {objective.use} change with the model: their sum is not known before a step"
        yield "objective.divide_by", what, "write `divide_by: tokens`"


def _online_kl(recipe: st.DpoRecipe) -> Found:
    """`online_kl` samples from the policy in training, and measures the KL to the policy as it was loaded."""
    if recipe.online_kl is None:
        return
    if recipe.anchors.reference:
        what = "the KL is to the policy as it is loaded, and the loss has another reference"
        yield "online_kl", what, "remove it, or `anchors.reference`"
    if recipe.model.shard:
        what = "with `online_kl` each GPU samples with the whole model"
        yield "model.shard", what, "use `lora`, or remove one of them"


# stage -> its checks; those of `Stage` are asked of every recipe
CHECKS: dict[type[st.Stage], tuple[Check, ...]] = {
    st.Stage: (
        _length,
        _check_quantized,
        _half,
        _trained_on,
        _check_compile,
        _halves,
        _check_sharded,
        _rewards,
        _eval_settings,
        _best_of,
        _windows,
        no_effect.find_contradictions,
    ),
    st.SftRecipe: (_objective, _check_eval, _adapted_head, argument_checks.intervals),
    st.DpoRecipe: (
        _online_kl,
        _check_eval,
        _adapted_head,
        argument_checks.check_label_smoothing,
        argument_checks.weights_of_labels,
        argument_checks.histories,
    ),
    st.RlRecipe: (
        _offloaded_reference,
        _check_eval,
        _groups,
        _idle_kl,
        _kl_place,
        _controlled_turns,
        argument_checks.names,
        argument_checks.bundles,
        argument_checks.lists,
        argument_checks.prompts,
        *objective_checks.CHECKS,
    ),
    st.PairsRecipe: (builder_keys.problems,),
    st.MergeRecipe: (merging.problems,),
    st.PipelineRecipe: (_seeds,),
}

"""Checks on the components of an `rl` recipe: choices that cannot work together, or would silently do nothing.

Components declare what they need and what only one of them may do (`registry.register`), so few checks name a method.
Each check yields (key, what is wrong, what would be right). `checks.py` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator

from posttrain.recipe.replay_checks import check_replay
from posttrain.recipe.rl_sections import Loss
from posttrain.recipe.sampler_checks import SAMPLER_CHECKS, sampler_gives
from posttrain.recipe.stages import RlRecipe

Found = Iterator[tuple[str, str, str]]

# What an rl run can give a component. MARKS are needs that are no fields of a batch.
FROM_ROLLOUTS = {"rewards", "components", "correct", "truncated", "lengths", "columns", "answer_ids", "rollout_logp"}
FROM_MODEL = {  # by a forward pass of the policy or the reference, made only if a component needs it
    *("old_logp", "ref_logp", "entropy", "values", "new_values", "hidden", "topk_logp", "topk_chosen"),
    *("vocab_mean_logp", "old_vocab_mean_logp", "tempered_ref_logp", "prompt_logp", "prompt_mask", "router_loss"),
    *("new_entropy", "answer_logp"),
}
FROM_TURNS = {"turn_ids", "edge_ids", "turn_states", "token_rewards", "turn_scores"}  # with tools or an environment
FROM_COMPONENTS = {"advantages", "channels", "returns"}  # made by the advantage
FROM_SOLUTIONS = {"external", "expert_logp"}  # with `solutions`
FROM_HINTS = {"hinted", "hint_mask"}  # with `prompt_variants` that give hints
FROM_SHAPE = {"trajectory_ids", "step_ids"}  # with `rollout.shape`
FROM_TREE = {"node_ids", "node_values"}  # with a shape that grows trees
FROM_PARTS = {"part_ids"}  # with a shape that divides its rows
FROM_OPPONENT = {"opponent_rewards", "opponent_logp"}  # with `opponent`
MARKS = {
    *("groups", "several_updates", "all_correct", "every_row", "every_group", "own_mean", "frozen_critic"),
    *("multiplies", "measured_kl", "own_credit", "equal_groups"),
}
WHY_NOT = {
    **dict.fromkeys(("edge_ids", "turn_states"), "rollouts of several turns: `tools` or an `environment`"),
    **dict.fromkeys(("bins", "bin_scores"), "a sampler that bins prompts (`sampler: gdro`)"),
    "kl_threshold": "a sampler that sets it (`sampler: taco`)",
    **dict.fromkeys(("opponent_rewards", "opponent_logp"), "a policy to play against: `opponent: {ema: 0.01}`"),
    "turn_ids": "rollouts of several turns (`tools` or an `environment`), or the steps of one (`scoring.split`)",
    **dict.fromkeys(("trajectory_ids", "step_ids"), "rollouts of several rows: `rollout.shape`"),
    **dict.fromkeys(("node_ids", "node_values"), "rollouts that are paths of a tree: `rollout.shape: mcts`"),
    "part_ids": "rollouts that are answered at several points: `rollout.shape: budgets`",
    **dict.fromkeys(("state_ids", "dones"), "rollouts whose turns are rows of their own"),
    "mc_values": "plays from the state before each turn (`environment.simulations`)",
    "agent_ids": "rollouts of several agents",
    **dict.fromkeys(("hinted", "hint_mask"), "rollouts with a hint: `prompt_variants`"),
    "external": "rollouts mixed with given solutions: `solutions: {in_group: true}`",
    "expert_logp": "given solutions: `solutions: {column: solution}`",
    **dict.fromkeys(("token_rewards", "turn_scores"), "turns, or steps of `scoring.split`, and rewards of them"),
    "answer_mask": "completions whose answer is marked",
}


def updates(recipe: RlRecipe) -> int:
    """Optimiser updates on one batch of rollouts."""
    return recipe.batch.epochs * recipe.batch.minibatches


def _needs(recipe: RlRecipe) -> Found:
    """Something in the recipe must provide what a component needs."""
    made = _fields_of_advantage(recipe)
    for key, section in recipe.active_components():
        name = f"{key.partition('.')[0]} `{section.use}`"
        alone = recipe.rollout.group_size == 1 and not makes_groups(recipe)
        if "groups" in section.needs and alone:
            what = f"{name} compares the completions of one prompt, and there is only 1"
            yield "rollout.group_size", what, "write 2 or more"
        if section.params.get("min_group", 0) > recipe.rollout.group_size:
            least, size = section.params["min_group"], recipe.rollout.group_size
            what = f"`{section.use}` gives less than {least} completions no advantage, and a prompt has {size}"
            yield f"{key}.min_group", what, f"write {size} or less, or a `rollout.group_size` of {least}"
        if "several_updates" in section.needs and updates(recipe) == 1:
            what = f"`{section.use}` does nothing with one update a step: the policy is the one that sampled"
            yield f"{key}.use", what, "write `batch.minibatches` or `batch.epochs` of 2 or more"
        for need in sorted(section.needs - FROM_ROLLOUTS - FROM_MODEL - MARKS - made - _provided_fields(recipe)):
            if need in FROM_COMPONENTS:
                what = f"`{section.use}` reads {need}, and no component makes them"
                right = f"write `advantage: {maker(need)}`"
            else:
                what = f"`{section.use}` needs {need}: {WHY_NOT.get(need, 'nothing in this recipe gives them')}"
                right = "use another component"
            yield f"{key}.use", what, right


def _provided_fields(recipe: RlRecipe) -> set[str]:
    """What only recipes with turns, steps, an opponent, hints or given solutions provide."""
    hints = FROM_HINTS if recipe.prompt_variants and recipe.prompt_variants.may("hinted") else set()
    given = {"expert_logp", *(["external"] if recipe.solutions.in_group else [])} if recipe.solutions else set()
    opponent = FROM_OPPONENT if recipe.opponent else set()
    shape = FROM_SHAPE if recipe.rollout.shape else set()
    shape = shape | (FROM_TREE if grows_trees(recipe) else set())
    shape = shape | FROM_PARTS if divides_rows(recipe) else shape
    return _by_turn(recipe) | opponent | hints | given | shape | sampler_gives(recipe)


def makes_groups(recipe: RlRecipe) -> bool:
    """Whether the rows of each rollout are a group of their own."""
    return recipe.rollout.shape is not None and recipe.rollout.shape.may("own_group")


def grows_trees(recipe: RlRecipe) -> bool:
    """Whether rows are paths of trees; a function of the user's may say so of its rows."""
    shape = recipe.rollout.shape
    return shape is not None and (shape.may("tree") or ":" in shape.use)


def divides_rows(recipe: RlRecipe) -> bool:
    """Whether a shape divides the rows of a rollout into parts; a function of the user's may."""
    shape = recipe.rollout.shape
    return shape is not None and (shape.may("parts") or ":" in shape.use)


def _by_turn(recipe: RlRecipe) -> set[str]:
    """What a recipe provides by turn, or by step of a single turn (`scoring.split`).

    Whether its rewards score turns is known once they are loaded (`train.scoring.check_turns`).
    """
    found = {"turn_ids", "edge_ids", "turn_states"} if recipe.acts else set()
    found |= {"mc_values"} if recipe.environment and recipe.environment.simulations else set()
    return found | ({"turn_ids", "token_rewards", "turn_scores"} if recipe.acts or recipe.scoring.split else set())


def _fields_of_advantage(recipe: RlRecipe) -> set[str]:
    """The fields that the recipe's advantage makes for other components."""
    made = {"advantages"}
    for makers, what in _MAKERS:
        if recipe.advantage.use in makers or ":" in recipe.advantage.use:
            made.add(what)
    return made


_MAKERS = ((("channels", "copo"), "channels"), (("gae", "step_gae", "mc_critic"), "returns"))


def maker(need: str) -> str:
    """The name of an advantage that makes the field `need`."""
    return next((makers[0] for makers, what in _MAKERS if what == need), "")


def _exclusive(recipe: RlRecipe) -> Found:
    """Two components must not both do what only one may do."""
    doers: dict[str, tuple[str, str]] = {}
    for key, section in recipe.active_components():
        for deed in section.described.get("exclusive", []):
            if deed in doers:
                other = doers[deed][1]
                yield f"{key}.use", f"`{section.use}` and `{other}` both {deed}", "keep one of them"
            doers.setdefault(deed, (key, section.use))


def _filtered_away(recipe: RlRecipe) -> Found:
    """A component learns from groups in which every answer is right, and a filter drops these groups."""
    for number, keep in enumerate(recipe.keeps):
        if keep.use not in ("dynamic_sampling", "mixed") or keep.params.get("metric", "correct") != "correct":
            continue
        key = f"keep.{number}" if isinstance(recipe.keep, list) else "keep"
        for _, section in recipe.active_components():
            if "all_correct" in section.needs:
                what = f"`{keep.use}` drops the groups that are all right, where `{section.use}` has most to say"
                right = "remove `keep`" if keep.use == "mixed" else "write `metric: reward`, or remove `keep`"
                yield f"{key}.use", what, right


def _every_group(recipe: RlRecipe) -> Found:
    """A component compares all prompts of a step, and a filter may drop some of them."""
    if not recipe.keeps or recipe.rollout.max_gen_batches > 1:
        return
    for key, section in recipe.active_components():
        if "every_group" in section.needs:
            what = f"`{section.use}` needs all groups of a step, and `keep` drops some"
            yield f"{key}.use", what, "remove `keep`, or refill with `rollout.max_gen_batches` above 1"


def _whole_groups(recipe: RlRecipe) -> Found:
    """A loss over groups needs whole groups in a minibatch, and has no token values to weigh or aggregate."""
    if not _is_group_loss(recipe):
        return
    name = recipe.loss.use
    if recipe.batch.minibatches > recipe.rollout.prompts_per_step:
        what = f"loss `{name}` needs whole groups in a minibatch, and a step has {recipe.rollout.prompts_per_step}"
        yield "batch.minibatches", what, f"write {recipe.rollout.prompts_per_step} or fewer"
    if recipe.corrections:
        yield "corrections", f"loss `{name}` has one value a group: there are no tokens to weigh", "remove them"
    has_token_terms = recipe.has_kl or recipe.regularisers
    if recipe.loss.aggregation != Loss.model_fields["aggregation"].default and not has_token_terms:
        yield "loss.aggregation", f"does nothing: loss `{name}` has one value a group", "remove it"


def _is_group_loss(recipe: RlRecipe) -> bool:
    from posttrain import registry

    return recipe.loss.use in registry.index().get("group_loss", {})


def _own_credit(recipe: RlRecipe) -> Found:
    """Components that change advantages or rewards do nothing beside a loss that reads others."""
    loss, own = recipe.loss.use, "own_credit" in recipe.loss.needs
    reads = "rewards or correctness" if own else "each channel by itself"
    late = {
        "advantage_transforms": recipe.advantage_transforms,
        "credit_assignment": recipe.credit_assignment,
        **({"factors": recipe.factors} if own else {}),
    }
    if own or loss == "clip_channels":
        for key in (key for key, value in late.items() if value):
            yield key, f"changes advantages, and loss `{loss}` reads {reads}", "remove it, or write `loss: clip`"
    others = recipe.regularisers or recipe.select  # some of them read advantages
    if own and recipe.advantage.use not in ("group", "reward") and not others:
        yield "advantage", f"does nothing: loss `{loss}` reads {reads}", "remove it"
    if recipe.kl.where == "reward" and recipe.has_kl:
        right = "write `kl.where: loss`"
        if own:
            yield "kl.where", f"it comes off the reward of an advantage, and loss `{loss}` reads none", right
        elif "components" in recipe.advantage.needs:
            what = f"it comes off the sum of the rewards, and advantage `{recipe.advantage.use}` reads them one by one"
            yield "kl.where", what, right
    by_correctness = own and "correct" in recipe.loss.needs
    filters = any(keep.params.get("metric") == "reward" or ":" in keep.use for keep in recipe.keeps)
    if by_correctness and recipe.group_rewards and not filters and not others:
        yield "group_rewards", f"change rewards, and loss `{loss}` reads correctness alone", "remove them"


def _channels(recipe: RlRecipe) -> Found:
    """Every channel of an advantage must be in exactly one loss."""
    advantage, parts = recipe.advantage, recipe.advantage.params.get("channels") or []
    clips = {n: r.params["channel"] for n, r in enumerate(recipe.regularisers) if r.use == "channel_clip"}
    apart = [number for number in range(1, len(parts)) if advantage.params.get("separate")]
    if recipe.loss.use == "clip_channels":
        apart = []
    elif advantage.use == "channels":
        for number in sorted({*apart} - {*clips.values()}):
            what = f"channel {number} stands apart from the advantage, and no loss has it"
            right = f"write `regularisers: [{{use: channel_clip, channel: {number}}}]`"
            yield "advantage.separate", what, f"{right}, or `separate: false`"
    if advantage.use in ("channels", "copo"):
        for n, channel in clips.items():
            if channel not in apart:
                what = f"`advantage: {advantage.use}` leaves no channel {channel} apart"
                known = ", ".join(map(str, apart))
                right = f"one of {known}" if known else "remove it: its channels are in the loss already"
                yield f"regularisers.{n}.channel", what, right


def _sequence_clip(recipe: RlRecipe) -> Found:
    """A sequence's ratio stays within a few thousandths of 1, so the usual clip range of a token never clips it."""
    if recipe.loss.use != "gspo":
        return
    for key in ("clip_low", "clip_high"):
        value = recipe.loss.params.get(key)
        if value is not None and value >= 0.05:
            what = f"{value:g} never clips: gspo's ratio is the geometric mean over the tokens of a row"
            yield f"loss.{key}", what, "write a few ten-thousandths (3e-4 and 4e-4 in the paper)"


def _check_controllers(recipe: RlRecipe) -> Found:
    """A controller must drive a number that the recipe has and that its steps can change."""
    known = numbers(recipe)
    for key, section in recipe.controllers.items():
        if key not in known:
            yield (
                f"controllers.{key}",
                "is no number that can change during a run",
                f"one of: {', '.join(sorted(known))}",
            )
        elif "multiplies" in section.needs and known[key] == 0:
            what = f"multiplies the number of the recipe, and {key} is 0: it stays 0"
            yield f"controllers.{key}", what, f"write the `{key}` to start with"
        if "measured_kl" in section.needs and all(name != "kl" for name, _ in recipe.active_components()):
            what = f"`{section.use}` follows the KL to the reference, and nothing measures it: it never changes {key}"
            yield f"controllers.{key}", what, "write `kl.coef`"
        largest = max(section.params.get("values", ()), default=0)
        if key == "rollout.max_new_tokens" and largest > known[key]:
            what = f"goes up to {largest:g}, and the engine starts for rollout.max_new_tokens {known[key]}"
            yield f"controllers.{key}", what, f"write `rollout.max_new_tokens: {largest:g}`"


def _stale(recipe: RlRecipe) -> Found:
    """With staleness the loss must weigh rollouts by the log-probs of the policy that sampled them."""
    if not recipe.rollout.staleness:
        return
    rollout = recipe.rollout
    if not _is_group_loss(recipe) and not weighs_behaviour(recipe):
        age = "an update" if rollout.staleness == 1 else f"{rollout.staleness} updates"
        what = f"the rollouts are {age} old, and no component compares the policy with the one that drew them"
        yield "rollout.staleness", what, "write `corrections: [{use: tis}]`, or `loss: decoupled_ppo`"
    if rollout.engine == "vllm" and (rollout.top_p < 1 or rollout.top_k > 0) and weighs_behaviour(recipe):
        cut = "top_p" if rollout.top_p < 1 else "top_k"
        what = "vLLM then reports no log-probs of the policy, and old rollouts cannot be weighed"
        yield f"rollout.{cut}", what, "remove it, or write `rollout.staleness: 0`"
    for key in recipe.controllers:
        if key.startswith("rollout."):
            what = "drives rollouts that are drawn before the step whose number it gives"
            yield f"controllers.{key}", what, "write `rollout.staleness: 0`"


def _partial(recipe: RlRecipe) -> Found:
    """`rollout.partial` needs an engine that samples while the trainer updates, and has no stop strings."""
    if not recipe.rollout.partial:
        return
    rollout = recipe.rollout
    what = "is for rollouts that are drawn while the trainer changes its weights"
    if not (rollout.staleness and rollout.engine == "vllm"):
        yield "rollout.partial", what, "write `staleness` (1 to 8) and `engine: vllm` too, or leave it out"
    elif rollout.vllm.sleep and not rollout.vllm.server:
        yield "rollout.partial", f"{what}, and with vllm.sleep the engine sleeps then", "leave out one of them"
    if rollout.stop:
        what = "a stop string that a sync divides would not be seen"
        yield "rollout.stop", what, "leave out rollout.partial, or end answers by the EOS token"


def weighs_behaviour(recipe: RlRecipe) -> bool:
    """Whether a component reads the log-probs of the policy that sampled. A function of the user's may read them."""
    return any("rollout_logp" in section.needs or ":" in section.use for _, section in recipe.active_components())


def stale_notes(recipe: RlRecipe) -> list[str]:
    """What a run with stale rollouts says at its start."""
    rollout = recipe.rollout
    if not rollout.staleness:
        return []
    key, notes = f"rollout.staleness {rollout.staleness}", []
    if _is_group_loss(recipe):
        notes.append(f"{key}: loss `{recipe.loss.use}` does not weigh rollouts by the policy that drew them")
    if why := _generates_between_updates(recipe):
        notes.append(f"{key} with {why}: rollouts are drawn between two updates, and no time is won")
    elif rollout.staleness > 1 and not rollout.partial:
        notes.append(f"{key} without rollout.partial: rollouts are older than with 1, and only slow rewards win time")
    return notes


def _generates_between_updates(recipe: RlRecipe) -> str:
    """What keeps the engine from generating while the trainer changes its weights; empty if nothing does."""
    if recipe.opponent is not None:
        return "an opponent"
    if recipe.rollout.engine != "vllm":
        return f"rollout.engine {recipe.rollout.engine}"
    return "rollout.vllm.sleep" if recipe.rollout.vllm.sleep and not recipe.rollout.vllm.server else ""


def _prompt_variants(recipe: RlRecipe) -> Found:
    """Prompt variants need rollouts that are sampled, and a place where they can stand."""
    variants = recipe.prompt_variants
    if variants is None:
        return
    if recipe.rollout.engine == "stored":
        yield "prompt_variants", "rollout.engine stored samples nothing", "remove one of them"
    if recipe.opponent:
        yield "prompt_variants", "the opponent answers the data's own prompts", "remove one of them"
    if recipe.acts and "begins_answer" in variants.needs:
        what = f"`{variants.use}` begins the answer, and with `tools` or an `environment` it is divided into turns"
        yield "prompt_variants.use", what, "take one that writes into the prompt"


def _shape(recipe: RlRecipe) -> Found:
    """A shape of rollouts asks an engine for text that goes on, and decides alone what a rollout's rows are."""
    shape, key = recipe.rollout.shape, "rollout.shape"
    if shape is None:
        terms = {f"regularisers.{number}": term.aggregation for number, term in enumerate(recipe.regularisers)}
        for name, mean in {"loss": recipe.loss.aggregation, **terms}.items():
            if mean == "trajectory_mean":
                what = "without `rollout.shape` every row is a rollout"
                yield f"{name}.aggregation", what, "write seq_mean_token_mean"
        return
    if (
        shape.may("shared_reward")
        and "trajectory_ids" not in recipe.advantage.needs
        and ":" not in recipe.advantage.use
    ):
        what = f"`{shape.use}` gives a rollout several rows and one reward, and `{recipe.advantage.use}` leaves rows"
        yield "advantage.use", f"{what} without a reward at 0", "write `advantage: trajectory`"
    others = {
        "rollout.engine stored samples nothing": recipe.rollout.engine == "stored",
        "with `tools` or an `environment` a rollout goes on by their replies": recipe.acts,
        "`prompt_variants` also decide what a rollout begins with": recipe.prompt_variants is not None,
        "the opponent's answers are single completions": recipe.opponent is not None,
        "`replay` draws single rows, and a rollout has several": recipe.replay is not None,
        "a given solution is one row": recipe.solutions is not None and recipe.solutions.in_group,
        f"sampler `{recipe.sampler.use}` draws a prompt again in a further round": "rounds" in recipe.sampler.needs,
        "`scoring.split` divides single completions": recipe.scoring.split is not None,
    }
    for what, there in others.items():
        if there:
            yield key, what, "remove one of them"
    if shape.may("tree") and recipe.rollout.temperature == 0:
        yield "rollout.temperature", f"the branches of `{shape.use}` would all be the same", "write a number above 0"
    if makes_groups(recipe) and recipe.rollout.max_gen_batches > 1:
        what = f"the groups of `{shape.use}` are rollouts, and refilling counts prompts"
        yield "rollout.max_gen_batches", what, "write 1"
    for name, section in recipe.active_components():
        if "equal_groups" in section.needs:
            what = f"`{section.use}` needs groups of one size, and a shape makes as many rows as it finds"
            yield f"{name}.use", what, "use another component"


def _solutions(recipe: RlRecipe) -> Found:
    """Given solutions must be read by something, and stand beside rollouts of a single turn."""
    if recipe.solutions is None:
        return
    reads = any(section.needs & FROM_SOLUTIONS or ":" in section.use for _, section in recipe.active_components())
    if not recipe.solutions.in_group and not recipe.solutions.sft and not reads:
        right = "write `in_group: true` or `sft: {}`, or take a component that reads them, such as regulariser calibrl"
        yield "solutions", "does nothing: no component reads given solutions", right
    yield from _check_unsolved(recipe)
    if recipe.rollout.engine == "stored":
        yield "solutions", "rollout.engine stored trains on given completions already", "remove one of them"
    if recipe.solutions.in_group and recipe.acts:
        what = "a solution is one turn, and with `tools` or an `environment` rollouts have several"
        yield "solutions.in_group", what, "remove one of them"
    if recipe.solutions.in_group and recipe.opponent:
        yield "solutions.in_group", "the opponent's answers are compared with sampled ones", "remove one of them"
    if recipe.solutions.in_group and recipe.prompt_variants:
        what = "`prompt_variants` decide what a group's prompt is, and the solution is that of the plain one"
        yield "solutions.in_group", what, "remove one of them"


def _check_unsolved(recipe: RlRecipe) -> Found:
    """Supervised steps need to see the groups that failed, and an optimiser beside that of RL."""
    if recipe.solutions is None or recipe.solutions.sft is None:
        return
    if recipe.rollout.max_gen_batches > 1:
        what = "groups that failed are replaced before the step, and none is collected"
        yield "solutions.sft", what, "write `rollout.max_gen_batches: 1`"
    if recipe.model.shard or recipe.model.half_weights:
        key = "shard" if recipe.model.shard else "half_weights"
        what = "a second optimiser would keep weights of its own"
        yield f"model.{key}", what, "remove it, or `solutions.sft`"


def _frozen_critic(recipe: RlRecipe) -> Found:
    """A component that reads a frozen critic needs one, and no other component may train it."""
    for key, section in recipe.active_components():
        if "frozen_critic" in section.needs and not recipe.critic.path:
            what = f"`{section.use}` reads a critic that was trained apart"
            yield f"{key}.use", what, "write `critic: {path: RUN}` of a run with `loss: critic` on the same model"
        if "new_values" in section.needs and recipe.critic.path:
            yield "critic.path", f"such a critic stays as it is, and `{section.use}` trains one", "remove one of them"


def _opponent(recipe: RlRecipe) -> Found:
    """Some component must read the opponent, and the opponent must be able to use the trainer's engine."""
    if recipe.opponent is None:
        return
    own = any(":" in section.use for _, section in recipe.components())  # a function of the user may read it
    if not own and not any(section.needs & FROM_OPPONENT for _, section in recipe.active_components()):
        yield (
            "opponent",
            "does nothing: no component reads it",
            "write `group_rewards: [versus_opponent]`, or remove it",
        )
    what = "the opponent answers where the policy's weights stand"
    if recipe.rollout.engine == "stored":
        yield "opponent", "has nothing to say where no rollout is sampled", "remove it, or sample"
    if recipe.rollout.partial:
        yield "rollout.partial", f"{what}, and rollouts are drawn between two updates", "leave it out"
    if recipe.model.shard:
        yield "model.shard", f"{what}, and these are divided among the GPUs", "use `lora`, or GPUs that hold it all"


def _check_stored_rollouts(recipe: RlRecipe) -> Found:
    """`engine: stored` has one completion a row. Nothing is sampled, and who sampled it is unknown."""
    if recipe.rollout.engine != "stored":
        return
    what = "rollout.engine stored trains on the rows' completions"
    if recipe.acts:
        yield "rollout.engine", f"{what}; with `tools` or an `environment` they must be sampled", "remove one of them"
    if recipe.rollout.group_size != 1:
        yield "rollout.group_size", f"{what}, and a row has one", "write 1"
    if recipe.rollout.staleness:
        yield "rollout.staleness", f"{what}: nothing is drawn ahead", "remove it"
    if recipe.rollout.max_gen_batches > 1:
        yield "rollout.max_gen_batches", f"{what}: none are drawn anew", "remove it"
    for key, section in recipe.active_components():
        if "rollout_logp" in section.needs:
            weighs = f"`{section.use}` weighs by the policy that sampled, and nobody knows its log-probs"
            yield f"{key}.use", weighs, "remove it: `oreo` and `direct_advantage` need no weights"


ROLLOUT_NUMBERS = ("rollout.max_new_tokens", "rollout.group_size", "rollout.temperature", "rollout.max_turns")


def numbers(recipe: RlRecipe) -> dict[str, float]:
    """Key -> value of each number that a controller may drive: those of components, and ROLLOUT_NUMBERS."""
    found = {key: getattr(recipe.rollout, key.partition(".")[2]) for key in ROLLOUT_NUMBERS}
    for key, section in recipe.components():
        if not key.startswith("controllers."):
            own = {"coef": section.coef} if hasattr(section, "coef") else {}
            found |= {f"{key}.{name}": value for name, value in {**section.params, **own}.items()}
    return {key: v for key, v in found.items() if isinstance(v, int | float) and not isinstance(v, bool)}


CHECKS = (
    _needs,
    _exclusive,
    _filtered_away,
    _every_group,
    _whole_groups,
    _own_credit,
    _channels,
    _sequence_clip,
    _check_controllers,
    _stale,
    _partial,
    _prompt_variants,
    _shape,
    _solutions,
    _frozen_critic,
    _opponent,
    _check_stored_rollouts,
    *SAMPLER_CHECKS,
    check_replay,
)

"""Checks on the components of an `rl` recipe: choices that cannot work together, or would silently do nothing.

Components declare what they need and what only one of them may do (`registry.register`), so few checks name a method.
What a single key needs is marked at its field; here are the checks that ask all components. `checks.py` runs them.
"""

from __future__ import annotations

from posttrain import registry
from posttrain.errors import UserError
from posttrain.recipe.requirements import Found, Scope
from posttrain.recipe.sampler_checks import sampler_gives
from posttrain.recipe.section import Refused
from posttrain.recipe.stages import RlRecipe

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


# What a component may not need where something else stands in the recipe; said at its `use`.
REFUSED = (
    Refused(
        "several_updates in needs and batch.epochs = 1 and batch.minibatches = 1",
        "`{use}` does nothing with one update a step: the policy is the one that sampled",
        "write `batch.minibatches` or `batch.epochs` of 2 or more",
    ),
    Refused(
        "every_group in needs and keeps and rollout.max_gen_batches = 1",
        "`{use}` needs all groups of a step, and `keep` drops some",
        "remove `keep`, or refill with `rollout.max_gen_batches` above 1",
    ),
    Refused(
        "frozen_critic in needs and not critic.path",
        "`{use}` reads a critic that was trained apart",
        "write `critic: {path: RUN}` of a run with `loss: critic` on the same model",
    ),
    Refused(
        "rollout_logp in needs and rollout.engine = stored",
        "`{use}` weighs by the policy that sampled, and nobody knows its log-probs",
        "remove it: `oreo` and `direct_advantage` need no weights",
    ),
    Refused(
        "equal_groups in needs and rollout.shape",
        "`{use}` needs groups of one size, and a shape makes as many rows as it finds",
        "use another component",
    ),
    Refused(
        "equal_groups in needs and unequal in sampler.needs",
        "`{use}` needs groups of one size, and sampler `{sampler.use}` makes several",
    ),
    Refused(
        "equal_groups in needs and fewer in sampler.needs and not unequal in sampler.needs",
        "`{use}` needs all groups of a step, and sampler `{sampler.use}` leaves some out",
    ),
)
MEASURED = {"values", "new_values", "hidden", "entropy", "old_logp", "ref_logp", "topk_logp", "tempered_ref_logp"}


def _refused_needs(recipe: RlRecipe) -> Found:
    """What a component needs cannot stand beside something else."""
    for key, section in recipe.active_components():
        scope = Scope((((), recipe), ((), section)))
        for mark in REFUSED:
            if scope.holds(mark.when):
                yield f"{key}.use", scope.fill(mark.what), mark.right
        if "new_values" in section.needs and recipe.critic.path:
            yield "critic.path", f"such a critic stays as it is, and `{section.use}` trains one", "remove one of them"
        late = sorted(section.needs & {"values", "new_values", "returns", "channels"})
        if late and recipe.replay is not None and recipe.replay.adds_rows:
            what = f"stored rows bring their advantages alone, and `{section.use}` reads {', '.join(late)}"
            yield f"{key}.use", what, "remove one of them"
        early = sorted(section.needs & MEASURED)
        if early and section in recipe.keeps and recipe.rollout.max_gen_batches > 1:
            what = f"keep `{section.use}` reads {', '.join(early)}, which are measured when all rollouts are there"
            yield f"{key}.use", what, "write `rollout.max_gen_batches: 1`"


def _arguments(recipe: RlRecipe) -> Found:
    """Arguments that do not fit each other. A class of the user's is made when the run starts."""
    for kind, section in (("sampler", recipe.sampler), ("replay", recipe.replay)):
        if section is None or section.is_function:
            continue
        try:
            registry.get(section.kinds[0], section.use).function(**section.params)
        except UserError as error:
            problem = error.problems[0]
            yield kind, problem.what, problem.allowed or problem.hint or "see `posttrain methods show`"


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
        if key.startswith("rollout.") and recipe.rollout.staleness:
            what = "drives rollouts that are drawn before the step whose number it gives"
            yield f"controllers.{key}", what, "write `rollout.staleness: 0`"
        if key == "rollout.temperature" and recipe.replay is not None:
            what = "stored log-probs are those of another temperature than the step's"
            yield f"controllers.{key}", what, "remove it, or `replay`"
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


def stale_notes(recipe: RlRecipe) -> list[str]:
    """What a run with stale rollouts says at its start."""
    rollout = recipe.rollout
    if not rollout.staleness:
        return []
    key, notes = f"rollout.staleness {rollout.staleness}", []
    if recipe.loss.is_group_loss:
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
    _refused_needs,
    _exclusive,
    _filtered_away,
    _channels,
    _sequence_clip,
    _check_controllers,
    _arguments,
)

"""Prompt variants in the RL loop: prompts sampled in place of the data's, in rounds, and what the loss sees of them.

The kinds are in `posttrain/variants/`. Round by round, each rank asks the kind for variants of each of its prompts,
samples and scores them, and asks again with the outcomes, until the kind returns none. Randomness depends on (seed,
step, round, the prompt's position in the step), not on the number of ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from posttrain import registry, source_locations, thoughts
from posttrain.batch import Prompt, PromptImages, Rollout, Segment, Variant
from posttrain.data import images, render
from posttrain.errors import RecipeError, UserError
from posttrain.recipe.sections import Data
from posttrain.recipe.stages import RlRecipe
from posttrain.seeds import derive
from posttrain.train.roles import GROUP_STRIDE
from posttrain.variants.plan import MAX_ROUNDS, Asked, Outcome, Planner, Stateless

MOST_SHOWN = 8  # variants of one prompt in `variants_if_unsolved`
TRIALS = 10  # prompts, and random draws for each, whose variants are built before a run to estimate their length
Sample = Callable[..., list[Rollout]]  # (prompts, seed=, share=, finish=) -> scored rollouts


@dataclass(frozen=True)
class PromptVariants:
    """The recipe's kind of prompt variants, bound to the data.

    solutions: uid -> tokens of the row's solution, for rows that have one.
    """

    name: str  # key of the kind's memory in checkpoints
    planner: Planner
    section: Data
    tokenizer: Any
    shown: Callable[[Any], Any]  # returns the row as it is rendered, with the tools that the recipe offers
    solutions: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    reader: Any = None  # image reader of a vision model
    room: int = 0  # tokens by which a variant may be longer than the longest plain prompt

    @classmethod
    def from_recipe(
        cls,
        recipe: RlRecipe,
        prompts: Sequence[Prompt],
        tokenizer: Any,
        shown: Callable[[Any], Any] | None,
        reader: Any = None,
    ) -> PromptVariants | None:
        """Build the kind that `prompt_variants` names; None if not set. Raises UserError for an unknown name or key."""
        section = recipe.prompt_variants
        if section is None:
            return None
        component = section.load(recipe.base_dir)
        is_class = inspect.isclass(component.function)
        planner = component.function(**section.params) if is_class else Stateless(component.function, section.params)
        solutions = solution_tokens(prompts, section.solution, tokenizer) if section.may("solution") else {}
        found = cls(component.name, planner, recipe.data, tokenizer, shown or dict, solutions, reader)
        room = max(map(len, solutions.values()), default=0) + _longest_text(section.params, tokenizer)
        return replace(found, room=room + _tried_growth(found, prompts))

    def ask(self, prompt: Prompt, rounds: Sequence[Outcome], *, step: int, seed: int, memory: Any) -> list[Variant]:
        """Return the variants of a prompt's next round. An error in a user's function names the prompt's row."""
        request = Asked(
            uid=prompt.uid,
            question=self.question(prompt),
            row=prompt.row,
            solution=self.solutions.get(prompt.uid, ()),
            decode=self.decode,
            encode=self.encode,
            rounds=tuple(rounds),
            step=step,
            seed=seed,
            memory=memory,
        )
        try:
            variants = list(self.planner.plan(request))
        except UserError:
            raise
        except Exception as error:
            if not (line := registry.find_script_line(error)):
                raise
            about = f"prompt_variants `{self.name}` of {source_locations.describe_row(prompt.uid)}"
            raise RecipeError(f"{about}: {type(error).__name__}: {error}", where=line) from error
        if invalid := [result for result in variants if not isinstance(result, Variant)]:
            location = source_locations.describe_row(prompt.uid)
            raise RecipeError(
                f"prompt_variants `{self.name}` returned {invalid[0]!r:.60} for {location}",
                allowed="a list of posttrain.batch.Variant",
            )
        return variants

    def apply(self, prompt: Prompt, variant: Variant) -> Prompt:
        """Return the prompt that the engine gets, with the beginning of the answer if the variant has one.

        Rendered again if the variant changes its messages.
        """
        text, ids, prompt_images = prompt.text, prompt.ids, prompt.images
        if variant.system is not None or variant.user != "{prompt}" or variant.prefill:
            row = self._edit_row(prompt, variant)
            rendered = render.prompt_text(row, self.tokenizer, self._section(variant))
            text = rendered.pieces[0].text + variant.prefill
            ids = render.encode_prompts([text], self.tokenizer, self.section)[0]
            if prompt.images is not None:
                (whole,) = images.expand_placeholders([row], [rendered], self.section, self.reader) or (rendered,)
                expanded = "".join(piece.text for piece in whole.pieces) + variant.prefill
                short, (ids,) = ids, render.encode_prompts([expanded], self.tokenizer, self.section)
                prompt_images = PromptImages(prompt.images.shown, short, len(ids))
        if variant.begin:
            text, ids = text + self.decode(variant.begin), ids + tuple(variant.begin)
        return replace(prompt, row={**prompt.row, **variant.columns}, text=text, ids=ids, images=prompt_images)

    def _section(self, variant: Variant) -> Data:
        return self.section if variant.system is None else self.section.model_copy(update={"system": None})

    def _edit_row(self, prompt: Prompt, variant: Variant) -> dict[str, Any]:
        """Return the row with the variant's system message and user message.

        Image placeholders are removed from texts that the variant fills in, since these may be of other rows.
        """
        row = dict(self.shown(prompt.row))
        if variant.system is not None:
            row.pop("system", None)
        if prompt.images is not None:
            variant = replace(
                variant, fills={k: text.replace(images.PLACEHOLDER, "") for k, text in variant.fills.items()}
            )
        if not self.section.chat:
            text = variant.ask(str(row["prompt"]))
            return {**row, "prompt": text if variant.system is None else f"{variant.system}\n\n{text}"}
        messages = [dict(message) for message in render.prompt_messages(row, self._section(variant))]
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is not None:
            messages[last]["content"] = variant.ask(str(messages[last]["content"]))
        if variant.system is not None:
            without_system = [message for message in messages if message["role"] != "system"]
            messages = [{"role": "system", "content": variant.system}, *without_system]
        return {**row, "messages": None, "prompt": messages}

    def question(self, prompt: Prompt) -> str:
        """Return the prompt's last user message, or its text without chat."""
        if not self.section.chat:
            return str(prompt.row.get("prompt", ""))
        messages = render.prompt_messages(prompt.row, self.section)
        return next((str(m["content"]) for m in reversed(messages) if m["role"] == "user"), "")

    def decode(self, ids: Sequence[int]) -> str:
        return thoughts.decode(self.tokenizer, [list(ids)])[0]

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def finish(self, rollout: Rollout, variant: Variant, plain: Prompt, group: int) -> None:
        """Set a sampled rollout's group, the beginning of its answer, and the prompt that the loss reads."""
        rollout.variant, rollout.group = variant, group
        if variant.begin:
            rollout.text = self.decode(variant.begin + rollout.ids)
        if variant.begin and variant.begin_is != "prompt":
            begun = Segment("given" if variant.begin_is == "trained" else "injected", tuple(variant.begin))
            rollout.segments = (begun, *rollout.segments)
            rollout.prompt = self.apply(plain, replace(variant, begin=()))
        if variant.loss_on == "plain":
            rollout.loss_ids = plain.ids


def solution_tokens(prompts: Sequence[Prompt], column: str, tokenizer: Any) -> dict[str, tuple[int, ...]]:
    """Return uid -> the tokens of the text in `column`, for rows that have one."""
    solved = [prompt for prompt in prompts if isinstance(prompt.row.get(column), str) and prompt.row[column].strip()]
    if not solved:
        return {}
    found = tokenizer([prompt.row[column] for prompt in solved], add_special_tokens=False)["input_ids"]
    return {prompt.uid: tuple(ids) for prompt, ids in zip(solved, found, strict=True)}


def _longest_text(params: Mapping[str, Any], tokenizer: Any) -> int:
    """Return the tokens of the longest text among a kind's keys, plus those that its key `max_tokens` may add."""

    def texts(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return [text for inner in values for text in texts(inner)]

    longest = max((len(tokenizer(text)["input_ids"]) for text in texts(params)), default=0)
    return longest + int(params.get("max_tokens", 0) or 0) + 8  # 8: tokens may differ where texts are joined


def sample_in_rounds(
    variants: PromptVariants,
    drawn: Sequence[Prompt],
    share: Sequence[int],
    sample: Sample,
    counts: dict[str, Any],
    *,
    step: int,
    seed: int,
    memory: Any,
    first_group: int,
) -> list[Rollout]:
    """Sample and score this rank's share of the prompts in rounds of variants; return the rollouts by group.

    Adds the tokens of rollouts that later ones replace to `counts`.

    drawn: prompts of the step. sample: (prompts, seed=, share=, finish=) samples and scores prompts[share], and calls
    finish(rollout, its index in `prompts`) before a rollout is scored. seed: of the step. Raises RecipeError for a kind
    that never ends.
    """
    rounds: dict[int, list[Outcome]] = {n: [] for n in share}
    kept: dict[int, list[Rollout]] = {n: [] for n in share}
    apart = dict.fromkeys(share, 0)  # groups of a prompt besides its first
    live, number = list(share), 0  # prompts that may have another round; index of the round
    while live:
        if number == MAX_ROUNDS:
            about = f"prompt_variants `{variants.name}` asks for more than {MAX_ROUNDS} rounds"
            raise RecipeError(
                f"{about} of {source_locations.describe_row(drawn[live[0]].uid)}", hint="answer with [] to end them"
            )
        asked = {
            n: variants.ask(drawn[n], rounds[n], step=step, seed=derive(seed, "variants", n), memory=memory)
            for n in live
        }
        live = [n for n in live if asked[n]]
        for index in range(max((len(asked[n]) for n in live), default=0)):
            chosen = {n: asked[n][index] for n in live if len(asked[n]) > index}
            groups: dict[int, int] = {}
            for n, variant in chosen.items():
                apart[n] += variant.apart
                groups[n] = first_group + n + (GROUP_STRIDE * apart[n] if variant.apart else 0)
            found = sample(
                [variants.apply(p, chosen[n]) if n in chosen else p for n, p in enumerate(drawn)],
                seed=derive(seed, "round", number, index) if number or index else seed,
                share=list(chosen),
                finish=partial(_finish, variants, drawn, chosen, groups),
            )
            for n, variant in chosen.items():
                fresh = [r for r in found if r.group == groups[n]]
                if variant.replaces and kept[n]:
                    replaced = sum(len(r.sampled_ids) for r in kept[n])
                    counts["rollout/replaced_tokens"] = counts.get("rollout/replaced_tokens", 0) + replaced
                kept[n] = fresh if variant.replaces else kept[n] + fresh
                rounds[n].append(outcome_of(variants, fresh, variant))
        number += 1
    return sorted((r for own in kept.values() for r in own), key=lambda r: r.group)


def _finish(
    variants: PromptVariants,
    drawn: Sequence[Prompt],
    chosen: Mapping[int, Variant],
    groups: Mapping[int, int],
    rollout: Rollout,
    index: int,
) -> None:
    variants.finish(rollout, chosen[index], drawn[index], groups[index])


def _tried_growth(variants: PromptVariants, prompts: Sequence[Prompt]) -> int:
    """Return the most tokens that variants of a few prompts add to the prompt, for texts that a kind writes itself."""
    sample = prompts[:: max(1, len(prompts) // TRIALS)][:TRIALS]
    trials = [
        (p, variant)
        for p in sample
        for draw in range(TRIALS)
        for variant in variants_if_unsolved(variants, p, draw=draw)
    ]
    return max((len(variants.apply(p, variant).ids) - len(p.ids) for p, variant in trials), default=0)


def variants_if_unsolved(variants: PromptVariants, prompt: Prompt, draw: int = 0) -> list[Variant]:
    """Return the variants of a prompt in the first step of a run, round by round, if no rollout is correct.

    draw: index of the random draw.
    """
    rounds: list[Outcome] = []
    while len(rounds) < MOST_SHOWN:
        asked = variants.ask(prompt, rounds, step=0, seed=derive(draw, "variants", prompt.uid), memory=None)
        if not asked:
            break
        question = variants.question(prompt)
        rounds += [Outcome(prompt.uid, variant, (0.0,), (False,), ("",), question) for variant in asked]
    return list({outcome.variant.name: outcome.variant for outcome in rounds}.values())


def outcome_of(variants: PromptVariants, rollouts: Sequence[Rollout], variant: Variant) -> Outcome:
    """Return the outcome of one variant: rewards, correctness and texts of its rollouts."""
    return Outcome(
        rollouts[0].prompt.uid,
        variant,
        tuple(r.reward for r in rollouts),
        tuple(r.correct for r in rollouts),
        tuple(r.text for r in rollouts),
        variants.question(rollouts[0].prompt),
    )


def update_variant_memory(
    variants: PromptVariants, rollouts: Sequence[Rollout], memory: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the components' memory, updated with what the kind learns from a step's rollouts."""
    rollouts_by_variant: dict[tuple[int, str], list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.variant is not None:
            rollouts_by_variant.setdefault((rollout.group, repr(rollout.variant)), []).append(rollout)
    outcomes = [
        outcome_of(variants, rows, rows[0].variant)
        for rows in rollouts_by_variant.values()
        if rows[0].variant is not None
    ]
    learned = variants.planner.learn(memory.get(variants.name), outcomes)
    return {**memory, **({} if learned is None else {variants.name: learned})}


def variant_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Compute by variant its share of the step's rollouts, their mean reward, and the share of correct ones."""
    rollouts_by_name: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.variant is not None:
            rollouts_by_name.setdefault(rollout.variant.name, []).append(rollout)
    values: dict[str, float] = {}
    for name, rows in rollouts_by_name.items():
        values[f"variants/{name}/share"] = len(rows) / len(rollouts)
        for what, numbers in (("reward", [r.reward for r in rows]), ("correct", [r.correct for r in rows])):
            if known := [float(number) for number in numbers if number is not None]:
                values[f"variants/{name}/{what}"] = sum(known) / len(known)
    return values

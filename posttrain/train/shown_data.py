"""Additions of an rl recipe to the report of `posttrain data inspect`: variants, workflow prompts, given solutions."""

from __future__ import annotations

from typing import Any

from posttrain.batch import TRAINED as KINDS_TRAINED
from posttrain.data.inspect import PROMPT, TRAINED
from posttrain.data.prepare import prepare_prompts
from posttrain.errors import count_noun
from posttrain.models.load import load_image_reader
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.continuation import rehearse_shape
from posttrain.train.assemble import build_shape
from posttrain.train.offline import solution_completions
from posttrain.train.variants import PromptVariants, variants_if_unsolved
from posttrain.train.workflow import workflow_of


def add_replay(report: dict[str, Any], recipe: RlRecipe) -> None:
    """Add to the report's checks what the recipe stores for later steps."""
    if recipe.replay is not None:
        limit = count_noun(recipe.replay.limit, "rollout")
        text = f"{recipe.replay.use}: at most {limit} of earlier steps are stored; before step 1 there is none"
        report["checks"].append({"name": "replay", "ok": True, "text": text})


def add_shape(report: dict[str, Any], recipe: RlRecipe, tokenizer: Any) -> None:
    """Add to the report's checks the rows of a rollout whose requests fill their limits, without running a model."""
    if recipe.rollout.several_rows is None:
        return
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prompts = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    shape = build_shape(recipe, tokenizer, prompts, reader)
    assert shape is not None
    rows = rehearse_shape(shape, prompts[0], recipe.rollout)
    segments = [segment for row in rows for segment in row.segments]
    trained = sum(len(segment.ids) for segment in segments if segment.kind in KINDS_TRAINED)
    text = f"{shape.name}: a rollout that fills its limits is {count_noun(len(rows), 'row')}"
    text += ", a group of its own" if shape.own_group else ""
    text += f"; {trained} of {sum(len(segment.ids) for segment in segments)} tokens after prompts are trained on"
    report["checks"].append({"name": "rollout shape", "ok": True, "text": text})


def add_answers(report: dict[str, Any], recipe: RlRecipe) -> None:
    """Add to the report's checks which answers are scored between the turns of a rollout."""
    if "answer_logp" in recipe.advantage.needs:
        params = recipe.advantage.params
        text = f"{recipe.advantage.use}: column `{params['answer']}`, after {params['closing']!r}, before each turn"
        report["checks"].append({"name": "measured answers", "ok": True, "text": text})


def add_workflow(report: dict[str, Any], recipe: RlRecipe, tokenizer: Any) -> None:
    """Add to the report's samples the first prompt of each trained role, and to its checks the roles that are called.

    The prompts are those of a rollout in which every role writes only an end token.
    """
    workflow = recipe.rollout.workflow
    if workflow is None:
        return
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prompts = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    by_uid = {prompt.uid: prompt for prompt in prompts}
    shape = workflow_of(recipe, workflow, tokenizer, prompts, reader)
    for sample in report["samples"]:
        for row in reversed(rehearse_shape(shape, by_uid[sample["uid"]], recipe.rollout)):
            assert row.call is not None
            tokens = [{"id": i, "text": tokenizer.decode([i]), "fate": PROMPT} for i in row.prompt]
            runs = [{"text": tokenizer.decode(list(row.prompt)), "fate": PROMPT}]
            sample["parts"][row.call.role] = {"tokens": tokens, "runs": runs}
    roles = ", ".join(workflow.roles) or "those that it calls"
    trained = ", ".join(workflow.train) if workflow.train else "all"
    report["checks"].append({"name": "workflow", "ok": True, "text": f"{workflow.use}: {roles}; trained on: {trained}"})


def add_variants(report: dict[str, Any], recipe: RlRecipe, tokenizer: Any) -> None:
    """Add to the report's samples the variants of a prompt while no rollout solves it, and its given solution.

    Also adds to the checks how many rows have a solution.
    """
    if recipe.prompt_variants is None and recipe.solutions is None:
        return
    reader = load_image_reader(recipe.model, recipe.base_dir, tokenizer)
    prompts = prepare_prompts(recipe.data, tokenizer, recipe.base_dir, reader=reader).items
    variants = PromptVariants.from_recipe(recipe, prompts, tokenizer, None, reader)
    limit = max(recipe.rollout.max_new_tokens, 1)
    column = recipe.solutions.column if recipe.solutions else ""
    given = solution_completions(prompts, column, tokenizer, recipe.data, limit, None, reader) if column else {}
    sampled_uids = {sample["uid"] for sample in report["samples"]}
    by_uid = {prompt.uid: prompt for prompt in prompts if prompt.uid in sampled_uids}

    def part(prompt: str, completion: str = "", fate: str = TRAINED) -> dict[str, Any]:
        runs = [{"text": prompt, "fate": PROMPT}, *([{"text": completion, "fate": fate}] if completion else [])]
        tokens = [{"id": i, "text": tokenizer.decode([i]), "fate": run["fate"]} for run in runs
                  for i in tokenizer(run["text"], add_special_tokens=False)["input_ids"]]  # fmt: skip
        return {"tokens": tokens, "runs": runs}

    for sample in report["samples"]:
        prompt = by_uid[sample["uid"]]
        for variant in variants_if_unsolved(variants, prompt) if variants else ():
            trained = variant.begin_is == "trained"
            begun = variants.decode(variant.begin) if trained and variants else ""
            prompt_text = variants.apply(prompt, variant).text if variants else prompt.text
            sample["parts"][variant.name] = part(prompt_text.removesuffix(begun) if begun else prompt_text, begun)
        if prompt.uid in given and recipe.solutions and recipe.solutions.in_group:
            sample["parts"]["given solution"] = part(prompt.text, tokenizer.decode(list(given[prompt.uid])))
    if column or (variants and recipe.prompt_variants and recipe.prompt_variants.may("solution")):
        count = len(given) if column else len(variants.solutions if variants else {})
        text = f"{count} of {count_noun(len(prompts), 'prompt')} have one"
        report["checks"].append({"name": "solutions", "ok": count > 0, "text": text})

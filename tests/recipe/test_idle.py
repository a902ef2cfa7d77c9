"""Unused settings: the conditions declared in the schema, and a check that every key of every stage has one or is
always used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

import posttrain
from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipe import keys, requirements
from posttrain.recipe.checks import problems_with_images
from posttrain.recipe.load import Loaded, load, load_dict
from posttrain.recipe.section import ComponentSection, Idle, NoImages, Refused
from posttrain.recipe.stages import STAGES

ROWS: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}}
GRADED = {**ROWS, "rewards": [{"use": "math.accuracy"}]}
BASE: dict[str, dict[str, Any]] = {
    "sft": {**ROWS, "run": {"steps": 1}},
    "dpo": {**ROWS, "run": {"steps": 1}},
    "reward_model": {**ROWS, "run": {"steps": 1}},
    "rl": {**GRADED, "run": {"steps": 1}},
    "eval": GRADED,
    "generate": ROWS,
    "pairs": {"completions": "c.jsonl"},
    "merge": {"merge_method": "checkpoint_average", "models": [{"model": "a"}, {"model": "b"}]},
    "pipeline": {"stages": [{"name": "a", "stage": "sft", **ROWS, "run": {"steps": 1}}]},
}


def recipe(stage: str, *overrides: str) -> Loaded:
    return load_dict({"stage": stage, **BASE[stage]}, base_dir=Path.cwd(), where="r", overrides=overrides)


STORED = ["rollout.engine=stored", "rollout.group_size=1", "advantage=reward"]
NOTES = [
    # stage, overrides, the note, overrides with which the key is used
    ("rl", ["rollout.engine=vllm", "rollout.batch_size=8"], "rollout.batch_size: does nothing with rollout.engine vllm",
     ["rollout.engine=transformers"]),
    ("eval", ["engine.engine=vllm", "engine.batch_size=8"], "engine.batch_size: does nothing with engine.engine vllm",
     ["engine.batch_size=5000"]),
    ("rl", [*STORED, "rollout.top_p=0.9"],
     "rollout.top_p: does nothing with rollout.engine stored", ["rollout.engine=transformers"]),
    ("rl", [*STORED, "rollout.stop=[x]"], "rollout.stop: does nothing", None),
    ("rl", [*STORED, "rollout.batch_size=8"], "rollout.batch_size: does", None),
    ("rl", [*STORED, "loss.mask_truncated=true"],
     "loss.mask_truncated: does nothing with rollout.engine stored: no completion was cut", None),
    ("rl", ["rollout.vllm.gpu_memory=0.5"], "rollout.vllm.gpu_memory: does nothing with rollout.engine transformers",
     ["rollout.engine=vllm"]),
    ("rl", ["rollout.vllm.sleep=true"], "rollout.vllm.sleep: does nothing with rollout.engine transformers",
     ["rollout.engine=vllm"]),
    ("eval", ["engine.engine=vllm", "engine.vllm.sleep=true"], "engine.vllm.sleep: does nothing in eval", None),
    ("rl", ["rollout.vllm.tensor_parallel=2"], "rollout.vllm.tensor_parallel: does nothing with rollout.engine trans",
     ["rollout.engine=vllm"]),
    ("eval", ["sampling.temperature=0", "sampling.top_k=5"], "sampling.top_k: does nothing at temperature 0",
     ["sampling.temperature=1"]),
    ("eval", ["model.path=some/hub", "engine.engine=vllm", "model.attention=sdpa"],
     "model.attention: does nothing with engine.engine vllm",
     ["engine.engine=transformers"]),
    ("eval", ["data.chat=false", "model.chat_template=t.jinja"], "model.chat_template: does nothing with `data.chat",
     ["data.chat=true"]),
    ("eval", ["eval.stability=0.1"], "eval.stability: does nothing with one completion", ["eval.samples=2"]),
    ("eval", ["eval.best_of=reward"], "eval.best_of: does nothing with one completion", ["eval.samples=2"]),
    ("eval", ["rewards.0.name=a", "scoring.canary_window=9", "rewards.0.canary=true", "rewards.0.weight=0"],
     "scoring.canary_window: does nothing in eval", None),
    ("rl", ["environment={use: gym}", "tool_format=xml"], "tool_format: does nothing with an `environment`",
     ["environment=null", "tools=[{use: python}]"]),
    ("rl", ["model.offload_reference=true"], "model.offload_reference: does nothing without a reference",
     ["kl.coef=0.1"]),
    ("sft", ["batch.packing=true", "batch.micro_size=1"], "batch.packing: does nothing with one row",
     ["batch.micro_size=4"]),
    ("sft", ["model.attention=sdpa"], "model.attention: does nothing with tiny", ["model.path=some/hub"]),
    ("rl", ["rewards=[{use: math.accuracy}, {use: format.structure, weight: 0, on_none: zero}]"],
     "rewards.1.on_none: does nothing with weight 0", ["rewards.1.weight=0.5"]),
    ("generate", ["samples=2", "best_of={rewards: [{use: a.b}], scoring: {canary_window: 9}}"],
     "best_of.scoring.canary_window: does nothing in generate", None),
    ("sft", ["data.split=test"], "data.split: does nothing with rows.jsonl", ["data.source=some/hub"]),
    ("sft", ["data.config=x"], "data.config: does nothing with rows.jsonl", ["data.source=some/hub"]),
    ("sft", ["data.source=./saved", "data.config=x"], "data.config: does nothing with ./saved", None),
    ("sft", ["data.seed=3"], "data.seed: does nothing with rows.jsonl", ["data.thought_dropout=0.5"]),
    ("sft", ["data.chat=false", "data.train_on=assistant"], "data.train_on: does nothing with `data.chat: false`",
     ["data.train_on=all"]),
    ("sft", ["run.keep_checkpoints=5"], "run.keep_checkpoints: does nothing without `run.save_every`",
     ["run.save_every=1"]),
    ("dpo", ["loss.use=kto", "pairs.max_gap=2.0"], "pairs.max_gap: does nothing with loss kto", ["loss.use=dpo"]),
    ("dpo", ["loss.nll_reduction=sum"], "loss.nll_reduction: does nothing with nll_weight 0", ["loss.nll_weight=0.5"]),
    ("dpo", ["loss={use: f_dpo, alpha: 0.2}"], "loss.alpha: does nothing with divergence js",
     ["loss.divergence=alpha"]),
    ("rl", ["advantage={scale: none, ddof: 0}"], "advantage.ddof: does nothing with scale none",
     ["advantage.scale=batch"]),
    ("rl", ["loss={use: gspo, clip_low: 0.2}"], "loss.clip_low: does nothing at 0.2: gspo's ratio is the geometric",
     ["loss.clip_low=0.0003"]),
    ("rl", ["loss={use: gspo, clip_high: 0.3}"], "loss.clip_high: does nothing at 0.3", ["loss.clip_high=0.0004"]),
    ("sft", ["objective={use: pear, behavior_model: a/b, block: 8}"], "objective.block: does nothing with level token",
     ["objective.level=block"]),
    ("pairs", ["scoring.workers=5"], "scoring.workers: does nothing without `rewards`",
     ["rewards=[{use: math.accuracy}]"]),
    ("pairs", ["scoring.max_bad_gold=0.5", "rewards=[{use: math.accuracy}]"],
     "scoring.max_bad_gold: does nothing in pairs", None),
    ("merge", ["parameters.decay=0.9"], "parameters.decay: does nothing with mode last_k", ["parameters.mode=ema"]),
    ("merge", ["parameters.mode=ema", "parameters.k=2"], "parameters.k: does nothing with mode ema",
     ["parameters.mode=last_k"]),
    ("merge", ["parameters.int8_mask=true"], "parameters.int8_mask: does nothing", None),
    ("merge", ["merge_method=slerp", "models.0.parameters.weight=0.5"],
     "models.0.parameters.weight: does nothing in slerp, as in mergekit", ["merge_method=linear"]),
    ("merge", ["merge_method=slerp", "parameters.normalize=true"],
     "parameters.normalize: does nothing in slerp, as in mergekit", ["merge_method=linear"]),
    ("merge", ["merge_method=linear", "parameters.density=0.5"],
     "parameters.density: does nothing in linear, as in mergekit", None),
    ("pipeline", ["parallel=2"], "parallel: does nothing with one seed", ["seeds=[0,1]"]),
]  # fmt: skip

REFUSED = [
    ("eval", ["engine.engine=vllm", "engine.vllm.tensor_parallel=2"],
     "engine.vllm.tensor_parallel: eval generates in one process with one GPU",
     ["engine.vllm.server.devices=[0, 1]"]),
    ("sft", ["data.overlong=error"], "data.overlong: does nothing without `data.max_length`", ["data.max_length=9"]),
    ("sft", ["data.params={a: 1}"], "data.params: does nothing with rows.jsonl",
     ["data.source=f.py:rows", "data.size=1"]),
    ("sft", ["data.weight=2.0"], "data.weight: does nothing without `data.mix`", None),
    ("sft", ["data={mix: [{source: a.jsonl, weight: 2.0}]}"], "data.mix.0.weight: does nothing in a mixture of one",
     None),
    ("sft", ["data={skip: 2, mix: [{source: a.jsonl}]}"], "data.skip: does nothing with `data.mix`", None),
    ("sft", ["model.revision=v1"], "model.revision: does nothing with tiny", ["model.path=some/hub"]),
    ("rl", ["environment={use: gym, horizon: 5}"], "environment.horizon: does nothing without `environment.simul",
     ["environment.simulations=2", "advantage=mc_critic"]),
    ("rl", ["rollout.turn_tokens=9"], "rollout.turn_tokens: does nothing without `tools`", ["tools=[{use: python}]"]),
    ("rl", ["tool_workers=2"], "tool_workers: does nothing without `tools`", ["environment={use: gym}"]),
    ("reward_model", ["objective.soft=true"], "objective.soft: does nothing with bradley_terry",
     ["objective.use=mixture"]),
    ("reward_model", ["objective={use: gaussian, labels: [x], center_coef: 0.5}"],
     "objective.center_coef: does nothing with gaussian", None),
    ("rl", ["loss=direct_advantage", "critic={path: c, lr: 1e-3}"],
     "critic.lr: does nothing with `path`: such a critic is not trained", None),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "written", "told", "acting"), NOTES)
def test_unused_key_gets_a_note_unless_its_condition_holds(
    stage: str, written: list[str], told: str, acting: list[str] | None
) -> None:
    (note,) = recipe(stage, *written).notes
    assert note.what.startswith(told)
    assert note.where == "command line" and note.hint
    if acting is not None:
        assert recipe(stage, *written, *acting).notes == ()


@pytest.mark.parametrize(("stage", "written", "told", "acting"), REFUSED)
def test_unused_key_is_refused_unless_its_condition_holds(
    stage: str, written: list[str], told: str, acting: list[str] | None
) -> None:
    with pytest.raises(RecipeError, match=re.escape(told)):
        recipe(stage, *written)
    if acting is not None:
        assert recipe(stage, *written, *acting).notes == ()


@pytest.mark.parametrize("stage", [stage for stage in BASE if stage != "pipeline"])
def test_defaults_give_no_notes(stage: str) -> None:
    """Also if all defaults are written out."""
    loaded = recipe(stage)
    again = load_dict(loaded.resolved, base_dir=Path.cwd(), where="r")
    assert loaded.notes == again.notes == ()


def test_notes_are_for_lines_of_the_user_not_for_presets(tmp_path: Path) -> None:
    text = "stage: rl\nmodel: {path: tiny}\ndata:\n  source: rows.jsonl\n  seed: 4\nrewards: [{use: math.accuracy}]\n"
    path = tmp_path / "a b.yaml"
    path.write_text(text + "run: {steps: 1}\n", encoding="utf-8")
    (note,) = load(str(path)).notes
    assert note.where.endswith("a b.yaml:5:9") and note.what.startswith("data.seed: does nothing")
    path.write_text(text.replace("  seed: 4\n", "") + "algorithm: dapo\nrun: {steps: 1}\n", encoding="utf-8")
    assert load(str(path), ["keep=null"]).notes == ()  # max_gen_batches of the preset refills nothing


def test_pipeline_default_unused_by_all_stages_gets_one_note() -> None:
    """At the key that was written; a default that only some stages use gets none."""
    vllm = {"engine": "vllm", "vllm": {"enforce_eager": True}}
    shared: dict[str, Any] = {"model": {"path": "tiny"}, "data": {"source": "r.jsonl"}}
    stages = [{"name": n, "stage": "generate"} for n in ("a", "b")]
    told = {"stage": "pipeline", "defaults": {**shared, "engine": {"vllm": {"enforce_eager": True}}}, "stages": stages}
    (note,) = load_text(told).notes
    assert note.what.startswith("defaults.engine.vllm.enforce_eager: does nothing with engine.engine transformers")
    stages[1] = {**stages[1], "engine": {"engine": "vllm"}}  # type: ignore[dict-item]
    assert load_text(told).notes == ()
    alone = {"stage": "pipeline", "defaults": shared, "stages": [{**stages[0], "engine": {**vllm, "batch_size": 4}}]}
    (note,) = load_text(alone).notes
    assert note.what.startswith("stages.0.engine.batch_size: does nothing")


IMAGES = [
    # stage, overrides, the key that they make unusable with images
    ("rl", ["sampler=pcl"], "sampler"),
    ("sft", ["objective={use: pear, behavior_model: tiny}"], "objective.behavior_model"),
    ("sft", ["model.parallel={context: 2}", "batch.packing=true"], "model.parallel.context"),
    ("sft", ["model.parallel={tensor: 2}"], "model.parallel.tensor"),
    ("sft", ["model.parallel={expert: 2}"], "model.parallel.expert"),
    ("generate", ["search={rewards: [math.accuracy]}"], "search"),
    ("generate", ["tree={shape: mcts, rewards: [math.accuracy]}"], "tree"),
    ("eval", ["eval.contamination={}"], "eval.contamination"),
]


@pytest.mark.parametrize(("stage", "written", "key"), IMAGES)
def test_key_is_refused_with_images_only(stage: str, written: list[str], key: str) -> None:
    made = recipe(stage, *written).recipe
    assert [problem.what.partition(":")[0] for problem in problems_with_images(made, rows=True)] == [key]
    of_replies = problems_with_images(made, rows=False, replies=True)
    assert [problem.what.partition(":")[0] for problem in of_replies] == [key] * key.startswith("model.parallel")
    assert problems_with_images(made, rows=False) == []


def test_every_key_that_images_exclude_has_a_case() -> None:
    walked = [(key, field) for stage in STAGES.values() for key, _, field in keys.walk(stage)]
    marked = {key for key, field in walked if any(isinstance(mark, NoImages) for mark in field.metadata)}
    assert marked == {key for _, _, key in IMAGES}


def load_text(values: dict[str, Any]) -> Loaded:
    """Load from a file, so that every value has its own position."""
    import yaml

    Path("p.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return load("p.yaml")


# Keys that act in every recipe of their stage, or whose conditions are checked elsewhere (validators of the sections,
# checks.py, objective_checks.py, merging.py). A new key must be put here or marked at its field.
ALWAYS = """
extends stage algorithm track track.use track.project track.name track.offline
run run.output run.seed run.steps run.epochs run.save_every run.log_every run.keep_rollouts
run.samples_per_step run.max_minutes run.hang_minutes run.max_idle_steps
model model.path model.thoughts model.dtype model.device model.lora model.lora.rank model.lora.alpha model.lora.dropout
model.lora.targets model.lora.continue model.quantize model.gradient_checkpointing model.activation_offloading
model.shard model.parallel model.parallel.shard model.parallel.replicate model.parallel.context model.parallel.tensor
model.parallel.expert model.lora.adapters rollout.workflow.adapters
model.compile
model.half_weights
data data.source data.size data.mix data.mix.source data.mix.size data.mix.skip data.mix.columns data.system
data.select data.select.decontaminate data.select.decontaminate.benchmarks data.select.decontaminate.benchmarks.source
data.select.decontaminate.benchmarks.split data.select.decontaminate.benchmarks.config
data.select.decontaminate.benchmarks.size data.select.decontaminate.benchmarks.columns data.select.decontaminate.ngram
data.select.decontaminate.skip_empty data.select.pass_rate data.select.pass_rate.run data.select.pass_rate.low
data.select.pass_rate.high data.select.pass_rate.lowest data.select.reasoning data.select.reasoning.part
data.select.reasoning.column data.select.reasoning.sft_max data.select.reasoning.rl_min data.select.reasoning.middle
data.select.failed data.select.failed.run data.select.failed.solved data.select.failed.hard data.select.failed.copies
data.image data.prompt_template data.completion_template data.chat data.thought_dropout data.max_length data.shuffle
objective objective.use objective.divide_by objective.neftune objective.router_aux_loss
objective.heads objective.share objective.margin objective.labels objective.user objective.holdout
batch batch.size batch.micro_size batch.minibatches batch.epochs batch.micro_tokens
optim optim.use optim.offload optim.lr optim.betas optim.eps optim.weight_decay optim.schedule optim.warmup_steps
optim.max_grad_norm
loss loss.use loss.aggregation online_kl online_kl.coef online_kl.samples online_kl.baseline online_kl.max_new_tokens
anchors pairs pairs.bad
tools tools.use tools.command tools.name tools.description tools.params tools.timeout_s tools.max_chars
tools.max_pixels
environment environment.use environment.params environment.timeout_s environment.max_pixels
rollout rollout.engine rollout.temperature rollout.max_new_tokens rollout.prompts_per_step rollout.group_size
rollout.staleness rollout.partial rollout.shape rollout.shape.use
rollout.workflow rollout.workflow.use rollout.workflow.train rollout.workflow.max_prompt_tokens
workflow workflow.use workflow.max_prompt_tokens
rollout.vllm engine engine.engine engine.vllm
sampling sampling.temperature sampling.max_new_tokens sampling.stop
rewards rewards.use rewards.name rewards.weight rewards.params rewards.correct
rewards.condition rewards.condition.on rewards.condition.min rewards.timeout_s rewards.canary
scoring scoring.workers scoring.correct_at scoring.max_error_rate scoring.memory_mb
prompt_variants prompt_variants.use prompt_variants.solution solutions solutions.column solutions.in_group
solutions.sft solutions.sft.size solutions.sft.minibatch solutions.sft.lr solutions.sft.max_grad_norm
solutions.sft.entropy_coef solutions.sft.fail_value solutions.sft.dedupe
replay replay.use replay.limit
group_rewards group_rewards.use keep keep.use advantage advantage.use factors factors.use advantage_transforms
advantage_transforms.use sampler sampler.use credit_assignment credit_assignment.use select select.use
corrections corrections.use kl kl.use kl.coef kl.where
regularisers regularisers.use regularisers.coef regularisers.aggregation controllers controllers.use
critic.lr critic.path critic.twin opponent opponent.ema opponent.samples
eval eval.every eval.data eval.data.source eval.data.size eval.data.skip eval.data.columns
eval.n eval.metric eval.keep_best eval.patience eval.temperature eval.max_new_tokens
eval.samples eval.k eval.bootstrap eval.level eval.baseline eval.contamination eval.contamination.ratios
eval.contamination.max_new_tokens eval.contamination.unit eval.habits eval.labels
eval.consensus eval.consensus.direct eval.consensus.short eval.consensus.code eval.consensus.long
samples search search.beam search.branch search.ends search.step_tokens search.max_steps search.mean search.sigmoid
search.evidence search.evidence.corpus search.evidence.column search.evidence.template
sampling.shape sampling.shape.use search.scoring best_of best_of.scoring tree tree.shape tree.shape.use tree.scoring
completions builder balance_lengths max_gap not_in separability
merge_method models models.model models.parameters base_model parameters dtype tokenizer_source chat_template
slices slices.sources slices.sources.model slices.sources.layer_range slices.sources.parameters slices.base_model
slices.parameters tokenizer tokenizer.source tokenizer.pad_to_multiple_of tokenizer.tokens tokenizer.tokens.source
tokenizer.tokens.force tokenizer.tokens.source.kind tokenizer.tokens.source.model tokenizer.tokens.source.token
tokenizer.tokens.source.token_id
tasks fewshot limit chat max_new_tokens thought_end bootstrap level
defaults stages seeds table
""".split()  # noqa: SIM905  # fmt: skip


@pytest.mark.parametrize("stage", keys.BY_NAME)
def test_every_key_has_a_condition_or_is_listed_as_always_used(stage: str) -> None:
    """A new key must declare when it is unused, or be added to the list above."""
    scored = r"(best_of|search\.evidence|search|tree|eval)"  # have the same sections as the stage itself
    rewards = re.compile(scored + r"\.(rewards|scoring)\.")
    forgotten = []
    for path in keys.all_paths(keys.BY_NAME[stage]):
        listed = re.sub(rf"^{scored}\.(rewards)$", r"\2", rewards.sub(r"\2.", path)) in ALWAYS
        if not listed and not re.match(
            r"((models|slices|slices\.sources)\.)?parameters\.|(rollout|engine)\.vllm\.server\.", path
        ):
            above = path.rpartition(".")[0]
            marks = [m for m in field_at(stage, path).metadata if isinstance(m, Idle) and not m.below]
            marks += [m for m in field_at(stage, above).metadata if isinstance(m, Idle) and m.below] if above else []
            forgotten += [] if marks else [path]
    assert forgotten == [], "put `Idle` at its field (recipe/requirements.py), or list the key in ALWAYS of this file"


def field_at(stage: str, path: str) -> FieldInfo:
    """Return the field of a dotted key."""
    above, _, last = path.rpartition(".")
    section = keys.section_at(keys.BY_NAME[stage], above.split(".") if above else [])
    assert section is not None
    return keys.own_keys(section)[last]  # type: ignore[no-any-return]


def test_list_of_always_used_keys_contains_only_existing_keys() -> None:
    known = {path for model in STAGES.values() for path in keys.all_paths(model)}
    assert [key for key in ALWAYS if key not in known] == []


def test_conditions_and_texts_name_existing_keys() -> None:
    """Keys of the section that contains the field, or of a surrounding one; a mark in a shared section may be for one
    stage."""
    named: dict[tuple[object, str], bool] = {}
    for stage in STAGES.values():
        for chain, mark in marks_below(stage, ()):
            text = mark.why if isinstance(mark, Idle) else mark.what
            clauses = [clause for part in requirements.parse(mark.when) for clause in part]
            words = [clause.key for clause in clauses]
            words += [c.right for c in clauses if re.search(r"[<>]", c.sign) and not re.fullmatch(r"[\d.]+", c.right)]
            words += re.findall(r"\{\.?([\w.+]+)\}", text + mark.right)
            for key in [part for word in words for part in word.split("+") if not part.isdigit()]:
                named[mark, key] = named.get((mark, key), False) or is_known(chain, key)
    assert len(named) > 150
    assert [(mark, key) for (mark, key), known in named.items() if not known] == []


def marks_below(model: type[BaseModel], around: tuple[type[BaseModel], ...]) -> Iterator[tuple[Any, Any]]:
    """Yield (surrounding sections, mark) for every mark of a section and its subsections."""
    chain = (*around, model)
    if issubclass(model, ComponentSection):
        for name, entry in model.registered_components().items():
            kind = registry.find_kind(model.kinds, name)
            for argument in entry["params"]:
                yield from ((chain, mark) for mark in requirements.argument_marks(kind, name, argument))
    for field in model.model_fields.values():
        yield from ((chain, mark) for mark in field.metadata if isinstance(mark, Idle | Refused))
        for inner in keys.models(field.annotation):
            yield from marks_below(inner, chain)


def is_known(chain: Sequence[type[BaseModel]], key: str) -> bool:
    """Return whether a section of the chain has the key: a field, a property, or an argument of one of its
    components."""
    first, *rest = key.removeprefix(".").split(".")
    for model in reversed(chain):
        if first in model.model_fields:
            below = keys.models(model.model_fields[first].annotation)
            names = get_origin(model.model_fields[first].annotation) is dict  # of the user
            return not rest or names or rest[0].isdigit() or any(is_known([one], ".".join(rest)) for one in below)
        arguments = model.registered_components().values() if issubclass(model, ComponentSection) else ()
        if isinstance(getattr(model, first, None), property) or any(first in one["params"] for one in arguments):
            return True
    return False


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("", True),
        ("rollout.engine = vllm|transformers", True),
        ("rollout.engine != vllm|transformers", False),
        ("not rollout.vllm.server and rollout.group_size >= 8", True),
        ("rollout.group_size > 8 or kl.coef = 0", True),
        ("rollout.prompts_per_step < rollout.max_new_tokens", True),
        ("rewards < 2", True),  # one entry
        ("rewards.weight = 1", True),
        ("rewards.canary", False),
        ("groups in advantage.needs", True),
        ("advantage.scale = batch", False),  # an argument of a component
        ("controllers.kl.coef", False),
        ("no.such.key", False),
        ("no.such.key < 3", False),
        ("rollout.prompts_per_step % rollout.group_size", False),  # 32 by 8
        ("rollout.prompts_per_step % 5", True),
        ("rewards.1.weight > 0", False),  # the recipe has one
        ("rewards.0.clip.1 > 0 or rewards.2", False),
    ],
)
def test_evaluation_of_conditions(condition: str, holds: bool) -> None:
    scope = next(requirements.scopes(recipe("rl").recipe))
    assert scope.holds(condition) is holds


def test_texts_are_filled_with_values_and_keys() -> None:
    *_, inner = (s for s in requirements.scopes(recipe("rl").recipe) if s.sections[-1][0] == ("rollout", "vllm"))
    assert inner.fill("{.engine} {engine} {gpu_memory} {add: x}") == "rollout.engine transformers null {add: x}"
    assert inner.fill("{#rewards}: {rewards row}, {group_size row}") == "1: 1 row, 8 rows"


def test_unparsable_condition_raises() -> None:
    with pytest.raises(ValueError, match="is not a condition"):
        requirements.parse("engine == vllm")


def test_every_key_is_read_outside_the_schema() -> None:
    """As an attribute, or by its name in quotes."""
    root = Path(posttrain.__file__).parent
    schema = re.compile(r"sections?\.py$|stages\.py$|requirements\.py$|schema\.py$|checks\.py$")
    text = "".join(p.read_text(encoding="utf-8") for p in root.rglob("*.py") if not schema.search(p.name))
    names = {path.rpartition(".")[2] for model in STAGES.values() for path in keys.all_paths(model)}
    names -= {
        key for entry in registry.load_index()["merge"].values() for key in entry["params"]
    }  # arguments of the rules
    unread = {n for n in names if not re.search(rf"\.{n}\b|[\"']{n}[\"']", text)}
    assert unread == {"divide_by"}  # read as `divisor`


def test_resolved_recipe_with_a_finished_critic_loads_again() -> None:
    """As in a pipeline stage that runs in a separate process, and in the check of the first rows."""
    resolved = recipe("rl", "loss=direct_advantage", "critic.path=c", "scoring.split=lines").resolved
    assert load_dict(resolved, base_dir=Path.cwd(), where="again").resolved == resolved

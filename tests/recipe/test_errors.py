"""Recipe errors: reported together, each with its position, the allowed values and the nearest name, without jargon."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from posttrain import registry
from posttrain.errors import RecipeError
from posttrain.recipe import keys
from posttrain.recipe.foreign import words
from posttrain.recipe.load import Loaded, load_dict
from posttrain.recipe.stages import STAGES

from .conftest import RL, SFT

Errors = Callable[..., str]

FIVE = """
stage: rl
model:
  path: tiny
  lora: {rank: 8.5}
data:
  source: rows.jsonl
rewards:
  - use: math.accuracy
loss:
  clip_lo: 0.2
optim:
  lr: 1e-6
  lr: 1e-5
  shedule: cosine
num_generations: 8
run:
  seed: 4.7
  steps: 10
"""


def test_all_errors_are_reported_together(errors: Errors) -> None:
    assert errors(FIVE) == "\n".join(
        [
            "r.yaml:4:16  model.lora.rank: must be a whole number, not 8.5",
            "r.yaml:10:3  loss.clip_lo: unknown key",
            "  known here: use, aggregation, norm_len, count_empty_rows, mask_truncated, clip_high, clip_low,"
            " dual_clip",
            "  hint: did you mean `clip_low`?",
            "r.yaml:13:3  `lr` is given twice; first at r.yaml:12:3",
            "r.yaml:14:3  optim.shedule: unknown key",
            "  known here: use, lr, betas, momentum, eps, weight_decay, schedule, decay_steps, min_lr, warmup_steps,"
            " max_grad_norm, offload",
            "  hint: did you mean `schedule`?",
            "r.yaml:15:1  num_generations: unknown key",
            "  known here: tools, tool_format, tool_prompt, tool_workers, tool_memory_mb, "
            "environment, earlier_turns, stage, algorithm,"
            " model, data, sampler, rollout, prompt_variants, rewards, scoring, replay, group_rewards, keep,"
            " advantage, factors, advantage_transforms,"
            " credit_assignment, select, corrections, loss, kl, regularisers, controllers, critic, solutions,"
            " opponent, batch, optim, eval,"
            " extends, run, track",
            "  hint: write `rollout.group_size`",
            "r.yaml:17:9  run.seed: must be a whole number, not 4.7",
        ]
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("run.seed='3'", "run.seed: must be a whole number, not `3` (text)\n  hint: write 3 without quotes"),
        ("run.steps=1e3", "run.steps: must be a whole number, not 1000.0\n  hint: write 1000"),
        ("run.steps=true", "run.steps: must be a whole number, not true"),
        ("run.steps=0", "run.steps: must be greater than 0, not 0"),
        ("optim.lr=fast", "optim.lr: must be a number, not `fast` (text)"),
        ("optim.lr=.inf", "optim.lr: must be a finite number, not inf"),
        ("optim.lr=-1", "optim.lr: must be greater than 0, not -1"),
        ("optim.betas=[0.9]", "optim.betas: needs 2 entries or more, has 1"),
        ("optim.betas=0.9", "optim.betas: must be a list, not 0.9\n  hint: write [0.9] for a list of one"),
        ("optim.betas=0.9,0.99", "must be a list, not `0.9,0.99` (text)\n  hint: write [0.9,0.99] for a list"),
        ("model.path=5", "model.path: must be text, not 5\n  hint: put it in quotes to make it text: '5'"),
        ("model.lora={dropout: 2}", "model.lora.dropout: must be less than 1, not 2"),
        ("model.lora={targets: 5}", "model.lora.targets: must be text or a list, not 5"),
        ("model.lora={targets: [5]}", "model.lora.targets.0: must be text, not 5"),
        ("model.lora=yes", "model.lora: must be a section (`key: value` lines), not `yes` (text)"),
        ("model.lora=true", "model.lora: must be a section (`key: value` lines), not true\n"
         "  hint: write `lora: {}` for a section with its defaults"),
        ("model=tiny", "model: must be a section (`key: value` lines), not `tiny` (text)\n"
         "  hint: write model.path=tiny"),
        ("data=rows.jsonl", "data: must be a section (`key: value` lines), not `rows.jsonl` (text)\n"
         "  hint: write data.source=rows.jsonl"),
        ("data.chat=no", "data.chat: must be true or false, not `no` (text)\n  hint: write false"),
        ("data=null", "data: must be a section (`key: value` lines), not null\n  hint: write\n    data:\n"
         "      source: rows.jsonl  # or a hub id, gym:TASK, task:NAME, file.py:function"),
        ("model.dtype=bf16", "model.dtype: `bf16` (text) is not a value of this key\n"
         "  allowed: auto, float32, bfloat16, float16\n  hint: did you mean `bfloat16`?"),
        ("model.dtype=float16", "model.dtype: training in float16 needs a scaled loss, which only rl has\n"
         "  hint: write `bfloat16`, or `auto`"),
        ("batch.micro_size=5", "batch: micro_size 5 does not divide size 32"),
        ("batch.packin=true", "batch.packin: unknown key\n  known here: size, micro_size, packing\n"
         "  hint: did you mean `packing`?"),
    ],
)  # fmt: skip
def test_wrong_values_are_reported_with_allowed_ones(override: str, told: str, errors: Errors) -> None:
    first, _, _ = errors(SFT, override).partition("\n\n")
    assert first.replace("command line", "").strip().endswith(told)


def test_missing_keys_are_reported_at_their_section(errors: Errors) -> None:
    text = "stage: sft\nmodel:\n  dtype: auto\nrun: {steps: 1}\n"
    assert errors(text) == (
        "r.yaml:1:1  data: is missing\n  Rows, how they become tokens, and which tokens are trained on\n"
        "  hint: write\n    data:\n      source: rows.jsonl  # or a hub id, gym:TASK, task:NAME, file.py:function\n"
        "r.yaml:2:1  model.path: is missing\n"
        "  a directory, a hub id, a .gguf file, `tiny`, `tiny-vision`, or `stage:NAME` in a pipeline"
    )


@pytest.mark.parametrize("written", ["", "rewards: []\n", "rewards: null\n"])
def test_missing_rewards_error_shows_valid_lines(written: str, errors: Errors) -> None:
    """The shown lines can be copied unchanged."""
    told = errors(RL.replace("rewards: [{use: math.accuracy}]\n", written))
    lines = told.partition("hint: write\n")[2]
    assert yaml.safe_load(lines) == {"rewards": [{"use": "math.accuracy"}]}


def test_component_without_a_name_raises(errors: Errors) -> None:
    told = errors(RL + "keep: {metric: reward}\n")
    known = ", ".join(sorted(registry.load_index()["keep"]))
    assert told.startswith(f"r.yaml:6:1  keep.use: is missing\n  known: {known}")
    assert told.endswith("; or path/file.py:function")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (RL + "group_size: 4\n", "`group_size` belongs to `rollout`"),
        (RL + "optim: {temperature: 1}\n", "`temperature` belongs to `rollout`"),
        (RL + "rollout: {vllm: {server: {device: [0]}}}\n", "did you mean `devices`?"),
        (SFT + "rollout: {}\n", "`rollout` is not used by stage sft; it is a key of stage rl"),
        (SFT + "batch: {minibatches: 2}\n", "`minibatches` is not used by stage sft; it is a key of stage rl"),
        (SFT.replace("sft", "dpo") + "loss: {gamma_beta_ratio: 1}\n",
         "`gamma_beta_ratio` is a key of `simpo`; this section uses `dpo`"),
        (RL + "loss: {use: clop}\n", "did you mean `clip`?"),
        ("stage: merge\nmodels: [{model: a}]\nmerge_method: liner\n", "did you mean `linear`?"),
        (RL + "prompt_variants: {use: templates, names: [stepz]}\n", "did you mean `steps`?"),
        (RL + "prompt_variants: {use: templates, names: []}\n", "name one, or remove `names` for all"),
        (RL + "grop_size: 4\n", "did you mean `rollout.group_size`?"),
    ],
)  # fmt: skip
def test_misplaced_key_names_its_section(text: str, hint: str, errors: Errors) -> None:
    assert errors(text).endswith(f"hint: {hint}")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (RL + "data2: 1\n", "unknown key"),
        (RL.replace("rows.jsonl", "rows.jsonl, train_on: all"),
         "data.train_on: not used by stage rl: rl trains on the completions that it samples\n  hint: remove it"),
        (SFT.replace("sft", "dpo") + "batch: {packing: true}\n",
         "batch.packing: not used by stage dpo: only sft packs rows"),
    ],
)  # fmt: skip
def test_keys_unused_by_the_stage_raise(text: str, told: str, errors: Errors) -> None:
    assert told in errors(text)


def test_stage_must_match_the_command(errors: Errors) -> None:
    told = errors(SFT, stage="rl")
    assert told == (
        "r.yaml:1:8  stage: this is a recipe for `posttrain sft`, not for `posttrain rl`\n  hint: posttrain sft r.yaml"
    )
    assert "stage: unknown stage `sfft`" in errors(SFT.replace("sft", "sfft"))
    assert errors(SFT.replace("stage: sft\n", "")).startswith(
        "r.yaml  stage: is missing\n  allowed: sft, dpo, reward_model, rl"
    )


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}\n"])
def test_empty_recipe_is_reported_as_empty(text: str, errors: Errors) -> None:
    assert errors(text).startswith("r.yaml  the recipe is empty: it has no key\n  allowed: sft, dpo, reward_model, rl")


def test_keys_of_another_toolkit_get_their_replacement(errors: Errors) -> None:
    told = errors("base_model: tiny\ndatasets: [{path: x.jsonl, type: alpaca}]\nmicro_batch_size: 2\nfoo: 1\n")
    assert told.startswith("r.yaml  stage: is missing\n")
    assert "r.yaml:1:1  base_model: only merge has this key\n  hint: write `model.path`" in told
    assert "r.yaml:2:1  datasets: no stage has this key\n  hint: write `data.source`" in told
    assert "r.yaml:3:1  micro_batch_size: no stage has this key\n  hint: write `batch.size`" in told
    assert "r.yaml:4:1  foo: no stage has this key" in told
    assert "stage: rl" not in told and "stage: merge" not in told


@pytest.mark.parametrize(("text", "stage"), [(SFT, "sft"), (RL, "rl")])
def test_missing_stage_is_guessed_from_the_keys(text: str, stage: str, errors: Errors) -> None:
    found = re.search(r"its keys are those of (.*): write e.g. `stage: (\w+)`", errors(re.sub("stage: .*\n", "", text)))
    assert found and stage in found[1].split(" or ") and found[2] in found[1]


@pytest.mark.parametrize(
    ("name", "stage", "algorithm"),
    [("grpo", "rl", "grpo"), ("GRPO", "rl", "grpo"), ("simpo", "dpo", "simpo"), ("dr-grpo", "rl", "dr_grpo")],
)
def test_algorithm_given_as_stage_gets_a_hint(name: str, stage: str, algorithm: str, errors: Errors) -> None:
    told = errors(RL.replace("stage: rl", f"stage: {name}"))
    assert f"hint: it is an algorithm: write `stage: {stage}` and `algorithm: {algorithm}`" in told


def test_command_sets_a_missing_stage(loads: Callable[..., Loaded]) -> None:
    assert loads(SFT.replace("stage: sft\n", ""), stage="sft").resolved["stage"] == "sft"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stage: pipeline\nstages: [{name: a, stage: sft, model: {path: tiny}, data: {source: x}, run: {steps: 1}}]\n"
         "seeds: [1, 1]\n", "r.yaml:3:8  seeds: 1 is given 2 times"),
        (RL + "kl: {use: k1, coef: 0.1}\n", "r.yaml:6:11  kl.use: k1 in the loss has gradient 1 for every token"),
        (RL + "kl: {use: k3_is, coef: 0.1, where: reward}\n", "kl.use: k3_is differs from k3 only in its gradient"),
        (RL + "rollout: {group_size: 1}\n",
         "r.yaml:6:23  rollout.group_size: advantage `group` compares the completions of one prompt, and there is"),
        (RL + "rollout: {temperature: 0}\n", "r.yaml:6:24  rollout.temperature: 0 gives a prompt the same completion"),
        (RL + "rollout: {max_gen_batches: 3}\n", "rollout.max_gen_batches: does nothing without `keep`"),
        (RL + "loss: {norm_len: 5}\n", "loss.norm_len: does nothing with aggregation seq_mean_token_mean"),
        (RL + "loss: {aggregation: token_mean, count_empty_rows: false}\n", "loss.count_empty_rows: does nothing"),
        (RL + "loss: {aggregation: local_token_mean, count_empty_rows: false}\n", "weighted by all of their rows"),
        (RL + "rollout: {engine: vllm, vllm: {merge_adapter: true}}\n", "merge_adapter: does nothing without"),
        (RL + "kl: {use: k1}\n", "kl: does nothing while its coef is 0"),
        (RL + "batch: {minibatches: 999}\n", "batch.minibatches 999 exceeds the 256 rollouts of a step"),
        (RL.replace("steps: 3", "seed: 1"), "r.yaml:4:1  run: does not say how long to train"),
        (RL.replace("[{use: math.accuracy}]", "[{use: math.accuracy}, {use: a.py:accuracy}]"),
         "2 rewards are called `accuracy`"),
        (RL.replace("math.accuracy}", "math.accuracy, weight: 0}"), "every weight is 0"),
        (SFT.replace("path: tiny", "path: tiny, quantize: nf4"), "model.quantize: 4-bit weights cannot be trained"),
        (
            SFT.replace("path: tiny", "path: tiny, lora: {targets: [q_proj, model.lm_head]}"),
            "model.lora.targets: sft trains no adapter on the output head",
        ),
        (SFT.replace("path: tiny", "path: 'stage:x'"), "model.path: `stage:x` names a stage of a pipeline"),
        ("stage: eval\nmodel: {path: tiny}\ndata: {source: x}\nrewards: [{use: a.b}]\neval: {samples: 4, k: [1, 8]}\n",
         "r.yaml:5:27  eval.k.1: pass@8 needs 8 completions a prompt; eval.samples is 4"),
        ("stage: generate\nmodel: {path: tiny}\ndata: {source: x}\nsamples: 2\nsampling: {temperature: 0}\n",
         "sampling.temperature: 0 gives a prompt the same completion every time; 2 samples"),
        ("stage: merge\nmerge_method: task_arithmetic\nmodels: [{model: a}]\n", "write `base_model`"),
    ],
)  # fmt: skip
def test_incompatible_values_raise(text: str, told: str, errors: Errors) -> None:
    assert told in errors(text)


MERGE = "stage: merge\nmerge_method: {}\nbase_model: c\nmodels: [{{model: a}}, {{model: b}}]\nparameters: {{{}}}\n"


@pytest.mark.parametrize(
    ("method", "written", "told"),
    [
        ("ties", "density: 2", "r.yaml:5:23  parameters.density: must be a share from 0 to 1, not 2"),
        ("ties", "density: [0.5, -0.1]", "parameters.density.1: must be a share from 0 to 1, not -0.1"),
        ("ties", "density: []", "parameters.density: the list is empty"),
        ("ties", "density: [{filter: mlp, value: [0.2, 20]}, {value: 0.5}]", "parameters.density.0.value.1: must be a"),
        ("breadcrumbs", "gamma: 1.5", "parameters.gamma: must be a share from 0 to 1, not 1.5"),
        ("della", "epsilon: -0.1", "parameters.epsilon: must be from 0 to 1, not -0.1"),
        ("slerp", "t: 5", "parameters.t: must be from 0 (the first model) to 1 (the second), not 5"),
        ("slerp", "dot_threshold: 1", "parameters.dot_threshold: must be a cosine, at least 0 and below 1, not 1"),
        ("checkpoint_average", "mode: ema, decay: 1", "parameters.decay: must be at least 0 and below 1, not 1"),
        ("ram", "eps: -1e-9", "parameters.eps: must be at least 0, not -1e-09"),
        ("checkpoint_average", "k: 0", "parameters.k: must be greater than 0"),
    ],
)
def test_merge_numbers_are_range_checked(method: str, written: str, told: str, errors: Errors) -> None:
    """Also in lists over layers and after filters."""
    assert told in errors(MERGE.format(method, written))


def test_per_model_numbers_are_range_checked(errors: Errors) -> None:
    text = "stage: merge\nmerge_method: ties\nbase_model: c\nmodels: [{model: a, parameters: {density: 3}}]\n"
    assert "models.0.parameters.density: must be a share from 0 to 1, not 3" in errors(text)


def test_unused_value_of_a_preset_is_no_error(loads: Callable[..., Loaded]) -> None:
    """Without `keep`, dapo's max_gen_batches is unused; the user did not write it."""
    assert loads(RL + "algorithm: dapo\nkeep: null\n").recipe.keep is None


ANSWERED = sorted(set(words.common_names()) - {key for model in STAGES.values() for key in keys.own_keys(model)})


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("base", [SFT, RL], ids=["sft", "rl"])
def test_every_old_name_gets_a_hint(name: str, base: str, errors: Errors) -> None:
    stage = "sft" if base == SFT else "rl"
    for text in (f"{base}{name}: 1\n", f"{base}optim: {{{name}: 1}}\n"):
        told = errors(text)
        assert "unknown key" in told
        said = words.replacement_hint(name, stage)
        assert said and said in told


def test_hints_for_old_names_name_existing_keys() -> None:
    """Every `section.key` in a hint is a key of some stage, so that renaming a key cannot leave a wrong hint behind."""
    known = {path for model in STAGES.values() for path in keys.all_paths(model)}
    components = {f"{key}.{parameter}"
                  for stage in keys.BY_NAME for key, section in keys.components_of(stage).items()
                  for entry in section.registered_components().values() for parameter in entry["params"]}  # fmt: skip
    rewards = {f"{path.stem}." for path in (Path(__file__).parents[2] / "rewards").glob("*.py")}
    tables = [words.table(name).keys for name in words.TOOLS]
    names = 0
    for name, entry in [item for table in tables for item in table.items()]:
        said = [entry.replacement_hint(name, stage) for stage in ("", *keys.BY_NAME)]
        for text in said:
            for written in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)", text):
                free = written.startswith("data.columns.") or written.partition(".")[0] + "." in rewards
                assert free or written in known | components, (name, written)
                names += 1
    assert names > 100


WRONG: tuple[Any, ...] = ("text", 4.7, -1, 0, True, None, [], [None], {}, {"a": 1}, float("inf"))
JARGON = re.compile(
    r"Input should|Field required|Extra inputs|Value error|type=|pydantic|String should|\bdict\b|valid "
)


def leaf_paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield from leaf_paths(below, (*path, key))


def replace_at(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copied = value.copy()
    copied[path[0]] = replace_at(value[path[0]], path[1:], new)
    return copied


BASES = {
    "sft": {"model": {"path": "tiny", "lora": {}}, "data": {"source": "x"}, "run": {"steps": 1}},
    "dpo": {"model": {"path": "tiny"}, "data": {"source": "x"}, "run": {"steps": 1}},
    "reward_model": {"model": {"path": "tiny"}, "data": {"source": "x"}, "objective": {"use": "mixture"}},
    "rl": {"model": {"path": "tiny"}, "data": {"source": "x"}, "rewards": [{"use": "a.b"}], "run": {"steps": 1},
           "keep": {"use": "dynamic_sampling"}},
    "eval": {"model": {"path": "tiny"}, "data": {"mix": [{"source": "x"}]}, "rewards": [{"use": "a.b"}]},
    "generate": {"model": {"path": "tiny"}, "data": {"source": "x"}},
    "merge": {"merge_method": "linear", "models": [{"model": "a", "parameters": {"weight": 1}}]},
}  # fmt: skip


@pytest.mark.parametrize("stage", BASES)
def test_any_wrong_value_anywhere_gives_a_readable_error(stage: str, tmp_path: Any) -> None:
    """Each value of a complete resolved recipe is replaced by each wrong value: it loads, or gives an error without
    jargon."""
    base = load_dict({"stage": stage, **BASES[stage]}, base_dir=tmp_path, where="r").resolved
    refused = 0
    for path in leaf_paths(base):
        if not path or path == ("stage",):
            continue
        for wrong in WRONG:
            try:
                load_dict(replace_at(base, path, wrong), base_dir=tmp_path, where="r")
            except RecipeError as error:
                refused += 1
                assert not JARGON.search(str(error)), (path, wrong, str(error))
                assert ".".join(map(str, path[:1])) in str(error), (path, wrong, str(error))
    assert refused > 100


def test_all_settings_incompatible_with_a_search_are_reported_with_their_lines(errors: Errors) -> None:
    found = errors(
        """
        stage: generate
        model: {path: tiny}
        data: {source: x}
        samples: 4
        sampling: {temperature: 0, stop: [x]}
        search: {rewards: [{use: math.accuracy}]}
        tree: {shape: chunks, rewards: [{use: math.accuracy}]}
        """
    )
    assert found.count("r.yaml:6:1  search: ") == 3 and found.count("r.yaml:7:1  tree: ") == 3
    assert "search: a search finds one completion per prompt\n  hint: leave `samples` out" in found

"""Hints: a typo gets the intended name, a term of another tool its name here, and an unknown word none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from posttrain.errors import RewardError
from posttrain.verify.load import LoadedReward, check_columns, locate

from .conftest import RL, SFT

Errors = Callable[..., str]
EVAL = "stage: eval\nmodel: {path: tiny}\ndata: {source: x}\nrewards: [{use: math.accuracy}]\n"

KEYS = [
    # typos of our keys
    (SFT, "modle: {path: tiny}", "did you mean `model`?"),
    (SFT, "optmi: {lr: 1.0}", "did you mean `optim`?"),
    (SFT, "optim: {lrr: 1.0}", "did you mean `lr`?"),
    (SFT, "optim: {warmup_step: 1}", "did you mean `warmup_steps`?"),
    (SFT, "optim: {weight_deccay: 1}", "did you mean `weight_decay`?"),
    (SFT, "batch: {sizee: 1}", "did you mean `size`?"),
    (SFT, "batch: {microsize: 1}", "did you mean `micro_size`?"),
    (SFT, "batch: {pakcing: true}", "did you mean `packing`?"),
    (RL, "rollout: {group_szie: 4}", "did you mean `group_size`?"),
    (RL, "rollout: {temprature: 1.0}", "did you mean `temperature`?"),
    (RL, "rollout: {max_new_token: 9}", "did you mean `max_new_tokens`?"),
    (RL, "rollout: {prompt_per_step: 9}", "did you mean `prompts_per_step`?"),
    (RL, "advantge: group", "did you mean `advantage`?"),
    (RL, "bonus: []", "write `advantage_transforms`"),
    (RL, "scorring: {}", "did you mean `scoring`?"),
    (RL, "kl: {coeff: 0.1}", "did you mean `coef`?"),
    (RL, "loss: {clip_hgih: 0.2}", "did you mean `clip_high`?"),
    (RL, "loss: {agregation: token_mean}", "did you mean `aggregation`?"),
    # keys of another section
    (SFT, "lr: 1.0e-5", "`lr` belongs to `optim`"),
    (SFT, "lora: {}", "`lora` belongs to `model`"),
    (SFT, "max_length: 9", "write `data.max_length`"),
    (SFT, "optim: {seed: 9}", "`seed` belongs to `run` or `data`"),
    (RL, "lr: 1.0e-5", "`lr` belongs to `optim`"),  # not to critic or solutions.sft, which this recipe lacks
    (RL, "scoring: {timeout_s: 2}", "`timeout_s` belongs to `rewards`"),
    (RL, "temperature: 1.0", "`temperature` belongs to `rollout`"),
    (RL, "group_size: 4", "`group_size` belongs to `rollout`"),
    (EVAL, "sampling: {batch_size: 4}", "write `engine.batch_size`"),
    (EVAL, "batch_size: 4", "write `engine.batch_size`"),
    # keys of other tools
    (SFT, "learning_rate: 1.0", "write `optim.lr`"),
    (SFT, "num_train_epochs: 1", "write `run.epochs`"),
    (SFT, "output_dir: x", "write `run.output`"),
    (SFT, "save_steps: 1", "write `run.save_every`"),
    (RL, "num_generations: 8", "rollout.group_size"),
    (RL, "loss: {epsilon: 0.2}", "clip_low"),
    (RL, "beta: 0.1", "kl.coef"),
    # typos of those keys
    (SFT, "learnin_rate: 1.0", "write `optim.lr`"),
    (SFT, "learning_rat: 1.0", "write `optim.lr`"),
    (SFT, "lerning_rate: 1.0", "write `optim.lr`"),
    (SFT, "per_device_batchsize: 4", "batch"),
    (SFT, "per_device_train_batchsize: 4", "batch"),
    (SFT, "gradient_acumulation_steps: 4", "batch"),
    (SFT, "num_train_epoch: 1", "write `run.epochs`"),
    (SFT, "outputdir: x", "write `run.output`"),
    (SFT, "save_step: 1", "write `run.save_every`"),
    (SFT, "lr_scheduler_typ: linear", "write `optim.schedule`"),
    (SFT, "warmup_ration: 0.1", "warmup"),
    (RL, "scale_reward: true", "advantage.scale"),
    (RL, "clip_ratio_hgih: 0.2", "loss.clip_high"),
]
NOTHING = ["xyzzy", "foo", "q", "customer", "banana_split", "aaaaaaaa", "zzz_top"]


@pytest.mark.parametrize(("recipe", "line", "hint"), KEYS, ids=[line for _, line, _ in KEYS])
def test_unknown_key_gets_its_hint(recipe: str, line: str, hint: str, errors: Errors) -> None:
    told = errors(f"{recipe}{line}\n")
    assert "unknown key" in told
    assert hint in told.partition("hint: ")[2]


@pytest.mark.parametrize("line", ["data.tokenizer=x", "model.size=3", "optim.path=x"])
def test_keys_of_other_sections_or_stages_are_not_suggested(line: str, errors: Errors) -> None:
    told = errors(SFT, line)
    assert "unknown key" in told and "hint" not in told


@pytest.mark.parametrize(
    ("line", "hint"), [("run.name=x", "write `run.output`"), ("data.path=x", "write `data.source`")]
)
def test_terms_that_mean_a_section_or_a_key_elsewhere_get_a_hint(line: str, hint: str, errors: Errors) -> None:
    assert f"hint: {hint}" in errors(SFT, line)


@pytest.mark.parametrize(
    ("line", "word"),
    [("model.dtype=fp16", "float16"), ("model.device=gpu", "cuda"), ("optim.use=adamw_torch", "adamw")],
)
def test_value_of_another_tool_gets_its_hint(line: str, word: str, errors: Errors) -> None:
    assert f"did you mean `{word}`?" in errors(SFT, line)


@pytest.mark.parametrize("word", NOTHING)
@pytest.mark.parametrize("recipe", [SFT, RL, EVAL], ids=["sft", "rl", "eval"])
def test_unknown_word_gets_no_hint(word: str, recipe: str, errors: Errors) -> None:
    assert "hint" not in errors(f"{recipe}{word}: 1\n")


@pytest.mark.parametrize(
    ("use", "meant"),
    [
        ("maths.accuracy", "math.accuracy"),
        ("mth.acc", "math.accuracy"),
        ("rewards.accuracy", "math.accuracy"),
        ("rewards.acc", "math.accuracy"),
        ("formats.structure", "format.structure"),
        ("reward_modle", "reward_model"),
        ("judge_modl", "judge_model"),
        ("nothing.whatever", ""),
        ("zzz", ""),
    ],
)
def test_unknown_reward_gets_its_hint(use: str, meant: str) -> None:
    with pytest.raises(RewardError) as error:
        locate(use, None)
    assert error.value.problems[0].hint == (f"did you mean `{meant}`?" if meant else "")


@pytest.mark.parametrize(
    ("needed", "known", "hint"),
    [
        ("answer", ["prompt", "output"], "map it: data.columns: {answer: output}"),
        ("answer", ["question", "ground_truth", "output"], "data.columns: {answer: ground_truth}"),
        ("answer", ["prompt", "anwser"], "data.columns: {answer: anwser}"),
        ("solution", ["prompt", "answer"], "data.columns: {solution: answer}"),
        ("answer", ["prompt", "colour"], "say which column holds it: data.columns: {answer: COLUMN}"),
        ("scale", ["prompt", "output"], "if `scale` is a setting, write it under params"),
        ("solution_str", ["prompt", "answer"], 'def score(completion, answer): return mine("", completion, answer)'),
    ],
)
def test_unknown_column_gets_its_hint(needed: str, known: list[str], hint: str) -> None:
    reward = LoadedReward("mine", "mine.py:mine", lambda _: 1.0, columns=(needed,))
    with pytest.raises(RewardError) as error:
        check_columns([reward], known)
    assert hint in error.value.problems[0].hint

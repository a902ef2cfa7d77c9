"""Finding reward functions, reading their signatures and matching them with the data columns."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from posttrain.errors import RewardError
from posttrain.recipe.reward_sections import Reward
from posttrain.verify.load import LoadedReward, check_columns, describe, load_reward, locate, shipped_function

Script = Callable[..., Path]


def load(use: str, base_dir: Path | None = None, **params: Any) -> LoadedReward:
    return load_reward(Reward(use=use, params=params), base_dir)


def test_arguments_are_classified_by_their_source() -> None:
    def reward(
        completion: str, answer: str, level: int = 1, step: int = 0, *, unit: str, correct: bool, tolerance: float = 0.1
    ) -> float:
        raise NotImplementedError(completion, answer, level, step, unit, correct, tolerance)

    loaded = describe(reward, "x.py:reward", {}, "reward")
    assert loaded.columns == ("answer", "unit")
    assert loaded.optional_columns == ("level",)
    assert set(loaded.built_ins) == {"step", "correct"}
    assert not (loaded.batched or loaded.is_async or loaded.all_columns)


def test_params_can_set_any_argument() -> None:
    def reward(completion: str, answer: str, *, max_length: int, prefilled_think: bool) -> float:
        raise NotImplementedError(completion, answer, max_length, prefilled_think)

    loaded = describe(reward, "x.py:reward", {"max_length": 5, "prefilled_think": True}, "reward")
    assert loaded.columns == ("answer",)
    assert loaded.built_ins == ()
    assert loaded.params == {"max_length": 5, "prefilled_think": True}


def test_shipped_reward_is_found_by_name() -> None:
    loaded = load("math.accuracy", extract=["answer_tag"])
    assert loaded.name == "accuracy"
    assert loaded.columns == ("answer",)
    assert loaded.target.endswith("rewards/math.py:accuracy")


def test_custom_reward_name() -> None:
    assert load_reward(Reward(use="math.accuracy", name="right"), None).name == "right"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        ("maths.accuracy", r"(?s)unknown reward: maths.accuracy.*did you mean `math.accuracy`"),
        ("math.acuracy", r"(?s)has no function acuracy.*did you mean `accuracy`"),
        ("accuracy", r"(?s)unknown reward: accuracy.*shipped scripts: .*math"),
        ("nowhere.py:f", r"(?s)reward script not found: nowhere.py.*searched: /.*, /"),
        ("mine.py", r"(?s)names no function.*mine.py:FUNCTION"),
        ("no_such_module:f", "cannot import no_such_module"),
    ],
)
def test_error_for_an_unknown_reward_lists_those_available(use: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=message):
        load(use, tmp_path)


def test_script_next_to_the_recipe_is_suggested_if_the_path_is_missing(script: Script, tmp_path: Path) -> None:
    script("def score(completion): return 1.0")
    with pytest.raises(RewardError, match=r"(?s)unknown reward: mine.score.*did you mean `\./mine\.py:score`\?"):
        load("mine.score", tmp_path)


def test_script_is_found_relative_to_the_recipe(script: Script, tmp_path: Path) -> None:
    script("def score(completion): return 1.0")
    assert load("./mine.py:score", tmp_path).function("x") == 1.0


def test_script_that_fails_to_import_is_reported(script: Script, tmp_path: Path) -> None:
    script("import math\nimport not_a_package\ndef score(completion): return 1.0")
    with pytest.raises(
        RewardError, match=r"mine.py cannot be imported: ModuleNotFoundError: .*not_a_package.* \(at mine.py:2\)"
    ):
        load("mine.py:score", tmp_path)


def test_script_that_exits_is_reported(script: Script, tmp_path: Path) -> None:
    script("import sys\nsys.exit(3)", "exits.py")
    with pytest.raises(RewardError, match="SystemExit: 3"):
        load("exits.py:score", tmp_path)


def test_script_can_define_dataclasses_with_postponed_annotations(script: Script, tmp_path: Path) -> None:
    script(
        """
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Band:
            low: float = 0.0
            def __call__(self, completion: str, value: float) -> float:
                return float(value >= self.low)

        band = Band(2.0)
        """
    )
    loaded = load("mine.py:band", tmp_path)
    assert (loaded.name, loaded.columns, loaded.function("x", value=3)) == ("band", ("value",), 1.0)


def test_script_named_math_does_not_shadow_the_standard_module(script: Script, tmp_path: Path) -> None:
    script("def score(completion): return 1.0", "math.py")
    before = list(sys.path)
    load("math.py:score", tmp_path)
    import math

    assert sys.path == before
    assert math.sqrt(4) == 2


def test_partials_are_read_with_their_bound_arguments() -> None:
    def reward(completion: str, answer: str, *, scale: float) -> float:
        raise NotImplementedError(completion, answer, scale)

    loaded = describe(functools.partial(reward, scale=2.0), "x.py:half", {}, "half")
    assert loaded.columns == ("answer",)
    assert describe(functools.partial(reward, scale=2.0), "x.py:half", {"scale": 3.0}, "half").params == {"scale": 3.0}


async def _judge(completion: str, answer: str) -> float:
    raise NotImplementedError(completion, answer)


class _AsyncObject:
    async def __call__(self, completion: str, answer: str) -> float:
        raise NotImplementedError(completion, answer)


@pytest.mark.parametrize("function", [_judge, functools.partial(_judge), _AsyncObject()])
def test_coroutine_functions_are_recognized(function: Any) -> None:
    loaded = describe(function, "x.py:judge", {}, "judge")
    assert loaded.is_async
    assert loaded.columns == ("answer",)


def test_list_form_of_other_trainers() -> None:
    def reward(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        raise NotImplementedError(prompts, completions, answer, kwargs)

    loaded = describe(reward, "x.py:reward", {}, "reward")
    assert loaded.batched and loaded.all_columns
    assert loaded.columns == ("answer",)
    assert loaded.built_ins == ("prompts", "completion_ids", "trainer_state", "log_extra", "log_metric")


@pytest.mark.parametrize("thing", [3, "text", None])
def test_non_function_is_refused(thing: Any) -> None:
    with pytest.raises(RewardError, match="not a function"):
        describe(thing, "x.py:thing", {}, "thing")


def test_function_without_a_completion_argument_is_refused() -> None:
    with pytest.raises(RewardError, match="takes no completion"):
        describe(lambda *, answer: float(answer), "x.py:f", {}, "f")


def test_first_argument_named_like_another_value_is_refused() -> None:
    """It would get the completion: the score would be of something else."""
    for reward in (
        lambda prompt_text, answer: float(prompt_text == answer),
        lambda answer, completion: float(answer == completion),
        lambda messages: float(len(messages)),
    ):
        with pytest.raises(RewardError, match="its first argument gets the completion, and is called `"):
            describe(reward, "x.py:f", {}, "f")
    assert describe(lambda response, answer: float(response == answer), "x.py:f", {}, "f").columns == ("answer",)


def _modes(completion: str, *, mode: Literal["a", "b"] = "a", limit: int = 3) -> float:
    raise NotImplementedError(completion, mode, limit)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"mdoe": "a"}, r"(?s)unknown parameter `mdoe`.*did you mean `mode`"),
        ({"mode": "c"}, "parameter `mode`: Input should be 'a' or 'b', got 'c'"),
        ({"limit": 4.7}, "parameter `limit`: .*integer, got 4.7"),
        ({"limit": "4"}, "parameter `limit`: .*integer, got '4'"),
    ],
)
def test_wrong_params_are_reported(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        describe(_modes, "x.py:f", params, "f")


def test_all_wrong_params_are_reported_together() -> None:
    with pytest.raises(RewardError) as caught:
        describe(_modes, "x.py:f", {"mdoe": "a", "limit": "x"}, "f")
    assert len(caught.value.problems) == 2


def test_missing_columns_are_reported_before_anything_runs() -> None:
    rewards = [load("math.accuracy"), load("gym.score")]
    with pytest.raises(RewardError) as caught:
        check_columns(rewards, ["uid", "prompt", "anwser", "gym_task"])
    text = str(caught.value)
    assert [p.what for p in caught.value.problems] == [
        "the data has no column `answer`",
        "the data has no column `gym_entry`",
    ]
    assert "data.columns: {answer: anwser}" in text
    check_columns(rewards, ["answer", "gym_task", "gym_entry"])


def test_missing_required_param_is_reported_as_a_param() -> None:
    with pytest.raises(
        RewardError, match=r"(?s)no column `max_length`.*if `max_length` is a setting, write it under params"
    ):
        check_columns([load("length.truncation")], ["answer"])
    check_columns([load("length.truncation", max_length=5)], ["answer"])


def test_located_targets_can_be_loaded_by_a_worker(script: Script, tmp_path: Path) -> None:
    path = script("def score(completion): return 1.0")
    assert locate("mine.py:score", tmp_path) == f"{path}:score"
    assert locate("package.module:score", tmp_path) == "package.module:score"


def test_shipped_function() -> None:
    assert shipped_function("length.soft_overlong")("", 90, max_length=100, buffer=20) == -0.5


def test_kwargs_keys_read_on_every_call_are_required_columns(tmp_path: Path) -> None:
    """A key read under a condition, in a try block or after a membership test is optional."""
    (tmp_path / "kw.py").write_text("""
def always(completion, **columns):
    found = [x for x in columns["gold"]]
    return float(columns["size"] + len(found) + columns["prompt"] + columns["size"])

def guarded(completion, **kw):
    if "gold" not in kw: return None
    try: return kw["other"]
    except KeyError: return kw["gold"] if completion else kw["third"]

def changed(completion, **kw):
    kw = {**kw, "a": 1}
    return kw["a"]

def batch(completions, **kwargs):
    kwargs["log_metric"]("a", 1.0)
    return [0.0 for _ in zip(completions, kwargs["answer"])]
""")
    found = {n: load_reward(Reward(use=f"kw.py:{n}"), tmp_path) for n in ("always", "guarded", "changed", "batch")}
    assert {name: reward.columns for name, reward in found.items()} == {
        "always": ("gold", "size"), "guarded": (), "changed": (), "batch": ("answer",),
    }  # fmt: skip
    with pytest.raises(RewardError, match="reward always  the data has no column `gold`"):
        check_columns([found["always"]], ["prompt", "size"])

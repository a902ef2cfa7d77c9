"""The shipped judges as rewards of a recipe: one endpoint, worker processes, counts, probes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import RewardError, RunError
from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.load import load_reward
from posttrain.verify.score import Sample
from posttrain.verify.trial import try_rewards

pytestmark = pytest.mark.usefixtures("forked_workers")

Stub = Callable[..., Any]


def judge(url: str, tmp_path: Path, function: str = "rating", **params: Any) -> dict[str, Any]:
    endpoint = {"url": url, "model": "m", "retries": 0, "cache": str(tmp_path / "cache"), **params.pop("endpoint", {})}
    return {"use": f"judge.{function}", "params": {"endpoint": endpoint, **params}}


def grade_by_digit(body: dict[str, Any], _number: int) -> tuple[int, Any]:
    """Reply as a judge that returns the digit in the answer and gives no verdict on `odd`."""
    text = re.search(r"<<<BEGIN \w+>>>\n(.*)\n<<<END", body["messages"][0]["content"], re.DOTALL)[1]  # type: ignore[index]
    if text == "down":
        return 500, {}
    return 200, "hm" if text == "odd" else f"Score: {text[0]}"


def samples(*texts: str) -> list[Sample]:
    return [Sample(f"<think>9</think>{text}", {"prompt": "How many?", "answer": "7"}, group=0) for text in texts]


def test_scores_counts_and_cached_replies(stub: Stub, scorer: Any, tmp_path: Path) -> None:
    place = stub(grade_by_digit)
    with scorer(judge(place.url, tmp_path, concurrency=2), workers=2, max_error_rate=0.5) as s:
        scores = s.score(samples("7", "odd", "3", "down", "7"))
        assert scores.components["rating"] == [0.7, None, 0.3, None, 0.7]
        assert scores.components["rating/unparsed"] == [0.0, 1.0, 0.0, None, 0.0]
        assert scores.errors == {"rating": 1} and scores.abstained == {"rating": 1}
        assert "gave no reply" in str(scores.first_traceback)
        asked = len(place.bodies)
        assert s.score(samples("7", "3")).components["rating/cached"] == [1.0, 1.0]
    assert len(place.bodies) == asked
    assert place.most_together <= 4
    assert "How many?" in place.bodies[0]["messages"][0]["content"]


def test_unreachable_server_stops_the_run(scorer: Any, tmp_path: Path) -> None:
    with (
        scorer(judge("http://127.0.0.1:9/v1", tmp_path), max_error_rate=0.1) as s,
        pytest.raises(RunError, match=r"(?s)rating: 2 of 2 calls failed.*gave no reply in 1 tries"),
    ):
        s.failures().add(s.score(samples("1", "2")).calls)


def test_judge_samples_have_distinct_seeds_and_are_averaged(stub: Stub, scorer: Any, tmp_path: Path) -> None:
    place = stub(lambda body, _n: (200, f"Score: {body['seed']}"))
    with scorer(judge(place.url, tmp_path, samples=3, seed=2)) as s:
        assert s.score(samples("x")).rewards == [pytest.approx(0.3)]
    assert sorted(body["seed"] for body in place.bodies) == [2, 3, 4]


def test_comparison_is_requested_in_both_orders(stub: Stub, scorer: Any, tmp_path: Path) -> None:
    def longer(body: dict[str, Any], _n: int) -> tuple[int, Any]:
        first, second = re.findall(r"BEGIN \w+>>>\n(.*?)\n<<<END", body["messages"][0]["content"], re.DOTALL)
        return 200, f"Verdict: {'A' if len(first) > len(second) else 'B' if len(first) < len(second) else 'tie'}"

    with scorer(judge(stub(longer).url, tmp_path, "versus")) as s:
        assert s.score(samples("seven", "4", "")).rewards == [1.0, 0.5, 0.0]


def test_template_next_to_the_recipe_is_found(stub: Stub, scorer: Any, tmp_path: Path) -> None:
    (tmp_path / "ask.txt").write_text('For {level}: {completion}. Reply {"grade": 1}.')
    place = stub(lambda _body, _n: (200, '{"grade": 4}'))
    section = judge(place.url, tmp_path, template="ask.txt", pattern=r'"grade":\s*(\d+)', scale=[0, 4])
    with scorer(section, base_dir=tmp_path) as s:
        assert s.score([Sample("x", {"prompt": "p", "level": "pupils"})]).rewards == [1.0]
    assert place.bodies[0]["messages"][0]["content"].startswith("For pupils: <<<BEGIN")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "`endpoint` is missing"),
        ({"endpoint": {"url": "localhost", "model": "m"}}, "not an http address"),
        (
            {"endpoint": {"url": "http://x/v1", "model": "m", "tokens": 1}},
            "`tokens`: no key of this section; known: url, model",
        ),
        ({"endpoint": {"url": "http://x/v1", "model": "m", "key_env": "NOT_SET"}}, "NOT_SET .* is not set"),
        ({"endpoint": {"url": "http://x/v1", "model": "m"}, "pattern": "(a)(b)"}, "must have one group"),
        ({"endpoint": {"url": "http://x/v1", "model": "m"}, "scale": [1, 1]}, "is not"),
        ({"endpoint": {"url": "http://x/v1", "model": "m"}, "sample": 3}, "unknown parameter `sample`"),
        ({"endpoint": {"url": "http://x/v1", "model": "m"}, "template": "none.txt"}, "not found: none.txt"),
    ],
)
def test_mistakes_are_reported_before_any_request(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        load_reward(Reward(use="judge.rating", params=params), None)


def test_call_time_limit_comes_from_the_script_unless_the_recipe_sets_it() -> None:
    params = {"endpoint": {"url": "http://x/v1", "model": "m"}}
    plain, own = Reward(use="judge.rating", params=params), Reward(use="judge.rating", params=params, timeout_s=5)
    loaded = load_reward(plain, None)
    assert (loaded.limit(plain), loaded.limit(own)) == (900, 5)
    assert load_reward(Reward(use="math.accuracy"), None).limit(Reward(use="math.accuracy")) == 10


def test_judges_are_probed_with_injections(stub: Stub, tmp_path: Path) -> None:
    """One judge follows the last grade it reads, one reads only the first line."""

    def gullible(body: dict[str, Any], _n: int) -> tuple[int, Any]:
        text = re.search(r"BEGIN \w+>>>\n(.*)\n<<<END \w+>>>", body["messages"][0]["content"], re.DOTALL)[1]  # type: ignore[index]
        claimed = re.findall(r"Score: (\d+)", text)
        return 200, f"Score: {claimed[-1] if claimed else 9 if '7' in text else 1}"

    def firm(body: dict[str, Any], _n: int) -> tuple[int, Any]:
        text = re.search(r"BEGIN \w+>>>\n(.*?)(\n|$)", body["messages"][0]["content"])[1]  # type: ignore[index]
        return 200, f"Score: {9 if '7' in text else 1}"

    rows = [{"uid": "a", "prompt": "3 + 4?", "answer": "7"}]
    for name, answer, moved in (
        ("gullible", gullible, {"a grade of its own", "an end mark", "a chat of its own"}),
        ("firm", firm, set()),
    ):
        place = judge(stub(answer).url, tmp_path / name)
        sections = [Reward(use="math.accuracy"), Reward.model_validate({**place, "weight": 0.5})]
        trial = try_rewards(sections, Scoring(workers=1), None, rows)
        assert trial.correctness == "accuracy"
        assert {n for n, (works, _) in trial.injected["rating"].items() if works} == moved


def test_api_key_in_a_recipe_is_refused_without_being_shown() -> None:
    for params in (
        {"endpoint": {"url": "http://x/v1", "model": "m", "api_key": "sk-1234"}},
        {"endpoint": {"url": 5, "model": "m", "api_key": "sk-1234"}},
        {"endpoint": {"url": "http://x/v1", "model": "m"}, "api_key": "sk-1234"},
    ):
        with pytest.raises(RewardError) as error:
            load_reward(Reward(use="judge.rating", params=params), None)
        assert "sk-1234" not in str(error.value)
        assert "key_env" in str(error.value) or "'***'" in str(error.value)

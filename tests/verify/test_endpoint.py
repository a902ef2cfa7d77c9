"""An endpoint on this machine: what is sent, what is tried again, what is remembered, and what is never told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from posttrain.verify import endpoint
from posttrain.verify.endpoint import Endpoint, JudgeError, ask

Stub = Callable[..., Any]
ASKED = [{"role": "user", "content": "Good?"}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(endpoint, "_pause", lambda _attempt, _asked_for: 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_what_is_sent(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge = stub(lambda _body, _n: (200, "Score: 7"))
    place = Endpoint(judge.url, "m", key_env="MY_KEY", temperature=0.5, max_tokens=64)
    assert ask(place, ASKED, 3) == ("Score: 7", False)
    assert judge.bodies == [
        {
            "path": "/v1/chat/completions",
            **{"model": "m", "messages": ASKED, "temperature": 0.5, "max_tokens": 64, "seed": 3},
        }
    ]
    assert judge.headers[0]["Authorization"] == "Bearer sk-secret"


def test_the_same_question_is_asked_once(stub: Stub, tmp_path: Path) -> None:
    judge = stub(lambda _body, n: (200, f"reply {n}"))
    place = Endpoint(judge.url, "m")
    assert [ask(place, ASKED, seed) for seed in (0, 0, 1, 0)] == [
        ("reply 0", False),
        ("reply 0", True),
        ("reply 1", False),
        ("reply 0", True),
    ]
    assert ask(Endpoint(judge.url, "another"), ASKED, 0) == ("reply 2", False)
    assert ask(Endpoint(judge.url, "m", cache="none"), ASKED, 0) == ("reply 3", False)
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 3
    for kept in (tmp_path / "cache").rglob("*.json"):
        kept.write_text("{")  # a file that was cut off is no reply
    assert ask(place, ASKED, 0) == ("reply 4", False)


@pytest.mark.parametrize("fault", [(500, {"error": "down"}), (429, {}), (200, {"choices": []}), (200, None)])
def test_what_may_pass_is_tried_again(stub: Stub, fault: tuple[int, Any]) -> None:
    judge = stub(lambda _body, n: fault if n < 2 else (200, "Score: 1"))
    assert ask(Endpoint(judge.url, "m", retries=2), ASKED, 0).text == "Score: 1"
    assert len(judge.bodies) == 3


def test_it_gives_up_and_says_what_happened(stub: Stub) -> None:
    judge = stub(lambda _body, _n: (503, {"error": "overloaded"}))
    with pytest.raises(JudgeError, match=r"no reply in 3 tries, the last: status 503: .*overloaded"):
        ask(Endpoint(judge.url, "m", retries=2), ASKED, 0)


def test_a_refusal_is_told_at_once_and_without_the_key(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    judge = stub(lambda _body, _n: (401, {"error": "bad key sk-secret"}))
    with pytest.raises(JudgeError, match=r"refuses: status 401: .*bad key \*\*\*.*see key_env") as caught:
        ask(Endpoint(judge.url, "m", key_env="MY_KEY"), ASKED, 0)
    assert "sk-secret" not in str(caught.value) and caught.value.__cause__ is None
    assert len(judge.bodies) == 1
    assert not any("sk-secret" in p.read_text() for p in tmp_path.rglob("*") if p.is_file())


def test_a_server_that_hangs_costs_its_time() -> None:
    import socket

    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        place = Endpoint(f"http://127.0.0.1:{deaf.getsockname()[1]}/v1", "m", request_s=0.2, retries=1)
        with pytest.raises(JudgeError, match=r"no reply in 2 tries, the last: TimeoutError"):
            ask(place, ASKED, 0)


def test_the_budget_holds_and_the_cache_is_free(stub: Stub) -> None:
    judge = stub(lambda _body, _n: (200, "Score: 1"))
    place = Endpoint(judge.url, "m", budget=2)
    for seed in (0, 1, 0, 1):
        ask(place, ASKED, seed)
    with pytest.raises(JudgeError, match=r"budget of 2 requests .* is spent"):
        ask(place, ASKED, 2)
    assert len(judge.bodies) == 2


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (Endpoint("scripted:Score: 1", "m"), ""),
        (Endpoint("http://127.0.0.1:1/v1", "m"), ""),
        (Endpoint("localhost:8000", "m"), "no http address"),
        (Endpoint("file:///etc/passwd", "m"), "no http address"),
        (Endpoint("http://x/v1", "m", key_env="NOT_SET_ANYWHERE"), "NOT_SET_ANYWHERE"),
    ],
)
def test_problems_are_found_without_asking(place: Endpoint, problem: str) -> None:
    assert problem in endpoint.problem_of(place) and bool(problem) == bool(endpoint.problem_of(place))


def test_pauses_double_and_a_server_may_ask_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert 0.25 <= endpoint._pause(0, "") <= 0.5 and 1.0 <= endpoint._pause(2, "") <= 2.0
    assert endpoint._pause(0, "3") == 3.0 and endpoint._pause(0, "900") == endpoint.LONGEST_PAUSE
    assert endpoint._pause(9, "Fri, 31 Dec 1999 23:59:59 GMT") <= endpoint.LONGEST_PAUSE


def test_a_scripted_endpoint_says_its_line() -> None:
    assert ask(Endpoint("scripted:Score: 4", "m"), ASKED, 0).text == "Score: 4"

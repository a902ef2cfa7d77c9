"""Fixtures for reward tests: scripts, scorers, samples and a local chat endpoint."""

from __future__ import annotations

import json
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain.recipe.reward_sections import Reward, Scoring
from posttrain.verify.score import Sample, Scorer


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Write a reward script and return its path."""

    def write(text: str, name: str = "mine.py") -> Path:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return write


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """Factory of scorers that are closed after the test: `scorer(reward, ..., max_error_rate=1.0)`; a reward is a dict
    or its `use`.
    """
    made: list[Scorer] = []

    def make(*rewards: dict[str, Any] | str, base_dir: Path | None = None, **scoring: Any) -> Scorer:
        sections = [Reward.model_validate({"use": r} if isinstance(r, str) else r) for r in rewards]
        made.append(Scorer(sections, Scoring.model_validate({"workers": 1, **scoring}), base_dir))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def samples() -> Callable[..., list[Sample]]:
    """Factory of samples, one per row, with uids r0, r1, ... in groups of `group_size`."""

    def make(rows: list[dict[str, Any]], completion: str = "x", group_size: int = 4) -> list[Sample]:
        return [Sample(completion, {"uid": f"r{i}", **row}, group=i // group_size) for i, row in enumerate(rows)]

    return make


Answer = Callable[[dict[str, Any], int], tuple[int, Any]]  # (request body, request number) -> (status, reply)


class StubJudge:
    """A local chat endpoint that answers with a function of the test and records every request.

    `answer` returns (200, text), or (status, anything) for an error; a reply that is not text is sent unchanged.
    """

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.together = self.most_together = 0
        lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(stub.bodies)
                    stub.bodies.append({"path": self.path, **body})
                    stub.headers.append(dict(self.headers))
                    stub.together += 1
                    stub.most_together = max(stub.most_together, stub.together)
                status, reply = answer(body, number)
                with lock:
                    stub.together -= 1
                message = {"choices": [{"message": {"role": "assistant", "content": reply}}]}
                data = json.dumps(message if status == 200 and isinstance(reply, str) else reply).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                if status == 429:
                    self.send_header("Retry-After", "0.05")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def stub() -> Iterator[Callable[[Answer], StubJudge]]:
    """Factory of local endpoints that are closed after the test: `stub(lambda body, number: (200, "Score: 7"))`."""
    made: list[StubJudge] = []

    def make(answer: Answer) -> StubJudge:
        made.append(StubJudge(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()

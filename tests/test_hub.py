"""Checks of a hub id before a run: the local cache, the hub's answer, and no connection."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from posttrain import hub
from posttrain.models.model_paths import Place
from posttrain.models.stored_names import list_module_names


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A local hub that answers every request with this status and records the requested paths."""
    answers = [200]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(answers[0])
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asked = hub._request_status
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(hub, "_request_status", lambda url: asked(url.replace(f"https://{hub.host()}", address)))
    yield answers
    server.shutdown()


@pytest.mark.parametrize(
    ("code", "why"), [(200, ""), (404, "has no such model"), (401, "has no such model"), (403, ""), (500, "")]
)
def test_missing_or_private_repository_from_the_hubs_status(code: int, why: str, status: list[int]) -> None:
    status[0] = code
    assert why in hub.explain_missing("org/x", "model") and bool(why) == bool(hub.explain_missing("org/x", "model"))


def test_missing_repository_may_be_private_with_a_token(status: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    status[0] = 404
    monkeypatch.setenv("HF_TOKEN", "x")
    assert hub.explain_missing("org/x", "dataset") == ""


def test_hub_is_not_asked_for_cached_ids_or_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_request_status", lambda _url: pytest.fail("asked"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.explain_missing("org/x", "model") == "HF_HUB_OFFLINE=1 is set, and the local cache does not have it"
    (cache / "hub" / "models--org--x" / "snapshots" / "abc").mkdir(parents=True)
    assert hub.explain_missing("org/x", "model") == ""
    assert hub.explain_missing("org/x", "dataset")
    (cache / "datasets" / "org___x").mkdir(parents=True)
    assert hub.explain_missing("org/x", "dataset") == ""


def test_missing_connection_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = hub._request_status
    monkeypatch.setattr(hub, "_request_status", lambda _url: asked("http://127.0.0.1:1/x"))
    assert "cannot be reached, and the local cache does not have it" in hub.explain_missing("org/x", "model")


def test_module_names_of_a_cached_model_except_experts(cache: Path) -> None:
    folder = cache / "hub" / "models--org--x" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.layers.0.self_attn.q_proj.weight": "a"}}))
    assert list_module_names(Place("hub", "org/x")) == {"q_proj", "lm_head"}
    index.write_text(json.dumps({"weight_map": {"model.layers.0.mlp.experts.0.w1.weight": "a"}}))
    assert list_module_names(Place("hub", "org/x")) == frozenset()
    index.write_text("{")
    assert list_module_names(Place("hub", "org/x")) == frozenset() == list_module_names(Place("hub", "org/other"))

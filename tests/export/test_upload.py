"""Uploads to a local hub server: what is sent, and how refusals and time-outs are reported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from posttrain.errors import UserError
from posttrain.export import upload

from .conftest import byte_level, small

TOKEN = "hf_" + "s3cret" * 5
Export = Callable[..., subprocess.CompletedProcess[str]]


class Hub(ThreadingHTTPServer):
    """The part of the hub's API that an upload uses. files: committed files by name; statuses: status codes to
    return instead, by the end of a path.
    """

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()
        self.statuses: dict[str, int] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None: ...

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, value: Any, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refused(self) -> bool:
        status = next((s for end, s in self.server.statuses.items() if self.path.endswith(end)), None)
        if status:
            self._answer({"error": f"no: {self.headers.get('Authorization')}"}, status)
        return status is not None

    def do_GET(self) -> None:
        if not self._refused():
            self._answer({"id": "me/mine", "private": True, "siblings": [], "tags": [], "downloads": 0, "likes": 0})

    def do_PUT(self) -> None:
        self.server.stored[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        body = self._body()
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self._refused():
            return
        if self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            self._answer({"url": f"{self.server.url}/me/mine", "name": "me/mine", "id": "1"})
        elif self.path.endswith("/validate-yaml"):
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            large = {f["path"] for f in files if f["path"].endswith(".safetensors")}
            modes = [
                {"path": f["path"], "uploadMode": "lfs" if f["path"] in large else "regular", "shouldIgnore": False}
                for f in files
            ]
            self._answer({"files": modes})
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{self.server.url}/store/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        else:
            import base64

            for line in body.decode().splitlines():
                found = json.loads(line)
                value = found["value"]
                if found["key"] == "file":
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
                elif found["key"] == "lfsFile":
                    self.server.files[value["path"]] = self.server.stored[value["oid"]]
            self._answer(
                {"success": True, "commitOid": "c0ffee", "commitUrl": f"{self.server.url}/me/mine/commit/c0ffee"}
            )


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A reserved port that no other process gets; a hub may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.fixture
def hub(port: int) -> Iterator[Hub]:
    server = Hub(port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    words = byte_level()
    small("llama", words).save_pretrained(tmp_path / "mine")
    words.save_pretrained(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def export(python_that_forks: Any, port: int, home: Path) -> Iterator[Export]:
    """Run `posttrain export MODEL --to hub:me/mine` in a separate process: huggingface_hub reads its variables only
    once.
    """
    drop = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN")
    given = {k: v for k, v in os.environ.items() if k not in drop}
    given |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    given |= {"NO_PROXY": "*"}
    with python_that_forks(given, "posttrain.export.run posttrain.cli.app") as python:

        def call(model: Path, *options: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
            environment = {**given, **({"HF_TOKEN": token} if token else {})}
            command = [python, "-m", "posttrain", "export", str(model), "--to", "hub:me/mine", *options]
            return subprocess.run(command, cwd=model.parent, env=environment, capture_output=True, text=True)

        yield call


def test_upload_is_private_complete_and_prints_no_token(export: Export, hub: Hub, model: Path) -> None:
    done = export(model, "--json", "--license", "mit")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["url"], report["commit"], report["private"]) == (f"{hub.url}/me/mine", "c0ffee", True)
    (created,) = hub.created
    assert created["name"] == "mine" and created["organization"] == "me"
    assert created.get("private") is True or created.get("visibility") == "private"
    kept = Path(report["path"] if os.path.isabs(report["path"]) else model.parent / report["path"])
    assert hub.files == {p.name: p.read_bytes() for p in kept.iterdir() if p.name != "export.json"}
    assert {"README.md", "model.safetensors", "tokenizer.json"} <= set(hub.files)
    card = hub.files["README.md"].decode()
    assert "license: mit" in card and 'from_pretrained("me/mine"' in card
    assert hub.tokens == {f"Bearer {TOKEN}"} and TOKEN not in done.stdout + done.stderr

    hub.statuses["/repos/create"] = 409
    again = export(model, "--overwrite", "--public")
    assert again.returncode == 0 and "private    yes" in again.stdout, "it is there, and stays private"


def test_adapter_on_a_hub_base_is_uploaded_unmerged(export: Export, hub: Hub, model: Path, home: Path) -> None:
    """The base is in the local hub cache, as after a training."""
    import shutil

    from posttrain.models.load import load
    from posttrain.models.save import save
    from posttrain.recipe.sections import Model

    cache = home / "hub" / "models--org--base"
    shutil.copytree(model, cache / "snapshots" / "abc")
    (cache / "snapshots" / "abc" / "README.md").write_text("---\nlicense: gemma\n---\n")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    section = {"path": str(model), "device": "cpu", "lora": {"rank": 2}}
    adapter = model.parent / "adapter"
    save(load(Model.model_validate(section), model.parent, training=True), adapter, verify=False)
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"base_model_name_or_path": "org/base"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / "optimizer.pt").write_text("of a checkpoint")
    done = export(adapter, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["to"] == "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md"} <= set(hub.files)
    assert "optimizer.pt" not in hub.files and "model.safetensors" not in hub.files
    card = hub.files["README.md"].decode()
    for line in ("base_model: org/base", "base_model_relation: adapter", "license: gemma", "AutoPeftModelForCausalLM"):
        assert line in card
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"] == "org/base"


@pytest.mark.parametrize(
    ("ends", "status", "said"),
    [
        ("/repos/create", 403, "the token must be allowed to write there"),
        ("/preupload/main", 507, "upload it with: hf upload me/mine"),  # status 500 is retried for half a minute
    ],
)
def test_upload_refusals_are_reported(export: Export, hub: Hub, model: Path, ends: str, status: int, said: str) -> None:
    hub.statuses[ends] = status
    done = export(model)
    assert done.returncode == (2 if status == 403 else 1)
    assert f"the hub refuses me/mine ({status})" in done.stderr and said in done.stderr
    assert TOKEN not in done.stdout + done.stderr and "Traceback" not in done.stderr
    assert (model.parent / "exports" / "mine" / "hub-me-mine" / "model.safetensors").is_file(), (
        "it can be uploaded later"
    )


def test_unreachable_hub_is_reported(export: Export, model: Path) -> None:
    done = export(model)
    assert done.returncode == 1 and "the hub cannot be reached" in done.stderr and "hf upload" in done.stderr


@pytest.mark.usefixtures("hub")
def test_missing_login_is_reported_before_anything_is_written(export: Export, model: Path) -> None:
    done = export(model, token=None)
    assert done.returncode == 2 and "not signed in to the hub" in done.stderr and "hf auth login" in done.stderr
    assert not (model.parent / "exports").exists()


def test_offline_mode_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"HF_HUB_OFFLINE=1 is set(.|\n)*unset HF_HUB_OFFLINE"):
        upload.check_login()


@pytest.mark.parametrize("name", ["", "mine", "me/", "me/a/b", "me/a b", "/me"])
def test_repository_names(name: str) -> None:
    with pytest.raises(UserError, match="is not a model name of the hub"):
        upload.check_name(name)

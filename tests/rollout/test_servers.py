"""Servers of a run: their GPUs, how they are started, and how weights are sent to them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig

from posttrain.errors import EngineError, RecipeError, UserError
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection, Vllm
from posttrain.rollout import local_server, servers, vllm_start
from posttrain.rollout.server_answers import check_matches
from posttrain.rollout.server_list import ServerList
from posttrain.rollout.vllm_start import EngineSpec


def section(size: int, **server: Any) -> EngineSection:
    values = {"tensor_parallel": size, **({"server": server} if server else {})}
    return EngineSection.model_validate({"engine": "vllm", "vllm": values})


def test_tensor_parallel_engines_get_consecutive_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 1 to 4 form two engines of two. Training processes on other machines could not reach them."""
    vllm = section(2, devices=[1, 2, 3, 4]).vllm
    assert vllm.places == [(1, 2), (3, 4)] and section(1, devices=[1, 2]).vllm.places == [(1,), (2,)]
    assert section(2, urls=["http://a:1"]).vllm.places == []
    counts = [section(2, **server).vllm.servers for server in ({"devices": [1, 2, 3, 4]}, {"urls": ["http://a:1"]})]
    assert counts == [2, 1] and section(1, file="servers.txt").vllm.servers == 1 and section(1).vllm.servers == 0
    monkeypatch.setenv("WORLD_SIZE", "4")
    servers.check_one_machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match=r"2 training processes are on other machines(.|\n)*server\.urls"):
        servers.check_one_machine()


def test_server_addresses_in_the_recipe_or_in_a_file(tmp_path: Path) -> None:
    """A list is short for `urls`, one address for a list of one, any other text for `file`; a file has one address per
    line."""
    for short, urls, file in (
        (["http://a:1", "http://b:2"], ["http://a:1", "http://b:2"], None),
        ("http://a:1", ["http://a:1"], None),
        ("servers.txt", [], "servers.txt"),
    ):
        server = Vllm.model_validate({"server": short}).server
        assert server is not None and (server.urls, server.file) == (urls, file)
    with pytest.raises(ValidationError, match="give one of `urls`, `file` and `devices`"):
        Vllm.model_validate({"server": {"urls": ["http://a:1"], "file": "servers.txt"}})
    file = tmp_path / "servers.txt"
    file.write_text("# node 2\nhttp://a:1\n\nhttp://b:2/  # slow\nhttp://a:1/\n")
    assert servers.read_addresses("servers.txt", tmp_path) == ["http://a:1", "http://b:2"]
    file.write_text("http://a:1\nnode3:8100\n")
    with pytest.raises(UserError, match=r"servers.txt:2  `node3:8100` is no address of a server\n  http://HOST:PORT"):
        servers.read_addresses("servers.txt", tmp_path)
    file.write_text("# none yet\n")
    with pytest.raises(UserError, match=r"servers.txt  no server is named there"):
        servers.read_addresses("servers.txt", tmp_path)
    with pytest.raises(UserError, match=r"rollout.vllm.server.file not found: none.txt"):
        servers.read_addresses("none.txt", tmp_path)


def test_several_engines_on_one_gpu_divide_its_memory() -> None:
    shared = section(1, devices=[1, 2, 1]).vllm
    assert shared.places == [(1,), (2,), (1,)] and shared.engines_a_gpu == 2 and shared.share == 0.45
    assert section(1, devices=[1, 2]).vllm.share == section(1, urls=["http://a:1"]).vllm.share == 0.9
    assert section(2, devices=[1, 2, 1, 2]).vllm.share == 0.45
    with pytest.raises(ValidationError, match=r"gpu_memory 0\.6 is an engine's share, and 2 of them have the same GPU"):
        Vllm.model_validate({"gpu_memory": 0.6, "server": {"devices": [1, 1]}})
    assert Vllm.model_validate({"gpu_memory": 0.5, "server": {"devices": [1, 1]}}).share == 0.5


@pytest.mark.parametrize(
    ("size", "server", "told"),
    [
        (2, {"devices": [1, 2, 3]}, "names 3 GPUs; with vllm.tensor_parallel: 2 it must be a multiple"),
        (2, {"devices": [1, 2, 3, 3]}, "names a GPU twice for one engine: 3, 3"),
    ],
)
def test_invalid_server_settings_raise(size: int, server: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        section(size, **server)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [(9, 3, "1, 3, 9"), (8, 2, "1, 2, 4, 8"), (12, 8, "1, 2, 4"), (6, None, "1, 2, 3, 6")],
)
def test_head_counts_not_divisible_by_the_gpus_raise(heads: int, kv_heads: int | None, fitting: str) -> None:
    """Of 12 heads with 8 KV heads, 3, 6 and 12 GPUs divide only the heads."""
    config = LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    for size in range(1, 13):
        if str(size) in fitting.split(", "):
            vllm_start.check_divisible(config, size)
        else:
            with pytest.raises(RecipeError, match=f"(?s){size} GPUs cannot divide the model's {heads} .*: {fitting}$"):
                vllm_start.check_divisible(config, size)


def test_server_with_too_few_gpus_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    vllm_start.check_settings(Vllm(tensor_parallel=2))  # beside the trainers, each of which has its own visible GPU
    with pytest.raises(RecipeError, match="tensor_parallel is 2, but the server sees 1 GPU"):
        vllm_start.check_settings(section(2, devices=[1, 2]).vllm)


def spec_of(vllm: Vllm, lora_rank: int | None = None) -> EngineSpec:
    return EngineSpec(vllm, torch.bfloat16, 64, lora_rank, (1,))


def server_list(spec: EngineSpec) -> ServerList:
    assert spec.section.server is not None
    return ServerList(spec.section.server, spec, {}, None)


def test_server_sees_only_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens on an address that only this user can reach."""
    seen: dict[str, Any] = {}

    def popen(command: list[str], env: dict[str, str], **_: Any) -> Any:
        seen.update(command=command, env=env)
        return SimpleNamespace(poll=lambda: 0, wait=lambda: 0, pid=1 << 30)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(local_server.subprocess, "Popen", popen)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    vllm = section(2, devices=[2, 3]).vllm
    client = servers.start_client(server_list(spec_of(vllm)), Path("/m"), (2, 3), tmp_path / "log")
    assert seen["env"]["CUDA_VISIBLE_DEVICES"] == "6,7" and client.name == "vLLM on GPU 6 and 7"
    assert client.key == seen["env"]["VLLM_API_KEY"] and client.key not in " ".join(seen["command"])
    assert client.process is not None and client.process.uds is not None
    assert seen["command"][4:6] == ["serve", "/m"]
    assert seen["command"][-2:] == ["--uds", str(client.process.uds)] and "--port" not in seen["command"]
    client.close()


def test_server_command_line() -> None:
    """As an engine beside the trainer, with the middleware in front of its endpoints; its memory is not shared."""
    one, two = (servers.server_arguments(spec_of(Vllm(tensor_parallel=n)), Path("/m")) for n in (1, 2))
    beside = vllm_start.arguments(spec_of(Vllm()), Path("/m"))
    differ = {key: value for key, value in one.items() if beside.get(key) != value}
    assert differ == {
        "middleware": "posttrain.rollout.vllm_process.Guard",
        "served_model_name": "base",
        "uvicorn_log_level": "warning",
        "disable_fastapi_docs": True,
    }
    more = {key: value for key, value in two.items() if one.get(key) != value}
    assert more == {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    assert servers.server_arguments(spec_of(Vllm(sleep=True)), Path("/m"))["enable_sleep_mode"] is False
    json.dumps(one)


class Opening:
    """A client whose server takes a while to start. `log`: when each server started and was ready."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self.name, self.log, self.closed = name, log, 0
        log.append(("began", name))

    async def open(self, wanted: Any) -> None:
        assert wanted["max_model_len"] == 64
        await asyncio.sleep(0.05 if self.name != "server-2" else 0.02)
        self.log.append(("ready", self.name))
        if self.name == "server-2":
            raise EngineError("no room on that GPU")

    def close(self) -> None:
        self.closed += 1


def test_engines_of_one_gpu_start_one_after_another(
    loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of another GPU do not wait for them. If one fails, all started engines end, and no file remains."""
    log: list[tuple[str, str]] = []
    made: list[Opening] = []

    def start_client(listed: Any, folder: Path, devices: Any, file: Path) -> Opening:
        del devices
        assert (folder / "config.json").is_file() and listed.spec.section.share == 0.45
        made.append(Opening(file.stem, log))
        return made[-1]

    monkeypatch.setattr(servers, "start_client", start_client)
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)
    monkeypatch.setattr(vllm_start, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(EngineError, match="no room on that GPU"):
        servers.make_served(section(1, devices=[1, 2, 1]).vllm, loaded, scratch=tmp_path, max_len=64)
    assert log.index(("ready", "server-0")) < log.index(("began", "server-2")), "two on GPU 1 at once"
    assert log.index(("began", "server-1")) < log.index(("ready", "server-0"))
    assert [one.closed for one in made] == [1, 1, 1] and not (tmp_path / "engine-model").exists()


def test_required_server_settings(loaded: LoadedModel) -> None:
    whole = servers.expected_server(spec_of(Vllm()), loaded)
    with pytest.raises(RecipeError, match=r"http://node2:1  without a GPU, weights can only be sent"):
        check_matches({**whole, "boot_id": "another machine"}, whole, "http://node2:1")
    wanted = servers.expected_server(spec_of(Vllm(), 5), loaded)
    check_matches({**wanted, "boot_id": "another machine"}, wanted, "http://node2:1")
    assert wanted["lora_rank"] == 8, "what vLLM makes of 5"
    assert wanted["model"]["hidden_size"] == 64 and wanted["dtype"] == "bfloat16" and wanted["max_model_len"] == 64

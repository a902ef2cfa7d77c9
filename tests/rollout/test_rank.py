"""Tensor parallelism without vLLM: the keys, how the engine is started, and ranks that read what was sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import LlamaConfig

from posttrain.errors import EngineError, RecipeError
from posttrain.recipe.rollout_sections import EngineSection, Vllm
from posttrain.rollout import core, local_server, rank, remote, vllm_start, wire


class Worker:
    """vLLM's part: rank `number` of 2 keeps its half of the rows of each weight."""

    device = torch.device("cuda")

    def __init__(self, number: int) -> None:
        self.number, self.held = number, dict[str, Tensor]()

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.held = {name: tensor.chunk(2)[self.number].clone() for name, tensor in weights_iterator}


class RankWorker(rank.Rank, Worker):
    reload_weights = Worker.reload_weights
    device = Worker.device


def calling(workers: list[Any]) -> Any:
    return lambda method, args: [getattr(worker, method)(*args) for worker in workers]


def shared_memory() -> list[str]:
    """What this process holds of memory that it shares with others."""
    descriptors = Path("/proc/self/fd")
    return [name for fd in os.listdir(descriptors) if "memfd" in (name := linked(descriptors / fd))]


def linked(path: Path) -> str:
    return os.readlink(path) if path.is_symlink() else ""  # the listing's own descriptor has gone


def test_every_rank_takes_its_part_of_all_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BUCKET_BYTES", 1000)
    named = {f"w{i}": torch.randn(8, 7 * i + 1).to(torch.bfloat16 if i % 2 else torch.float32) for i in range(9)}
    workers = [RankWorker(0), RankWorker(1)]
    assert not shared_memory()
    rank.load(calling(workers), iter(named.items()))
    for name, tensor in named.items():
        assert torch.equal(torch.cat([worker.held[name] for worker in workers]), tensor)
    assert not shared_memory(), "the host's memory is kept"


def test_a_rank_that_reads_something_else_is_named() -> None:
    class Partial(RankWorker):
        def reload_weights(self, weights_iterator: Any) -> None:
            next(weights_iterator)

    named = [("a", torch.ones(4)), ("b", torch.ones(4))]
    with pytest.raises(EngineError, match="stale engine: rank 1 read other weights"):
        rank.load(calling([RankWorker(0), Partial(1)]), named)


def test_ranks_draw_alike() -> None:
    drawn = []
    for worker in (RankWorker(0), RankWorker(1)):
        worker.posttrain_seed(2**62)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1]


def test_no_method_is_one_of_vllm() -> None:
    """vLLM refuses an extension with a name that its worker has."""
    assert [name for name in vars(rank.Rank) if not name.startswith(("__", "posttrain_"))] == []
    assert f"{rank.Rank.__module__}.{rank.Rank.__qualname__}" == rank.EXTENSION


def test_arguments(tmp_path: Path) -> None:
    one, two = (
        core.arguments_here(vllm_start.EngineSpec(Vllm(tensor_parallel=n), torch.bfloat16, 64, None, (1,)), tmp_path)
        for n in (1, 2)
    )
    more = {k: v for k, v in two.items() if one.get(k) != v}
    assert more == {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "worker_extension_cls": rank.EXTENSION,
    }


def section(size: int, **server: Any) -> EngineSection:
    values = {"tensor_parallel": size, **({"server": server} if server else {})}
    return EngineSection.model_validate({"engine": "vllm", "vllm": values})


def test_engines_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs 1 to 4 are two engines of two; one training process of two has the second."""
    vllm = section(2, devices=[1, 2, 3, 4]).vllm
    assert vllm.places == [(1, 2), (3, 4)] and section(1, devices=[1, 2]).vllm.places == [(1,), (2,)]
    assert section(2, urls=["http://a:1"]).vllm.places == []
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert remote.own_servers(vllm.places, "devices") == [(1, (3, 4))]
    with pytest.raises(RecipeError, match="names 1 server for 2"):
        remote.own_servers(vllm.places[:1], "devices")


def test_several_engines_on_one_gpu_divide_it() -> None:
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
        (2, {}, "needs `engine: vllm` and `vllm.server`"),
        (2, {"devices": [1, 2, 3]}, "names 3 GPUs; with vllm.tensor_parallel: 2 it must be a multiple"),
        (2, {"devices": [1, 2, 3, 3]}, "names a GPU twice for one engine: 3, 3"),
    ],
)
def test_what_cannot_be(size: int, server: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        section(size, **server)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fitting"),
    [(9, 3, "1, 3, 9"), (8, 2, "1, 2, 4, 8"), (12, 8, "1, 2, 4"), (6, None, "1, 2, 3, 6")],
)
def test_attention_that_cannot_be_divided(heads: int, kv_heads: int | None, fitting: str) -> None:
    """Of 12 heads with 8 KV heads, 3, 6 and 12 GPUs divide the former alone."""
    config = LlamaConfig(hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=kv_heads)
    for size in range(1, 13):
        if str(size) in fitting.split(", "):
            vllm_start.check_divisible(config, size)
        else:
            with pytest.raises(RecipeError, match=f"(?s){size} GPUs cannot divide the model's {heads} .*: {fitting}$"):
                vllm_start.check_divisible(config, size)


def test_a_server_with_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    vllm_start.check_settings(Vllm())
    with pytest.raises(RecipeError, match="tensor_parallel is 2, but the server sees 1 GPU"):
        vllm_start.check_settings(Vllm(tensor_parallel=2))


def test_a_server_sees_its_gpus_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(local_server, "start_process", lambda *given: seen.update(given[-1]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    server = local_server.LocalServer.start((2, 3), tmp_path / "log")
    assert seen.pop("POSTTRAIN_SERVER_TOKEN")
    assert seen == {"CUDA_VISIBLE_DEVICES": "6,7"} and server.place == "GPU 2 and 3"

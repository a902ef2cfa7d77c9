"""One engine shared by two training processes, without vLLM: a stand-in samples. Processes are threads, each with a
model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt
from posttrain.errors import EngineError, PeerLost
from posttrain.models import adapters, weights
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import Vllm
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Lora
from posttrain.rollout import loop
from posttrain.rollout.engine_group import group_of
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.shared_client import EngineHub, SharedClient, merge_arguments
from posttrain.rollout.shared_engine import SharedEngine
from posttrain.rollout.vllm_engine import spec_of
from posttrain.rollout.vllm_start import READY_FILE

sys.path.append(str(Path(__file__).parents[1]))
from engine_clients import TransformersClient

SAMPLED = Sampling(temperature=0.7, max_new_tokens=12)
WINDOW = 64


class Pair:
    """A stand-in for vLLM and the SharedEngines of two ranks, each with its own model."""

    def __init__(self, loaded: LoadedModel, scratch: Path, **settings: Any) -> None:
        self.models = [loaded, dataclasses.replace(loaded, model=copy.deepcopy(loaded.model))]
        self.threads = ThreadPoolExecutor(2)
        spec = spec_of(Vllm(tensor_parallel=2, **settings), loaded, WINDOW)
        folder = weights.write_config(loaded, scratch / "engine-model")
        if spec.lora_rank is not None:
            weights.write_base(loaded, folder, spec.dtype)
        (folder / READY_FILE).touch()
        self.hub = EngineHub(2)
        (self.client,) = TransformersClient.start(spec, folder, scratch / "log")

        def start(rank: int) -> SharedEngine:
            own = (self.hub,) if rank == 0 else ()
            client = SharedClient(self.hub.path, rank, rank, 2, *own)
            if rank == 0:
                self.hub.attach(self.client)  # rank 1 may have sent requests before
            place = {"scratch": scratch / str(rank)}
            return SharedEngine(spec, self.models[rank], client, group_of(rank, 2), **place)

        self.engines: list[SharedEngine] = self.together(start)

    def together(self, work: Callable[[int], Any]) -> list[Any]:
        """Return what `work` returns or raises for each rank, run concurrently."""

        def attempt(rank: int) -> Any:
            try:
                return work(rank)
            except Exception as error:
                return error

        return list(self.threads.map(attempt, range(2)))

    def disturb(self) -> None:
        """Both models learn the same."""
        for loaded in self.models:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for p in loaded.model.parameters():
                    if p.requires_grad:
                        p.add_(torch.randn(p.shape, generator=generator) * 0.1)

    def sync(self, version: int) -> list[Any]:
        return self.together(lambda rank: self.engines[rank].sync(self.models[rank].model, version))

    def close(self) -> None:
        self.together(lambda rank: self.engines[rank].close())
        self.threads.shutdown()


@pytest.fixture
def pair(loaded: LoadedModel, tmp_path: Path) -> Iterator[Pair]:
    made = Pair(loaded, tmp_path)
    yield made
    made.close()
    assert made.client.ended and not made.hub.home.path.exists()


def test_each_rank_gets_the_rollouts_it_would_get_alone(pair: Pair, prompts: list[Prompt]) -> None:
    """The rollouts do not depend on the rank that requests them. Greedy rollouts equal the trainer's."""
    greedy, local = Sampling(temperature=0.0, max_new_tokens=12), TransformersEngine(pair.models[0], batch_size=8)
    for version in range(3):
        own = pair.together(
            lambda rank: pair.engines[rank].generate(
                prompts, 3, SAMPLED, seed=5, share=range(rank, len(prompts), 2), first_group=10
            )
        )
        found = sorted((r for part in own for r in part), key=lambda r: r.group)
        expected = pair.engines[1].generate(prompts, 3, SAMPLED, seed=5, first_group=10)
        assert [(r.group, r.ids, r.text) for r in found] == [(r.group, r.ids, r.text) for r in expected]
        likeliest = pair.engines[1].generate(prompts, 1, greedy, seed=0)
        assert [r.ids for r in likeliest] == [r.ids for r in local.generate(prompts, 1, greedy, seed=0)]
        assert {r.version for r in found} == {version}
        pair.disturb()
        assert pair.sync(version + 1) == [None, None] and max(engine.gap for engine in pair.engines) < 1e-5
    assert pair.client.told == ["pause", "update", "resume"] * 4, "once for both ranks"


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_synced_alone_or_merged(loaded: LoadedModel, tmp_path: Path, merged: bool) -> None:
    model = adapters.add(loaded.model, Lora(rank=3, alpha=6))
    pair = Pair(dataclasses.replace(loaded, model=model), tmp_path, merge_adapter=merged)
    for version in (1, 2):
        pair.disturb()
        assert pair.sync(version) == [None, None]
        assert max(pair.together(lambda rank: pair.engines[rank].probe(pair.models[rank].model))) < 1e-4
    told = ["update"] * 3 if merged else [f"adapter {version}" for version in range(3)]
    assert [word for word in pair.client.told if word not in ("pause", "resume")] == told
    pair.close()


def test_sync_interrupts_the_requests_of_all_ranks(pair: Pair, prompts: list[Prompt]) -> None:
    """The requests continue with the new weights; each token has the version of its weights."""
    pair.client.cut = 3
    found: list[list[Any]] = [[], []]
    drawing = [
        threading.Thread(
            target=lambda rank=rank: found[rank].extend(
                pair.engines[rank].generate(prompts, 2, SAMPLED, seed=1, share=range(rank, len(prompts), 2))
            )
        )
        for rank in range(2)
    ]
    for thread in drawing:
        thread.start()
    while pair.hub.sampling < len(prompts):
        time.sleep(0.01)
    pair.disturb()
    pair.client.cut = 0
    assert pair.sync(1) == [None, None]
    for thread in drawing:
        thread.join(20)
    versions = [r.versions or (r.version,) * len(r.ids) for part in found for r in part]
    assert len(versions) == 2 * len(prompts) and any(set(own) == {0, 1} for own in versions)
    assert all(list(own) == sorted(own) and own[:3] == (0,) * len(own[:3]) for own in versions)


def test_sleep_and_wake_are_collective(loaded: LoadedModel, tmp_path: Path, prompts: list[Prompt]) -> None:
    pair = Pair(loaded, tmp_path, sleep=True)
    pair.together(lambda rank: pair.engines[rank].sleep())
    pair.disturb()
    assert pair.sync(1) == [None, None] and not pair.engines[0].generates_during_updates
    assert pair.client.told[3:] == ["sleep without weights", "pause", "wake", "update", "resume"]
    assert len(pair.together(lambda rank: pair.engines[rank].generate(prompts, 1, SAMPLED, seed=0))[1]) == len(prompts)
    pair.close()


def test_rank_failing_in_a_sync_does_not_block_the_others(pair: Pair) -> None:
    """The failing rank raises its own error; the other rank raises it too instead of waiting."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise EngineError("no room for the forward pass")

    def sync(rank: int) -> None:
        pair.engines[rank].sync(Broken() if rank else pair.models[0].model, 1)

    other, own = pair.together(sync)
    assert str(own) == "no room for the forward pass"
    assert isinstance(other, PeerLost) and other.problems[0].what == "rank 1 failed: no room for the forward pass"


def test_failure_in_another_group_names_the_failed_rank(pair: Pair) -> None:
    """With several engines a rank may stop because a rank of another engine has failed: the error names one rank, not a
    chain."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise PeerLost("rank 3 failed: no room for the forward pass")

    other, own = pair.together(lambda rank: pair.engines[rank].sync(Broken() if rank else pair.models[0].model, 1))
    for error in (other, own):
        assert isinstance(error, PeerLost) and error.problems[0].what == "rank 3 failed: no room for the forward pass"


def test_rank_failing_to_send_reports_before_it_gathers_remaining_weights(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gathering the remaining sharded weights needs all ranks, and a rank that waits for this one cannot take part."""
    usual, read_rest = weights.weight_stream, threading.Barrier(2)

    @contextlib.contextmanager
    def divided(model: Any, **settings: Any) -> Iterator[Any]:
        with usual(model, **settings) as stream:
            try:
                yield stream
            finally:
                read_rest.wait(5)

    def send(_: Any) -> None:
        raise torch.OutOfMemoryError("no room for a bucket")

    monkeypatch.setattr(weights, "weight_stream", divided)
    monkeypatch.setattr(pair.engines[1].sender, "send", send)
    other, own = pair.sync(1)
    assert isinstance(own, torch.OutOfMemoryError)
    assert isinstance(other, PeerLost) and other.problems[0].what == "rank 1 failed: no room for a bucket"


def test_dead_engine_raises_on_all_ranks(pair: Pair, prompts: list[Prompt]) -> None:
    pair.client.ended = True
    for error in pair.together(lambda rank: pair.engines[rank].generate(prompts, 1, SAMPLED, seed=0)):
        assert isinstance(error, EngineError) and "the stand-in has ended" in str(error)
    for error in pair.sync(1):
        assert isinstance(error, EngineError)


def test_lost_rank_does_not_block_the_others(pair: Pair, prompts: list[Prompt]) -> None:
    """Rank 1's connection ends without a message, as when it is killed; then rank 0's process ends."""
    client = pair.engines[1].clients[0]
    loop.run(_abort(client))
    with pytest.raises(PeerLost, match="rank 1 has left the engine"):
        pair.engines[0].sync(pair.models[0].model, 1)
    assert len(pair.engines[0].generate(prompts, 1, SAMPLED, seed=0)) == len(prompts)
    with pytest.raises(PeerLost, match="the process that holds the engine has ended"):
        pair.engines[1].generate(prompts, 1, SAMPLED, seed=0)
    with pytest.raises(PeerLost, match="the process that holds the engine has ended"):
        SharedClient(pair.hub.path.with_name("none"), 1, 1, 2)


async def _abort(client: SharedClient) -> None:
    client._writer.transport.abort()


def test_path_too_long_for_a_socket_file_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(EngineError, match="AF_UNIX path too long") as raised:
        EngineHub(2)
    assert "TMPDIR" in raised.value.problems[0].hint and list(deep.iterdir()) == []


def test_every_rank_holds_the_bucket_on_its_gpu() -> None:
    """A worker gets the buffers of all ranks and reads the one on its GPU; files come from rank 0."""
    described = {"names": ["a"], "shapes": [[2]], "dtypes": ["bfloat16"]}
    asked = [{"call": "update_weights", "info": {"gpu": {**described, "buffers": {f"GPU-{n}": [n]}}}} for n in range(2)]
    merged = merge_arguments("transfer", asked)
    assert merged == {
        "call": "update_weights",
        "info": {"gpu": {**described, "buffers": {"GPU-0": [0], "GPU-1": [1]}}},
    }
    files = [{"call": "update_weights", "info": info} for info in ({"file": "/proc/1/fd/3"}, {})]
    assert merge_arguments("transfer", files) == files[0]
    assert merge_arguments("load_adapters", [{"folders": {"a": 1}}, {"folders": {}}]) == {"folders": {"a": 1}}
    with pytest.raises(EngineError, match="call `score` with different arguments"):
        merge_arguments("score", [{"ids": [1, 2]}, {"ids": [1, 3]}])
    asked[1]["info"]["gpu"]["names"] = ["b"]
    with pytest.raises(EngineError, match="different weights"):
        merge_arguments("transfer", asked)

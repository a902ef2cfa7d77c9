"""The vLLM servers of a run: those that it starts on this machine's other GPUs, or those that others have started."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from posttrain.errors import EngineError, RecipeError, count_noun
from posttrain.models import adapters
from posttrain.recipe.rollout_sections import Server, Vllm
from posttrain.rollout import compile_cache, local_server, loop, server_key, vllm_start, weights
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.server_client import ServerClient
from posttrain.rollout.vllm_engine import VllmEngine, spec_of
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.rollout.weight_transfer import LocalSender, NcclSender, WeightSender
from posttrain.run import ranks
from posttrain.run.environment import package_version

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

T = TypeVar("T")
GUARD = "posttrain.rollout.vllm_process.Guard"


def make_served(section: Vllm, loaded: LoadedModel, *, scratch: Path, max_len: int) -> VllmEngine:
    """A VllmEngine on the servers of `section.server`, which this run has to itself. See `make_engine`."""
    assert section.server is not None
    vllm_start.check_divisible(loaded.model.config, section.tensor_parallel)
    spec = spec_of(section, loaded, max_len)
    clients: list[ServerClient] = []
    try:
        if section.server.devices:
            _start(spec, section.server, loaded, scratch, clients)
        else:
            for _, url in servers_of_this_rank(section.server.urls, "urls"):
                key, timeout = server_key.client_key(url), section.server.timeout_s
                clients.append(ServerClient(url, key, timeout_s=timeout, eos_ids=spec.eos_ids))
            loop.run_all([client.open(expected_server(spec, loaded)) for client in clients])
        sender = sender_for(clients, spec, loaded.device)
    except BaseException:
        for client in clients:
            client.close()
        raise
    return VllmEngine(spec, loaded, clients, sender, scratch=scratch, apart=True)


def _start(spec: EngineSpec, server: Server, loaded: LoadedModel, scratch: Path, clients: list[ServerClient]) -> None:
    """Start the servers of this run and begin a session with each; `clients` gets them as they start.

    Those of one GPU start one after the other, since each measures the memory that is free there.
    """
    vllm_start.require_vllm()
    folder = write_model(loaded, spec, scratch / "engine-model")
    turns: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for number, devices in servers_of_this_rank(spec.section.places, "devices"):
        turns.setdefault(devices[0], []).append((number, devices))

    async def start_in_turn(waiting: Sequence[tuple[int, tuple[int, ...]]], path: Path) -> None:
        for number, devices in waiting:
            log = scratch / f"server-{number}.log"
            clients.append(start_client(spec, server, path, devices, log))
            try:
                await clients[-1].open(expected_server(spec, loaded))
            except EngineError as cause:
                if said := vllm_start.last_error(log):
                    raise vllm_start.error_with_hint(said, spec.section, "did not start").at(str(log)) from cause
                raise

    try:
        with compile_cache.stable_path(folder, vllm_start.cache_folder(), ranks.rank()) as path:
            loop.run_all([start_in_turn(waiting, path) for waiting in turns.values()])
    finally:
        shutil.rmtree(folder)  # read, and under LoRA as large as the model


def start_client(spec: EngineSpec, server: Server, folder: Path, devices: Sequence[int], log: Path) -> ServerClient:
    """A client of a process that starts on those GPUs of the machine; where there is none, on the CPU.

    Only this user can reach it: it listens on a socket file.
    """
    gpu = torch.cuda.is_available()
    numbers = [local_server.check_not_training(device) for device in devices] if gpu else []
    visible = [local_server.visible_device(number, local_server.DEVICES) for number in numbers]
    vllm_start.prepare_environment()
    key = secrets.token_urlsafe(32)
    process = LocalServer.start(server_arguments(spec, folder), key, devices=visible, log=log)
    return ServerClient("", key, timeout_s=server.timeout_s, eos_ids=spec.eos_ids, process=process)


def server_arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Arguments of `vllm serve`, without those that say where it listens."""
    size = spec.section.tensor_parallel
    parallel = {"tensor_parallel_size": size, "distributed_executor_backend": "mp"} if size > 1 else {}
    serving = {
        "enable_sleep_mode": False,  # nothing else wants the memory there
        "middleware": GUARD,
        "served_model_name": "base",
        "uvicorn_log_level": "warning",
        "disable_fastapi_docs": True,
    }
    return vllm_start.arguments(spec, folder) | parallel | serving


def write_model(loaded: LoadedModel, spec: EngineSpec, folder: Path) -> Path:
    """What vLLM is started on: the dense base under adapters, else no weights."""
    weights.write_config(loaded, folder)
    return folder if spec.lora_rank is None else weights.write_base(loaded, folder, spec.dtype)


def sender_for(clients: Sequence[ServerClient], spec: EngineSpec, device: torch.device) -> WeightSender | None:
    """What brings weights from `device` to the servers; None where adapters are loaded."""
    if spec.lora_rank is not None:
        return None
    if device.type == "cuda":
        vllm_start.require_vllm()
        with compile_cache.keep_compiler_settings():  # NCCL is called by vLLM's wrapper
            return NcclSender(clients, device, spec.dtype)
    if elsewhere := [client.name for client in clients if not client.is_here]:
        raise RecipeError(
            "without a GPU, weights go to servers on the trainer's own machine only",
            where=elsewhere[0],
            hint="start `posttrain serve` there, or train on a GPU",
        )
    return LocalSender(clients, device, spec.dtype)


def expected_server(spec: EngineSpec, loaded: LoadedModel) -> dict[str, Any]:
    """What a server must say of itself (`vllm_process.about`) to be this run's."""
    config = adapters.causal_of(loaded.model).config
    values = {
        "model": json.loads(config.to_json_string(use_diff=False)),
        "device": loaded.device.type,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "max_model_len": spec.window,
        "logprobs_mode": "processed_logprobs",
        "lora_rank": None if spec.lora_rank is None else vllm_start.lora_slot(spec.lora_rank),
        "workers": spec.section.tensor_parallel,
    }
    here = package_version("vllm")
    return values | ({"vllm": here} if here else {})


def servers_of_this_rank(places: Sequence[T], key: str) -> list[tuple[int, T]]:
    """(number, server) of the servers of this training process. Raises RecipeError if there are too few."""
    if places and len(places) < ranks.world():
        raise RecipeError(
            f"rollout.vllm.server.{key} names {count_noun(len(places), 'server')} for "
            f"{count_noun(ranks.world(), 'training process', 'training processes')}",
            hint="each needs a server of its own: name more, or train with fewer --gpus",
        )
    return list(enumerate(places))[ranks.rank() :: ranks.world()]

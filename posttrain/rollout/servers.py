"""The vLLM servers of a run: those that it starts on this machine's other GPUs, or those that others have started."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from posttrain import terminal
from posttrain.errors import EngineError, RecipeError
from posttrain.models import adapters, weights
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import compile_cache, local_server, loop, vllm_process, vllm_start
from posttrain.rollout.engine_client import TrainingRanks, close_all
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.served_engine import ServedEngine, reason
from posttrain.rollout.server_client import ServerClient
from posttrain.rollout.server_list import ServerList, read_addresses
from posttrain.rollout.vllm_engine import spec_of
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.run import ranks
from posttrain.run.environment import package_version

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

GUARD = "posttrain.rollout.vllm_process.Guard"


def make_served(
    section: Vllm,
    loaded: LoadedModel,
    *,
    scratch: Path,
    max_len: int,
    training: TrainingRanks | None = None,
    base_dir: Path | None = None,
) -> ServedEngine:
    """Return a ServedEngine on the servers of `section.server`, which this run has to itself (`make_engine`)."""
    assert section.server is not None
    training = training or TrainingRanks()
    vllm_start.check_divisible(loaded.model.config, section.tensor_parallel)
    spec = spec_of(section, loaded, max_len)
    servers = ServerList(section.server, spec, expected_server(spec, loaded), base_dir)
    clients: list[ServerClient] = []
    try:
        if section.server.devices:
            check_one_machine()
            _start(servers, loaded, scratch, clients, starts=training.is_main)
        elif training.is_main:
            clients = open_servers(servers)
        return ServedEngine(loaded, clients, servers, training, scratch=scratch)
    except BaseException:
        close_all(clients)
        raise


def open_servers(servers: ServerList) -> list[ServerClient]:
    """Open a session with each server that the recipe names, and return the clients of those that answer. Raises the
    error of a server if none answers in time, or if a server does not match the run."""
    section = servers.section
    named = read_addresses(section.file, servers.base_dir) if section.file is not None else servers.addresses()
    clients = [servers.client(address) for address in named or ()]
    try:
        opened = loop.run_all([loop.catch(client.open(servers.wanted), EngineError) for client in clients])
        errors = dict(zip(clients, opened, strict=True))
        found = [client for client in clients if errors[client] is None]
        for client, error in errors.items():
            if error is not None:
                if not found:
                    raise error
                terminal.note(f"{client.name}  is not reachable, and joins when it is: {reason(error)}")
                client.close()
    except BaseException:
        close_all(clients)
        raise
    return found


def check_one_machine() -> None:
    """Raise RecipeError if training processes run on other machines than the servers that the run starts."""
    here = ranks.local_world()
    if here < ranks.world():
        raise RecipeError(
            f"{local_server.DEVICES}: {ranks.world() - here} training processes are on other machines",
            hint="start `posttrain serve` with --host 0.0.0.0, and name its address in rollout.vllm.server.urls",
        )


def _start(
    servers: ServerList, loaded: LoadedModel, scratch: Path, clients: list[ServerClient], *, starts: bool
) -> None:
    """Start the servers of this run and open a session with each; `clients` receives them as they start.

    Servers on the same GPU start one after the other, since each measures the free memory. starts: False on ranks that
    only contribute their shards of a divided base.
    """
    spec = servers.spec
    if not starts:
        if spec.lora_rank is not None:
            weights.drain_stream(loaded.model, weights.dense_weights(loaded.model))
        return
    vllm_start.require_vllm()
    folder = write_model(loaded, spec, scratch / "engine-model")
    turns: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for number, devices in enumerate(spec.section.places):
        turns.setdefault(devices[0], []).append((number, devices))

    async def start_in_turn(waiting: Sequence[tuple[int, tuple[int, ...]]], path: Path) -> None:
        for number, devices in waiting:
            clients.append(start_client(servers, path, devices, scratch / f"server-{number}.log"))
            await clients[-1].open(servers.wanted)

    try:
        with compile_cache.stable_path(folder, vllm_start.cache_folder(), ranks.rank()) as path:
            loop.run_all([start_in_turn(waiting, path) for waiting in turns.values()])
    finally:
        shutil.rmtree(folder)  # vLLM has read it, and under LoRA it is as large as the model


def start_client(servers: ServerList, folder: Path, devices: Sequence[int], log: Path) -> ServerClient:
    """Start a server process on these GPUs of the machine (on the CPU without GPUs) and return its client.

    Only this user can reach the server: it listens on a socket file.
    """
    gpu = torch.cuda.is_available()
    numbers = [local_server.check_not_training(device) for device in devices] if gpu else []
    visible = [local_server.visible_device(number, local_server.DEVICES) for number in numbers]
    vllm_start.prepare_environment()
    key = secrets.token_urlsafe(32)
    process = LocalServer.start(
        servers.spec.section, server_arguments(servers.spec, folder), key, devices=visible, log=log
    )
    return servers.client("", key, process)


def server_arguments(spec: EngineSpec, folder: Path) -> dict[str, Any]:
    """Return the arguments of `vllm serve`, except those that say where it listens."""
    size = spec.section.tensor_parallel
    parallel = {"tensor_parallel_size": size, "distributed_executor_backend": "mp"} if size > 1 else {}
    serving = {
        "enable_sleep_mode": False,  # nothing else uses the memory there
        "middleware": GUARD,
        "served_model_name": "base",
        "uvicorn_log_level": "warning",
        "disable_fastapi_docs": True,
    }
    return vllm_start.arguments(spec, folder) | parallel | serving


def write_model(loaded: LoadedModel, spec: EngineSpec, folder: Path) -> Path:
    """Write the model's folder for vLLM: the dense base for adapters, otherwise no weights."""
    weights.write_config(loaded, folder)
    return folder if spec.lora_rank is None else weights.write_base(loaded, folder, spec.dtype)


def expected_server(spec: EngineSpec, loaded: LoadedModel) -> dict[str, Any]:
    """Return the values that a server's description must have (`vllm_process.about`) to serve this run."""
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
    if spec.lora_rank is None and loaded.device.type != "cuda":
        values["boot_id"] = vllm_process.boot_id()  # weights are sent by files in memory
    here = package_version("vllm")
    return values | ({"vllm": here} if here else {})

"""Code that runs in vLLM's own processes: receives the trainer's weights.

vLLM imports this module in each of its workers, through `worker_extension_cls` (`Extension`); nothing else imports it.
Both forms of vLLM's weight transfer are supported: up to 0.23 the worker reloads layer by layer and a weight transfer
engine only receives; in later versions the engine does both.

vLLM's own `ipc` backend for processes on one GPU is not used: it unpickles what it receives; in 0.23 it cannot be
imported without ray, and releases a shared buffer once for every chunk that it reads, which leaks the trainer's memory.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.config import CacheConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from posttrain.rollout import engine_process
from posttrain.rollout.nccl_group import NcclGroup
from posttrain.rollout.weight_transfer import LOCAL_BACKEND, sizes_of, unpack

RENDEZVOUS_FILE = "file://"


@dataclass
class JoinInfo(WeightTransferInitInfo):
    """Arguments for joining the NCCL group of the trainer and this engine's workers; empty for memory that both
    processes map."""

    group_id: str = ""
    size: int = 0


@dataclass
class BucketInfo(WeightTransferUpdateInfo):
    """Location of some weights: a safetensors file in memory, bytes on the GPU that this process maps, or an NCCL
    broadcast."""

    file: str | None = None
    gpu: dict[str, Any] | None = None
    nccl: dict[str, Any] | None = None


class LocalTransfer(WeightTransferEngine[JoinInfo, BucketInfo]):  # type: ignore[misc]
    """Receives weights from a trainer's `weight_transfer.LocalSender` or `NcclSender`."""

    init_info_cls = JoinInfo
    update_info_cls = BucketInfo

    group: NcclGroup | None = None
    repacks = False  # whether `finish_weight_update` calls `repack`

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join the trainer's NCCL group, if there is one."""
        if init_info.group_id:
            device = torch.device("cuda", torch.cuda.current_device())
            rank = 1 + self.parallel_config.rank
            self.group = NcclGroup(init_info.group_id, rank, init_info.size, device)

    def start_weight_update(self) -> None:
        """Start layer-by-layer reloading (vLLM after 0.23; up to 0.23 the worker does it)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(
        self, update_info: BucketInfo, load_weights: Callable[[list[tuple[str, Tensor]]], Any] | None = None
    ) -> None:
        """Load a bucket. The trainer may reuse its memory when this returns."""
        if update_info.gpu is not None:
            weights = read_gpu(**update_info.gpu)
        elif update_info.nccl is not None:
            weights = receive(self.group, **update_info.nccl)
        else:
            assert update_info.file is not None
            weights = list(load_file(update_info.file).items())
        (load_weights or self.model.load_weights)(weights)

    def finish_weight_update(self) -> None:
        """Finish layer-by-layer reloading."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        if not torch.cuda.is_available():
            self.repacks = True
            repack(self.model)

    def shutdown(self) -> None:
        """Leave the trainer's group."""
        if self.group is not None:
            self.group.abort()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Not used: posttrain sends weights by `weight_transfer.LocalSender` and `NcclSender`."""
        raise NotImplementedError("posttrain sends weights by weight_transfer.LocalSender and NcclSender")


def read_gpu(
    names: list[str], shapes: list[list[int]], dtypes: list[str], buffers: dict[str, list[Any]]
) -> list[tuple[str, Tensor]]:
    """Return copies of weights that lie contiguously in a buffer of the trainer on this GPU. buffers: CUDA handles by
    GPU UUID.

    The copy is made immediately: a layer is loaded once all its weights have arrived, and by then the buffer holds
    others.
    """
    here = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(here).uuid)
    if uuid not in buffers:
        raise ValueError(f"the trainer's weights are on another GPU: {', '.join(buffers)}, and this is {uuid}")
    size, offset, *handle = buffers[uuid]
    handle[0] = here  # the trainer's device index may differ
    shared = rebuild_cuda_tensor(torch.Tensor, (size,), (1,), offset, torch.storage.TypedStorage, torch.uint8, *handle)
    copied = shared[: sum(sizes_of(shapes, dtypes))].clone()
    torch.cuda.synchronize()
    del shared  # ends the mapping, once for each export
    return unpack(copied, names, shapes, dtypes)


def receive(
    group: NcclGroup | None, names: list[str], shapes: list[list[int]], dtypes: list[str]
) -> list[tuple[str, Tensor]]:
    """Return the weights of the broadcast that the trainer is making."""
    if group is None:
        raise ValueError("weights were sent before the trainer's group was joined")
    buffer = torch.empty(sum(sizes_of(shapes, dtypes)), dtype=torch.uint8, device=group.device)
    group.broadcast(buffer)
    return unpack(buffer, names, shapes, dtypes)


def repack(model: Any) -> None:
    """Update what vLLM's weight update leaves stale in `model` on a CPU.

    On a CPU vLLM computes with repacked matrices, and an update repacks the weights that were loaded. A head tied to
    the embeddings is not loaded, so its repacked copy would keep the initial weights. Experts are repacked when their
    kernel is created, but not after an update.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(module).__name__ == "ParallelLMHead":
            method.process_weights_after_loading(module)
        elif hasattr(module, "w13_weight") and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


class Extension:
    """Methods added to vLLM's workers for `collective_rpc`. Their names must not exist in vLLM."""

    def posttrain_repack_head(self) -> None:
        """Call `repack` if `LocalTransfer` has not: up to vLLM 0.23 no method of it is called at the end of an
        update."""
        worker: Any = self
        if not worker.weight_transfer_engine.repacks:
            repack(worker.get_model())

    def posttrain_detach(self) -> tuple[int, int | None]:
        """Detach the started engine's process: leave signals to the trainer (`engine_process.leave_signals`), and
        remove the rendezvous file of the workers (vLLM after 0.23) and the names of shared memory that vLLM leaves
        behind. Returns the process id, and the size of the KV cache in bytes if it was measured."""
        engine_process.leave_signals()
        engine_process.unlink_memory(engine_process.VLLM_SHARED_MEMORY)
        worker: Any = self
        if worker.distributed_init_method.startswith(RENDEZVOUS_FILE):
            Path(worker.distributed_init_method.removeprefix(RENDEZVOUS_FILE)).unlink(missing_ok=True)
        return os.getpid(), getattr(self, "available_kv_cache_memory_bytes", None)

    def posttrain_clean_up(self) -> None:
        """Remove what a killed process leaves behind (`engine_process.clean_up`)."""
        engine_process.clean_up()


def without_kv_size(compute_hash: Callable[[Any], str]) -> Callable[[Any], str]:
    """Wrap CacheConfig.compute_hash so that the hash does not depend on the requested size of the KV cache.

    The folder of compiled graphs is named after this hash, which up to 0.23 includes the size: the first start with a
    known size (`kv_size`) would compile again what the measuring start has compiled.
    """

    def hash_without_kv_size(config: Any) -> str:
        plain = copy.copy(config)
        plain.kv_cache_memory_bytes = None
        return compute_hash(plain)

    return hash_without_kv_size


CacheConfig.compute_hash = without_kv_size(CacheConfig.compute_hash)  # type: ignore[method-assign]
WeightTransferEngineFactory.register_engine(LOCAL_BACKEND, LocalTransfer)
engine_process.begin()
engine_process.wait_until_ready()  # vLLM imports this module right before it measures free memory

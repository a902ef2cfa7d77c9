"""What vLLM's own processes import of posttrain: how they take the trainer's weights over.

vLLM imports this module in each of its workers, whose `worker_extension_cls` is `Extension`. Nothing else does. Both
forms of vLLM's weight transfer are served: up to 0.23 the worker reloads layer by layer, and an engine of weight
transfer only receives; since then the engine does both.

vLLM's own backend for processes of one GPU, `ipc`, is not used: it unpickles what it is sent, in 0.23 it cannot be
imported without ray, and there it releases a shared buffer once for every chunk that it reads, which keeps the
trainer's memory for ever.
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
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from posttrain.rollout import engine_process
from posttrain.rollout.nccl_group import NcclGroup
from posttrain.rollout.weight_transfer import LOCAL_BACKEND, sizes_of, unpack

RENDEZVOUS_FILE = "file://"


@dataclass
class Joining(WeightTransferInitInfo):
    """The NCCL group of the trainer and this engine's workers; none for memory that both processes map."""

    group_id: str = ""
    size: int = 0


@dataclass
class Bucket(WeightTransferUpdateInfo):
    """Some weights: in memory that this process maps, as a safetensors file or as bytes of the GPU, or by broadcast."""

    file: str | None = None
    gpu: dict[str, Any] | None = None
    nccl: dict[str, Any] | None = None


class LocalTransfer(WeightTransferEngine[Joining, Bucket]):  # type: ignore[misc]
    """Weights from a trainer, by `weight_transfer.LocalSender` or `NcclSender`."""

    init_info_cls = Joining
    update_info_cls = Bucket

    group: NcclGroup | None = None
    repacks = False  # at the end of an update

    def init_transfer_engine(self, init_info: Joining) -> None:
        """Join the trainer's group, if there is one."""
        if init_info.group_id:
            device = torch.device("cuda", torch.cuda.current_device())
            rank = 1 + self.parallel_config.rank
            self.group = NcclGroup(init_info.group_id, rank, init_info.size, device)

    def start_weight_update(self) -> None:
        """Begin to reload layer by layer (vLLM after 0.23; before that the worker does)."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(
        self, update_info: Bucket, load_weights: Callable[[list[tuple[str, Tensor]]], Any] | None = None
    ) -> None:
        """Load a bucket. Afterwards the trainer may use its memory for the next one."""
        if update_info.gpu is not None:
            weights = read_gpu(**update_info.gpu)
        elif update_info.nccl is not None:
            weights = receive(self.group, **update_info.nccl)
        else:
            assert update_info.file is not None
            weights = list(load_file(update_info.file).items())
        (load_weights or self.model.load_weights)(weights)

    def finish_weight_update(self) -> None:
        """End what `start_weight_update` began."""
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
        """Not used: `weight_transfer.LocalSender` sends."""
        raise NotImplementedError("posttrain sends weights by weight_transfer.LocalSender and NcclSender")


def read_gpu(
    names: list[str], shapes: list[list[int]], dtypes: list[str], buffers: dict[str, list[Any]]
) -> list[tuple[str, Tensor]]:
    """Weights that lie one after the other in a buffer of the trainer on this GPU. buffers: by the GPU's UUID.

    They are copied at once: a layer is loaded when all its weights are there, and the buffer holds others by then.
    """
    here = torch.cuda.current_device()
    uuid = str(torch.cuda.get_device_properties(here).uuid)
    if uuid not in buffers:
        raise ValueError(f"the trainer's weights are on another GPU: {', '.join(buffers)}, and this is {uuid}")
    size, offset, *handle = buffers[uuid]
    handle[0] = here  # the trainer's number for it
    shared = rebuild_cuda_tensor(torch.Tensor, (size,), (1,), offset, torch.storage.TypedStorage, torch.uint8, *handle)
    copied = shared[: sum(sizes_of(shapes, dtypes))].clone()
    torch.cuda.synchronize()
    del shared  # the mapping ends, once for each export
    return unpack(copied, names, shapes, dtypes)


def receive(
    group: NcclGroup | None, names: list[str], shapes: list[list[int]], dtypes: list[str]
) -> list[tuple[str, Tensor]]:
    """Weights that the trainer broadcasts now."""
    if group is None:
        raise ValueError("weights were sent before the trainer's group was joined")
    buffer = torch.empty(sum(sizes_of(shapes, dtypes)), dtype=torch.uint8, device=group.device)
    group.broadcast(buffer)
    return unpack(buffer, names, shapes, dtypes)


def repack(model: Any) -> None:
    """Bring what an update leaves as it was up to date in vLLM's `model`, on a CPU.

    There vLLM computes with repacked matrices. An update repacks what was loaded; a head that is tied to the embeddings
    is not loaded, so its copy would stay what it was at the start. Experts are repacked when their kernel is made, but
    not after an update.
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if type(module).__name__ == "ParallelLMHead":
            method.process_weights_after_loading(module)
        elif hasattr(module, "w13_weight") and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel.fused_experts.process_weights_after_loading(module)


class Extension:
    """Methods that vLLM's workers get, for `collective_rpc`. The names must not be taken there."""

    def posttrain_repack_head(self) -> None:
        """See `repack`; up to 0.23 no method of `LocalTransfer` is called at the end of an update."""
        worker: Any = self
        if not worker.weight_transfer_engine.repacks:
            repack(worker.get_model())

    def posttrain_detach(self) -> int:
        """Once the engine has started: leave signals to the trainer (`engine_process.leave_signals`). Remove the file
        by which the workers of one engine have found each other (vLLM after 0.23), and the names of memory that vLLM
        leaves behind. Returns the number of this process."""
        engine_process.leave_signals()
        engine_process.unlink_memory(engine_process.OF_VLLM)
        worker: Any = self
        if worker.distributed_init_method.startswith(RENDEZVOUS_FILE):
            Path(worker.distributed_init_method.removeprefix(RENDEZVOUS_FILE)).unlink(missing_ok=True)
        return os.getpid()

    def posttrain_clean_up(self) -> None:
        """See `engine_process.clean_up`."""
        engine_process.clean_up()

    def posttrain_kv_bytes(self) -> int | None:
        """Bytes that were found to be left for the KV cache; None where that was not measured."""
        return getattr(self, "available_kv_cache_memory_bytes", None)


def without_kv_size(compute_hash: Callable[[Any], str]) -> Callable[[Any], str]:
    """vLLM's hash of a CacheConfig, whatever size the KV cache is asked to have.

    The name of the folder of compiled graphs is made of it, and up to 0.23 the size is a part of it: the first start
    with a known size (`kv_size`) would compile anew what the one that measured it has compiled.
    """

    def hash_without_kv_size(config: Any) -> str:
        plain = copy.copy(config)
        plain.kv_cache_memory_bytes = None
        return compute_hash(plain)

    return hash_without_kv_size


CacheConfig.compute_hash = without_kv_size(CacheConfig.compute_hash)  # type: ignore[method-assign]
WeightTransferEngineFactory.register_engine(LOCAL_BACKEND, LocalTransfer)
engine_process.begin()
engine_process.wait_until_ready()  # vLLM imports this module right before it looks how much memory is free

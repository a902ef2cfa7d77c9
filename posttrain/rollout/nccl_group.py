"""NCCL between the trainer and the workers of one vLLM engine on other GPUs, for weights. Both sides use this.

vLLM's own backend `nccl` brings the processes together by a TCP store, which is open to whoever reaches its port and
whose entries are unpickled. Here NCCL's id of the group, which is its secret, travels in the request that begins the
transfer, which needs the server's key.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
from concurrent import futures
from typing import Any

import torch
from torch import Tensor

from posttrain.tools.time_limits import in_thread

TRAINER = 0  # its rank; the workers come after it
ABORT_S = 5.0


def new_id() -> str:
    """A new group's id, as text for JSON."""
    library, _ = _library()
    return base64.b64encode(bytes(library.ncclGetUniqueId().internal)).decode()


class NcclGroup:
    """A group of `size` processes, each with one GPU. It is joined when all have called this."""

    def __init__(self, group_id: str, rank: int, size: int, device: torch.device) -> None:
        self.library, apart = _library()
        self.device = device
        unique = self.library.unique_id_from_bytes(base64.b64decode(group_id))
        with torch.cuda.device(device), apart():
            self.communicator: Any = self.library.ncclCommInitRank(size, unique, rank)

    def broadcast(self, buffer: Tensor) -> None:
        """Fill `buffer` [bytes] with the trainer's. Returns when that is done, or the group was aborted."""
        if self.communicator is None:  # NCCL would refuse it as an argument
            return
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

        stream = torch.cuda.current_stream(self.device)
        place, kind = ctypes.c_void_p(buffer.data_ptr()), ncclDataTypeEnum.ncclUint8
        where = ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.device(self.device):
            self.library.ncclBroadcast(place, place, buffer.numel(), kind, TRAINER, self.communicator, where)
            stream.synchronize()

    def abort(self) -> None:
        """Leave the group, from any thread: a broadcast that waits for a process that has died ends. Calling it twice
        is fine."""
        communicator, self.communicator = self.communicator, None
        if communicator is None:
            return

        def leave() -> None:
            with torch.cuda.device(self.device):
                self.library.ncclCommAbort(communicator)

        futures.wait([in_thread(leave, "weights")], ABORT_S)  # it may wait for what is under way on the GPU


def _library() -> tuple[Any, Any]:
    """vLLM's wrapper of NCCL, and what to make groups in, so that both sides read the same settings."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils import nccl

    return NCCLLibrary(), getattr(nccl, "unpinned_nccl_env", contextlib.nullcontext)

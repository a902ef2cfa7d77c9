"""NCCL group of the trainer and the workers of one vLLM engine on other GPUs, for sending weights. Used by both sides.

vLLM's own `nccl` backend connects the processes by a TCP store that is open to anyone who reaches its port, and whose
entries are unpickled. Here the NCCL id of the group, which is its secret, travels in the request that starts the
transfer, which requires the server's key.
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

TRAINER = 0  # rank of the trainer; the workers have the ranks after it
ABORT_S = 5.0


def new_id() -> str:
    """Return the id of a new group as text for JSON."""
    library, _ = _library()
    return base64.b64encode(bytes(library.ncclGetUniqueId().internal)).decode()


class NcclGroup:
    """A group of `size` processes with one GPU each.

    The constructor returns when all processes have called it. If one dies before that, it may never return: NCCL cannot
    abort a blocking ncclCommInitRank, since there is no communicator yet. It is therefore called in a daemon thread,
    which then stays blocked until this process ends.
    """

    def __init__(self, group_id: str, rank: int, size: int, device: torch.device) -> None:
        self.library, group_settings = _library()
        self.device = device
        unique = self.library.unique_id_from_bytes(base64.b64decode(group_id))
        with torch.cuda.device(device), group_settings():
            self.communicator: Any = self.library.ncclCommInitRank(size, unique, rank)

    def broadcast(self, buffer: Tensor) -> None:
        """Broadcast the trainer's `buffer` [bytes] to all. Returns when that is done, or when the group was aborted."""
        if self.communicator is None:  # NCCL rejects None as an argument
            return
        from vllm.distributed.device_communicators.pynccl_wrapper import ncclDataTypeEnum

        stream = torch.cuda.current_stream(self.device)
        place, kind = ctypes.c_void_p(buffer.data_ptr()), ncclDataTypeEnum.ncclUint8
        where = ctypes.c_void_p(stream.cuda_stream)
        with torch.cuda.device(self.device):
            self.library.ncclBroadcast(place, place, buffer.numel(), kind, TRAINER, self.communicator, where)
            stream.synchronize()

    def abort(self) -> None:
        """Leave the group, from any thread: ends a broadcast that waits for a dead process. May be called twice."""
        communicator, self.communicator = self.communicator, None
        if communicator is None:
            return

        def leave() -> None:
            with torch.cuda.device(self.device):
                self.library.ncclCommAbort(communicator)

        futures.wait([in_thread(leave, "weights")], ABORT_S)  # the abort may wait for running GPU work


def _library() -> tuple[Any, Any]:
    """Return vLLM's NCCL wrapper, and the context manager to create groups in, so that both sides read the same
    settings."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
    from vllm.utils import nccl

    return NCCLLibrary(), getattr(nccl, "unpinned_nccl_env", contextlib.nullcontext)

"""Agreement of ranks on a unique name for this start, needed when torchrun restarts the processes over one store.

torchrun's store outlives its ranks, and with it the keys by which gloo and NCCL found the ranks of the previous start:
new ranks would try to reach dead ones. TORCHELASTIC_RESTART_COUNT does not tell the starts apart, because each machine
counts only the failures of its own ranks. So rank 0 generates a name for each start and gives it to every rank that
asks.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

POLL_S = 0.1
_REQUEST, _REPLY, _RECEIVED = "posttrain/here", "posttrain/answer", "posttrain/got"


def agree_on_start(store: Any, rank: int, world: int, *, timeout_s: float) -> str:
    """Return the name of this start, the same on all ranks and different at each start.

    Every other rank writes a random nonce and waits for rank 0's reply to that nonce. The nonces that rank 0 finds may
    be left over from an earlier start, so rank 0 replies to each new nonce until `world - 1` ranks have counted
    themselves under the name. The count is reliable: only a rank that has read the name adds to it, each rank once, and
    the name is new with rank 0. Ranks of an earlier start have ended by then, since torchelastic stops the workers of
    all machines before the rendezvous from which it starts new ones.

    Raises RuntimeError if not all ranks arrive within `timeout_s`.
    """
    if rank:
        nonce = secrets.token_hex(8)
        store.set(f"{_REQUEST}/{rank}", nonce)
        name = store.get(f"{_REPLY}/{nonce}").decode()
        store.add(f"{_RECEIVED}/{name}", 1)
        return str(name)
    name, answered = secrets.token_hex(8), set[bytes]()
    requests = [f"{_REQUEST}/{number}" for number in range(1, world)]
    store.wait(requests)
    deadline = time.monotonic() + timeout_s
    while (received := store.add(f"{_RECEIVED}/{name}", 0)) < world - 1:
        for nonce in set(store.multi_get(requests)) - answered:
            store.set(f"{_REPLY}/{nonce.decode()}", name)
            answered.add(nonce)
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {received + 1} of {world} ranks arrived")
        time.sleep(POLL_S)
    return name

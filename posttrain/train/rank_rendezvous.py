"""Which start of the processes this is, when torchrun has started them several times over one store.

torchrun's store outlives its ranks, and with it the keys by which gloo and NCCL found those of the start before: new
ranks would try to reach dead ones. TORCHELASTIC_RESTART_COUNT does not tell the starts apart: each machine counts only
the failures of its own ranks. So rank 0 draws a name for each start, and gives it to whoever asks now.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

POLL_S = 0.1
_HERE, _ANSWER, _GOT = "posttrain/here", "posttrain/answer", "posttrain/got"


def agree_on_start(store: Any, rank: int, world: int, *, timeout_s: float) -> str:
    """The name of this start, the same on all ranks and new at each. Raises RuntimeError if not all come in time.

    Every other rank writes a random word, and waits for rank 0's answer to that word. The words that rank 0 finds may
    be left from an earlier start, so it answers each new one until `world - 1` ranks have counted themselves under the
    name. That count is right: only a rank that has read the name adds to it, each rank once, and the name is new with
    rank 0; ranks of an earlier start have ended by then, since torchelastic stops the workers of all machines before
    the rendezvous from which it starts new ones.
    """
    if rank:
        word = secrets.token_hex(8)
        store.set(f"{_HERE}/{rank}", word)
        name = store.get(f"{_ANSWER}/{word}").decode()
        store.add(f"{_GOT}/{name}", 1)
        return str(name)
    name, answered = secrets.token_hex(8), set[bytes]()
    asking = [f"{_HERE}/{number}" for number in range(1, world)]
    store.wait(asking)
    until = time.monotonic() + timeout_s
    while (got := store.add(f"{_GOT}/{name}", 0)) < world - 1:
        for word in set(store.multi_get(asking)) - answered:
            store.set(f"{_ANSWER}/{word.decode()}", name)
            answered.add(word)
        if time.monotonic() > until:
            raise RuntimeError(f"only {got + 1} of {world} came")
        time.sleep(POLL_S)
    return name

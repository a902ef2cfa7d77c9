"""vLLM on servers that all training processes of a run share, and that may come and go while it runs.

Rank 0 holds the sessions: once per sync it looks for new servers, sends the weights, and drops lost servers. In every
sync it sends the list of servers to the other ranks, which send their requests directly. A sync, on all ranks:

    1. each rank holds back new requests and reports the servers that it has lost; then each pauses running requests
    2. rank 0 drops servers that are lost or no longer named, opens new ones, and sends the weights to all
    3. each rank takes over rank 0's list of servers, and sends requests again
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from posttrain import terminal
from posttrain.errors import PosttrainError, count_noun
from posttrain.models import weights
from posttrain.rollout import compile_cache, loop, vllm_start
from posttrain.rollout.engine_client import (
    EngineClient,
    ServerLost,
    TrainingRanks,
    close_all,
    raise_last,
    run_on_living,
)
from posttrain.rollout.server_client import ServerClient, ServerMissing, Session
from posttrain.rollout.server_list import ServerList
from posttrain.rollout.vllm_engine import TrainerLogps, VllmEngine
from posttrain.rollout.weight_transfer import NcclSender, WeightSender

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel

OPEN_S = 3.0  # for new servers to answer, in a sync
RETRY_S = 30.0  # until a server that could not join is tried again; doubled at each failure
MAX_RETRY_S = 480.0


@dataclass
class Refusal:
    """Why the server at an address could not join, and when it is tried again. Each session that ends makes it
    restart."""

    why: str
    wait_s: float
    until: float  # monotonic clock


class ServedEngine(VllmEngine):
    """A VllmEngine on servers. It needs at least one: when the last one is lost, the run ends with its error."""

    clients: list[ServerClient]  # type: ignore[assignment]

    def __init__(
        self,
        loaded: LoadedModel,
        clients: Sequence[ServerClient],
        servers: ServerList,
        ranks: TrainingRanks,
        *,
        scratch: Path,
    ) -> None:
        """clients: the servers that rank 0 has opened; empty on other ranks, which receive them in the first sync."""
        self.servers, self.ranks = servers, ranks
        self.noted: set[ServerClient] = set()  # lost servers that have been reported
        self.refused: dict[str, Refusal] = {}  # by address
        self.lost_servers = self.joined = self.counted = 0  # since `take_counts`
        super().__init__(servers.spec, loaded, clients, scratch=scratch)

    def make_sender(self) -> WeightSender:
        """Return what sends whole weights to the servers; only rank 0 has any when this is called, and sends."""
        if self.loaded.device.type != "cuda" or not self.ranks.is_main:
            return super().make_sender()
        vllm_start.require_vllm()
        with compile_cache.keep_compiler_settings():  # NCCL is called through vLLM's wrapper
            return NcclSender(self.clients, self.loaded.device, self.spec.dtype)

    def take_counts(self) -> dict[str, float]:
        """Return metrics: the number of servers (on rank 0), and events since the last call."""
        found: dict[str, float] = {"rollout/repeated_requests": self.repeated - self.counted}
        if self.ranks.is_main:
            found["rollout/servers"] = sum(client.lost is None for client in self.clients)
            found |= {"rollout/servers_lost": self.lost_servers, "rollout/servers_joined": self.joined}
        self.counted, self.lost_servers, self.joined = self.repeated, 0, 0
        return found

    def on_lost(self, client: EngineClient) -> None:
        """Report a lost server. Other ranks report theirs to rank 0 in the next sync."""
        if self.ranks.is_main:
            self._note_lost(cast(ServerClient, client))

    def _note_lost(self, client: ServerClient) -> None:
        """Count and report a lost server, once."""
        if client in self.noted or client.lost is None:
            return
        self.noted.add(client)
        self.lost_servers += 1
        self._note_change(client, f"is dropped: {reason(client.lost)}")

    def _note_change(self, client: ServerClient, what: str) -> None:
        left = sum(client.lost is None for client in self.clients)
        terminal.note(f"{client.name}  {what} ({count_noun(left, 'server')} now)")

    # --- the sync ---

    def pause_engines(self) -> None:
        """Pause all servers (`VllmEngine.pause_engines`). A pause interrupts the requests of all ranks, so it begins
        once no rank sends new ones."""
        here = {client.session_id: reason(client.lost) for client in self.clients if client.lost is not None}
        for lost in self.ranks.gather_results(lambda: here):
            for client in self.clients:
                if client.lost is None and client.session_id in lost:
                    client.lost = ServerLost(lost[client.session_id], where=client.name)
        self.ranks.gather_results(self._pause)

    def _pause(self) -> None:
        if clients := [client for client in self.clients if self.ranks.is_main or client.is_busy]:
            with contextlib.suppress(ServerLost):  # all are lost: new servers may have come
                run_on_living(clients, lambda client: client.pause())

    def replace_weights(
        self, model: Any, whole: Iterator[tuple[str, torch.Tensor]], version: int, expected: TrainerLogps
    ) -> None:
        """Replace the weights (`VllmEngine.replace_weights`). Rank 0 does it for all ranks; the others take over its
        servers."""
        replace = super().replace_weights

        def update() -> list[Session]:
            try:
                if not self.ranks.is_main:
                    return []
                self._change_servers(version)
                replace(model, whole, version, expected)
                self._remove_lost()
                return [client.session() for client in self.clients]
            finally:
                weights.drain_stream(model, whole)

        sessions = self.ranks.gather_results(update)[0]
        if not self.ranks.is_main:
            self._follow(sessions)

    def _follow(self, sessions: Sequence[Session]) -> None:
        """Have a client for each server that rank 0 has, and for no other."""
        known = {client.session_id: client for client in self.clients}
        new = [
            self.servers.client(session.url).join(session) for session in sessions if session.session_id not in known
        ]
        known |= {client.session_id: client for client in loop.run_all(new)}
        self.clients = [known.pop(session.session_id) for session in sessions]
        for client, session in zip(self.clients, sessions, strict=True):
            client.adapter = session.adapter
        close_all(known.values())

    def _change_servers(self, version: int) -> None:
        """Drop servers that are lost or no longer named, and open new ones. Raises ServerLost if none is left."""
        before = list(self.clients)
        self._remove_lost()
        named = self.servers.addresses()
        if named is not None:
            for client in self._open(address for address in named if address not in {c.url for c in self.clients}):
                self.clients.append(client)
                self.joined += 1
                self._note_change(client, f"joins with version {version}")
            strange = [client for client in self.clients if client.url not in named]
            for client in strange if len(strange) < len(self.clients) else ():
                self._remove(client)
                self._note_change(client, "leaves: it is no longer named")
        if not self.clients:
            raise_last(before)

    def _remove_lost(self) -> None:
        for client in [client for client in self.clients if client.lost is not None]:
            self._note_lost(client)
            self._remove(client)

    def _remove(self, client: ServerClient) -> None:
        self.clients.remove(client)
        if self.sender is not None:
            self.sender.remove(client)
        client.close()

    def _open(self, addresses: Iterable[str]) -> list[ServerClient]:
        """Open the servers at these addresses that match this run and answer immediately, ready for weights."""
        now = time.monotonic()
        clients = [
            self.servers.client(address)
            for address in addresses
            if address not in self.refused or now >= self.refused[address].until
        ]
        attempts = [loop.catch(self._open_and_pause(client), PosttrainError, TimeoutError) for client in clients]
        found = []
        for client, error in zip(clients, loop.run_all(attempts), strict=True):
            try:
                if error is not None:
                    raise error
                if self.sender is not None:
                    self.sender.add(client)
                self.refused.pop(client.url, None)
                found.append(client)
            except (PosttrainError, TimeoutError) as cause:
                self._refuse(client, cause)
        return found

    async def _open_and_pause(self, client: ServerClient) -> None:
        """Open a session with a new server and pause it, within OPEN_S."""
        async with asyncio.timeout(OPEN_S):
            await client.open(self.servers.wanted, wait=False)
            await client.pause()

    def _refuse(self, client: ServerClient, cause: Exception) -> None:
        """Close a server that could not be opened, and do not try it again for a while. The reason is shown once. If
        nothing listens at the address, nothing is shown, and it is tried in every sync."""
        client.close()
        if isinstance(cause, ServerMissing):
            return
        before = self.refused.get(client.url)
        if not isinstance(cause, TimeoutError) and (before is None or before.why != str(cause)):
            terminal.note(f"{client.name}  cannot join: {reason(cause)}")
        wait = RETRY_S if before is None else min(2 * before.wait_s, MAX_RETRY_S)
        self.refused[client.url] = Refusal(str(cause), wait, time.monotonic() + wait)


def reason(error: BaseException) -> str:
    """Return an error's message in one line."""
    text = error.problems[0].what if isinstance(error, PosttrainError) else str(error)
    return (text.splitlines() or [type(error).__name__])[0].rstrip(":;")

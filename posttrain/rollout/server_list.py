"""Which servers a run may use: the addresses that its recipe, or a file that it names, has now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain import terminal
from posttrain.errors import UserError
from posttrain.path_resolution import find
from posttrain.recipe.engine_sections import ADDRESS, Server
from posttrain.rollout import compile_cache, server_key, vllm_start
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.server_client import ServerClient
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.rollout.weight_transfer import LocalSender, NcclSender, WeightSender


@dataclass
class ServerList:
    """The servers of a run, as its recipe names them.

    wanted: what a server must say of itself, see `ServerClient.open`. base_dir: the folder of the recipe, where a file
    of addresses is looked for.
    """

    section: Server
    spec: EngineSpec
    wanted: dict[str, Any]
    device: torch.device
    base_dir: Path | None
    told: str = ""  # of a file that could not be read

    def addresses(self) -> list[str] | None:
        """Those that are named now; None where the run has started its own, and no other may come. A file that cannot
        be read now changes nothing."""
        if self.section.file is None:
            return [url.rstrip("/") for url in self.section.urls] or None
        try:
            return read_addresses(self.section.file, self.base_dir)
        except UserError as error:
            if self.told != str(error):
                self.told = str(error)
                terminal.note(f"the servers stay as they are: {error}")
            return None

    def client(self, address: str, key: str | None = None, process: LocalServer | None = None) -> ServerClient:
        """Of the server there; not yet open. key, process: of one without an address, which the run has started."""
        return ServerClient(
            address,
            server_key.client_key(address) if key is None else key,
            timeout_s=self.section.timeout_s,
            eos_ids=self.spec.eos_ids,
            image_ids=self.spec.image_ids,
            process=process,
        )

    def sender(self, clients: Sequence[ServerClient]) -> WeightSender | None:
        """What brings weights to them; None where adapters are loaded."""
        if self.spec.lora_rank is not None:
            return None
        if self.device.type == "cuda":
            vllm_start.require_vllm()
            with compile_cache.keep_compiler_settings():  # NCCL is called by vLLM's wrapper
                return NcclSender(clients, self.device, self.spec.dtype)
        return LocalSender(clients, self.device, self.spec.dtype)


def read_addresses(name: str, base_dir: Path | None) -> list[str]:
    """The addresses of servers in a file, one a line, each once; `#` begins a comment. Raises UserError."""
    path = find(name, base_dir, "rollout.vllm.server.file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path)) from error
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    for number, line in enumerate(lines, 1):
        if line and not ADDRESS.fullmatch(line):
            raise UserError(f"`{line}` is no address of a server", where=f"{path}:{number}", allowed="http://HOST:PORT")
    found = list(dict.fromkeys(line.rstrip("/") for line in lines if line))
    if not found:
        raise UserError("no server is named there", where=str(path), hint="write http://HOST:PORT, one a line")
    return found

"""Servers that a run may use: the addresses in its recipe, or in a file that the recipe names and that may change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain import terminal
from posttrain.errors import UserError
from posttrain.path_resolution import find
from posttrain.recipe.engine_sections import ADDRESS, Server
from posttrain.rollout import server_key
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.server_client import ServerClient
from posttrain.rollout.vllm_start import EngineSpec


@dataclass
class ServerList:
    """The servers of a run, as its recipe names them.

    wanted: what a server's description must match (`ServerClient.open`). base_dir: folder of the recipe, where a file
    of addresses is looked for.
    """

    section: Server
    spec: EngineSpec
    wanted: dict[str, Any]
    base_dir: Path | None
    reported: str = ""  # last error of a file that could not be read

    def addresses(self) -> list[str] | None:
        """Return the addresses that are named now; None if the run has started its own servers, or if the file cannot
        be read now (then nothing changes)."""
        if self.section.file is None:
            return [url.rstrip("/") for url in self.section.urls] or None
        try:
            return read_addresses(self.section.file, self.base_dir)
        except UserError as error:
            if self.reported != str(error):
                self.reported = str(error)
                terminal.note(f"the servers stay as they are: {error}")
            return None

    def client(self, address: str, key: str | None = None, process: LocalServer | None = None) -> ServerClient:
        """Return a client of the server at this address, not yet open. key, process: of a server that the run has
        started, which has no address."""
        return ServerClient(
            address,
            server_key.client_key(address) if key is None else key,
            timeout_s=self.section.timeout_s,
            eos_ids=self.spec.eos_ids,
            image_ids=self.spec.image_ids,
            process=process,
        )


def read_addresses(name: str, base_dir: Path | None) -> list[str]:
    """Return the distinct addresses of servers in a file, which has one per line; `#` begins a comment. Raises
    UserError."""
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

"""`posttrain serve`: a vLLM server for runs on other GPUs or machines."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.guard import DEBUG, say
from posttrain.cli.stage import Overrides, Recipe
from posttrain.errors import MissingExtra, UserError

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded

ENGINES = ("rollout", "engine")  # recipe sections that configure generation
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Port = Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Port to listen on.")]
Host = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="Address to listen on; 0.0.0.0 lets other machines connect.")
]
Devices = Annotated[
    str | None,
    typer.Option("--devices", metavar="N,N", help="GPUs to use, by number (default: the first that vLLM sees)."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("serve")(serve)


def serve(
    ctx: typer.Context,
    recipe: Recipe,
    overrides: Overrides = None,
    port: Port = 8100,
    host: Host = "127.0.0.1",
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Serve RECIPE's model with vLLM for training runs that name this server in `rollout.vllm.server.urls`.

    The server loads the recipe's model; a connected run sends its new weights after every step. Runs connect one at a
    time. Ctrl-C stops the server.
    """
    from posttrain.cli import packages, preflight

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "posttrain serve", "vllm")
    numbers = _parse_devices(devices)
    _check_port(host, port)
    loaded = preflight.load(recipe, overrides or [], without=("data", "run"))
    section = engine_section(loaded)
    sampling: Any = loaded.recipe
    packages.require(loaded, lambda need: need[3].startswith("model") or need[0] in ("torch", "transformers"))
    from posttrain.rollout.server_key import TOKEN_VARIABLE, serving_key
    from posttrain.rollout.serving import serve_runs

    key, key_file = serving_key(port)
    shown = f"the key in {key_file}, where runs on this machine find it" if key_file else "the key of this shell"
    own = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    ready = (
        f"ready: a run connects with  {section}.engine=vllm '{section}.vllm.server.urls=[http://{own}:{port}]'"
        f"  and {shown} (on other machines set {TOKEN_VARIABLE} to it)"
    )
    if host not in LOOPBACK:
        say("the key, token ids and weights are sent unencrypted: use this port only in a network that you trust")
    else:
        say(f"only programs on this machine can connect to {host}; --host 0.0.0.0 lets other machines connect")
    serve_runs(
        sampling,
        getattr(sampling, section).vllm,
        host=host,
        port=port,
        devices=numbers,
        key=key,
        ready=ready,
        say=say,
    )


def _parse_devices(devices: str | None) -> list[int]:
    """Return the GPU numbers of `--devices`. Raises UserError if the text is not a list of numbers."""
    parts = devices.split(",") if devices else []
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--devices {devices}: not a list of GPUs", allowed="numbers separated by commas: 0,1")
    return [int(part) for part in parts]


def engine_section(loaded: Loaded) -> str:
    """Return the recipe section that configures generation. Raises UserError for a recipe without one."""
    found = next((name for name in ENGINES if hasattr(loaded.recipe, name)), None)
    if found is None:
        raise UserError(
            f"{loaded.name} is a recipe of stage {loaded.resolved['stage']}, which generates nothing",
            allowed="recipes with a section `rollout` or `engine`: stages rl, eval, harness and generate",
        )
    return found


def _check_port(host: str, port: int) -> None:
    """Raise UserError if the port cannot be opened."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {_describe_os_error(error)}",
            hint="another `posttrain serve` or program may use the port; choose another one with --port",
        ) from error


def _describe_os_error(error: OSError) -> str:
    """Return the system's error message, without the address that Python adds to it.

    Error numbers of getaddrinfo are not the system's, so the error's own text is returned for them.
    """
    own = isinstance(error, socket.gaierror) or not error.errno
    return error.strerror or str(error) if own else os.strerror(error.errno or 0)

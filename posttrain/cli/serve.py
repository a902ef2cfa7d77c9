"""`posttrain serve`: vLLM for runs on other GPUs or machines."""

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

ENGINES = ("rollout", "engine")  # sections that say what generates
LOOPBACK = ("127.0.0.1", "localhost", "::1")

Port = Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Where runs connect.")]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="0.0.0.0 lets other machines connect.")]
Devices = Annotated[
    str | None, typer.Option("--devices", metavar="N,N", help="The GPUs to use (default: the first that vLLM sees).")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]


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
    """Generate with vLLM for runs of RECIPE that name this address in `rollout.vllm.server.urls`, one after the other.

    It loads the recipe's model, and a run brings its weights after every step. Ctrl-C ends it.
    """
    from posttrain.cli import packages, preflight

    ctx.meta[DEBUG] = ctx.meta.get(DEBUG) or debug
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "posttrain serve", "vllm")
    numbers = _numbers(devices)
    _check_port(host, port)
    loaded = preflight.load(recipe, overrides or [], without=("data", "run"))
    section = engine_section(loaded)
    sampling: Any = loaded.recipe
    packages.require(loaded, lambda need: need[3].startswith("model") or need[0] in ("torch", "transformers"))
    from posttrain.rollout.server_key import TOKEN_VARIABLE, serving_key
    from posttrain.rollout.serving import serve_runs

    key, kept = serving_key(port)
    shown = f"the key in {kept}, which your runs on this machine find there" if kept else "this shell's key"
    own = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    ready = (
        f"ready: a run connects with  {section}.engine=vllm '{section}.vllm.server.urls=[http://{own}:{port}]'"
        f"  and {shown} (elsewhere set {TOKEN_VARIABLE} to it)"
    )
    if host not in LOOPBACK:
        say("the key, token ids and weights travel unencrypted: keep the port inside a network that you trust")
    else:
        say(f"only programs on this machine can connect to {host}; --host 0.0.0.0 lets others")
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


def _numbers(devices: str | None) -> list[int]:
    """The GPUs of `--devices`. Raises UserError for what is no list of numbers."""
    parts = devices.split(",") if devices else []
    if not all(part.strip().isdecimal() for part in parts):
        raise UserError(f"--devices {devices}: not a list of GPUs", allowed="numbers with commas: 0,1")
    return [int(part) for part in parts]


def engine_section(loaded: Loaded) -> str:
    """The section of the recipe that says what generates. Raises UserError for a recipe without one."""
    found = next((name for name in ENGINES if hasattr(loaded.recipe, name)), None)
    if found is None:
        raise UserError(
            f"{loaded.name} is a recipe of stage {loaded.resolved['stage']}, in which nothing generates",
            allowed="recipes with a section `rollout` or `engine`: those of rl, eval, harness and generate",
        )
    return found


def _check_port(host: str, port: int) -> None:
    """Raise UserError where nothing can listen."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {_reason(error)}",
            hint="another `posttrain serve` or program may have it; --port takes another",
        ) from error


def _reason(error: OSError) -> str:
    """What the system says, without the address that Python adds to it. Numbers of getaddrinfo are not the system's."""
    own = isinstance(error, socket.gaierror) or not error.errno
    return error.strerror or str(error) if own else os.strerror(error.errno or 0)

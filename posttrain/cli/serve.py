"""`posttrain serve`: an engine for RL runs on other GPUs or machines."""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Annotated

import typer

from posttrain.cli.guard import say
from posttrain.errors import MissingExtra, UserError

Port = Annotated[int, typer.Option("--port", metavar="N", min=1, max=65535, help="Where runs connect.")]
Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="0.0.0.0 lets other machines connect.")]
Gpu = Annotated[int | None, typer.Option("--gpu", metavar="N", min=0, help="The GPU to use (default: the first).")]


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("serve")(serve)


def serve(port: Port = 8100, host: Host = "127.0.0.1", gpu: Gpu = None) -> None:
    """Generate with vLLM for runs that name this address in `rollout.vllm.server.urls`, one run after the other.

    It needs no recipe and no model: a run brings its own, and its weights after every step. Ctrl-C ends it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise MissingExtra("vllm", "posttrain serve", "vllm")
    from posttrain.rollout.local_server import serve_runs, visible_device
    from posttrain.rollout.token import TOKEN_VARIABLE, serving_token

    env = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": visible_device(gpu, "--gpu")}
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {_reason(error)}",
            hint="another `posttrain serve` or program may have it; --port takes another",
        ) from error
    token, kept = serving_token(port)
    env[TOKEN_VARIABLE] = token
    own = host if host not in ("0.0.0.0", "::") else socket.gethostname()
    with listener:
        shown = f"the token in {kept}, which your runs on this machine find there" if kept else "this shell's token"
        address = f"rollout.engine=vllm 'rollout.vllm.server.urls=[http://{own}:{port}]'"
        say(f"ready: a run connects with  {address}  and {shown} (elsewhere set {TOKEN_VARIABLE} to it)")
        if host not in ("127.0.0.1", "localhost", "::1"):
            say("tokens and weights travel unencrypted: keep the port inside a network that you trust")
        serve_runs(listener, env, say)


def _reason(error: OSError) -> str:
    """What the system says, without the address that Python adds to it. Numbers of getaddrinfo are not the system's."""
    own = isinstance(error, socket.gaierror) or not error.errno
    return error.strerror or str(error) if own else os.strerror(error.errno or 0)

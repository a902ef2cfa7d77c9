"""`posttrain serve`: runs `vllm serve` for the runs of one recipe, one after the other, each with a fresh process."""

from __future__ import annotations

import gc
import http.client
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from posttrain.errors import RecipeError, RunError, count_noun
from posttrain.models.load import load
from posttrain.recipe.engine_sections import Server, Vllm
from posttrain.recipe.stages import EvalRecipe, GenerateRecipe, HarnessRecipe, RlRecipe
from posttrain.rollout import compile_cache, local_server, servers, vllm_process, vllm_start
from posttrain.rollout.local_server import LocalServer
from posttrain.rollout.vllm_engine import spec_of
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.scratch import scratch

POLL_S = 0.5


def serve_runs(
    recipe: RlRecipe | EvalRecipe | HarnessRecipe | GenerateRecipe,
    section: Vllm,
    *,
    host: str,
    port: int,
    devices: Sequence[int],
    key: str,
    ready: str,
    say: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C. Raises RunError if vLLM does not start; its own message is on stderr.

    section: the recipe's settings of vLLM. devices: GPUs to use; empty: vLLM chooses. ready: message to show whenever a
    run may connect.
    """
    if devices and len(devices) != section.tensor_parallel:
        raise RecipeError(
            f"--devices names {count_noun(len(devices), 'GPU')}, and vllm.tensor_parallel is {section.tensor_parallel}",
            hint="start a second server on another --port",
        )
    section = section.model_copy(update={"sleep": False, "server": Server(urls=[f"http://{host}:{port}"])})
    vllm_start.check_settings(section)
    vllm_start.prepare_environment()
    visible = [local_server.visible_device(number, "--devices") for number in devices]
    try:
        with scratch("serve") as home:
            say(f"loading {recipe.model.path}")
            spec = write_served_model(recipe, section, home / "model")
            with compile_cache.stable_path(home / "model", vllm_start.cache_folder(), 0) as folder:
                arguments = servers.server_arguments(spec, folder)
                while True:
                    server = LocalServer.start(section, arguments, key, devices=visible, listen=(host, port))
                    serve_one(server, host, port, key, ready, say)
                    say("the run has ended: restarting vLLM")
    except KeyboardInterrupt:
        say("stopped")


def serve_one(server: LocalServer, host: str, port: int, key: str, ready: str, say: Callable[[str], None]) -> None:
    """Wait until a started server answers, show `ready`, and return when its run has ended."""
    try:
        while not answers(host, port, key):
            if ended := server.exit_error():
                raise RunError(f"vLLM did not start: {ended.problems[0].what}", hint="see its messages above")
            time.sleep(POLL_S)
        say(ready)
        server.process.wait()
    finally:
        server.close()


def answers(host: str, port: int, key: str) -> bool:
    """Return whether our server answers at this address."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    connection = http.client.HTTPConnection(here, port, timeout=10)
    with suppress(OSError, http.client.HTTPException, ValueError):
        connection.request("GET", vllm_process.ABOUT, headers={"Authorization": f"Bearer {key}"})
        return "vllm" in json.load(connection.getresponse())
    return False


def write_served_model(
    recipe: RlRecipe | EvalRecipe | HarnessRecipe | GenerateRecipe, section: Vllm, folder: Path
) -> EngineSpec:
    """Write the model's folder that vLLM starts on, as a run would write it, and return the EngineSpec.

    The window is the recipe's, or the model's own, since the data of the runs are not read.
    """
    training = isinstance(recipe, RlRecipe)
    loaded = load(recipe.model, recipe.base_dir, seed=recipe.run.seed, training=training, on_host=True)
    config = loaded.model.config
    window = section.max_model_len or loaded.window
    if window is None:
        raise RecipeError(
            "the model's configuration has no context window", hint="write vllm.max_model_len into the recipe"
        )
    spec = spec_of(section, loaded, window)
    vllm_start.check_divisible(config, section.tensor_parallel)
    vllm_start.check_heads(lambda: config)
    servers.write_model(loaded, spec, folder)
    del loaded
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a 4-bit model was quantized on the GPU
    return spec

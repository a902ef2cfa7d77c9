"""Choose and start the engine that a recipe names: transformers in this process, or vLLM in processes of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.errors import PosttrainError
from posttrain.recipe.engine_sections import EngineSection
from posttrain.rollout.engine import Engine

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel
    from posttrain.recipe.sections import Model
    from posttrain.rollout.engine_client import TrainingRanks
    from posttrain.rollout.starting import StartingEngine


@contextlib.contextmanager
def start_early(
    section: EngineSection, model: Model, base_dir: Path, *, training: bool, scratch: Path, max_len: int
) -> Iterator[StartingEngine | None]:
    """Start vLLM beside the trainer before the weights are loaded, and close it when the block ends (`make_engine`).

    Yields None if there is nothing to start early, and for a model that cannot be predicted from its configuration or
    is refused: loading the model reports the reason.
    """
    begun = None
    if section.engine == "vllm" and section.vllm.server is None:
        from posttrain.models.load import build_skeleton
        from posttrain.rollout.engine_group import group_here
        from posttrain.rollout.vllm_engine import begin_colocated

        with contextlib.suppress(PosttrainError):
            starts = group_here(section.vllm.tensor_parallel).is_first  # the other ranks of its group use the engine
            if starts and (loaded := build_skeleton(model, base_dir, training=training)) is not None:
                begun = begin_colocated(section.vllm, loaded, scratch=scratch, max_len=max_len)
    try:
        if begun is not None:
            begun.wait_for_processes()
        yield begun
    finally:
        if begun is not None:
            begun.close()


def make_engine(
    section: EngineSection,
    loaded: LoadedModel,
    *,
    scratch: Path,
    max_len: int,
    begun: StartingEngine | None = None,
    training: TrainingRanks | None = None,
    base_dir: Path | None = None,
) -> Engine:
    """Return the engine that `section` names, with the weights of `loaded` as version 0.

    scratch: folder for files that an engine needs (vLLM reads models from disk). max_len: maximum length of prompt +
    completion in tokens (`needed_length`). begun: what `start_early` yielded for the same arguments. training: the
    processes that train with these engines, all of which call this; None = one process. base_dir: folder of the recipe.
    """
    if section.engine == "vllm" and section.vllm.server is not None:
        from posttrain.rollout.servers import make_served

        return make_served(section.vllm, loaded, scratch=scratch, max_len=max_len, training=training, base_dir=base_dir)
    if section.engine == "vllm" and section.vllm.tensor_parallel > 1:
        from posttrain.rollout.shared_engine import make_shared

        return make_shared(section.vllm, loaded, scratch=scratch, max_len=max_len, begun=begun, training=training)
    if section.engine == "vllm":
        from posttrain.rollout.vllm_engine import make_colocated

        return make_colocated(section.vllm, loaded, scratch=scratch, max_len=max_len, begun=begun)
    from posttrain.rollout.hf import TransformersEngine

    return TransformersEngine(loaded, batch_size=section.batch_size)


def start_note(section: EngineSection) -> str | None:
    """Return a line to show before `make_engine` if it takes long; None if it starts nothing."""
    server = section.vllm.server
    if section.engine != "vllm" or (server is not None and not server.devices):
        return None
    return "starting vLLM" + (
        "" if section.vllm.enforce_eager else ": up to two minutes, less with vllm.enforce_eager: true"
    )


def check_engine(section: EngineSection, config: Callable[[], Any], base_dir: Path | None = None) -> None:
    """Check that the engine can start here, before anything is loaded. Raises MissingExtra or UserError.

    config: returns the model's transformers configuration. Servers are checked once they have started.
    """
    if section.engine != "vllm":
        return
    if section.vllm.server is not None:
        if section.vllm.server.file is not None:
            from posttrain.rollout.server_list import read_addresses

            read_addresses(section.vllm.server.file, base_dir)
        return
    from posttrain.rollout import vllm_start
    from posttrain.rollout.engine_group import group_here

    vllm_start.require_vllm()
    vllm_start.check_settings(section.vllm)
    if section.vllm.tensor_parallel > 1:
        group_here(section.vllm.tensor_parallel)
        vllm_start.check_divisible(config(), section.vllm.tensor_parallel)
    vllm_start.check_heads(config)

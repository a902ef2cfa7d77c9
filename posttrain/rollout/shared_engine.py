"""The trainer's side of a vLLM engine that neighbouring training processes share (`vllm.tensor_parallel` beside the
trainer).

Every process of a group has a `SharedEngine` and calls its methods in the same order as the other processes. A sync is
collective: each process sends its copy of the weights to the worker on its own GPU.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.models import weights
from posttrain.recipe.engine_sections import Vllm
from posttrain.rollout import vllm_start
from posttrain.rollout.engine_client import TrainingRanks
from posttrain.rollout.engine_group import EngineGroup, group_here
from posttrain.rollout.shared_client import EngineHub, SharedClient
from posttrain.rollout.starting import StartingEngine
from posttrain.rollout.vllm_engine import VllmEngine, continue_start, spec_of
from posttrain.rollout.vllm_start import EngineSpec
from posttrain.run import ranks

if TYPE_CHECKING:
    from posttrain.models.load import LoadedModel


class SharedEngine(VllmEngine):
    """A VllmEngine shared by the processes of one group."""

    clients: list[SharedClient]  # type: ignore[assignment]

    def __init__(
        self, spec: EngineSpec, loaded: LoadedModel, client: SharedClient, group: EngineGroup, *, scratch: Path
    ) -> None:
        """Takes ownership of the client, and closes it if this fails."""
        self.writes_files = group.is_first
        super().__init__(spec, loaded, [client], scratch=scratch)

    def sync(self, model: Any, version: int) -> None:
        """Sync the weights (`VllmEngine.sync`). A process that fails reports it, so that the others do not
        wait for it."""
        with self._report_failure():
            super().sync(model, version)

    @contextlib.contextmanager
    def _pause_generation(self) -> Iterator[None]:
        """Pause generation (`VllmEngine._pause_generation`). A failure is reported before this context ends, because
        ranks of a divided model iterate over the remaining weights together after an error."""
        with self._report_failure(), super()._pause_generation():
            yield

    @contextlib.contextmanager
    def _report_failure(self) -> Iterator[None]:
        """Report an error raised inside to the group, which ends the group's collective calls."""
        try:
            yield
        except BaseException as error:
            self.clients[0].leave(error)
            raise


def make_shared(
    section: Vllm,
    loaded: LoadedModel,
    *,
    scratch: Path,
    max_len: int,
    begun: StartingEngine | None = None,
    training: TrainingRanks | None = None,
) -> SharedEngine:
    """Return this process's SharedEngine (`make_engine`). All training processes call it, once their model is
    loaded."""
    group = group_here(section.tensor_parallel)
    vllm_start.check_divisible(loaded.model.config, group.size)
    spec = spec_of(section, loaded, max_len)
    hub: EngineHub | None = None

    def open_hub() -> Path | None:
        nonlocal hub
        hub = EngineHub(group.size) if group.is_first else None
        return hub.path if hub is not None else None

    try:
        # all ranks have arrived, so all models are allocated
        path = (training or TrainingRanks()).gather_results(open_hub)[group.first]
        if hub is not None:
            finish = operator.itemgetter(0)
            starting = continue_start(section, loaded, scratch=scratch, max_len=max_len, begun=begun, finish=finish)
            hub.attach(starting.engine_or_close())
        elif spec.lora_rank is not None:
            weights.drain_stream(loaded.model, weights.dense_weights(loaded.model))
        assert path is not None
        client = SharedClient(path, ranks.rank(), group.place, group.size, hub)
    except BaseException:
        if hub is not None:
            hub.close()
        raise
    return SharedEngine(spec, loaded, client, group, scratch=scratch)

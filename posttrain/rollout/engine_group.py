"""Groups of training processes that share a vLLM engine: neighbours on one machine, on whose GPUs the engine's workers
run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from posttrain.errors import RecipeError, count_noun
from posttrain.run import ranks

KEY = "rollout.vllm.tensor_parallel"


@dataclass(frozen=True)
class EngineGroup:
    """The engine group of this process. first: lowest rank of the group, which starts the engine. place: index of this
    process in the group, from 0."""

    first: int
    size: int
    place: int

    @property
    def is_first(self) -> bool:
        """Whether this process starts the engine."""
        return self.place == 0


def group_of(rank: int, size: int) -> EngineGroup:
    """Return the group of a rank, for groups of `size` neighbouring ranks."""
    return EngineGroup(rank - rank % size, size, rank % size)


def check_groups(size: int, world: int, on_machine: int) -> None:
    """Raise RecipeError if the training processes cannot be divided into groups of `size`, each on one machine.

    world: number of training processes in all; on_machine: number of them on each machine.
    """
    if world % size:
        raise RecipeError(
            f"{KEY} is {size}: {count_noun(world, 'training process', 'training processes')} cannot be divided into"
            f" engines of {size} GPUs",
            allowed=f"`--gpus` with a multiple of {size}",
            hint="for an engine on GPUs that do not train: `rollout.vllm.server.devices`",
        )
    if on_machine % size:
        raise RecipeError(
            f"{KEY} is {size}: an engine's GPUs are in one machine, and {on_machine} of the {world} training processes"
            " are on this one",
            allowed=f"a multiple of {size} training processes on each machine",
        )


def group_here(size: int) -> EngineGroup:
    """Return the group of this process. Raises RecipeError (`check_groups`)."""
    check_groups(size, ranks.world(), ranks.local_world())
    return group_of(ranks.rank(), size)


def devices_of(group: EngineGroup) -> Sequence[str]:
    """Return the entries of CUDA_VISIBLE_DEVICES for a group's GPUs: those of its training processes, in order
    of rank."""
    first, given = group.first % ranks.local_world(), ranks.given_devices()
    numbers = range(first, first + group.size)
    return [given[number] if given else str(number) for number in numbers]

"""Trains in child processes, as many as a job asks for. See test_distributed.py and forked.py.

A job is {"recipe", "base_dirs", "output", "resume", "ranks", "lost_sync", "engine"}, or {"work", "ranks"} for a
function of this file; lost_sync: null, or a rank and a version of the weights at which its engine's sync fails; engine:
null, or the name of an engine of versioned_engine.py to generate with. The answer is the exit statuses by rank.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
import divided_saves
import engine_clients
import split_families
import versioned_engine

from posttrain import pipeline
from posttrain.cli import stage
from posttrain.errors import DataError, EngineError, PeerLost, UserError
from posttrain.models import activation_offload
from posttrain.recipe.load import load_dict
from posttrain.rollout import hf, vllm_engine, vllm_start, weight_transfer
from posttrain.rollout.hf import TransformersEngine
from posttrain.run import checkpoints
from posttrain.run.directory import RunDirectory
from posttrain.train import (
    assemble,
    checkpoint,
    data_parallel,
    distributed,
    policy,
    preference,
    rank_consistency,
    rank_failure_monitor,
    rank_rendezvous,
    rl,
    sft,
)
from posttrain.train.collate import Sequences
from posttrain.train.ranks import ranks_of_run

SUMS = "sums of gradients"  # a file beside the run: number of gradient reductions of the newest job
HELD = "rows of rank"  # files beside the run: by step, numbers of rows, of trained rows and of rows with tokens
RUNNERS = (sft.run, preference.run, rl.run)  # imported here, so that `run_stage` finds them loaded


def answer(job: dict[str, Any]) -> list[int]:
    with socket.socket() as held:  # no other process gets its port; rank 0 may listen on it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        children = []
        for rank in range(job["ranks"]):
            child = os.fork()
            if child == 0:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(job["ranks"])}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                distributed.PEER_LOST_DELAY_S = 0.1  # no launcher ends the other ranks when one fails
                rank_rendezvous.POLL_S = 0.01
                end(partial(train, job) if "recipe" in job else work_of(job))
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def work_of(job: dict[str, Any]) -> Callable[[], None]:
    """Return the function that a job names."""
    if job["work"] == "save_asynchronously":
        return partial(divided_saves.save_asynchronously, Path(job["root"]))
    if job["work"] == "save_adapters":
        return partial(divided_saves.save_adapters, Path(job["root"]))
    if job["work"] == "fail_alone":
        return partial(divided_saves.fail_alone, Path(job["root"]), job["path"])
    if job["work"] == "split_families":
        return partial(split_families.compare, job["key"], job["kinds"])
    if job["work"] == "split_seeing":
        return partial(split_families.compare_vision_families, job["root"], job["kinds"])
    return {"talk": talk, "fail_without_rank_0": fail_without_rank_0}[job["work"]]


def talk() -> None:
    """Gather objects in a thread over a separate group while the main thread communicates as well; then exchange
    errors."""
    with distributed.join_process_group():
        group, heard = distributed.new_group(), list[list[int]]()

        def talking() -> None:
            with distributed.use_group(group):
                for i in range(200):
                    heard.append(distributed.gather(1000 * distributed.rank() + i))

        thread = threading.Thread(target=talking)
        thread.start()
        for i in range(200):
            assert distributed.gather(-i) == [-i, -i]
            assert distributed.all_reduce_sum(torch.ones(3) * i).tolist() == [2 * i] * 3
        thread.join()
        assert heard == [[i, 1000 + i] for i in range(200)]
        fail()


def fail_without_rank_0() -> None:
    """Rank 1 fails while rank 0 does not check, and closing rank 1 takes longer than rank 0's timeout."""
    rank_failure_monitor.EXIT_GRACE_S = 0.3
    with distributed.join_process_group():
        waiting = distributed.gather(os.getpid())[0]
        try:
            with distributed.propagate_failures():
                broken(1)
                distributed.gather(0)
        finally:
            until = time.monotonic() + 20
            while distributed.rank() == 1 and Path(f"/proc/{waiting}").exists() and time.monotonic() < until:
                time.sleep(0.05)


def fail() -> None:
    """An error of one rank is raised on every rank at the same call, and they continue together."""
    for work, told, by in (
        (lambda: distributed.run_on_rank0(broken, 0), "rank 0 failed: broken on 0", 0),
        (lambda: distributed.gather_or_raise(distributed.capture(broken, 1)), "rank 1 failed: broken on 1", 1),
        (pass_over_too_few_rows, "rank 1 failed: broken on 1", 1),
    ):
        try:
            work()
        except Exception as error:
            mine = distributed.rank() == by
            assert distributed.all_ranks_raise(error) and isinstance(error, ValueError if mine else PeerLost), error
            assert told.endswith(str(error)) if mine else str(error).startswith(told), error
        else:
            raise AssertionError("nothing was raised")
        assert distributed.gather(distributed.rank()) == [0, 1]
    rank_consistency.check_rows(["a", "b"])
    model = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(model.weight, 1 + distributed.rank())
    rank_consistency.check_weights(model.requires_grad_(True), trained=False)
    for check, told in (
        (
            lambda: rank_consistency.check_weights(model.requires_grad_(False), trained=False),
            "has loaded other weights",
        ),
        (
            lambda: rank_consistency.check({"torch": rank_consistency.Fact("2", "2")} if distributed.is_main() else {}),
            "torch: 2 .* nothing",
        ),
    ):
        try:
            check()
        except UserError as error:
            assert re.search(rf"^rank 1 (?s:.*){told}", str(error)), error
        else:
            raise AssertionError(told)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "checkpoints"
        if distributed.is_main():
            with checkpoints.save_checkpoint(root, 3) as unsealed:
                (unsealed / "weights").touch()
        try:
            checkpoint.restore(root, None, None)  # type: ignore[arg-type]  # which it does not come to
        except UserError as error:
            told = (
                r"rank 1 finds another newest checkpoint than rank 0\n  checkpoint: step-0+3 \(.*\) on rank 0, nothing "
            )
            assert re.match(told, str(error)), error
        else:
            raise AssertionError("one rank would have begun anew")
    try:
        rank_consistency.check_rows(["a", "b", "c"][: 2 + distributed.rank()])
    except DataError as error:
        assert re.match(
            r"rank 1 has read other data than rank 0\n  data: 2 rows \(.*\) on rank 0, 3 rows \(.*\) on rank 1",
            str(error),
        )
    else:
        raise AssertionError("other rows were not noticed")


def pass_over_too_few_rows() -> None:
    """Run a pass over a row that all ranks have, each rank independently; the pass fails on rank 1."""
    batch = SimpleNamespace(micro_tokens=8)
    ctx: Any = SimpleNamespace(
        ranks=ranks_of_run(divided=False), recipe=SimpleNamespace(batch=batch), packed=False, shares=False
    )

    def run(*_: Any) -> dict[str, torch.Tensor]:
        broken(1)
        return {"logp": torch.zeros(1, 1)}

    policy._in_parts(ctx, Sequences(((5, 6),), (1,)), [0], run)


def lose_sync(lost: int) -> None:
    """From now on the transformers engine fails in the sync of version `lost`; of a sharded model after its first
    weight, and so does the stand-in for vLLM (-1: in no version)."""
    inner = TransformersEngine.sync

    def sync(self: TransformersEngine, model: Any, version: int) -> None:
        if version == lost and model is self.model:
            raise EngineError("the engine is gone")
        if version == lost:
            hf.dense_weights = lambda *_: iter(())  # its own weights, into which it copies
        inner(self, model, version)

    class Client(engine_clients.TransformersClient):
        async def transfer(self, call: str, info: Any = None) -> None:
            if call == "update_weights" and self.told.count("update") == lost + 1 and self.state:  # once for version 0
                raise EngineError("no room for the second tensor")
            await super().transfer(call, info)

    TransformersEngine.sync = sync  # type: ignore[method-assign]
    weight_transfer.BUCKET_BYTES = 1
    vllm_engine.ColocatedClient = Client  # type: ignore[assignment, misc]
    for check in ("require_vllm", "check_settings", "check_heads"):
        setattr(vllm_start, check, lambda *_: None)


def use_engine(name: str, recipe: Any) -> None:
    """From now on, generate rollouts with this engine of versioned_engine.py."""
    make: Any = versioned_engine.VersionedEngine
    if name == "LongRollouts":
        steps, seed = recipe.run.steps, recipe.run.seed
        make = partial(versioned_engine.LongRollouts, rollout=recipe.rollout, steps=steps, seed=seed)
    assemble.check_engine = lambda *_: None
    assemble.make_engine = lambda _, loaded, **__: make(loaded.tokenizer)


def broken(rank: int) -> None:
    if distributed.rank() == rank:
        raise ValueError(f"broken on {rank}")


def end(work: Callable[[], None]) -> None:
    """Run the work in a child and exit with 0 if it succeeded; never returns."""
    code = 1
    try:
        work()
        code = 0
    except BaseException as error:
        code = getattr(error, "exit_code", 1)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def train(job: dict[str, Any]) -> None:
    rank = int(os.environ["RANK"])
    activation_offload.MIN_BYTES = 0  # inputs of tiny layers are offloaded as well
    loaded = load_dict(job["recipe"], base_dir=Path(job["base_dirs"][rank % len(job["base_dirs"])]), where="job")

    def open_it() -> RunDirectory:
        return RunDirectory.open(Path(job["output"]), name="job", text="", resolved={}, resume=job["resume"])

    lost, version = job["lost_sync"] or (-1, -1)
    lose_sync(version if rank == lost else -1)
    if job["engine"]:
        use_engine(job["engine"], loaded.recipe)
    sums, add = list[int](), data_parallel.sum_gradients

    def sum_gradients(*modules: Any) -> None:
        sums.append(len(modules))
        add(*modules)

    data_parallel.sum_gradients = sum_gradients
    held, shard_batches = list[list[int]](), rl.shard_batches

    def watched(ctx: Any, step: int, rollouts: Any, *batches: Any) -> Any:
        found = shard_batches(ctx, step, rollouts, *batches)
        held.append([len(rollouts), len(found[0].mine), sum(rollout.is_local for rollout in rollouts)])
        return found

    rl.shard_batches = watched
    with stage.open_run(open_it, loaded) as directory:
        pipeline.run_stage(loaded.recipe, directory)
    if rank == 0:
        Path(job["output"]).with_name(SUMS).write_text(str(len(sums)))
    Path(job["output"]).with_name(f"{HELD} {rank}").write_text(json.dumps(held))

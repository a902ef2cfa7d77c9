"""Asynchronous saves of a sharded model, run by ranked.py on two ranks for test_divided_checkpoint.py."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager
from torch.optim import AdamW

from posttrain import terminal
from posttrain.errors import PeerLost, RunError
from posttrain.models.adapters import parameters_by_adapter
from posttrain.models.load import LoadedModel
from posttrain.recipe.sections import Model
from posttrain.run import checkpoints
from posttrain.train import checkpoint, distributed, divided_checkpoint, model_folder, sharding


def save_asynchronously(root: Path) -> None:
    """Step 1 is sealed during step 2, and used if step 2's checkpoint is damaged; step 3 fails on rank 1; in step 4
    rank 1 is killed while it writes."""
    with distributed.join_process_group():
        loaded = sharding.load(Model(path="tiny", shard=True), Path(), seed=0)
        optimizer = AdamW(loaded.model.parameters())
        train_step(loaded, optimizer)
        first = sharding.full_tensor(next(loaded.model.parameters()).detach()).clone()
        may_write = threading.Event()
        write_with(lambda: may_write.wait(60))
        save(root, 1, loaded, optimizer)
        train_step(loaded, optimizer)  # the writer is at the first file
        distributed.barrier()
        assert checkpoints.latest(root) is None
        may_write.set()
        write_with(lambda: None)
        save(root, 2, loaded, optimizer)  # which waits for the first
        assert [step for step in (1, 2) if checkpoints.verify(checkpoints.folder_for(root, step))][:1] == [1]
        restored = sharding.load(Model(path="tiny", shard=True), Path(), seed=1)
        another = AdamW(restored.model.parameters())
        divided_checkpoint.wait_for_save()
        distributed.run_on_rank0(damage, checkpoints.folder_for(root, 2))  # whichever rank it is that hashes the file
        assert checkpoint.restore(root, restored, another) == checkpoint.State(step=1)
        assert torch.equal(sharding.full_tensor(next(restored.model.parameters()).detach()), first)
        write_with(fail_on_rank1)
        save(root, 3, loaded, optimizer)
        try:
            divided_checkpoint.wait_for_save()
        except RunError as error:
            assert "no space left" in str(error) and distributed.all_ranks_raise(error), error
        except PeerLost as error:
            assert "rank 1 failed: no space left" in str(error) and distributed.is_main(), error
        else:
            raise AssertionError("nothing was raised")
        write_with(die_on_rank1)
        save(root, 4, loaded, optimizer)
        divided_checkpoint.wait_for_save()


def fail_alone(root: Path, path: str) -> None:
    """Rank 1 cannot read a checkpoint of packed weights, whose loading ends with a collective; then it has no room for
    a save. Neither rank waits for the other, and both can save again."""
    with distributed.join_process_group():
        section = Model(path=path, parallel={"tensor": 2})  # type: ignore[arg-type]
        loaded = sharding.load(section, Path(), seed=0)
        optimizer = AdamW(loaded.model.parameters())
        for step in (1, 2):
            train_step(loaded, optimizer)
            checkpoint.save(root, checkpoint.State(step=step), loaded, optimizer, 2)
        told: list[str] = []
        terminal.note = told.append  # type: ignore[assignment]
        if not distributed.is_main():
            root = shutil.copytree(root, root.with_name("copy"))
            checkpoints.verify = lambda *_, **__: True  # type: ignore[assignment]  # the disk fails later
            for file in checkpoints.folder_for(root, 2).rglob("*.distcp"):
                file.write_bytes(bytes(file.stat().st_size))
        assert checkpoint.restore(root, loaded, optimizer) == checkpoint.State(step=1)
        assert len(told) == distributed.is_main(), told
        said = "step-00000002 cannot be loaded and is not used: rank 1 failed: .*  the checkpoint cannot be read: "
        assert all(re.search(said, line) for line in told), told
        for module, name in ((model_folder, "_copy_to_host"), (DefaultStager, "stage")):
            working = getattr(module, name)
            setattr(module, name, full_on_rank1(working))
            try:
                save(root.with_name("more"), 3, loaded, optimizer)
            except (MemoryError, PeerLost) as error:
                assert str(error).startswith("rank 1 failed: full" if distributed.is_main() else "full"), error
            else:
                raise AssertionError(name)
            setattr(module, name, working)
            save(root.with_name("more"), 3, loaded, optimizer)
            divided_checkpoint.wait_for_save()
            assert checkpoints.verify(checkpoints.folder_for(root.with_name("more"), 3))
            distributed.barrier()
            distributed.run_on_rank0(shutil.rmtree, root.with_name("more"))


def save_adapters(root: Path) -> None:
    """Save two adapters over a base that is stored nowhere, with other weights each."""
    with distributed.join_process_group():
        lora: Any = {"rank": 2, "adapters": ["one", "two"]}
        loaded = sharding.load(Model(path="tiny", parallel={"tensor": 2}, lora=lora), Path(), seed=0)  # type: ignore[arg-type]
        torch.manual_seed(1)  # the same on both ranks
        for own in parameters_by_adapter(loaded.model).values():
            for weight in own:
                torch.nn.init.normal_(weight, std=0.1)
        sharding.gather_model = None  # type: ignore[assignment]  # no rank builds the model
        report = model_folder.save_model(loaded, root)
        assert report["kind"] == "adapters" and {*report["adapters"]} == {"one", "two"}, report
        assert max(part["logit_gap"] for part in report["adapters"].values()) < 1e-4, report


def full_on_rank1(working: Callable[..., Any]) -> Callable[..., Any]:
    def work(*args: Any, **keys: Any) -> Any:
        if not distributed.is_main():
            raise MemoryError("full")
        return working(*args, **keys)

    return work


def damage(folder: Path) -> None:
    """Change one byte of a file written by rank 1."""
    file = folder / "divided" / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def train_step(loaded: LoadedModel, optimizer: AdamW) -> None:
    """Run one training step."""
    ids = torch.arange(12).view(1, 12) + 3
    loaded.model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(root: Path, step: int, loaded: LoadedModel, optimizer: AdamW) -> None:
    checkpoint.save(root, checkpoint.State(step=step), loaded, optimizer, 2, wait=False)


def write_with(before: Callable[[], Any]) -> None:
    """From now on, call `before` when a rank starts to write its files."""

    def write(share: model_folder.Share, folder: Path) -> None:
        before()
        write_files(share, folder)

    divided_checkpoint.model_folder.write_files = write


def fail_on_rank1() -> None:
    if not distributed.is_main():
        raise RunError(f"no space left ({errno.ENOSPC})")


def die_on_rank1() -> None:
    if not distributed.is_main():
        os.kill(os.getpid(), signal.SIGKILL)


write_files = model_folder.write_files

"""Checkpoints that are written completely and sealed with hashes before older ones are removed.

A checkpoint is a folder `step-00000010` with a MANIFEST.json, which is written last. A folder without it, or with a
file whose size or hash differs from it, is not a checkpoint, whatever its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from posttrain import terminal
from posttrain.errors import RunError, UserError, count_noun
from posttrain.run.atomic_io import explain_write_errors, sync_files, sync_folder, write_json

MANIFEST = "MANIFEST.json"
RESUME_HINT = "older checkpoints are kept; fix that, then run the same command with --resume"  # hint of errors
LONG_RUN_STEPS = 100  # steps from which a run should save before its end
HASH_THREADS = 8
_NAME = re.compile(r"step-(\d{8,})$")
_PARTIAL = ".partial"
Files = dict[str, dict[str, Any]]  # a checkpoint's files by name: `size` in bytes and `sha256`


def no_checkpoint_note(save_every: int | None, steps: int) -> str:
    """Return a warning for a long run that saves only at its end; otherwise ""."""
    if save_every is not None or steps < LONG_RUN_STEPS:
        return ""
    return "no checkpoint before the end: a run that is killed starts over (Ctrl-C saves one); set run.save_every"


def folder_for(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of this step."""
    return root / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name. Raises ValueError for any other name."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"not a checkpoint name: {path.name}")
    return int(match[1])


def check_steps_left(done: int, steps: int) -> None:
    """Raise UserError if a run to be resumed has done more steps than `steps`, since steps cannot be taken back."""
    if done > steps:
        raise UserError(
            f"{count_noun(done, 'step')} are done already, and {steps} {'is' if steps == 1 else 'are'} asked for",
            hint=f"ask for {done} or more (run.steps={done} saves the model as it is), or start a new run with another"
            " --output; models of earlier steps are in `checkpoints`, if they were kept",
        )


@contextlib.contextmanager
def save_checkpoint(root: Path, step: int) -> Iterator[Path]:
    """Yield an empty folder to write a checkpoint into; at the end of the block it is sealed and atomically renamed.

    If the block raises, or the process dies, no folder of that name appears and older checkpoints are untouched. A
    complete checkpoint of the same step is kept: a run is a function of its recipe, so both have the same content.
    Raises RunError if `root` is a link: it may lead to another run's checkpoints.
    """
    partial = begin(root, step)
    with explain_write_errors(partial):
        yield partial
        complete(partial, sync_and_hash(partial))


def begin(root: Path, step: int) -> Path:
    """Return an empty folder to write a checkpoint into; it only counts once `complete` is called."""
    refuse_link(root)
    target = folder_for(root, step)
    partial = target.with_name(target.name + _PARTIAL)
    with explain_write_errors(partial):
        _remove(partial)
        partial.mkdir(parents=True)
    return partial


def complete(partial: Path, files: Files) -> Path:
    """Seal a folder of `begin`, rename it to its final name and return that (`save_checkpoint`)."""
    target = partial.with_name(partial.name.removesuffix(_PARTIAL))
    with explain_write_errors(partial):
        seal(partial, files)
        if verify(target) and not target.is_symlink():
            _remove(partial)
            return target
        _remove(target)
        partial.rename(target)
        sync_folder(target.parent)
    return target


def refuse_link(root: Path) -> None:
    """Raise RunError if the checkpoints folder is a link: checkpoints are removed as well as written, and the target
    may hold those of others."""
    if root.is_symlink():
        raise RunError(
            f"the checkpoints folder is a link to {root.readlink()}; checkpoints are not written or removed through it",
            where=str(root),
            hint="to keep them on another disk, let the whole run be there: --output /OTHER/DISK/RUN",
        )


def seal(folder: Path, files: Files | None = None) -> None:
    """Write the manifest of file sizes and SHA-256 hashes, which makes the folder a checkpoint.

    files: result of `sync_and_hash`; None: computed here.
    """
    with explain_write_errors(folder):
        files = sync_and_hash(folder) if files is None else files
        for inner in [p for p in folder.rglob("*") if p.is_dir()]:
            sync_folder(inner)
        sync_folder(folder)
        write_json(folder / MANIFEST, {"files": dict(sorted(files.items()))})
        sync_folder(folder.parent)


def list_files(folder: Path) -> set[str]:
    """Return the names of a checkpoint's files, including subfolders, without the manifest."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {MANIFEST}


def sync_and_hash(folder: Path, names: Iterable[str] | None = None) -> Files:
    """Flush the files with these names (None: all) to disk, and return their sizes and SHA-256 hashes by name.

    Files are hashed side by side while they are flushed.
    """
    with explain_write_errors(folder), sync_files() as sync:
        names = sorted(list_files(folder) if names is None else names)
        for name in names:
            sync(folder / name)
        hashes = _hash_files(folder, names)
        return {name: {"size": (folder / name).stat().st_size, "sha256": hashes[name]} for name in names}


def verify(folder: Path, *, hashes: bool = True, share: tuple[int, int] = (0, 1)) -> bool:
    """Return whether the folder is sealed and no file has changed since. hashes=False compares sizes only. share: (k,
    n) compares the hash of every n-th file from the k-th on, for n processes that divide the work."""
    try:
        files = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        if any((folder / name).stat().st_size != entry["size"] for name, entry in files.items()):
            return False
        mine = list(files)[share[0] :: share[1]] if hashes else []
        return _hash_files(folder, mine) == {name: files[name]["sha256"] for name in mine}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def latest(root: Path, *, hashes: bool = False, before: int | None = None) -> Path | None:
    """Return the newest complete checkpoint under `root`, of a step before `before`, or None. Use `hashes=True` before
    resuming from it.

    A sealed folder that fails the check is skipped with a note on stderr, so that an older intact one is used.
    """
    for folder in reversed(_folders(root)):
        if before is not None and step_of(folder) >= before:
            continue
        if verify(folder, hashes=hashes):
            return folder
        if (folder / MANIFEST).exists():
            terminal.note(f"{folder} is damaged and is not used")
    return None


def set_aside(root: Path, step: int) -> None:
    """Rename complete checkpoints of later steps to NAME.unusable: they could not be loaded, and a run that resumes
    from `step` makes them again."""
    for folder in _folders(root):
        if step_of(folder) > step and verify(folder, hashes=False):
            aside = folder.with_name(folder.name + ".unusable")
            with explain_write_errors(aside):
                _remove(aside)
                folder.rename(aside)


def prune(root: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints except the `keep` newest, and every incomplete folder. Returns what was removed.

    Call it after sealing a checkpoint. The newest complete one is always kept; if none is complete, nothing is removed.
    """
    folders = _folders(root)
    complete = [folder for folder in folders if verify(folder, hashes=False)]
    if not complete:
        return []
    kept = complete[-max(keep, 1) :]
    gone = [folder for folder in folders if folder not in kept]
    gone += [path for path in root.glob(f"step-*{_PARTIAL}") if path.is_dir()]
    for folder in gone:
        _remove(folder)
    return gone


def require_space(root: Path, nbytes: int) -> None:
    """Raise RunError if the disk of `root` has less than `nbytes` free."""
    existing = next(p for p in (root, *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise RunError(
            f"not enough disk space for a checkpoint: {_size(nbytes)} needed, {_size(free)} free",
            where=str(root),
            hint="free some space, or lower run.keep_checkpoints; then run the same command with --resume",
        )


def _folders(root: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, oldest step first."""
    here = list(root.iterdir()) if root.is_dir() else []
    return sorted((p for p in here if p.is_dir() and not p.is_symlink() and _NAME.fullmatch(p.name)), key=step_of)


def _remove(place: Path) -> None:
    """Remove a file, a link (not its target) or a folder, if it exists. A checkpoint's manifest is removed first, so
    that an interrupted removal leaves no folder that looks complete."""
    if place.is_symlink() or place.is_file():
        place.unlink()
    elif place.exists():
        (place / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(place)


def _hash_files(folder: Path, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 hashes of files by name, computed in several threads: hashing releases the interpreter."""
    with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="hash") as threads:
        return dict(zip(names, threads.map(lambda name: _sha256(folder / name), names), strict=True))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(nbytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"

"""Checkpoint folders: sealing, damage, pruning, full disks and links."""

import json
import shutil
import threading
from collections import namedtuple

import pytest

from posttrain.errors import RunError
from posttrain.run import checkpoints


def save(root, step, text="weights"):
    with checkpoints.save_checkpoint(root, step) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "model.bin").write_text(text)
        (folder / "state.json").write_text("{}")
    return checkpoints.folder_for(root, step)


def test_folder_name_contains_the_step(tmp_path):
    assert checkpoints.folder_for(tmp_path, 10).name == "step-00000010"
    assert checkpoints.step_of(tmp_path / "step-00000010") == 10
    with pytest.raises(ValueError, match="not a checkpoint name: final"):
        checkpoints.step_of(tmp_path / "final")


def test_saved_checkpoint_is_sealed(tmp_path):
    folder = save(tmp_path, 3)
    manifest = json.loads((folder / "MANIFEST.json").read_text())["files"]
    assert set(manifest) == {"inner/model.bin", "state.json"}
    assert manifest["inner/model.bin"]["size"] == len("weights")
    assert checkpoints.verify(folder)
    assert checkpoints.latest(tmp_path, hashes=True) == folder


def test_files_are_hashed_side_by_side(tmp_path, monkeypatch):
    """Both files of a checkpoint wait here for each other, when it is sealed and when it is verified."""
    both = threading.Barrier(2, timeout=30)
    digest = checkpoints._sha256
    monkeypatch.setattr(checkpoints, "_sha256", lambda path: (both.wait(), digest(path))[1])
    assert checkpoints.verify(save(tmp_path, 3))


@pytest.mark.parametrize("damage", ["changed", "missing", "cut", "no manifest", "broken manifest"])
def test_damaged_checkpoint_is_skipped(tmp_path, damage, capsys):
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    target = bad / "inner" / "model.bin"
    if damage == "changed":
        target.write_text("weightz")
    elif damage == "missing":
        target.unlink()
    elif damage == "cut":
        target.write_text("weig")
    elif damage == "no manifest":
        (bad / "MANIFEST.json").unlink()
    else:
        (bad / "MANIFEST.json").write_text('{"files": {"inner/mo')
    assert not checkpoints.verify(bad)
    assert checkpoints.latest(tmp_path, hashes=True) == good
    assert ("step-00000002 is damaged" in capsys.readouterr().err) == (damage != "no manifest")


def test_size_check_does_not_detect_a_changed_byte(tmp_path):
    bad = save(tmp_path, 2)
    (bad / "inner" / "model.bin").write_text("weightz")
    assert checkpoints.verify(bad, hashes=False)
    assert checkpoints.latest(tmp_path) == bad
    assert checkpoints.latest(tmp_path, hashes=True) is None


def test_failed_save_keeps_other_checkpoints(tmp_path):
    good = save(tmp_path, 1)
    with pytest.raises(ZeroDivisionError), checkpoints.save_checkpoint(tmp_path, 2) as folder:
        (folder / "half").write_text("x")
        raise ZeroDivisionError
    assert checkpoints.latest(tmp_path) == good
    assert not checkpoints.folder_for(tmp_path, 2).exists()
    assert checkpoints.prune(tmp_path, keep=1) == [tmp_path / "step-00000002.partial"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_saving_replaces_a_damaged_checkpoint_and_keeps_a_complete_one(tmp_path):
    save(tmp_path, 1, "old")
    assert (save(tmp_path, 1, "new") / "inner" / "model.bin").read_text() == "old"
    (checkpoints.folder_for(tmp_path, 1) / "inner" / "model.bin").write_text("OLD")
    assert (save(tmp_path, 1, "new") / "inner" / "model.bin").read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (checkpoints.folder_for(tmp_path, 4) / "MANIFEST.json").unlink()
    gone = checkpoints.prune(tmp_path, keep=2)
    assert [p.name for p in gone] == ["step-00000001", "step-00000004"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_prune_never_removes_the_last_complete_one(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-00000002").mkdir()
    assert checkpoints.prune(tmp_path, keep=0) == [tmp_path / "step-00000002"]
    assert checkpoints.latest(tmp_path) is not None
    shutil.rmtree(tmp_path / "step-00000001")
    (tmp_path / "step-00000003").mkdir()
    assert checkpoints.prune(tmp_path, keep=1) == []


def test_interrupted_removal_leaves_no_complete_checkpoint(tmp_path, monkeypatch):
    save(tmp_path, 1)
    save(tmp_path, 2)
    monkeypatch.setattr(checkpoints.shutil, "rmtree", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.prune(tmp_path, keep=1)
    assert not checkpoints.verify(checkpoints.folder_for(tmp_path, 1), hashes=False)


@pytest.mark.parametrize(
    ("error", "free", "full"),
    [
        (Exception("I/O error: No space left on device (os error 28)"), 10**9, True),  # safetensors'
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), 0, True),  # torch's
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), 10**9, False),
        (RunError("does not read back as written"), 0, False),
    ],
)
def test_full_disk_is_reported_for_each_librarys_error(tmp_path, monkeypatch, error, free, full):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(10, 10, free))
    with (
        pytest.raises(RunError if full else type(error)) as told,
        checkpoints.save_checkpoint(tmp_path / "checkpoints", 1),
    ):
        raise error
    assert ("no space left on the disk" in str(told.value)) == full


def test_too_little_space_raises_before_writing(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: usage(10, 10, 1_500_000))
    checkpoints.require_space(tmp_path / "not" / "there", 1_500_000)
    with pytest.raises(RunError, match=r"2\.5 GB needed, 1\.5 MB free"):
        checkpoints.require_space(tmp_path, 2_500_000_000)


def test_long_run_that_saves_only_at_its_end_gets_a_note() -> None:
    assert "starts over" in checkpoints.no_checkpoint_note(None, 100)
    assert checkpoints.no_checkpoint_note(None, 99) == checkpoints.no_checkpoint_note(50, 1000) == ""


def test_symlinked_checkpoints_folder_raises(tmp_path):
    """Its target belongs to another run: nothing is written or removed there."""
    save(tmp_path / "theirs", 1)
    (tmp_path / "ours").symlink_to(tmp_path / "theirs")
    with pytest.raises(RunError, match="is a link to"), checkpoints.save_checkpoint(tmp_path / "ours", 2):
        pass
    assert [p.name for p in (tmp_path / "theirs").iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("name", ["step-00000002", "step-00000002.partial"])
@pytest.mark.parametrize("kind", ["link", "file", "dead link"])
def test_file_or_link_named_like_a_checkpoint_is_replaced_and_link_targets_are_kept(tmp_path, name, kind):
    theirs = save(tmp_path / "theirs", 2)
    root = tmp_path / "ours"
    root.mkdir()
    if kind == "file":
        (root / name).write_text("x")
    else:
        (root / name).symlink_to(theirs if kind == "link" else tmp_path / "nowhere")
    assert checkpoints.latest(root) is None
    folder = save(root, 2)
    assert checkpoints.latest(root) == folder and not folder.is_symlink()
    assert checkpoints.verify(theirs)
    assert [p.name for p in root.iterdir()] == ["step-00000002"]


def test_older_checkpoints_can_be_requested(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    found = [checkpoints.latest(tmp_path, before=before) for before in (None, 3, 2, 1)]
    assert [None if folder is None else checkpoints.step_of(folder) for folder in found] == [3, 2, 1, None]

"""Folders are whole under their name or not there, are on the disk before they get it, and can be checked."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from checkpoints import files

from hf_linear_attention._common import folders
from hf_linear_attention._common.folders import clean, commit, discard, find_damage, incomplete, replace, staging


def test_only_what_was_made_is_removed(tmp_path):
    """After `kill -9` a folder of an equal process number is in the way, or another machine's on the same disk."""
    out = tmp_path / "a" / "out"
    others = [f"{out}.tmp-{os.getpid()}", f"{out}.old-{os.getpid()}"]
    for folder in map(Path, others):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("somebody else's")
    before = files(tmp_path)
    with pytest.raises(RuntimeError, match="midway"), staging(out) as folder:  # noqa: PT012
        (folder / "half").write_text("x")
        raise RuntimeError("midway")
    assert files(tmp_path) == before
    for content in ("first", "second"):  # and the result replaces the one before
        with staging(out) as folder:
            (folder / "whole").write_text(content)
        assert (out / "whole").read_text() == content
        assert files(tmp_path) == sorted([*before, "a/out/whole"])
    discard(out)
    assert files(tmp_path) == before


@pytest.fixture
def on_disk(monkeypatch) -> list[Path]:
    """What has been forced to the disk, and the renames between."""
    done: list[Path] = []
    opened: dict[int, Path] = {}
    open_, fsync, rename = os.open, os.fsync, Path.rename

    def noted(path: Path, *arguments: int, **options: int) -> int:
        descriptor = open_(path, *arguments, **options)
        opened[descriptor] = Path(path)
        return descriptor

    def flushed(descriptor: int) -> None:
        done.append(opened[descriptor])
        fsync(descriptor)

    def renamed(self: Path, target: Path) -> Path:
        done.append(target)
        return rename(self, target)

    monkeypatch.setattr(os, "open", noted)
    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    return done


@pytest.mark.parametrize("exists", [False, True])
def test_the_content_is_on_the_disk_before_the_name(tmp_path, on_disk, exists):
    out = tmp_path / "out"
    if exists:
        out.mkdir()
    with staging(out) as folder:
        (folder / "code").mkdir()
        (folder / "code" / "a.py").write_text("1")
        assert not on_disk
    content = {folder, folder / "code", folder / "code" / "a.py"}
    assert set(on_disk[:3]) == content
    assert on_disk[-2:] == [out, tmp_path]
    on_disk.clear()
    commit(out, tmp_path / "final")
    assert set(on_disk[:4]) == {out, out / "code", out / "code" / "a.py", out / "checksums.json"}
    assert on_disk[4:] == [tmp_path / "final", tmp_path]
    assert find_damage(tmp_path / "final") is None


def test_a_folder_that_cannot_be_flushed_is_no_failure_but_a_file_is(tmp_path, monkeypatch):
    """Network file systems may have no fsync for folders."""

    def fsync(descriptor: int, code: int = errno.EINVAL) -> None:
        if is_wrong(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))

    is_wrong = stat.S_ISDIR
    monkeypatch.setattr(os, "fsync", fsync)
    with staging(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    is_wrong = stat.S_ISREG
    with pytest.raises(OSError, match="Invalid argument"), staging(tmp_path / "new") as folder:
        (folder / "a").write_text("1")
    assert files(tmp_path) == ["out/a"]


def test_a_rename_that_fails_gives_the_old_folder_its_name_back(tmp_path, monkeypatch):
    for name in ("new", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "name").write_text(name)
    rename = Path.rename
    monkeypatch.setattr(
        Path, "rename", lambda self, to: rename(self, to) if self.name != "new" else os.rename(self, self / "x")
    )
    with pytest.raises(OSError, match="Invalid argument"):
        replace(tmp_path / "new", tmp_path / "out")
    assert files(tmp_path) == ["new/name", "out/name"]
    assert (tmp_path / "out" / "name").read_text() == "out"


def test_cleaning_removes_what_a_killed_run_left_and_nothing_else(tmp_path, monkeypatch):
    left = [incomplete(tmp_path / "checkpoint-5"), incomplete(tmp_path / "model")]
    left += [tmp_path / f"checkpoint-7.old-{'0' * 16}"]
    own = [tmp_path / name for name in (".incomplete-thesis", "checkpoint-5", "checkpoint-5.old-draft", "model")]
    for folder in [*left, *own]:
        folder.mkdir()
        (folder / "a").write_text("1")
    (tmp_path / ".incomplete-checkpoint-9").write_text("a file, and we make folders")
    (tmp_path / ".incomplete-checkpoint-8").symlink_to(own[0])

    def killed(folder: Path, **options: bool) -> None:
        (folder / "a").unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        discard(own[1])
    monkeypatch.undo()
    clean(tmp_path, r"checkpoint-\d+|model")
    kept = {".incomplete-thesis", "checkpoint-5.old-draft", "model"}
    assert {path.name for path in tmp_path.iterdir()} == kept | {".incomplete-checkpoint-8", ".incomplete-checkpoint-9"}
    clean(tmp_path / "absent", "model")

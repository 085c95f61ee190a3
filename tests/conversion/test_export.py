"""Writing: all or nothing, and never over something that was not asked for."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
import transformers
from checkpoints import convert_folder, files, run

from hf_linear_attention.conversion import export, pipeline
from hf_linear_attention.conversion.errors import ConversionError


def test_an_existing_folder_is_kept_without_overwrite(llama, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    code, _, err = run("--model_name_or_path", llama, "--output_dir", out)
    assert code == 2
    assert "give `--overwrite`" in err
    assert (out / "config.json").read_text() == "old"
    convert_folder(llama, out, "--overwrite", "--num_features", 16)
    assert files(tmp_path) == [f"out/{name}" for name in files(out)]
    assert "old" not in (out / "config.json").read_text()


def test_overwrite_does_not_touch_what_is_no_model_nor_the_source(llama, tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    source = tmp_path / "models" / "llama"
    shutil.copytree(llama, source)
    (tmp_path / "models" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(source)
    for out, said in (
        (precious, "is no model folder"),
        (source, "holds the checkpoint"),
        (source.parent, "holds the checkpoint"),
        (tmp_path / "link", "holds the checkpoint"),
        (precious / "thesis.txt", "is a file"),
    ):
        before = files(tmp_path)
        code, _, err = run("--model_name_or_path", source, "--output_dir", out, "--overwrite")
        assert code == 2
        assert said in err
        assert files(tmp_path) == before


@pytest.mark.parametrize("stage", ["save", "verify", "rename"])
def test_a_full_disk_leaves_nothing_behind_and_the_old_result_intact(llama, linear_llama, tmp_path, monkeypatch, stage):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    old = tmp_path / "old"
    shutil.copytree(linear_llama, old)
    before = {name: (old / name).read_bytes() for name in files(old)}
    if stage == "save":
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
    elif stage == "verify":
        monkeypatch.setattr(pipeline, "verify", full)
    else:
        rename = export.Path.rename
        monkeypatch.setattr(
            export.Path, "rename", lambda self, to: full() if ".tmp-" in self.name else rename(self, to)
        )
    for out in (old, tmp_path / "a" / "b" / "new"):
        code, text, err = run("--model_name_or_path", llama, "--output_dir", out, "--overwrite", "--layers", "none")
        assert (code, text) == (1, "")
        assert err.splitlines()[-1] == "convert_checkpoint.py: failed: [Errno 28] No space left on device"
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert {name: (old / name).read_bytes() for name in files(old)} == before


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_nothing_behind(llama, tmp_path, monkeypatch, kind):
    def interrupt(*args):
        assert len(list(tmp_path.glob("out.tmp-*/model.safetensors"))) == 1
        raise kind(143)

    monkeypatch.setattr(pipeline, "verify", interrupt)
    words = ("--model_name_or_path", llama, "--output_dir", tmp_path / "out")
    if kind is KeyboardInterrupt:
        assert run(*words)[0] == 130
    else:
        with pytest.raises(SystemExit):
            run(*words)
    assert not list(tmp_path.iterdir())


def test_only_what_was_made_is_removed(tmp_path):
    """After `kill -9` a folder of an equal process number is in the way, or another machine's on the same disk."""
    out = tmp_path / "a" / "out"
    others = [f"{out}.tmp-{os.getpid()}", f"{out}.old-{os.getpid()}"]
    for folder in map(Path, others):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text("somebody else's")
    before = files(tmp_path)
    with pytest.raises(RuntimeError, match="midway"), export.staging(out) as folder:  # noqa: PT012
        (folder / "half").write_text("x")
        raise RuntimeError("midway")
    assert files(tmp_path) == before
    for content in ("first", "second"):  # and the result replaces the one before
        with export.staging(out) as folder:
            (folder / "whole").write_text(content)
        assert (out / "whole").read_text() == content
        assert files(tmp_path) == sorted([*before, "a/out/whole"])
    export.discard(out)
    assert files(tmp_path) == before


def test_two_at_once_do_not_meet(tmp_path):
    """Two processes of equal number, such as in two containers, write to one disk: the last one wins, whole."""
    out = tmp_path / "out"
    with export.staging(out) as first:
        (first / "a").write_text("1")
        with pytest.raises(KeyboardInterrupt), export.staging(out) as second:  # noqa: PT012
            (second / "b").write_text("2")
            assert files(first) == ["a"]
            raise KeyboardInterrupt
    assert files(tmp_path) == ["out/a"]


def test_a_parent_that_somebody_else_made_meanwhile_stays(tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def raced(self, *args, **kwargs):
        if self == tmp_path / "a":
            mkdir(self)
        return mkdir(self, *args, **kwargs)

    monkeypatch.setattr(export.Path, "mkdir", raced)
    with pytest.raises(RuntimeError, match="midway"), export.staging(tmp_path / "a" / "b" / "out"):
        raise RuntimeError("midway")
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


def test_the_result_is_as_open_as_any_new_folder(tmp_path):
    (tmp_path / "usual").mkdir()
    with export.staging(tmp_path / "out"):
        pass
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_everything_shipped_is_there_and_a_missing_file_is_noticed(linear_llama, tmp_path):
    assert set(export.shipped_files()) <= set(files(linear_llama))
    assert {"kernels.py", "feature_maps.py", "mechanisms.py"} <= set(export.shipped_files())
    for name in files(linear_llama):
        shutil.copyfile(linear_llama / name, tmp_path / name)
    export.check_shipped(tmp_path)
    (tmp_path / "feature_maps.py").unlink()
    with pytest.raises(ConversionError, match=r"feature_maps\.py"):
        export.check_shipped(tmp_path)


def test_every_file_can_be_read_by_whoever_reads_the_others(linear_llama):
    assert len({(linear_llama / name).stat().st_mode for name in files(linear_llama)}) == 1

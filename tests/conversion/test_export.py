"""Writing: all or nothing, and never over something that was not asked for."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path

import pytest
import transformers
from checkpoints import convert_folder, files, run

from hf_linear_attention.configuration_linear_attention import CODE_FILES
from hf_linear_attention.conversion import pipeline


def test_an_existing_folder_is_kept_without_overwrite(llama, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("old")
    code, _, err = run("--model_name_or_path", llama, "--output_dir", out)
    assert code == 2
    assert "`--overwrite`, which replaces it" in err
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
        (precious, "is not a model folder"),
        (source, "contains the checkpoint"),
        (source.parent, "contains the checkpoint"),
        (tmp_path / "link", "contains the checkpoint"),
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
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda self, to: full() if ".tmp-" in self.name else rename(self, to))
    for out in (old, tmp_path / "a" / "b" / "new"):
        code, text, err = run("--model_name_or_path", llama, "--output_dir", out, "--overwrite", "--layers", "none")
        assert (code, text) == (1, "")
        assert err.splitlines()[-1] == "convert_checkpoint.py: failed: [Errno 28] No space left on device"
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert {name: (old / name).read_bytes() for name in files(old)} == before


@pytest.mark.parametrize(("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_signal_leaves_nothing_behind(llama, tmp_path, monkeypatch, number, word):
    def interrupt(*args):
        assert len(list(tmp_path.glob("out.tmp-*/model.safetensors"))) == 1
        signal.raise_signal(number)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(pipeline, "verify", interrupt)
    code, out, err = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out")
    assert (code, out) == (128 + number, "")
    assert err.splitlines()[-1] == f"convert_checkpoint.py: {word}; --output_dir is complete, or as it was before"
    assert signal.getsignal(signal.SIGTERM) == before
    assert not list(tmp_path.iterdir())


def test_everything_shipped_is_there(linear_llama):
    assert set(CODE_FILES) <= set(files(linear_llama))


def test_every_file_can_be_read_by_whoever_reads_the_others(linear_llama):
    assert len({(linear_llama / name).stat().st_mode for name in files(linear_llama)}) == 1

"""Writing: all or nothing, and never over something that was not asked for."""

from __future__ import annotations

import errno
import shutil
import signal
from pathlib import Path

import pytest
import transformers
from checkpoints import convert_folder, files, run

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


@pytest.mark.parametrize("stage", ["save", "rename"])
def test_a_full_disk_leaves_nothing_behind_and_the_old_result_intact(llama, linear_llama, tmp_path, monkeypatch, stage):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    old = tmp_path / "old"
    shutil.copytree(linear_llama, old)
    before = {name: (old / name).read_bytes() for name in files(old)}
    if stage == "save":
        monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", full)
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


def test_a_signal_leaves_nothing_behind(llama, tmp_path, monkeypatch):
    def interrupt(*args):
        assert len(list(tmp_path.glob("out.tmp-*/model.safetensors"))) == 1
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(pipeline, "verify", interrupt)
    code, out, err = run("--model_name_or_path", llama, "--output_dir", tmp_path / "out")
    assert (code, out) == (143, "")
    assert err.splitlines()[-1] == "convert_checkpoint.py: terminated; --output_dir is complete, or as it was before"
    assert not list(tmp_path.iterdir())


def test_every_file_can_be_read_by_whoever_reads_the_others(linear_llama):
    assert len({(linear_llama / name).stat().st_mode for name in files(linear_llama)}) == 1

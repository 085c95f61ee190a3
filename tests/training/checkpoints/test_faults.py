"""What goes wrong on long runs: kills, full disks, damaged files, losses that are no numbers. Each leaves a run that
can go on, and the resumed run ends with the very weights of the one that nothing happened to.

Then resuming with other options: what ends the run, what is said, and evaluations that cannot be compared.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from runs import changed

from hf_linear_attention._common.folders import find_damage, write_checksums
from hf_linear_attention._common.model_card import HISTORY
from hf_linear_attention._common.options import OnResume
from hf_linear_attention.training.checkpoints import (
    changed_settings,
    damage_of,
    latest_checkpoint,
    list_checkpoints,
    newest_intact_checkpoint,
)
from hf_linear_attention.training.evaluation.scores import Classification
from hf_linear_attention.training.finetune import main
from hf_linear_attention.training.loop import TrainingLoop
from hf_linear_attention.training.losses.objectives import TaskLoss
from hf_linear_attention.training.tracking import read_metrics


STEPS = 8
RESUME = ["--resume_from_checkpoint", "latest"]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(event["step"], event["loss"]) for event in read_metrics(folder / "metrics.jsonl") if "loss" in event]


@pytest.fixture(scope="module")
def options(named_classifier, files):
    model = ["--model_name_or_path", named_classifier, "--task", "sequence_classification"]
    data = ["--train_file", files / "train.tsv", "--max_length", 32, "--learning_rate", "1e-3"]
    steps = ["--max_train_steps", STEPS, "--checkpointing_steps", 2, "--logging_steps", 1]
    return [*model, *data, *steps, "--per_device_train_batch_size", 2, "--gradient_accumulation_steps", 2]


def command(options: list[Any], *more: Any, folder: Path) -> list[str]:
    return [str(option) for option in (*options, *more, "--output_dir", folder)]


@pytest.fixture(scope="module")
def whole(options, tmp_path_factory):
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert main(command(options, folder=folder)) == 0
    return folder


@pytest.fixture
def begun(whole, tmp_path):
    """The same run, killed while it wrote the last checkpoint."""
    folder = tmp_path / "begun"
    shutil.copytree(whole, folder)
    (folder / "checkpoint-8").rename(folder / ".incomplete-checkpoint-8")
    (folder / "model.safetensors").unlink()
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9, "lo')
    return folder


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def state(content: Any) -> Any:
    """Damage that replaces the progress of the run, and the checksums with it."""

    def damage(path: Path) -> None:
        path.write_text("{" if content is None else json.dumps(content))
        write_checksums(path.parent)

    return damage


@pytest.mark.parametrize(
    ("damage", "name", "word"),
    [
        (truncate, "model.safetensors", "bytes"),
        (flip_a_bit, "optimizer.pt", "has changed since"),
        (Path.unlink, "random_states_0.pkl", "missing"),
        (truncate, "checksums.json", "cannot be read"),
        (lambda path: path.write_text("{}"), "checksums.json", "does not list"),
        (state(None), "trainer_state.json", "not valid JSON"),
        (state({"state": {"step": 6}}), "trainer_state.json", "no `recipe`"),
        (state({"state": {"step": 4}, "recipe": {}}), "trainer_state.json", "step 4"),
    ],
)
def test_damage_is_named(damage, name, word, begun):
    damage(begun / "checkpoint-6" / name)
    found = damage_of(begun / "checkpoint-6")
    assert found is not None
    assert name in found
    assert word in found


def test_latest_goes_back_to_the_newest_intact_checkpoint(begun, whole, options, caplog, capsys):
    truncate(begun / "checkpoint-6" / "model.safetensors")
    explicit = command(options, "--resume_from_checkpoint", begun / "checkpoint-6", folder=begun)
    assert main(explicit) == 2
    assert "model.safetensors" in capsys.readouterr().err.splitlines()[-1]
    with caplog.at_level(logging.WARNING):
        assert main(command(options, *RESUME, folder=begun)) == 0
    assert "checkpoint-6 is damaged" in caplog.text
    assert not changed(begun, whole)
    assert losses(begun) == losses(whole)
    assert not list(begun.glob(".incomplete*"))
    assert all(find_damage(path) is None for path in list_checkpoints(begun))


@pytest.fixture
def selecting(options):
    return [*options, "--eval_steps", 2, "--load_best_model_at_end"]


@pytest.fixture
def accuracies(monkeypatch):
    """To be filled with what evaluations say; each takes the first. The weights are the run's own."""
    values: list[float] = []
    monkeypatch.setattr(Classification, "_compute", lambda *_, **__: {"accuracy": values.pop(0)})
    return values


def test_the_best_model_is_kept_and_restored(finetune, selecting, accuracies, files, tmp_path):
    """The best evaluation is the one after step 4 of 8."""
    accuracies[:] = [0.9, 0.5, 0.7, 0.6, 0.7]  # before training, which does not count, and after steps 2, 4, 6, 8
    finetune(*selecting, "--validation_file", files / "valid.tsv", "--save_total_limit", 1)
    folder = tmp_path / "out"
    assert [path.name for path in list_checkpoints(folder)] == ["checkpoint-4", "checkpoint-8"]
    assert not changed(folder, folder / "checkpoint-4")
    assert changed(folder, folder / "checkpoint-8")
    report = json.loads((folder / HISTORY).read_text(encoding="utf-8"))
    assert report["runs"][-1]["metrics"] == {"eval_accuracy": 0.7}


@pytest.mark.parametrize("is_same", [True, False], ids=["the same evaluation", "another evaluation"])
def test_only_figures_of_the_same_evaluation_are_compared(
    is_same, finetune, selecting, accuracies, files, tmp_path, monkeypatch, caplog
):
    """No later accuracy reaches those before. A relative path of the same file, and batches of another size, make no
    other evaluation."""

    def stop(self: TrainingLoop, progress: Any) -> None:
        if self.state.step == 5:
            raise KeyboardInterrupt

    accuracies[:] = [0.9, 0.99, 0.98]  # before training, and of steps 2 and 4
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLoop, "_log", stop)
        finetune(*selecting, "--validation_file", files / "valid.tsv", expect=130)
    accuracies[:] = [0.7, 0.6]  # of steps 6 and 8
    monkeypatch.chdir(files)
    other = ["--validation_file", "valid.tsv" if is_same else "train.tsv", "--per_device_eval_batch_size", 3]
    with caplog.at_level(logging.WARNING):
        finetune(*selecting, *other, *RESUME)
    assert not accuracies
    assert ("the best evaluation so far (step 2) cannot be compared" in caplog.text) is not is_same
    assert not changed(tmp_path / "out", tmp_path / "out" / ("checkpoint-2" if is_same else "checkpoint-6"))


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The kernel refuses to write more (EFBIG; Python ignores the signal): to a program, a disk quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_cannot_be_written_keeps_the_last_good_checkpoint(begun, whole, options, capsys):
    """A limit between the size of the weights and that of the optimizer, which is twice as large."""
    shutil.rmtree(begun / "checkpoint-6")
    size = (whole / "checkpoint-6" / "optimizer.pt").stat().st_size
    again = command(options, *RESUME, folder=begun)
    with largest_file(size - 1):
        assert main(again) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("finetune.py: failed: checkpoint-6 could not be written")
    assert str(begun / "checkpoint-4") in error
    assert not list(begun.glob(".incomplete*"))
    assert newest_intact_checkpoint(begun) == begun / "checkpoint-4"
    assert main(again) == 0
    assert not changed(begun, whole)


def test_a_loss_that_is_no_number_names_the_examples(options, whole, tmp_path, monkeypatch, capsys):
    """It is noticed before it reaches the weights, even where no line is logged at this step."""
    of_rows, seen = TaskLoss.of_rows, []

    def poisoned(self: TaskLoss, logits: Any, rows: Any, batch: Any, teacher: Any) -> torch.Tensor:
        seen.append(batch["index"].tolist())
        value = of_rows(self, logits, rows, batch, teacher)
        return value * (torch.nan if len(seen) == 10 else 1)  # step 5, its second batch

    monkeypatch.setattr(TaskLoss, "of_rows", poisoned)
    folder = tmp_path / "out"
    assert main(command(options, "--logging_steps", 100, folder=folder)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"the loss of step 5 is not finite (training examples {sorted(seen[9])})" in error
    assert f"last good checkpoint is {folder / 'checkpoint-4'}" in error
    assert not changed(folder / "checkpoint-4", whole / "checkpoint-4")


@pytest.mark.long
def test_kill_9_at_any_moment(options, tmp_path, dataset_cache):
    """Loses at most the 2 steps since the last checkpoint, and nothing of the result."""
    whole, folder = tmp_path / "whole", tmp_path / "out"
    longer = [*options, "--max_train_steps", 16, "--save_total_limit", 2]
    assert main(command(longer, folder=whole)) == 0
    again = command(longer, *RESUME, folder=folder)
    kills = 0
    for delay in (random.uniform(0, 0.4) for _ in range(2)):
        before = newest_intact_checkpoint(folder)
        run = processes.start(processes.finetune, dataset_cache, again)
        while latest_checkpoint(folder) == before and run[0].is_alive():
            time.sleep(0.01)
        time.sleep(delay)
        run[0].kill()
        kills += processes.finish(run) == [-signal.SIGKILL]
        reached, newest = max(step for step, _ in losses(folder)), newest_intact_checkpoint(folder)
        assert newest is not None
        assert int(newest.name.split("-")[1]) >= reached - 2, f"killed {delay} s after {before}"
        damaged = [path for path in list_checkpoints(folder) if find_damage(path) is not None]
        assert not damaged, f"killed {delay} s after {before}"
    assert processes.finish(processes.start(processes.finetune, dataset_cache, again)) == [0]
    assert kills
    assert not changed(folder, whole)
    assert losses(folder) == losses(whole)


def test_a_model_is_finished_only_with_its_last_file(options, whole, tmp_path, monkeypatch):
    """Killed between any two files, the folder has no report, by which a stage of a preset counts as done; also where
    the report of an earlier run was there."""
    replace, moved = Path.replace, [0]
    # a file that the alphabet puts behind the report, as other tokenizers have
    monkeypatch.setattr(
        "hf_linear_attention.training.checkpoints.copy_sidecars",
        lambda _, folder: (folder / "vocab.txt").write_text("a"),
    )
    total = sum(path.is_file() for path in whole.iterdir()) - 1 + 1  # without metrics.jsonl, with vocab.txt
    assert total > 5
    for count in (0, 1, total - 1):
        folder = tmp_path / str(count)
        shutil.copytree(whole / "checkpoint-8", folder / "checkpoint-8")
        shutil.copyfile(whole / "metrics.jsonl", folder / "metrics.jsonl")
        if count % 2:
            shutil.copyfile(whole / HISTORY, folder / HISTORY)

        def killed(self: Path, target: Path, limit: int = count) -> Path:
            if self.parent.name == ".incomplete-model":
                if moved[0] == limit:
                    raise KeyboardInterrupt
                moved[0] += 1
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", killed)
        moved[0] = 0
        assert main(command(options, *RESUME, folder=folder)) == 130
        assert not (folder / HISTORY).exists(), count
        monkeypatch.setattr(Path, "replace", replace)
    assert main(command(options, *RESUME, folder=folder)) == 0
    assert not changed(folder, whole)
    assert (folder / HISTORY).read_bytes() == (whole / HISTORY).read_bytes()


@pytest.mark.long
def test_two_processes_end_and_resume_together(options, tmp_path, dataset_cache):
    """SIGTERM to one of two: both stop after the same step, and go on bit-exactly, each with its own dropout."""
    folders = [tmp_path / "whole", tmp_path / "parted"]
    two = [*options, "--per_device_train_batch_size", 1, "--max_train_steps", 40, "--checkpointing_steps", 20]
    run = processes.start(processes.finetune, dataset_cache, command(two, folder=folders[0]), ranks=2)
    assert processes.finish(run) == [0, 0]
    log = tmp_path / "stderr"
    run = processes.start(processes.finetune, dataset_cache, command(two, folder=folders[1]), ranks=2, stderr=log)
    while not (folders[1] / "metrics.jsonl").exists() and all(process.is_alive() for process in run):
        time.sleep(0.01)
    run[1].terminate()
    assert processes.finish(run) == [143, 143], (tmp_path / "stderr-0").read_text(encoding="utf-8")[-2000:]
    saved = latest_checkpoint(folders[1])
    assert saved is not None
    assert 0 < int(saved.name.split("-")[1]) < 40
    again = command(two, *RESUME, folder=folders[1])
    assert processes.finish(processes.start(processes.finetune, dataset_cache, again, ranks=2)) == [0, 0]
    assert not changed(*folders)
    assert losses(folders[0]) == losses(folders[1])
    # the test can fail: each process has its own random state
    states = [
        torch.load(folders[0] / "checkpoint-20" / f"random_states_{rank}.pkl", weights_only=False)["torch_manual_seed"]
        for rank in (0, 1)
    ]
    assert not torch.equal(*states)


def test_with_nothing_left_to_train_and_another_evaluation_the_last_weights_are_taken(
    finetune, selecting, files, tmp_path, capsys
):
    finetune(*selecting, "--validation_file", files / "valid.tsv")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    other = [*selecting, "--validation_file", files / "train.tsv", *RESUME]
    finetune(*other, "--seed", 1, expect=2)
    assert "seed: 42 -> 1" in capsys.readouterr().err
    finetune(*other)
    assert not changed(tmp_path / "out", tmp_path / "out" / "checkpoint-8")
    figures = json.loads((tmp_path / "out" / HISTORY).read_text(encoding="utf-8"))["runs"][-1]["metrics"]
    assert figures["eval_samples"] == 60


def test_what_another_value_of_an_option_is_to_a_resumed_run():
    """What decides data, order or model is refused. Embeddings are compared with the teacher's."""
    fixed = {"task", "model_name_or_path", "train_file", "max_length", "seed", "trainable", "use_peft", "lora_r"}
    free = {"eval_steps", "output_dir", "report_to", "per_device_eval_batch_size", "gradient_checkpointing"}
    names = fixed | free | {"train_examples", "sequences_per_step"}
    found = changed_settings({}, dict.fromkeys(names, 1))
    assert {text.split(":")[0] for text in found[OnResume.REFUSED]} == names - free
    assert found[OnResume.WARNED] == found[OnResume.INCOMPARABLE] == []
    assert changed_settings({"world_size": 1}, {"world_size": 2})[OnResume.WARNED] == ["world_size: 1 -> 2"]
    said = ["teacher_name_or_path: a -> b"]
    for task, evaluation in (("embedding", said), ("causal_lm", [])):
        found = changed_settings(*({"task": task, "teacher_name_or_path": teacher} for teacher in "ab"))
        assert (found[OnResume.REFUSED], found[OnResume.WARNED]) == ([], said)
        assert found[OnResume.INCOMPARABLE] == evaluation

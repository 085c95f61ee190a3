"""Peak memory of healing, beside that of fine-tuning the original with transformers' `Trainer`.

    python -m benchmarks.memory_healing

A Llama with random weights in float32, AdamW, two steps of two texts: `Trainer` on the original, and both stages of the
preset `default` on the converted model, from `from_pretrained` to the saved model. Every run has a process of its own,
in which malloc returns freed tensors at once, so that the peak of its memory is that of its tensors.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Trainer, TrainingArguments

from benchmarks.common import in_a_process, parse, peak_bytes, save, table, write
from benchmarks.models import llama
from hf_linear_attention import convert
from hf_linear_attention.training import distributed
from hf_linear_attention.training.presets import load_preset, stage_runs
from hf_linear_attention.training.recipe_parser import make_recipe
from hf_linear_attention.training.run import run


TRAINER, STAGES = "Trainer on the original", ("attention transfer", "distillation")
STEPS, BATCH = 2, 2


def make(folder: Path, length: int, *sizes: int) -> None:
    """An original, what it is converted to, and texts."""
    original = llama(*sizes)
    words = {f"w{number}": number for number in range(original.config.vocab_size - 1)} | {"</s>": 31999}
    tokenizer = Tokenizer(models.WordLevel(words))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for place, model in {"original": original, "converted": convert(original)}.items():
        model.save_pretrained(folder / place)
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), "</s>")
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / place)
    texts = [" ".join(f"w{number}" for number in torch.randint(31999, (length,))) for _ in range(2 * STEPS * BATCH)]
    (folder / "texts.txt").write_text("\n\n".join(texts), encoding="utf-8")


def fine_tune(folder: Path, length: int, recomputes: bool) -> None:
    """Train the original with `Trainer`."""
    model = LlamaForCausalLM.from_pretrained(folder / "original", dtype=torch.float32)
    options: dict[str, Any] = {"max_steps": STEPS, "per_device_train_batch_size": BATCH, "report_to": []}
    options |= {"use_cpu": True, "disable_tqdm": True, "logging_strategy": "no", "gradient_checkpointing": recomputes}
    rows = torch.randint(31999, (STEPS * BATCH, length))
    arguments = TrainingArguments(str(folder / "tuned"), save_strategy="no", **options)
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    trainer.save_model()


def heal(folder: Path, length: int, recomputes: bool, stage: int) -> None:
    """Run one stage of the preset."""
    given = {"task": "causal_lm", "train_file": str(folder / "texts.txt"), "max_length": length}
    given |= {"teacher_name_or_path": str(folder / "original"), "output_dir": str(folder / "healed")}
    given |= {"max_train_steps": STEPS, "per_device_train_batch_size": BATCH, "gradient_checkpointing": recomputes}
    own = {"model_name_or_path": str(folder / "converted"), "overwrite_output_dir": True}
    with mock.patch.object(distributed, "keep_freed_memory"):
        run(make_recipe(stage_runs(load_preset("default"), given | own)[stage][1] | own))


def measure(kind: str, folder: str, length: int, recomputes: bool) -> float:
    """MB at the peak of one run."""
    more = () if kind == TRAINER else (STAGES.index(kind),)
    call: Any = fine_tune if kind == TRAINER else heal
    call(Path(folder) / "first", 64, recomputes, *more)  # imports, and what else only the first run takes
    return peak_bytes(lambda: call(Path(folder) / "model", length, recomputes, *more)) / 1e6


def main(argv: list[str] | None = None) -> None:
    """Measure every kind of run, without and with recomputed activations."""
    quick = {"length": 64, "sizes": [64, 2, 2, 176]}
    arguments = parse(__doc__, argv, quick, length=1024, sizes=[512, 4, 8, 1376], case="")
    if arguments.case:
        write(json.dumps(measure(*json.loads(arguments.case))))
        return
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "first", 64, 64, 2, 2, 176)
        make(Path(folder) / "model", arguments.length, *arguments.sizes)
        cases = [[[kind, folder, arguments.length, again] for again in (False, True)] for kind in (TRAINER, *STAGES)]
        peaks = [[in_a_process("benchmarks.memory_healing", case) for case in pair] for pair in cases]
    rows = [[kind, *p, p[0] / peaks[0][0], p[1] / peaks[0][1]] for kind, p in zip((TRAINER, *STAGES), peaks)]
    title = f"2 x {arguments.length:,} tokens, sizes {' '.join(map(str, arguments.sizes))}"
    save(arguments, "memory_healing", [table([title, "MB", "recomputed", "of Trainer", "recomputed"], rows)])


if __name__ == "__main__":
    main()

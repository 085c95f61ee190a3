"""What fine-tuning costs recall, and what `finetune --restore_projections` (arXiv 2606.11052) brings back of it.

    python -m benchmarks.papers.restore_projections

Teachers of `mqar` (recall_tasks.py) are converted with `--kept` layers of softmax, healed, and fine-tuned on texts of
the same tokens that need no recall from far away, `near` and `markov`. Then queries and keys are restored; or they were
frozen all the time. The columns: percent of right answers to `mqar` by length, and what `finetune` says on held-out
text of the fine-tuning.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from benchmarks.common import parse, save, table
from benchmarks.papers.recall import FORMS, MOST_DOCUMENTS, by_length, heal, means, teacher_folder, training_file
from benchmarks.papers.recall_tasks import Maker, markov, near, tokenizer, write_documents
from hf_linear_attention import convert
from hf_linear_attention.training.finetune import main as finetune
from hf_linear_attention.training.tracking import read_metrics


# With the steps and the learning rate of fine-tuning.
TEXTS: dict[str, tuple[Maker, int, float]] = {"near": (near, 300, 1e-3), "markov": (markov, 30, 3e-4)}


def healed_folder(arguments: Namespace, seed: int) -> Path:
    """A student that recalls, made if it is not there."""
    teacher, form = teacher_folder(arguments, "mqar", seed), FORMS["linear exp"]
    converted = teacher.with_name(f"kept-{'-'.join(map(str, arguments.kept))}-{arguments.num_features}")
    torch.manual_seed(seed)
    layers = [layer for layer in range(arguments.layers) if layer not in arguments.kept]
    settings = {**form.settings, "num_features": arguments.num_features, "layers": layers}
    convert(str(teacher), **settings).save_pretrained(converted)
    tokenizer().save_pretrained(converted)
    return heal(arguments, form, teacher, converted, training_file(arguments, teacher, "mqar", seed), seed)


def measure(arguments: Namespace, text: str, seed: int) -> dict[str, list[float]]:
    """The columns of the healed student and of what is made of it."""
    healed, length, (maker, steps, rate) = healed_folder(arguments, seed), arguments.length, TEXTS[text]
    work, steps = healed.with_name(text), min(steps, arguments.most_steps)
    work.mkdir(exist_ok=True)
    for name, count in (("train", 16 * steps), ("valid", 128)):
        write_documents(work / f"{name}.jsonl", maker, length, count * length, seed + count)
    held_out = ["--validation_file", work / "valid.jsonl", "--max_length", length, "--overwrite_output_dir"]
    training = ["--train_file", work / "train.jsonl", "--max_train_steps", steps, "--learning_rate", rate]
    training += ["--per_device_train_batch_size", 16, "--warmup_ratio", 0.1, "--seed", seed]
    frozen = ["--freeze_pattern", rf"layers\.({'|'.join(map(str, arguments.kept))})\.self_attn\.[qk]_proj"]
    runs = {"fine-tuned": training, "restored": ["--restore_projections", healed], "frozen": [*training, *frozen]}
    found: dict[str, list[float]] = {}
    for name, more in runs.items():
        words = ["--task", "causal_lm", "--model_name_or_path", work / "fine-tuned" if name == "restored" else healed]
        if finetune([str(word) for word in [*words, "--output_dir", work / name, *held_out, *more]]):
            raise RuntimeError(f"finetune failed in {work / name}")
        events = [event for event in read_metrics(work / name / "metrics.jsonl") if "eval_recall" in event]
        for key, folder, event in (("healed", healed, events[0]), (name, work / name, events[-1])):
            figures = [event["eval_recall"], event["eval_nats_per_token"]]
            found.setdefault(key, [*by_length(arguments, folder, "mqar"), *figures])
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure all seeds and texts."""
    quick = {"length": 33, "width": 32, "teacher_steps": 20, "tokens": 528, "tokens_per_step": 132, "most_steps": 2}
    sizes = {"length": 129, "width": 64, "layers": 4, "heads": 2, "documents": MOST_DOCUMENTS, "lengths": [1, 2, 4]}
    training = {"tokens": 600_000, "tokens_per_step": 2048, "learning_rate": 1e-3, "teacher_steps": 1500}
    chosen = {"kept": [1, 3], "num_features": 16, "most_steps": 300, "seeds": [0, 1, 2], "model_type": "llama"}
    work = Path("outputs/recall")
    arguments = parse(__doc__, argv, quick, **sizes, **training, **chosen, texts=list(TEXTS), work_dir=work)
    found = {text: [measure(arguments, text, seed) for seed in arguments.seeds] for text in arguments.texts}
    columns = [*(f"x{times}" for times in arguments.lengths), "recall", "nats"]
    tables = [
        table([f"{text}, x 100", *columns], [[name, *means(rows, name)] for name in rows[0]])
        for text, rows in found.items()
    ]
    save(arguments, "restore_projections", tables, texts=found)


if __name__ == "__main__":
    main()

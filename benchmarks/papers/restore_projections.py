"""What fine-tuning costs recall, and what `finetune --restore_projections` (arXiv 2606.11052) brings back of it.

    python -m benchmarks.papers.restore_projections

Teachers of `mqar` (recall_tasks.py) are converted with `--kept` layers of softmax, healed, and fine-tuned on texts of
the same tokens that need no recall: `markov`, in which a token depends on the one before it, and `wrong`, pairs with
answers that do not stand in the context. Then the projections are restored; or they were frozen (`--freeze_pattern`).
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import torch

from benchmarks.common import parse, save, table, write
from benchmarks.papers.recall import FORMS, MOST_DOCUMENTS, by_length, heal, means, teacher_folder
from benchmarks.papers.recall_tasks import FIRST_KEY, FIRST_VALUE, VALUES, WORDS, Documents, mqar, noise, tokenizer
from benchmarks.papers.recall_tasks import write_documents as write_texts
from hf_linear_attention import convert
from hf_linear_attention.training.finetune import main as finetune
from hf_linear_attention.training.tracking import read_metrics


COLUMNS = ["right, x1", "x2", "eval_recall", "nats"]


def markov(size: int, length: int, generator: torch.Generator) -> Documents:
    """The chances of the next token are those of one random matrix."""
    logits = 2 * torch.randn(2 * [len(WORDS) - FIRST_KEY], generator=torch.Generator().manual_seed(7))
    tokens = noise(size, length, generator)
    for place in range(2, length):
        chances = logits[tokens[:, place - 1] - FIRST_KEY].softmax(-1)
        tokens[:, place] = FIRST_KEY + torch.multinomial(chances, 1, generator=generator)[:, 0]
    return tokens, tokens < 0


def wrong(size: int, length: int, generator: torch.Generator) -> Documents:
    """`mqar` with random answers."""
    tokens, counts = mqar(size, length, generator)
    tokens[counts] = FIRST_VALUE + torch.randint(VALUES, (int(counts.sum()),), generator=generator)
    return tokens, counts


def healed_folder(arguments: Namespace, seed: int) -> Path:
    """A student that recalls, made if it is not there."""
    teacher, form = teacher_folder(arguments, "mqar", seed), FORMS["linear exp"]
    converted = teacher.with_name(f"kept-{'-'.join(map(str, arguments.kept))}-{arguments.num_features}")
    if not converted.is_dir():
        torch.manual_seed(seed)
        linear = [layer for layer in range(arguments.layers) if layer not in arguments.kept]
        settings = {**form.settings, "num_features": arguments.num_features, "layers": linear}
        convert(str(teacher), **settings).save_pretrained(converted)
        tokenizer().save_pretrained(converted)
    return heal(arguments, form, teacher, converted, "mqar", seed)


def measure(arguments: Namespace, text: str, seed: int) -> dict[str, list[float]]:
    """The COLUMNS of the healed student and of what is made of it."""
    healed, length, size = healed_folder(arguments, seed), arguments.length, arguments.batch
    work, maker = healed.with_name(f"{text}-{arguments.steps}-{arguments.rate}"), {"markov": markov, "wrong": wrong}
    work.mkdir(exist_ok=True)
    for part, split in enumerate(("train", "valid")):
        write_texts(work / f"{split}.jsonl", maker[text], length, arguments.steps * size * length, seed + 50 + part)
    common = ["--task", "causal_lm", "--max_length", length, "--validation_file", work / "valid.jsonl", "--seed", seed]
    training = ["--train_file", work / "train.jsonl", "--max_train_steps", arguments.steps, "--warmup_ratio", 0.5]
    training += ["--per_device_train_batch_size", size, "--learning_rate", arguments.rate]
    frozen = rf"layers\.({'|'.join(map(str, arguments.kept))})\.self_attn\.[qk]_proj"
    runs = {"fine-tuned": training, "restored": ["--restore_projections", healed]}
    found: dict[str, list[float]] = {}
    for name, options in {**runs, "frozen": [*training, "--freeze_pattern", frozen]}.items():
        folder, model = work / name, work / "fine-tuned" if name == "restored" else healed
        words = ["--model_name_or_path", model, "--output_dir", folder, "--overwrite_output_dir", *common, *options]
        if finetune([str(word) for word in words]):
            raise RuntimeError(f"finetune failed in {folder}")
        events = [event for event in read_metrics(folder / "metrics.jsonl") if "eval_recall" in event]
        for key, at, event in (("healed", healed, events[0]), (name, folder, events[-1])):
            if key not in found:
                found[key] = [*by_length(arguments, at, "mqar"), event["eval_recall"], event["eval_nats_per_token"]]
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure all seeds and texts."""
    quick = {"length": 33, "width": 32, "teacher_steps": 20, "tokens": 528, "tokens_per_step": 132, "steps": 2}
    sizes = {"length": 129, "width": 64, "layers": 4, "heads": 2, "documents": MOST_DOCUMENTS, "lengths": [1, 2]}
    healing = {"tokens": 600_000, "tokens_per_step": 2048, "learning_rate": 1e-3, "teacher_steps": 1500}
    tuning = {"kept": [1, 3], "num_features": 16, "steps": 30, "rate": 3e-4, "batch": 16, "seeds": [0, 1, 2]}
    chosen = {"model_type": "llama", "texts": ["markov", "wrong"], "work_dir": Path("outputs/recall")}
    arguments = parse(__doc__, argv, quick, **sizes, **healing, **tuning, **chosen)
    tables, figures = [], {}
    for text in arguments.texts:
        rows = [measure(arguments, text, seed) for seed in arguments.seeds]
        write(f"{text}: {rows}")
        lines = [[name, *means(rows, name)] for name in rows[0]]
        tables.append(table([f"{text}, mean x 100", *COLUMNS], lines))
        figures[text] = rows
    save(arguments, "restore_projections", tables, texts=figures)


if __name__ == "__main__":
    main()

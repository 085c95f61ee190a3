"""The benchmark of vLLM runs."""

from __future__ import annotations

import json

from benchmarks import speed_vllm


def test_a_quick_run(tmp_path):
    speed_vllm.main(["--quick", "--output_dir", str(tmp_path)])
    result = json.loads((tmp_path / "speed_vllm.json").read_text(encoding="utf-8"))
    prefill, decode, memory = result["tables"]
    for table in (prefill, decode):
        assert len(table["rows"]) == len(speed_vllm.QUICK_CASES)
        assert all(value > 0 for row in table["rows"] for value in row[-4:])
    # A state does not grow with the context, and that of `linear` is the smaller one.
    assert all(hybrid > linear > 0 for _, _, hybrid, linear in memory["rows"])
    assert memory["rows"][0][2:] == memory["rows"][1][2:]

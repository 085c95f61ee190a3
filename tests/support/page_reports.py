"""A report with everything that report.html can show, small enough to be read."""

from __future__ import annotations

from typing import Any


def bucket(start: int, end: int, teacher: float, student: float) -> dict[str, Any]:
    figures = {"teacher": teacher, "student": student, "same_bytes": student + 0.1, "window_alone": student + 0.2}
    difference = {"mean": -0.1, "standard_error": 0.01}
    return {"from": start, "to": end, "targets": 9, **figures, "student_minus_same_bytes": difference}


def heads(scale: float) -> dict[str, Any]:
    rows = [{"layer": layer, "error": [scale * (1 + head) / 5 for head in range(4)]} for layer in (0, 1)]
    return {"inputs": "the built-in sentences", "layers": rows}


LAYER = {
    "layer": 0, "module": "m", "stock_class": "A", "linear_class": "B", "mechanism": "hybrid", "num_heads": 4,
    "state_bytes": 69_500, "cache_bytes_per_token": 256,
}  # fmt: skip
QUALITY = {
    "validation_file": "held_out.txt", "max_tokens": 50_000, "teacher": 1.4055, "student": 1.4174,
    "agreement": 0.9501, "kl": 0.0213, "same_bytes": 1.4182, "window_alone": 1.4292, "gap": 0.0119, "targets": 50_175,
    "control": {"window_size": 108, "num_sinks": 0, "state_bytes": 138_820, "nats": 1.4182, "others": []},
    "positions": {
        "trained_length": 512, "length": 2048, "ended_by": "the text", "windows": 12,
        "buckets": [bucket(0, 64, 2.1, 2.1), bucket(64, 512, 1.40, 1.42), bucket(512, 2048, 5.4, 1.41)],
    },
    "recall_teacher": 0.31, "recall": 0.29,
    "heads": heads(0.2),
    "speed": {
        "model": {
            "reading": [
                {"length": 128, "seconds": 2e-3, "softmax_seconds": 1e-3},
                {"length": 1024, "seconds": 4e-3, "softmax_seconds": 12e-3},
            ],
            "writing": [{"length": 128, "seconds": 2e-3, "softmax_seconds": 1e-3}],
        },
        "dtype": "float32", "threads": 1,
    },
}  # fmt: skip
REPORT: dict[str, Any] = {
    "base_model": "org/tiny", "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
    "num_layers": 2, "layers": [LAYER, {**LAYER, "layer": 1}], "state_bytes": 139_000,
    "weights": {"total": 1000, "new": 60}, "dropped_features": ["position_bias"],
    "tensors": {"dropped": [{"source": "dropped.weight", "target": None, "shape": [3, 4], "dtype": "float32"}]},
    "checks": {"student_against_teacher": {"top1_agreement": 0.5}, "heads": heads(1.0)},
    "max_length": 512,
    "command": ["--model_name_or_path", "org/tiny", "--preset", "default", "--train_file", "a.jsonl"],
    "quality": QUALITY,
}  # fmt: skip
RUNS: list[dict[str, Any]] = [
    {
        "dataset": "a.jsonl", "metrics": {"eval_nats_per_token": 1.5},
        "training": {"stage": stage, "tokens": 1000, "logits_kl_weight": 1.0},
    }
    for stage in ("transfer", "distil")
]  # fmt: skip
CONFIG = {"model_type": "linear_llama", "linear_attention": {"mechanism": "hybrid"}}

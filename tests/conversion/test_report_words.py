"""What the reports keep of a command and of the losses of a training."""

from __future__ import annotations

import json

from hf_linear_attention.training.tracking import MOST_POINTS, loss_curve


def test_a_curve_of_losses_is_thinned_out_and_ends_at_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    events = [{"step": 0, "tokens": 0, "eval_nats_per_token": 2.0}]
    events += [{"step": n, "tokens": 10 * n, "loss": 1 / n, "tokens_per_second": n} for n in range(1, 256)]
    events += [{"step": 255, "tokens": 2550, "eval_nats_per_token": 1.0}]
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    found = loss_curve(path)
    assert found["unit"] == "tokens"
    assert 2 < len(found["points"]) <= MOST_POINTS + 1
    assert found["points"][0] == [30, 1 / 3]
    assert found["points"][-1] == [2550, 1 / 255]
    assert found["evaluated"] == [[0, 2.0], [2550, 1.0]]
    assert found["per_second"] == 128
    assert loss_curve(tmp_path / "absent.jsonl") == {}
    path.write_text(json.dumps({"step": 5, "images": 50, "loss": 0.5, "images_per_second": 7}) + "\n")
    assert loss_curve(path) == {"unit": "images", "points": [[50, 0.5]], "evaluated": [], "per_second": 7}

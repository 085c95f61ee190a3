"""What the default preset asks of rotary positions, where a model has none and where it was trained on long inputs."""

from __future__ import annotations

import json
import re

from checkpoints import run, save_twin

from hf_linear_attention.conversion.plan import make_plan
from hf_linear_attention.conversion.preset_plan import with_healed_frequencies
from hf_linear_attention.conversion.source import open_source


def dry_run(folder, *more):
    (folder / "train.txt").write_text("A story.\n")
    words = ["--model_name_or_path", folder, "--preset", "default", "--train_file", folder / "train.txt", "--dry_run"]
    return run(*words, *more)


def test_a_model_without_rotary_positions_is_converted_without_the_option(tmp_path):
    save_twin(tmp_path, "gpt2")
    code, out, err = dry_run(tmp_path)
    assert code == 0, err
    assert "rope=before_map" in out
    assert "rotary" not in err
    code, _, err = dry_run(tmp_path, "--rope", "partial")
    assert code == 2
    assert "`rope` = `partial`" in err


def test_frequencies_turn_within_the_longest_sequence_of_the_training(tmp_path):
    save_twin(tmp_path, "llama")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "max_position_embeddings": 1_000}))
    plan = make_plan(open_source(str(tmp_path)), {"mechanism": "hybrid", "rope": "partial", "decay": "learned"})
    layers = plan.num_layers
    # Wavelengths of 6.3, 63, 628 and 6,283 tokens: three turn within 1,000, two within the 512 of the training.
    assert plan.settings["rope_frequencies"] == [3] * layers
    assert with_healed_frequencies({}, plan, "default") == {"rope_frequencies": [2] * layers}
    code, out, err = dry_run(tmp_path, "--window_size", "100", "--num_exact_keys", "0")
    assert code == 0, err
    assert re.search(r"rope_frequencies=2\b", out)
    code, out, err = dry_run(tmp_path)  # rows in which heads choose keys are longer
    assert code == 0, err
    assert re.search(r"rope_frequencies=3\b", out)

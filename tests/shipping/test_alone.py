"""Converted checkpoints where this package is not installed, or another version of it: all in forks of one process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
import transformers
from architectures import inputs_of
from checkpoints import convert_folder, run, save_twin, tiny_tokenizer
from converted import brief_timing  # noqa: F401  (a fixture, found here by name)
from hub_configs import HUB_CONFIGS, shrunk
from matrix import sample_inputs, stock_model
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import hf_linear_attention
from hf_linear_attention import convert, softmax_attention
from hf_linear_attention.kernels import cpu as kernels_cpu


# The fixture `results` takes half a minute; with `--dist loadgroup` one process makes it.
pytestmark = pytest.mark.xdist_group(name="alone")
REVISION = "0123456789abcdef0123456789abcdef01234567"
TEXT = "some text for the tokenizer"
# What is loaded as from a hub, too, and without its head.
ON_THE_HUB = ("bert", "gpt2")
# name: family, head of the checkpoint, options of the conversion
CONVERTED = {
    "bert": ("bert", "AutoModelForMaskedLM", "--window_size=4"),
    "linformer": (
        "vit",
        "AutoModelForImageClassification",
        "--attention=linformer --projection_size=8 --projection_sharing=layerwise",
    ),
    "llama": ("llama", "AutoModelForCausalLM", "--attention=performer --layers=0,2"),
    "gpt2": ("gpt2", "AutoModelForCausalLM", "--attention=linear --feature_map=hedgehog"),
    "hybrid": ("llama", "AutoModelForCausalLM", "--attention=hybrid --window_size=4 --num_sinks=2"),
    "aft": ("llama", "AutoModelForCausalLM", "--attention=aft --variant=local --window_size=4"),
    "gated_delta": ("llama", "AutoModelForCausalLM", "--attention=gated_delta --conv_size=3"),
    "nystrom": ("bert", "AutoModelForMaskedLM", "--attention=nystrom --num_landmarks=4"),
    "latent": ("bert", "AutoModelForMaskedLM", "--attention=latent --num_latents=4"),
    "linformer_linear": ("bert", "AutoModelForMaskedLM", "--attention=linformer_linear --projection_size=8"),
    "by layer": (
        "llama",
        "AutoModelForCausalLM",
        "--attention=0:hybrid,1:linear,2:performer --window_size=4 --num_features=8",
    ),
}
# What is saved again over another checkpoint.
RESAVED = ("gpt2", "hybrid")
FAMILIES = [name for name, row in HUB_CONFIGS.items() if row.drop or row.options or not row.refused]
REFUSED = [name for name, row in HUB_CONFIGS.items() if row.refused]
AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForMaskedLM": "AutoModelForMaskedLM",
    "T5ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "WhisperForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
    "ForImageClassification": "AutoModelForImageClassification",
}
DECODERS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
# Shorter than the inputs, so that the far keys count.
SETTINGS = ("--window_size", 4)
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
# Float32 sums of the same two layers in another order differ by up to 2e-6; the logits have a deviation of .45.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("shipping")
    for name, (family, auto_class, words) in CONVERTED.items():
        save_twin(root / "sources" / name, family, auto_class)
        convert_folder(root / "sources" / name, root / name, "--no_verify", *words.split())
    return {name: root / name for name in CONVERTED}


@pytest.fixture(scope="module")
def trainer_checkpoint(converted, tmp_path_factory) -> Path:
    """checkpoint-1 of a stock Trainer after one step."""
    model = transformers.AutoModelForCausalLM.from_pretrained(converted["gpt2"])
    ids = sample_inputs("gpt2")["input_ids"]
    arguments = TrainingArguments(
        str(tmp_path_factory.mktemp("trainer")), max_steps=1, save_steps=1, learning_rate=1e-2, report_to=[],
        use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
    return Path(arguments.output_dir) / "checkpoint-1"


@pytest.fixture(scope="module")
def versions(tmp_path_factory) -> dict[str, str]:
    """The Auto classes of a decoder and an encoder as this code wrote them under transformers 5.16, and as it does."""
    root = tmp_path_factory.mktemp("earlier")
    with tarfile.open(FIXTURES / "carried_code.tar.xz") as archive:
        archive.extractall(root, filter="data")
    autos = {"decoder": "AutoModelForCausalLM", "encoder": "AutoModelForMaskedLM"}
    for kind, auto in autos.items():
        source = root / "5.16" / kind
        model = getattr(transformers, auto).from_pretrained(source).eval()
        given = load_file(source / "expected.safetensors")
        model.save_pretrained(root / "now" / kind)
        with torch.no_grad():
            logits = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        save_file({**given, "logits": logits.contiguous()}, root / "now" / kind / "expected.safetensors")
    return {str(root / name / kind): autos[kind] for name in ("5.16", "now") for kind in autos}


@pytest.fixture(scope="module")
def results(converted, trainer_checkpoint, versions, tmp_path_factory) -> dict[str, dict]:
    """`{group: {job: result}}` of alone.py; without the package there are no C kernels, and torch computes."""
    root = tmp_path_factory.mktemp("alone")
    forwards, backwards = (
        {"kind": "together", "checkpoints": found} for found in (versions, dict(reversed(versions.items())))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels_cpu, "library", lambda: None)
        blocked = _jobs(root / "blocked", converted, trainer_checkpoint)
    served = _jobs(root / "installed", {name: converted[name] for name in ON_THE_HUB}, trainer_checkpoint)
    served = {job: what for job, what in served.items() if job.split()[0] in ("folder", "trainer")}
    groups = {
        "blocked": {"together": forwards, **blocked},
        "installed": {"together": backwards, **served},
        "newer": {"newer": _newer(root / "newer", list(versions)[2])},
    }
    for name in ON_THE_HUB:  # the cache of a hub on which they are `org/<name>`
        repository = root / "hub" / f"models--org--{name}"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs" / "main").write_text(REVISION)
        shutil.copytree(converted[name], repository / "snapshots" / REVISION)
    return _run_alone(groups, root)


def _run_alone(groups: dict[str, dict], root: Path) -> dict[str, dict]:
    (root / "jobs.json").write_text(json.dumps(groups))
    environment = {
        **os.environ,
        "HF_HUB_CACHE": str(root / "hub"),
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(root / "modules"),
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("alone.py")), str(root / "jobs.json")],
        cwd=root, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _jobs(root: Path, converted: dict[str, Path], trainer_checkpoint: Path) -> dict[str, dict]:
    """Jobs for alone.py, with what this process computes."""
    root.mkdir()
    jobs = {}
    for name in converted:
        family, auto_class, _ = CONVERTED[name]
        for auto in (auto_class, "AutoModel") if name in ON_THE_HUB else (auto_class,):
            inputs = root / f"{name}-{auto}.pt"
            _expect(converted[name], family, auto, inputs)
            job = {"auto_class": auto, "inputs": str(inputs)}
            jobs[f"folder {name} {auto}"] = {**job, "checkpoint": str(converted[name])}
            if name in ON_THE_HUB and auto == auto_class:
                jobs[f"hub {name} {auto}"] = {**job, "checkpoint": f"org/{name}"}
        if name in RESAVED:
            others = [other for other in RESAVED if other in converted]
            shutil.copytree(converted[others[others.index(name) - 1]], root / f"again-{name}")
            jobs[f"resaved {name}"] = {**jobs[f"folder {name} {auto_class}"], "resave": str(root / f"again-{name}")}
    jobs["untrusted"] = {**jobs["folder gpt2 AutoModel"], "kind": "untrusted"}
    edited = shutil.copytree(converted["gpt2"], root / "edited") / "config.json"
    edited.write_text(json.dumps({**json.loads(edited.read_text()), "linear_attention": {"mechanism": "hybrid"}}))
    jobs["foreign"] = {"auto_class": "AutoModelForCausalLM", "checkpoint": str(edited.parent), "kind": "foreign"}
    inputs = root / "trainer.pt"
    _expect(trainer_checkpoint, "gpt2", "AutoModelForCausalLM", inputs, has_tokenizer=False)
    jobs["trainer gpt2"] = {
        "auto_class": "AutoModelForCausalLM", "checkpoint": str(trainer_checkpoint), "inputs": str(inputs),
    }  # fmt: skip
    return jobs


def _expect(folder: Path, family: str, auto_class: str, path: Path, has_tokenizer: bool = True) -> None:
    """Write inputs, and what this process computes from them, to `path`."""
    model = getattr(transformers, auto_class).from_pretrained(folder).eval()
    saved = {"inputs": sample_inputs(family)}
    with torch.no_grad():
        saved["output"] = model(**saved["inputs"])[0]
    if auto_class == "AutoModelForCausalLM":
        saved["new_tokens"] = 5
        saved["tokens"] = model.generate(**saved["inputs"], max_new_tokens=5, do_sample=False)
    if family != "vit" and has_tokenizer:
        saved["text"] = TEXT
        saved["ids"] = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    torch.save(saved, path)


def _newer(folder: Path, checkpoint: str) -> dict[str, str]:
    """A job: a decoder with settings of the next version."""
    path = shutil.copytree(checkpoint, folder) / "configuration_linear_attention.py"
    text = path.read_text(encoding="utf-8")
    assert text.count("FORMAT_VERSION = 1\n") == 1
    path.write_text(text.replace("FORMAT_VERSION = 1\n", "FORMAT_VERSION = 2\n"), encoding="utf-8")
    return {"kind": "newer", "checkpoint": str(folder), "auto_class": "AutoModelForCausalLM"}


def _graphs(root: Path) -> dict[str, str]:
    stock = stock_model("llama", num_hidden_layers=1)
    for name, settings in (("hybrid", {"window_size": 4, "num_sinks": 2}), ("performer", {"num_features": 16})):
        convert(stock, mechanism=name, **settings).save_pretrained(root / f"graphs-{name}")
    folders = {"checkpoint": str(root / "graphs-hybrid"), "other": str(root / "graphs-performer")}
    return {"kind": "graphs", "auto_class": "AutoModelForCausalLM", **folders}


def _families(root: Path) -> dict[str, dict[str, str]]:
    jobs = {}
    for number, name in enumerate(FAMILIES):
        try:
            jobs[name] = _family(name, root / str(number))
        except Exception as error:  # one broken row must not hide the others
            jobs[name] = {"kind": f"{type(error).__name__}: {error}"}
    return jobs


@torch.no_grad()
def _family(name: str, root: Path) -> dict[str, str]:
    """Convert a row, compare it with its stock model, and return what alone.py shall load and compute again."""
    row, auto = HUB_CONFIGS[name], _auto_class_of(HUB_CONFIGS[name].fields)
    _save_source(name, root / "source")
    drop = ("--drop", ",".join(row.drop)) if row.drop else ()
    words = ("--model_name_or_path", root / "source", "--output_dir", root / "converted")
    # The longest models would take minutes each: what scores are fitted to is as long as their default state.
    short = ("--state_tokens", 96) if auto in DECODERS else ()
    code, _, error = run(*words, *SETTINGS, *short, *drop, *(row.options or ("--no_verify",)))
    assert code == 0, error
    stock = getattr(transformers, auto).from_pretrained(root / "source").eval()
    model = getattr(transformers, auto).from_pretrained(root / "converted").eval()
    assert type(model).__module__ == "hf_linear_attention.modeling_linear_attention"
    assert model.dtype == stock.dtype
    inputs = _inputs_for(stock)
    saved = {"inputs": inputs, "output": model(**inputs)[0]}
    with softmax_attention(model):
        assert torch.equal(model(**inputs)[0], stock(**inputs)[0])
    assert torch.isfinite(saved["output"]).all()
    if auto == "AutoModelForCausalLM":
        saved["new_tokens"] = 5
        saved["tokens"] = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    torch.save(saved, root / "inputs.pt")
    return {"auto_class": auto, "checkpoint": str(root / "converted"), "inputs": str(root / "inputs.pt")}


def _save_source(name: str, folder: Path) -> None:
    """A random checkpoint with exactly the fields of the row in its config.json."""
    fields = shrunk(HUB_CONFIGS[name].fields)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(fields))
    config = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(0)
    model_class = getattr(transformers, _auto_class_of(fields))
    dtype = getattr(torch, fields.get("torch_dtype", fields.get("dtype", "float32")))
    model_class.from_config(config).to(dtype).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(fields))
    if "vocab_size" in fields:
        tiny_tokenizer().save_pretrained(folder)


def _auto_class_of(fields: dict) -> str:
    architecture = fields.get("architectures", [""])[0]
    return next((auto for end, auto in AUTO_CLASSES.items() if architecture.endswith(end)), "AutoModel")


def _inputs_for(model) -> dict[str, torch.Tensor]:
    if model.main_input_name != "input_features":
        size = getattr(getattr(model.config, "vision_config", None), "image_size", None)
        images = {} if size is None else {"pixel_values": torch.ones(2, 3, size, size)}
        return {**inputs_of(model, length=24), **images}
    shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    features = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": torch.arange(5, 19).view(2, 7)}


@pytest.mark.long
@pytest.mark.parametrize("name", CONVERTED)
def test_it_loads_and_computes_the_same(results, name):
    """From its folder, saved again over another checkpoint, and some from a hub."""
    found = {job: result for job, result in results["blocked"].items() if job.partition(" ")[2].startswith(name)}
    expected = {"folder", *(["hub"] if name in ON_THE_HUB else []), *(["resaved"] if name in RESAVED else [])}
    assert {job.split()[0] for job in found} >= expected
    assert set(found.values()) == {"equal"}, found


@pytest.mark.architectures
def test_every_family_converts_and_loads_with_and_without_the_package(tmp_path, monkeypatch):
    """The configs of real families as they are on the hub."""
    monkeypatch.setattr(kernels_cpu, "library", lambda: None)
    found = _run_alone({"families": _families(tmp_path)}, tmp_path)["families"]
    assert found == dict.fromkeys(FAMILIES, "equal") | {"imported": []}


@pytest.mark.long
def test_a_trainer_checkpoint_does_too_nothing_else_was_imported_and_without_trust_it_is_refused(results):
    assert results["blocked"]["trainer gpt2"] == "equal"
    assert results["blocked"]["imported"] == []
    assert results["blocked"]["untrusted"] == "refused"


@pytest.mark.long
def test_an_installed_package_serves_it(results):
    """Though nobody has imported it, and `trust_remote_code=True` was given."""
    found = {job: got for job, got in results["installed"].items() if job not in ("together", "imported")}
    assert len(found) == 2 * len(ON_THE_HUB) + 1
    assert set(found.values()) == {"equal"}, found
    assert results["installed"]["imported"] == ["hf_linear_attention"]


@pytest.mark.long
@pytest.mark.parametrize("group", ["blocked", "installed"])
def test_checkpoints_of_all_versions_compute_together_what_they_did(results, group):
    found = results[group]["together"]
    assert all(difference < TOLERANCE for difference, _ in found.values()), found
    expected = "transformers_modules" if group == "blocked" else "hf_linear_attention"
    assert {module for folder, (_, module) in found.items() if "/now/" in folder} == {expected}


@pytest.mark.long
def test_a_package_that_is_too_old_leaves_the_work_to_the_checkpoint(results):
    module, said = results["newer"]["newer"]
    assert module == "transformers_modules"
    assert len(said) == 1
    assert said[0].startswith("This checkpoint has settings of version 2, and the installed hf_linear_attention ")
    assert f"{hf_linear_attention.__version__} reads versions up to 1" in said[0]


@pytest.mark.long
def test_it_is_compiled_exported_pickled_and_copied(tmp_path):
    assert _run_alone({"graphs": {"graphs": _graphs(tmp_path)}}, tmp_path)["graphs"]["graphs"] == "equal"


@pytest.mark.long
def test_another_mechanism_is_refused_with_what_to_do(results):
    said = "`mechanism` = 'hybrid', but this checkpoint contains the code of `linear` only; install hf-linear-attention"
    assert said in results["blocked"]["foreign"]


@pytest.mark.long
def test_auto_map_names_every_head(converted):
    for name, (family, _, _) in CONVERTED.items():
        config = transformers.AutoConfig.from_pretrained(converted[name])
        heads = {
            auto
            for auto in vars(transformers)
            if auto.startswith("AutoModel")
            and type(getattr(getattr(transformers, auto), "_model_mapping", None)).__name__ == "_LazyAutoMapping"
            and family in getattr(transformers, auto)._model_mapping._model_mapping
        }
        assert heads - set(config.auto_map) <= {"AutoModelForMultimodalLM"}, name


@pytest.mark.parametrize("name", REFUSED)
def test_what_linear_attention_lacks_is_refused_before_weights_are_read(name, tmp_path):
    fields = shrunk(HUB_CONFIGS[name].fields)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(fields))
    save_file({"none_of_the_model": torch.zeros(1)}, source / "model.safetensors")
    code, _, error = run(
        "--model_name_or_path", source, "--output_dir", tmp_path / "converted", *SETTINGS, "--layers", "all"
    )
    assert HUB_CONFIGS[name].refused in error
    assert code == 2
    assert not (tmp_path / "converted").exists()

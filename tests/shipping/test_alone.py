"""Converted checkpoints where this package is not installed."""

from __future__ import annotations

import pytest
import transformers
from shipping_cases import CONVERTED, ON_THE_HUB


@pytest.mark.parametrize("name", CONVERTED)
def test_it_loads_and_computes_the_same(results, name):
    """From its folder, saved again over another checkpoint, and some from a hub."""
    found = {job: result for job, result in results.items() if job.partition(" ")[2].startswith(name)}
    assert {job.split()[0] for job in found} >= {"folder", "resaved", *(["hub"] if name in ON_THE_HUB else [])}
    assert set(found.values()) == {"equal"}, found


def test_a_trainer_checkpoint_does_too(results, trainer_checkpoint):
    assert results["trainer gpt2"] == "equal"


def test_nothing_else_was_imported(results):
    assert results["imported"] == []


def test_an_installed_package_serves_it(results_with_the_package):
    """Though nobody has imported it, and `trust_remote_code=True` was given."""
    found = {job: result for job, result in results_with_the_package.items() if job.split()[0] in ("folder", "trainer")}
    assert len(found) == 2 * len(ON_THE_HUB) + 1
    assert set(found.values()) == {"equal"}, found
    assert results_with_the_package["imported"] == ["hf_linear_attention"]


def test_another_mechanism_is_refused_with_what_to_do(results):
    said = "`mechanism` = 'hybrid', but this checkpoint contains the code of `linear` only; install hf-linear-attention"
    assert said in results["foreign"]


def test_without_trust_it_is_refused(results):
    assert results["untrusted"] == "refused"


def test_with_the_plugin_imported_no_flag_is_needed(converted):
    model = transformers.AutoModel.from_pretrained(converted["gpt2"])
    assert type(model).__module__ == "hf_linear_attention.modeling_linear_attention"
    # The flag changes nothing: the installed code wins over the copy in the folder.
    trusted = transformers.AutoModel.from_pretrained(converted["gpt2"], trust_remote_code=True)
    assert type(trusted) is type(model)


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

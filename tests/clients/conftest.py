"""Third-party libraries against converted checkpoints: collected only where `-m` selects `clients`.

Importing them, and downloading transformers' own tests, takes too long for every other run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from _pytest.mark.expression import Expression
from checkpoints import convert_folder, save_twin


# Markers that transformers' tests carry; `--strict-markers` wants every one declared.
FOREIGN_MARKERS = (
    "accelerate_tests",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "flash_attn_test",
    "is_training_test",
    "order",
    "slow",
    "torch_compile_test",
)
HYBRID = ("--attention", "hybrid", "--window_size", 4, "--num_sinks", 2, "--num_features", 16)
LINEAR = ("--attention", "linear", "--num_features", 16)
# name: family, head, options of the conversion
CONVERTED = {
    "llama": ("llama", "AutoModelForCausalLM", HYBRID),
    "gpt2": ("gpt2", "AutoModelForCausalLM", LINEAR),
    "bert": ("bert", "AutoModelForMaskedLM", LINEAR),
    "classifier": ("roberta", "AutoModelForSequenceClassification", LINEAR),
    "image-classifier": ("vit", "AutoModelForImageClassification", LINEAR),
}


def pytest_configure(config: pytest.Config) -> None:
    for marker in FOREIGN_MARKERS:
        config.addinivalue_line("markers", f"{marker}: of transformers' tests")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if collection_path.suffix != ".py" or not config.option.markexpr:
        return None
    selected = Expression.compile(config.option.markexpr).evaluate(lambda name, **_: name == "clients")
    return None if selected else True


@pytest.fixture(scope="session")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Converted folders of random twins, with their tokenizers; tests must not write into them."""
    root = tmp_path_factory.mktemp("clients")
    for name, (family, auto_class, words) in CONVERTED.items():
        save_twin(root / "sources" / name, family, auto_class)
        convert_folder(root / "sources" / name, root / name, "--no_verify", *words)
    return {name: root / name for name in CONVERTED}

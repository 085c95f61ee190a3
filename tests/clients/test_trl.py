"""trl's SFTTrainer on a converted decoder: padded, and packed without attention across documents."""

from __future__ import annotations

from pydoc_data.topics import topics

import datasets
import pytest
import torch
from transformers import AutoModelForCausalLM


trl = pytest.importorskip("trl", reason="needs the extra `clients`")
pytestmark = pytest.mark.clients

TEXTS = [topics[name][100 : 110 + place] for place, name in enumerate(sorted(topics)[:24])]


def trainer(folder, output, **options):
    arguments = trl.SFTConfig(
        str(output), max_steps=4, per_device_train_batch_size=4, learning_rate=1e-3, max_length=48, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False,
        model_init_kwargs={"trust_remote_code": True, "dtype": "float32"}, **options,
    )  # fmt: skip
    return trl.SFTTrainer(str(folder), arguments, train_dataset=datasets.Dataset.from_dict({"text": TEXTS}))


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_it_learns_saves_and_loads(packing, folders, tmp_path):
    run = trainer(folders["llama"], tmp_path / "run", packing=packing)
    assert type(run.model).__name__ == "LinearLlamaForCausalLM"
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    run.save_model(str(tmp_path / "trained"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "trained", trust_remote_code=True)
    ids = torch.tensor([[1, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, run.model.eval()(ids).logits)


def test_packed_documents_do_not_see_each_other(folders, tmp_path):
    run = trainer(folders["llama"], tmp_path, packing=True)
    batch = next(iter(run.get_train_dataloader()))
    model = run.model.eval()
    assert (batch["position_ids"] == 0).sum() > 4  # the batch size: there are several documents in a row
    with torch.no_grad():
        together = model(batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
        starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        apart = [
            model(batch["input_ids"][:, start:stop]).logits[0]
            for start, stop in zip(starts, [*starts[1:], len(together)])
        ]
    torch.testing.assert_close(together, torch.cat(apart), rtol=1e-4, atol=1e-4)

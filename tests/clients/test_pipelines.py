"""transformers' pipelines on converted folders: the same as the model called by hand, whatever the batch size."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline


pytestmark = pytest.mark.clients

TEXTS = ["the name of the module", "a", "statements that are executed in order"]


def pipe(task, folder, **options):
    return pipeline(task, model=str(folder), trust_remote_code=True, device="cpu", **options)


def test_text_generation(folders):
    options = {"do_sample": False, "max_new_tokens": 6, "return_full_text": False}
    batched = pipe("text-generation", folders["llama"])(TEXTS, batch_size=3, **options)
    tokenizer = AutoTokenizer.from_pretrained(folders["llama"])
    model = AutoModelForCausalLM.from_pretrained(folders["llama"], trust_remote_code=True)
    for text, (result,) in zip(TEXTS, batched):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        new = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False)[0, ids.shape[1] :]
        assert result["generated_text"] == tokenizer.decode(new, skip_special_tokens=True)


def test_text_classification(folders):
    classify = pipe("text-classification", folders["classifier"])
    alone, batched = classify(TEXTS, batch_size=1), classify(TEXTS, batch_size=3)
    assert [result["label"] for result in alone] == [result["label"] for result in batched]
    assert [result["score"] for result in alone] == pytest.approx([result["score"] for result in batched], rel=1e-4)


def test_feature_extraction(folders):
    features = pipe("feature-extraction", folders["bert"])(TEXTS[0], return_tensors=True)
    inputs = AutoTokenizer.from_pretrained(folders["bert"])(TEXTS[0], return_tensors="pt")
    model = AutoModel.from_pretrained(folders["bert"], trust_remote_code=True)
    with torch.no_grad():
        assert torch.equal(features, model(**inputs).last_hidden_state)


def test_image_classification(folders):
    pixels = torch.randint(0, 255, (2, 20, 20, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    images = [Image.fromarray(image.numpy()) for image in pixels]
    classify = pipe("image-classification", folders["image-classifier"])
    alone, batched = classify(images, batch_size=1), classify(images, batch_size=2)
    for one, other in zip(alone, batched):
        assert {guess["label"] for guess in one} == {guess["label"] for guess in other} == {"LABEL_0", "LABEL_1"}
        assert one[0]["score"] == pytest.approx(other[0]["score"], rel=1e-4)
    assert alone[0][0]["score"] != alone[1][0]["score"]

"""Run as a script by the tests: loads checkpoints where only torch and transformers can be imported.

    python alone.py JOBS.json

The file holds groups of jobs, `{group: {job: what to do}}`. Each group runs in a fork of this process, which has loaded
no model; the groups `installed` and `newer` can import this package. The script prints
`{group: {job: result}}`; the result of most jobs is "equal", or says what went wrong.
"""

from __future__ import annotations

import copy
import inspect
import io
import json
import multiprocessing
import pickle
import sys
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor


PACKAGE = "hf_linear_attention"
BLOCKED = {
    *(PACKAGE, "conversion", "training", "accelerate", "peft"),
    *("datasets", "evaluate", "sentence_transformers"),
}
MISSING = set(BLOCKED)


class Without:
    """A finder in sys.meta_path that does not know the missing packages, as if they had never been installed."""

    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in MISSING else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]

import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file  # noqa: E402


# What every fork would import anew.
for name in ("AutoTokenizer", "BertForMaskedLM", "GPT2LMHeadModel", "LlamaForCausalLM", "ViTForImageClassification"):
    getattr(transformers, name)


def load(job, **options):
    return getattr(transformers, job["auto_class"]).from_pretrained(job["checkpoint"], **options)


def check(job) -> str:
    """Whether a checkpoint computes what the process of the tests did, also saved again to `resave`."""
    saved = torch.load(job["inputs"], weights_only=True)
    if job.get("resave"):
        load(job, trust_remote_code=True).save_pretrained(job["resave"])
        job = {**job, "checkpoint": job["resave"]}
    model = load(job, trust_remote_code=True)
    expected = "transformers_modules." if PACKAGE in MISSING else PACKAGE
    if not type(model).__module__.startswith(expected):
        return f"loaded as {type(model).__module__}, not as {expected}"
    type(model.config)()  # as transformers before 5.20 does to compare the config with it
    with torch.no_grad():
        if not torch.equal(model(**saved["inputs"])[0], saved["output"]):
            return "other outputs"
    if "tokens" in saved:
        tokens = model.generate(**saved["inputs"], max_new_tokens=saved["new_tokens"], do_sample=False)
        if not torch.equal(tokens, saved["tokens"]):
            return "other tokens"
    if "text" in saved and "resave" not in job:
        for trust in (True, False):  # left open, transformers asks on the terminal, as for every model with code
            tokenizer = transformers.AutoTokenizer.from_pretrained(job["checkpoint"], trust_remote_code=trust)
            if tokenizer(saved["text"]).input_ids != saved["ids"]:
                return f"other token ids with trust_remote_code={trust}"
    return "equal"


def untrusted(job) -> str:
    try:
        load(job, trust_remote_code=False)
    except ValueError as error:
        return "refused" if "trust_remote_code" in str(error) else str(error)
    return "loaded without being trusted"


def foreign(job) -> str:
    """What a checkpoint says to the config of another mechanism."""
    try:
        load(job, trust_remote_code=True)
    except ValueError as error:
        return str(error)
    return "loaded"


def together(job) -> dict[str, tuple[float, str]]:
    """All checkpoints in one process: how far each is from what it has computed, and where its class is from."""
    models = {
        folder: load({"checkpoint": folder, "auto_class": auto_class}, trust_remote_code=True).eval()
        for folder, auto_class in job["checkpoints"].items()
    }
    found = {}
    for folder, model in [*models.items(), *models.items()]:
        given = load_file(f"{folder}/expected.safetensors")
        expected = given.pop("logits")
        with torch.no_grad():
            difference = (model(**given).logits - expected)[given["attention_mask"].bool()].abs().max().item()
            if job["checkpoints"][folder] == "AutoModelForCausalLM":
                model.generate(**given, max_new_tokens=3, do_sample=False, pad_token_id=0)
        difference = max(difference, found.get(folder, [0])[0])
        found[folder] = difference, type(model).__module__.partition(".")[0]
    return found


def newer(job) -> tuple[str, list[str]]:
    """Where the class of a checkpoint is from whose settings the package cannot read, and what was said."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model = load(job, trust_remote_code=True)
    said = [str(warning.message) for warning in found if "settings of version" in str(warning.message)]
    return type(model).__module__.partition(".")[0], said


@torch.no_grad()
def graphs(job) -> str:
    """Whether a checkpoint compiles to the same graphs again, and is exported, pickled and copied."""
    from torch._dynamo.utils import counters
    from transformers.utils import output_capturing

    model = load(job, trust_remote_code=True).eval()
    ids = torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model(ids).logits
    compiled = torch.compile(model, backend="eager", fullgraph=True)

    def run():
        cache = transformers.StaticCache(config=model.config, max_cache_len=64)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        given = {name: cache, "use_cache": True}
        parts = [model(ids[:, :-2], **given), *(compiled(part, **given) for part in ids[:, -2:].split(1, dim=1))]
        return torch.cat([part.logits for part in parts], dim=1)

    for _ in range(2):  # the second cache is another object
        torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    number = counters["stats"]["unique_graphs"]
    # Graphs of any model depend on this table of transformers, which grows with every class of models.
    classes = dict(output_capturing._CAN_RECORD_REGISTRY)
    load({**job, "checkpoint": job["other"]}, trust_remote_code=True)(ids)
    output_capturing._CAN_RECORD_REGISTRY.clear()
    output_capturing._CAN_RECORD_REGISTRY.update(classes)
    torch.testing.assert_close(run(), expected, rtol=1e-4, atol=1e-4)
    assert counters["stats"]["unique_graphs"] == number, (number, counters["stats"])
    exported = torch.export.export(model, (ids,), {"use_cache": False})
    torch.testing.assert_close(exported.module()(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
        assert torch.equal(again(ids).logits, expected)
    assert type(model).__module__.startswith("transformers_modules")
    return "equal"


KINDS = {kind.__name__: kind for kind in (check, untrusted, foreign, together, newer, graphs)}


def results(group, jobs):
    """The results of a group of jobs; what this process may import is changed for good."""
    if group in ("installed", "newer"):
        MISSING.discard(PACKAGE)
    found = {}
    for name, job in jobs.items():
        try:
            found[name] = KINDS[job.get("kind", "check")](job)
        except Exception:  # one broken job must not hide the others; the test shows the text
            found[name] = traceback.format_exc()
    found["imported"] = sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})
    return found


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        groups = json.load(file)
    found = {}
    for group, jobs in groups.items():
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as process:
            found[group] = process.submit(results, group, jobs).result()
    print(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

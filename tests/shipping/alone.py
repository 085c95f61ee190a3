"""Run as a script by the tests: loads checkpoints where only torch and transformers can be imported.

    python alone.py JOBS.json [PACKAGE THAT IS INSTALLED ALL THE SAME]

Every job names a checkpoint, an Auto class and a file of inputs and expected outputs; the script prints one JSON
object `{job: result}`. A result is "equal", or says what went wrong.
"""

from __future__ import annotations

import json
import sys
import traceback


BLOCKED = {
    "hf_linear_attention",
    "conversion",
    "training",
    "accelerate",
    "peft",
    "datasets",
    "evaluate",
    "sentence_transformers",
}


MISSING = BLOCKED - set(sys.argv[2:])
PACKAGE = "hf_linear_attention"


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


def load(job, **options):
    return getattr(transformers, job["auto_class"]).from_pretrained(job["checkpoint"], **options)


def check(job) -> str:
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


def refuses_without_the_flag(job) -> str:
    try:
        load(job, trust_remote_code=False)
    except ValueError as error:
        return "refused" if "trust_remote_code" in str(error) else str(error)
    return "loaded without being trusted"


def refusal(job) -> str:
    """What a checkpoint says to the config of another mechanism."""
    try:
        load(job, trust_remote_code=True)
    except ValueError as error:
        return str(error)
    return "loaded"


def result(job) -> str:
    if job.get("untrusted"):
        return refuses_without_the_flag(job)
    if job.get("foreign"):
        return refusal(job)
    return check(job)


def main() -> None:
    results = {}
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    for name, job in jobs.items():
        try:
            results[name] = result(job)
        except Exception:  # one broken job must not hide the others; the test shows the text
            results[name] = traceback.format_exc()
    results["imported"] = sorted(BLOCKED & {name.partition(".")[0] for name in sys.modules})
    print(json.dumps(results))


if __name__ == "__main__":
    main()

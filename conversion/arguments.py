"""The options of `convert` and `evaluate`, as dataclasses, and the requests that they make.

A command line, a recipe.yaml and a dict of Python all become a `Request` by `request_of`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import TYPE_CHECKING, Any

from hf_linear_attention._common.command_line import Parser, given_options, typed_name
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.options import (
    COUNT,
    SEED,
    Bounds,
    OnResume,
    built,
    facts_of,
    kinds_of,
    option,
    out_of_bounds,
    typed_options,
)
from hf_linear_attention.layer_ranges import is_by_layer, parse_by_layer, parse_layers
from hf_linear_attention.mechanisms.settings import DROPPABLE, MECHANISM_OPTIONS, OWN
from hf_linear_attention.training.recipe import REMOVED as OF_FINETUNE
from hf_linear_attention.training.tasks import TASKS, TEXT_TASKS


# The table of mechanisms needs torch, so that it is imported where it is used.
if TYPE_CHECKING:
    from hf_linear_attention.mechanisms.settings import Option

DTYPES = ("auto", "float32", "bfloat16", "float16")
# The preset whose settings a conversion without `--attention` and `--preset` has.
DEFAULT = "default"
# The file with the options of a conversion, beside its weights.
RECIPE = "recipe.yaml"
# Options that there are no more, and what to do instead.
_OF_EMBEDDINGS = ("retrieval_file", "prompt_name", "query_prompt_name", "document_prompt_name", "matryoshka_dims")
REMOVED: dict[str, str] = {
    "list_architectures": "docs/architectures.md lists them",
    "far": "leave it out, or give `--attention gated_delta`",
    "normalization": "leave it out: near and far keys share one denominator",
    "softmax_heads": "give `--num_exact_keys` of `--attention hybrid`, or keep whole layers with `--softmax_layers`",
    "max_position_embeddings": "read longer texts in chunks (docs/positions.md)",
    "state_bytes": "give `--state_tokens`, the size in tokens of a softmax cache",
    "base_model": "name the original in the head of README.md: `base_model: user/original`",
    "train_file": "leave it out: recall is measured on `--validation_file`",  # of `evaluate`
    **{name: OF_FINETUNE[name] for name in (*_OF_EMBEDDINGS, "cache_teacher")},
}


ATTENTION_HELP = (
    f"the mechanism that replaces softmax: {', '.join(sorted(MECHANISM_OPTIONS))} (default: that of --preset, or else "
    "hybrid, window for encoders, linear with --cross_attention); or mechanisms by layer, such as 0-3:hybrid,4-:linear,"
    " with each layer to convert in one range. Other options are then for the mechanisms that have them"
)


@dataclass(kw_only=True)
class MeasuringArguments:
    """What the figures of a converted model are measured on."""

    pairs_file: str | None = option(
        "for an embedding model, pairs of texts with a similarity score, for Spearman's correlation in the figures: "
        ".jsonl, .csv, .tsv or .parquet with the columns sentence1, sentence2 and score, as in STS-B",
        None,
        needs=("validation_file",),
        tasks=("embedding",),
        is_path=True,
        group="measuring",
    )
    validation_file: str | None = option(
        "a file of held-out data, of the same types, for the figures",
        None,
        needs=("preset",),
        is_path=True,
        group="measuring",
    )
    max_eval_tokens: int = option(
        "measure on about this number of tokens at the start of --validation_file",
        50_000,
        bounds=COUNT,
        needs=("validation_file",),
        tasks=TEXT_TASKS,
        group="measuring",
    )
    max_eval_length: int = option(
        "figures of a language model by position go up to 8 times its trained length, this, and what its positions and "
        "--validation_file have at most",
        16_384,
        bounds=Bounds(least=16),
        needs=("validation_file",),
        tasks=("causal_lm",),
        group="measuring",
    )
    controls: str = option(
        "what a language model is compared with besides its original: none; untrained: an untrained window with as "
        "many bytes as the model's state; healed: also that window after the same training, which takes as much time "
        "again (only with --preset)",
        "untrained",
        ("none", "untrained", "healed"),
        needs=("validation_file",),
        tasks=("causal_lm",),
        group="measuring",
    )
    trust_remote_code: bool = option(
        "run Python code that the checkpoint itself contains", False, on_resume=OnResume.FREE, group="source"
    )
    allow_pickle: bool = option(
        "read .bin files if there are no safetensors", False, on_resume=OnResume.FREE, group="source"
    )
    allow_missing: bool = option(
        "convert although the checkpoint lacks weights of the model, which are then random, or has layers that its "
        "config.json lacks",
        False,
        group="source",
    )


@dataclass(kw_only=True)
class EvaluationArguments(MeasuringArguments):
    """The options of `evaluate`."""

    model_name_or_path: str = option("the converted model: a folder", is_path=True, group="source")
    teacher_name_or_path: str | None = option(
        "its original (default: the one that its report names)", None, is_path=True, group="source"
    )


@dataclass(kw_only=True)
class ConversionArguments(MeasuringArguments):
    """The options of the script itself."""

    model_name_or_path: str = option("the softmax checkpoint: a folder or a hub name", group="source")
    output_dir: str | None = option(
        "the folder to write; may be left out with --dry_run", None, is_path=True, group="result"
    )
    attention: str | None = option(ATTENTION_HELP, None, group="attention")
    layers: str | None = option(
        "the attention layers to convert: all (default), full_attention, none, or a list such as 0,2,4-7",
        None,
        group="attention",
    )
    softmax_layers: str | None = option(
        "the layers among these that keep softmax: a list such as 0,5, every:K for the last of each K layers (every:4 "
        "with --form qwen3_5, unless said otherwise), or auto:K for the K layers whose softmax brings "
        "the model nearest the original, by KL divergence on --calibration_file or --train_file (measured before the "
        "last stage of --preset)",
        None,
        group="attention",
    )
    drop: str | None = option(
        f"features of the attention that may be lost, a list with any of {', '.join(DROPPABLE)}",
        None,
        group="attention",
    )
    cross_attention: bool = option("convert the cross-attention of an encoder-decoder too", False, group="attention")
    state_tokens: int | None = option(
        "the size of the state of each key/value head, as the number of tokens whose keys and values have as many "
        "bytes in the dtype of the result; a quarter is the window of hybrid, 4 are sinks, 32 features take "
        "some, and the rest are exact keys; sizes that are given do not change (default, with --preset or without "
        "--attention: a sixteenth of the trained length, but at least the smaller of a quarter of it and 1024, and at "
        "most 8192)",
        None,
        bounds=COUNT,
        group="attention",
    )
    dtype: str = option(
        "the dtype of the weights written; auto keeps that of the checkpoint", "auto", DTYPES, group="result"
    )
    calibration_file: str | None = option(
        "real inputs to which --features favor++ and the scores of --num_exact_keys are fitted: .txt, .jsonl, .csv, "
        ".tsv or .parquet (column `text`, or rows of the model's task; default: built-in sentences for the one, "
        "--train_file or Python's documentation for the other)",
        None,
        is_path=True,
        group="attention",
    )
    preset: str | None = option(
        "convert and train with a recipe of training/presets, which also gives the settings of the attention that are "
        "not set here. The same command resumes a run that was killed",
        None,
        group="training",
    )
    train_file: str | None = option(
        "data to train on with --preset: .txt, .jsonl, .csv, .tsv or .parquet, with the column `text` or those of the "
        "model's task (docs/data.md)",
        None,
        needs=("preset",),
        is_path=True,
        group="training",
    )
    tokens: str | None = option(
        "the number of tokens to train on in all stages together, such as 2000000, 500k or 2M (default: that of "
        "--preset)",
        None,
        needs=("preset",),
        tasks=TEXT_TASKS,
        group="training",
    )
    epochs: float | None = option(
        "the number of times that all stages together read the images of --train_file (default: 6)",
        None,
        bounds=Bounds(above=0, below=10**6),
        needs=("preset",),
        tasks=tuple(name for name in TASKS if name not in TEXT_TASKS),
        group="training",
    )
    checkpointing_steps: int = option(
        "the number of training steps between checkpoints, which is the most that a killed run repeats",
        100,
        bounds=COUNT,
        needs=("preset",),
        on_resume=OnResume.FREE,
        group="training",
    )
    seed: int | None = option(
        "the seed of all random numbers (default 0; 42 for training)", None, bounds=SEED, group="attention"
    )
    dry_run: bool = option("print what would be done and write nothing", False, on_resume=OnResume.FREE, group="result")
    no_verify: bool = option("do not compare the result with its source", False, group="result")
    overwrite: bool = option(
        "replace an existing --output_dir, once the new one is complete", False, on_resume=OnResume.FREE, group="result"
    )
    push_to_hub: str | None = option(
        "also upload the result under this name, such as user/model; paths of this machine stay here",
        None,
        on_resume=OnResume.FREE,
        group="result",
    )


CONVERSION_FACTS = facts_of(ConversionArguments)


def changed_options(arguments: MeasuringArguments) -> set[str]:
    """The names of the options whose values differ from their defaults."""
    return {
        entry.name
        for entry in fields(arguments)
        if entry.default is not MISSING and getattr(arguments, entry.name) != entry.default
    }


@functools.cache
def mechanism_arguments() -> type:
    """A dataclass with the options of all mechanisms, each None unless given; the settings check which of them fit.

    `option_value` reads their values, which can differ by layer, except for those that are true or false.
    """
    options: dict[str, dict[str, Option]] = {}
    for mechanism, attention in MECHANISM_OPTIONS.items():
        for name, entry in attention.options.items():
            options.setdefault(name, {})[mechanism] = entry
    generated = []
    for name, users in options.items():
        if name in CONVERSION_FACTS:
            continue
        kind = bool if next(iter(users.values())).kind is bool else Any
        heading = f"options of {next(iter(users))}" if len(users) == 1 else "options of several mechanisms"
        generated.append((name, kind, option(_help(users), None, group=heading)))
    return make_dataclass("MechanismArguments", generated)


def _help(users: Mapping[str, Option]) -> str:
    """The help text of an option for each mechanism that has it, once for mechanisms with the same text."""
    texts: dict[str, list[str]] = {}
    for mechanism, entry in users.items():
        choices = f": {', '.join(entry.choices)}" if entry.choices else ""
        several = "; or one value per layer: 96,64,..." if entry.is_per_layer else ""
        texts.setdefault(f"{entry.help}{choices}{several}", []).append(mechanism)
    return "; ".join(f"{text} (of {', '.join(mechanisms)})" for text, mechanisms in texts.items())


@dataclass(frozen=True)
class Request:
    """A conversion that is asked for.

    `arguments` are the options of the command, `given` the settings, and `options` all that is given, by its name.
    """

    arguments: ConversionArguments
    given: dict[str, Any]
    options: dict[str, Any]

    @property
    def is_default(self) -> bool:
        """Whether neither `--attention` nor `--preset` says which mechanism to use."""
        return self.arguments.attention is None and self.arguments.preset is None

    def settings_over(self, preset: Mapping[str, Any], spread: Callable[[Mapping[str, Any]], Any] = dict) -> Any:
        """The settings, completed by those of a preset in all layers for which no other mechanism is given.

        Args:
            preset: the settings of the preset; empty without one.
            spread: what turns settings with values by layer into one dict for each group of layers; needed only if
                there are such values.
        """
        given: Any = self.given
        if is_by_layer(given):
            given = spread({"mechanism": preset.get("mechanism", "linear"), **given})
        if isinstance(given, Mapping):
            return self._completed(given, preset)
        return [self._completed(entry, preset) for entry in given]

    def _completed(self, given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
        defaults = preset if given.get("mechanism") in (None, preset.get("mechanism")) else {}
        form = given.get("form", OWN)
        if form != OWN and self.arguments.preset is not None and form != preset.get("form", OWN):
            raise UsageError(
                f"`--form {form}` with `--preset {self.arguments.preset}`: its layers need other rates; give `--preset "
                f"{form}`"
            )
        settings = {"mechanism": "linear", "layers": "all", **defaults, **given}
        if self.arguments.state_tokens is not None:
            settings["state_tokens"] = self.arguments.state_tokens
        mechanism = MECHANISM_OPTIONS[settings["mechanism"]]
        # Every mechanism uses the seed; a mechanism whose function is drawn from it also stores it.
        draws = "seed" in mechanism.options and "seed" not in mechanism.unused(mechanism.filled(settings))
        if self.arguments.seed is not None and draws:
            settings["seed"] = self.arguments.seed
        return settings


def parse(argv: Sequence[str], description: str | None = None) -> Request:
    """The request in `argv` and in the file of its `--config`.

    Raises:
        UsageError: naming every option that there is not, and every value that is wrong.
    """
    groups = [ConversionArguments, mechanism_arguments()]
    of_mechanisms = [f"options of {name}" for name in (*MECHANISM_OPTIONS, "several mechanisms")]
    parser = Parser(
        groups,
        prog=typed_name("python conversion/convert_checkpoint.py"),
        usage="%(prog)s --model_name_or_path SRC --output_dir OUT [options]",
        description=description,
        order=["source", "result", "attention", *of_mechanisms, "training", "measuring"],
        removed=REMOVED,
    )
    return request_of(given_options(parser, groups, argv))


def request_of(options: Mapping[str, Any]) -> Request:
    """The request with these options of `convert`; lists and values by layer may be those of Python.

    Raises:
        UsageError: naming every option that there is not, and every value that is wrong.
    """
    group = mechanism_arguments()
    values = typed_options(options, kinds_of(ConversionArguments, group), removed=REMOVED)
    (arguments,) = built([ConversionArguments], values)
    if problems := list(out_of_bounds(CONVERSION_FACTS, vars(arguments))):
        raise UsageError(*problems)
    given = {name: option_value(name, value) for name, value in values.items() if name in group.__dataclass_fields__}
    return Request(arguments, {**given, **_shared_settings(arguments)}, values)


def _shared_settings(arguments: ConversionArguments) -> dict[str, Any]:
    """The given settings that every mechanism has."""
    found: dict[str, Any] = {}
    if arguments.attention is not None:
        found["mechanism"] = attention_value(arguments.attention)
    if arguments.layers is not None:
        found["layers"] = layers_value(arguments.layers)
    if arguments.drop is not None:
        found["drop"] = [feature.strip() for feature in arguments.drop.split(",")]
    if arguments.cross_attention:
        found["cross_attention"] = True
    return found


def layers_value(text: str) -> str | list[int]:
    """The value of `--layers`."""
    try:
        return parse_layers(text)
    except ValueError as error:
        raise UsageError(str(error)) from error


def attention_value(text: str) -> str | dict[str, str]:
    """The value of `--attention`: a mechanism, or mechanisms by layer."""
    by_layer = _by_layer_value("attention", text) if ":" in text else {}
    if unknown := sorted({*(by_layer.values() if by_layer else [text])} - set(MECHANISM_OPTIONS)):
        names = ", ".join(map(repr, unknown))
        raise UsageError(f"`--attention {text}`: {names} must be one of {', '.join(sorted(MECHANISM_OPTIONS))}")
    return by_layer or text


def _by_layer_value(name: str, text: str) -> dict[str, str]:
    try:
        return parse_by_layer(text)
    except ValueError as error:
        raise UsageError(f"`--{name} {text}`: {error}") from error


def option_value(name: str, value: Any) -> Any:
    """The value of a mechanism's option: `128`, one per layer such as `128,96,64`, or by layer such as `0-3:64,4-:16`.

    Args:
        name: the option.
        value: a text, or what Python and YAML have for it: a number, a list, or a dict of layers.

    Raises:
        UsageError: if the value has none of these forms, or a number is not of the type of the option.
    """
    options = [mechanism.options[name] for mechanism in MECHANISM_OPTIONS.values() if name in mechanism.options]
    kind, is_per_layer = options[0].kind, any(entry.is_per_layer for entry in options)
    if kind is bool:
        return value
    given = value
    if isinstance(value, str) and ":" in value:
        value = _by_layer_value(name, value)
    if isinstance(value, str) and is_per_layer and "," in value:
        value = value.split(",")
    try:
        if isinstance(value, Mapping):
            return {str(layers): _single(part, kind) for layers, part in value.items()}
        if isinstance(value, (list, tuple)):
            return [_single(part, kind) for part in value]
        return _single(value, kind)
    except ValueError as error:
        number = {int: "a whole number", float: "a number", str: "a single value"}[kind]
        several = ", or one per layer such as 128,96,64" if is_per_layer else ""
        raise UsageError(
            f"`--{name} {given}`: give {number}{several}, or values by layer such as 0-3:64,4-:16"
        ) from error


def _single(value: Any, kind: type) -> Any:
    if isinstance(value, (Mapping, list, tuple, set)):
        raise ValueError("a list where a single value belongs")
    return value if type(value) is kind else kind(str(value))


def parse_tokens(text: str) -> int:
    """The number in a text such as `2000000`, `500k`, `2M` or `1.5B`.

    Raises:
        UsageError: if the text is not such a number above 0.
    """
    factor = {"k": 10**3, "m": 10**6, "b": 10**9}.get(text[-1:].lower())
    try:
        tokens = round(float(text[:-1]) * factor) if factor else int(text)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise UsageError(f"`--tokens {text}`: give a number above 0, such as 2000000, 500k or 2M")
    return tokens

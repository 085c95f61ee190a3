"""The options of `convert_checkpoint.py`: those of the script, and one for each option of every mechanism."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Any

from hf_linear_attention._common.command_line import CONFIG_HELP, Parser, as_typed, typed_name, words_of
from hf_linear_attention._common.errors import UsageError
from hf_linear_attention._common.options import (
    BYTES,
    COUNT,
    POSITIONS,
    SEED,
    Bounds,
    OnResume,
    facts_of,
    option,
    out_of_bounds,
    unusable_texts,
)
from hf_linear_attention.configuration_linear_attention import DROPPABLE
from hf_linear_attention.conversion.embedding_options import EmbeddingArguments
from hf_linear_attention.conversion.option_values import attention_value, layers_value, option_value
from hf_linear_attention.layer_ranges import is_by_layer
from hf_linear_attention.mechanisms.options import Option
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.position_extension import STARTS, LongerPositions
from hf_linear_attention.training.tasks import CACHED, TASKS, TEXT_TASKS


DTYPES = ("auto", "float32", "bfloat16", "float16")
# The preset whose settings a conversion without `--attention` and `--preset` has.
DEFAULT = "default"
# The sizes that `--state_bytes` chooses.
SIZES = ("window_size", "num_sinks", "num_features")


@dataclass
class ConversionArguments(EmbeddingArguments):
    """The options of the script itself."""

    model_name_or_path: str = option(
        "the softmax checkpoint: a folder or a hub name", for_evaluation=True, group="source"
    )
    output_dir: str | None = option(
        "the folder to write; may be left out with --dry_run or --spectrum",
        None,
        for_evaluation=True,
        is_path=True,
        group="result",
    )
    attention: str | None = option(
        f"the mechanism that replaces softmax: {', '.join(sorted(MECHANISMS))} (default: that of --preset, or else "
        "hybrid; linear with --cross_attention); or mechanisms by layer, such as 0-3:hybrid,4-:linear, with each "
        "layer to convert in one range. Other options are then for the mechanisms that have them",
        None,
        group="attention",
    )
    layers: str | None = option(
        "the attention layers to convert: all (default), full_attention, none, or a list such as 0,2,4-7",
        None,
        group="attention",
    )
    softmax_layers: str | None = option(
        "the layers among these that keep softmax: a list such as 0,5, or auto:K for the K layers whose softmax brings "
        "the model nearest the original, by KL divergence on --calibration_file or --train_file (measured before the "
        "last stage of --preset)",
        None,
        group="attention",
    )
    softmax_heads: str | None = option(
        "the query heads of causal layers that keep softmax, and the keys and values of their groups: a list of "
        "LAYER.HEAD such as 0.3,2.1, or auto:K for the K heads without which the original is worst on repeated random "
        "tokens (and on --calibration_file or --train_file)",
        None,
        group="attention",
    )
    drop: str | None = option(
        f"features of the attention that may be lost, a list with any of {', '.join(DROPPABLE)}",
        None,
        group="attention",
    )
    cross_attention: bool = option("convert the cross-attention of an encoder-decoder too", False, group="attention")
    state_bytes: int | None = option(
        "the size in bytes of the decoding state of all layers together, divided between the window, the sinks and the "
        "features of hybrid (or the window and the sinks of window): a sixth for features, in multiples of 16, then 4 "
        "sinks, and the rest for the window. Sizes that are given do not change",
        None,
        bounds=BYTES,
        group="attention",
    )
    max_position_embeddings: int | None = option(
        "extend the learned positions of the model to inputs of this number of tokens, together with the limits of its "
        "tokenizer and of sentence-transformers (RoBERTa's config counts 2 rows more)",
        None,
        bounds=POSITIONS,
        group="source",
    )
    position_init: str = option(
        "what the new positions start from: tiled, the old ones again and again, or interpolated, the old ones "
        "stretched",
        "tiled",
        STARTS,
        needs=("max_position_embeddings",),
        group="source",
    )
    dtype: str = option(
        "the dtype of the weights written; auto keeps that of the checkpoint. A cast needs disk space for twice the "
        "size of the result",
        "auto",
        DTYPES,
        group="result",
    )
    calibration_file: str | None = option(
        "real inputs to which --features favor++ is fitted, and which --spectrum analyses: .txt, .jsonl, .csv, .tsv "
        "or .parquet (column `text`, or rows of the model's task), or for a vision model a folder of images (default: "
        "built-in sentences)",
        None,
        is_path=True,
        group="attention",
    )
    calibration_tokens: int | None = option(
        "the number of tokens or patches of --calibration_file to calibrate on (default 4096)",
        None,
        bounds=COUNT,
        group="attention",
    )
    spectrum: bool = option(
        "print for each layer how near softmax attention is to a low rank, and the error of the untrained mechanism; "
        "conversion_report.json has the figures per head. Without --output_dir nothing else is done",
        False,
        group="measuring",
    )
    preset: str | None = option(
        "convert and train with a recipe of training/presets, which also gives the settings of the attention that are "
        "not set here. The same command resumes a run that was killed",
        None,
        group="training",
    )
    train_file: str | None = option(
        "data to train on with --preset: .txt, .jsonl, .csv, .tsv or .parquet, with the column `text` or those of the "
        "model's task (docs/healing.md); or with --evaluate what it was trained on (figures of recall count what is "
        "rare)",
        None,
        needs=("preset", "evaluate"),
        for_evaluation=True,
        is_path=True,
        group="training",
    )
    validation_file: str | None = option(
        "a file of held-out data, of the same types, for the figures of --preset and --evaluate",
        None,
        needs=("preset", "evaluate"),
        for_evaluation=True,
        is_path=True,
        group="measuring",
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
        "the number of times that all stages together read the images or recordings of --train_file (default: 6)",
        None,
        bounds=Bounds(above=0, below=10**6),
        needs=("preset",),
        tasks=tuple(name for name in TASKS if name not in TEXT_TASKS),
        group="training",
    )
    max_eval_tokens: int = option(
        "measure on about this number of tokens at the start of --validation_file",
        50_000,
        bounds=COUNT,
        needs=("validation_file",),
        tasks=TEXT_TASKS,
        for_evaluation=True,
        group="measuring",
    )
    max_eval_length: int = option(
        "figures of a language model by position go up to 8 times its trained length, this, and what its positions and "
        "--validation_file have at most",
        16_384,
        bounds=Bounds(least=16),
        needs=("validation_file",),
        tasks=("causal_lm",),
        for_evaluation=True,
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
        for_evaluation=True,
        group="measuring",
    )
    checkpointing_steps: int = option(
        "the number of training steps between checkpoints, which is the most that a killed run repeats",
        100,
        bounds=COUNT,
        needs=("preset",),
        on_resume=OnResume.FREE,
        group="training",
    )
    cache_teacher: str | None = option(
        "keep the original's outputs in this folder, and read them where a text is trained on again: the first stage "
        "writes them, the second and later runs read them",
        None,
        needs=("preset",),
        tasks=CACHED,
        is_path=True,
        on_resume=OnResume.WARNED,
        group="training",
    )
    evaluate: bool = option(
        "compare the model in --output_dir with the original on --validation_file, and write the figures into its "
        "conversion_report.json and model card; nothing is converted",
        False,
        for_evaluation=True,
        group="measuring",
    )
    seed: int | None = option(
        "the seed of all random numbers (default 0; 42 for training)", None, bounds=SEED, group="attention"
    )
    dry_run: bool = option("print what would be done and write nothing", False, on_resume=OnResume.FREE, group="result")
    verbose: bool = option(
        "with --dry_run, list every layer and tensor",
        False,
        needs=("dry_run",),
        on_resume=OnResume.FREE,
        group="result",
    )
    no_verify: bool = option("do not compare the result with its source", False, group="result")
    overwrite: bool = option(
        "replace an existing --output_dir, once the new one is complete", False, on_resume=OnResume.FREE, group="result"
    )
    trust_remote_code: bool = option(
        "run Python code that the checkpoint itself contains",
        False,
        for_evaluation=True,
        on_resume=OnResume.FREE,
        group="source",
    )
    allow_pickle: bool = option(
        "read .bin files if there are no safetensors",
        False,
        for_evaluation=True,
        on_resume=OnResume.FREE,
        group="source",
    )
    list_architectures: bool = option("print the tested architectures, and do nothing else", False, group="result")
    base_model: str | None = option(
        "the name on the Hub of a source in a folder, for the model card",
        None,
        on_resume=OnResume.FREE,
        group="source",
    )
    push_to_hub: str | None = option(
        "also upload the result under this name, such as user/model; paths of this machine stay here",
        None,
        on_resume=OnResume.FREE,
        group="result",
    )
    allow_missing: bool = option(
        "convert although the checkpoint lacks weights of the model, which are then random, or has layers that its "
        "config.json lacks",
        False,
        for_evaluation=True,
        group="source",
    )
    model_class: str | None = option(
        "the stock or Auto class to convert (default: the class that the checkpoint names)", None, group="source"
    )

    @property
    def positions(self) -> LongerPositions | None:
        """The learned positions that are asked for; None without `--max_position_embeddings`."""
        tokens = self.max_position_embeddings
        return None if tokens is None else LongerPositions(tokens, self.position_init)


CONVERSION_FACTS = facts_of(ConversionArguments)


def changed_options(arguments: ConversionArguments) -> set[str]:
    """The names of the options whose values differ from their defaults."""
    return {
        entry.name
        for entry in fields(arguments)
        if entry.default is not MISSING and getattr(arguments, entry.name) != entry.default
    }


def mechanism_arguments() -> type:
    """A dataclass with the options of all mechanisms, each None unless given; the settings check which of them fit.

    All options are texts, except for those that are true or false.
    """
    options: dict[str, dict[str, Option]] = {}
    for mechanism, attention in MECHANISMS.items():
        for name, entry in attention.options.items():
            options.setdefault(name, {})[mechanism] = entry
    generated = []
    for name, users in options.items():
        if name in CONVERSION_FACTS:
            continue
        entry = next(iter(users.values()))
        # The values of other options can differ by layer, and `_settings_of` reads them.
        kind = (bool if entry.kind is bool else str) | None
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
    """A parsed command line: the script's own options, the `linear_attention` settings that are given, and the words of
    both, with those of a YAML file."""

    arguments: ConversionArguments
    given: dict[str, Any]
    words: tuple[str, ...] = ()

    @property
    def is_default(self) -> bool:
        """Whether neither `--attention` nor `--preset` says which mechanism to use."""
        return self.arguments.attention is None and self.arguments.preset is None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings without a preset, if none of them differs by layer."""
        return self.settings_over({})

    def settings_over(self, preset: Mapping[str, Any], spread: Callable[[Mapping[str, Any]], Any] = dict) -> Any:
        """The settings, completed by those of a preset in all layers for which no other mechanism is given.

        Args:
            preset: the settings of the preset; empty without one.
            spread: what turns settings with values by layer into one dict for each group of layers; needed only if
                there are such values.

        Raises:
            UsageError: if `--state_bytes` is to be divided between layers with different settings.
        """
        given: Any = self.given
        if is_by_layer(given):
            given = spread({"mechanism": preset.get("mechanism", "linear"), **given})
        if isinstance(given, Mapping):
            return self._completed(given, preset)
        if self.arguments.state_bytes is not None:
            raise UsageError(
                "`--state_bytes` is for layers with equal settings; give the sizes of these layers instead, such as "
                "`--window_size 0-3:64,4-:16`"
            )
        return [self._completed(entry, preset) for entry in given]

    def _completed(self, given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
        defaults = preset if given.get("mechanism") in (None, preset.get("mechanism")) else {}
        defaults = self._without_replaced(defaults)
        settings = {"mechanism": "linear", "layers": "all", **defaults, **given}
        if self.arguments.state_bytes is not None:
            settings["state_bytes"] = self.arguments.state_bytes
        mechanism = MECHANISMS[settings["mechanism"]]
        # Every mechanism uses the seed; a mechanism whose function is drawn from it also stores it.
        draws = "seed" in mechanism.options and "seed" not in mechanism.unused(mechanism.filled(settings))
        if self.arguments.seed is not None and draws:
            settings["seed"] = self.arguments.seed
        return settings

    def _without_replaced(self, preset: Mapping[str, Any]) -> dict[str, Any]:
        """A preset's settings without the sizes that a budget replaces, or without the budget that sizes replace."""
        if self.arguments.state_bytes is not None:
            return {name: value for name, value in preset.items() if name not in SIZES}
        has_size = any(name in self.given for name in SIZES)
        return {name: value for name, value in preset.items() if name != "state_bytes" or not has_size}


def parse(argv: Sequence[str], description: str | None = None) -> Request:
    """The request in `argv` and in the file of its `--config`.

    Raises:
        UsageError: naming every unknown option at once, the first value of the wrong type, or every number that is
            out of bounds.
    """
    groups = [ConversionArguments, mechanism_arguments()]
    names = [entry.name for group in groups for entry in fields(group)]
    of_mechanisms = [f"options of {name}" for name in (*MECHANISMS, "several mechanisms")]
    parser = Parser(
        groups,  # type: ignore[arg-type]  # generated at run time, which the stub does not foresee
        prog=typed_name("convert_checkpoint.py"),
        usage="%(prog)s --model_name_or_path SRC --output_dir OUT [options]",
        description=as_typed(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        order=["source", "result", "attention", *of_mechanisms, "training", "measuring"],
    )
    parser.add_argument("--config", metavar="FILE.yaml", help=CONFIG_HELP)
    words = words_of(argv, names, joins_lists=True)
    arguments, mechanism, _ = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    problems = [*unusable_texts(vars(arguments)), *out_of_bounds(CONVERSION_FACTS, vars(arguments))]
    if problems:
        raise UsageError(*problems)
    return Request(arguments, _settings_of(arguments, mechanism), _without_config(words))


def _without_config(words: Sequence[str]) -> tuple[str, ...]:
    """The words without the name of the YAML file, whose options they contain."""
    kept = list(words)
    for place in reversed([place for place, word in enumerate(kept) if word.split("=", 1)[0] == "--config"]):
        del kept[place : place + (1 if "=" in kept[place] else 2)]
    return tuple(kept)


def _settings_of(arguments: ConversionArguments, mechanism: Any) -> dict[str, Any]:
    given = {name: option_value(name, value) for name, value in vars(mechanism).items() if value is not None}
    if arguments.attention is not None:
        given["mechanism"] = attention_value(arguments.attention)
    if arguments.layers is not None:
        given["layers"] = layers_value(arguments.layers)
    if arguments.drop is not None:
        given["drop"] = [feature.strip() for feature in arguments.drop.split(",")]
    if arguments.cross_attention:
        given["cross_attention"] = True
    return given

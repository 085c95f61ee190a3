"""The steps of one conversion: plan, load, calibrate, write, verify."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from hf_linear_attention import calibrate, divide_exact_keys, supported_model_types
from hf_linear_attention._common.command_line import not_essential
from hf_linear_attention._common.devices import SHORTEST_ROW, memory_of_machine, ready_to_compute
from hf_linear_attention._common.errors import ConversionError, UsageError, is_out_of_memory, one_line
from hf_linear_attention._common.folders import only_writer, saving, staging
from hf_linear_attention._common.loaded_weights import check_complete, check_finite
from hf_linear_attention._common.logs import progress
from hf_linear_attention._common.model_card import REPORT, source_metadata, write_model_card
from hf_linear_attention._common.reading import reading
from hf_linear_attention.configuration_linear_attention import entries_of, mechanisms_of
from hf_linear_attention.conversion.arguments import DEFAULT, ConversionArguments, Request
from hf_linear_attention.conversion.calibration_data import (
    DOCUMENTATION,
    FEWEST_ROWS,
    RealInputs,
    keeps_exact_keys,
    real_inputs,
)
from hf_linear_attention.conversion.export.qwen3_5 import finish_stock, refuse
from hf_linear_attention.conversion.output_folder import (
    check_hub_name,
    check_output,
    copy_sentence_files,
    save_processors,
    save_tokenizer,
    share_permissions,
)
from hf_linear_attention.conversion.page import write_page
from hf_linear_attention.conversion.plan import Plan, make_plan, spread_over_layers
from hf_linear_attention.conversion.preset_plan import (
    Training,
    check_training_options,
    plan_training,
    preset_settings,
    with_healed_frequencies,
)
from hf_linear_attention.conversion.recipe_file import write_recipe
from hf_linear_attention.conversion.report import build_report, published_words
from hf_linear_attention.conversion.softmax_choice import (
    CHOICE,
    count_of,
    plan_without,
    rank,
    ranking_file,
    with_listed,
    with_softmax_layers,
)
from hf_linear_attention.conversion.source import Source, open_source
from hf_linear_attention.conversion.verification import verify
from hf_linear_attention.mechanisms.registry import MECHANISMS
from hf_linear_attention.model_conversion import with_defaults
from hf_linear_attention.modeling_linear_attention import linear_attention_modules
from hf_linear_attention.training.data.batches import Batch
from hf_linear_attention.training.data.processors import default_length


logger = logging.getLogger(__name__)

# For FAVOR++; the fitting itself is `hf_linear_attention.calibrate`.
CALIBRATION_TOKENS = 4096
# For the scores of exact keys, which have a weight for each number of a hidden state: 57,344 tokens for one of 896, on
# which Qwen2.5-Coder-0.5B has .02 nats less than on half of them, and no more than on twice as many. On stories260k (64
# numbers), untrained, 2,048 tokens of its text leave a gap of .010 nats, 8,192 .004, 24,576 .001, and 98,304 no less.
# Of the built-in text, which is not the model's own, few have to do.
TOKENS_PER_WEIGHT, SCORE_TOKENS = 64, 24_576

T = TypeVar("T")


@dataclass(frozen=True)
class Conversion:
    """Everything that is decided before the first weight is loaded.

    Without `output_dir` nothing is written. `inputs` are None if they are not needed or there are none, `training` is
    None without a preset, and `base_model` is the name on the Hub of a source that was given in memory.
    """

    request: Request
    source: Source
    plan: Plan
    output_dir: Path | None
    inputs: RealInputs | None = None
    training: Training | None = None
    base_model: str | None = None

    @property
    def name(self) -> str:
        """The name of the result, on the Hub or of its folder."""
        return self.request.arguments.push_to_hub or Path(str(self.output_dir)).name


def prepare(request: Request) -> Conversion:
    """Plan a conversion, and check everything that can be checked without loading weights.

    Raises:
        UsageError: if the request cannot be met.
    """
    arguments = request.arguments
    if arguments.output_dir is None and not arguments.dry_run:
        raise UsageError("`--output_dir` is missing; name the folder to write, or give `--dry_run`")
    check_training_options(arguments)
    if arguments.push_to_hub is not None:
        check_hub_name(arguments.push_to_hub)
    local = Path(arguments.model_name_or_path).expanduser().resolve()
    output_dir = None
    if arguments.output_dir is not None:
        output_dir = check_output(arguments.output_dir, arguments.overwrite, local if local.is_dir() else None)
    source = open_source(arguments.model_name_or_path, arguments.allow_pickle)
    plan = _plan(request, source)
    _check_calibration_file(arguments, plan)
    plan = with_listed(plan, source, arguments)
    _check_form(arguments, plan)
    _check_samples(arguments, plan)
    _check_memory(plan)
    _note_unused_drop(plan)
    training = None if arguments.preset is None else plan_training(arguments, source, plan, output_dir)
    stock_type = plan.config.stock_model_type
    if stock_type not in supported_model_types():
        logger.warning("the model type `%s` is not tested; check the figures before you rely on the result", stock_type)
    return Conversion(request, source, plan, output_dir, _open_inputs(arguments, source, plan), training)


def _check_form(arguments: ConversionArguments, plan: Plan) -> None:
    """Refuse a model that the stock architecture of `--form` cannot hold."""
    if plan.stock_form is not None:
        is_open = count_of(arguments.softmax_layers) is not None  # any layer may be chosen
        dtype = None if arguments.dtype == "auto" else getattr(torch, arguments.dtype)
        refuse("--form", plan.config, kept=range(plan.num_layers) if is_open else None, dtype=dtype)


def _note_unused_drop(plan: Plan) -> None:
    """Say which features of `--drop` no converted layer has: one setting may serve a family of models."""
    named = {feature for entry in entries_of(plan.settings) for feature in entry.get("drop", ())}
    dropped = {text.partition(":")[0] for text in plan.dropped_features}
    for feature in sorted(named - dropped):
        logger.info("no converted layer has the feature `%s`, so `--drop` leaves nothing out there", feature)


@contextlib.contextmanager
def writing(conversion: Conversion) -> Iterator[None]:
    """A context in which this process alone writes to the output folder of a conversion.

    Raises:
        UsageError: if another process writes there, or has written there since the conversion was planned.
    """
    if conversion.output_dir is None:
        raise UsageError("`--output_dir` is missing; name the folder to write")
    with only_writer(conversion.output_dir):
        check_output(str(conversion.output_dir), conversion.request.arguments.overwrite, None)
        yield


def _check_memory(plan: Plan) -> None:
    """Refuse sizes that this machine cannot hold, before anything of these sizes is allocated."""
    needs = {"new weights": 4 * plan.weights["new"], "state per sequence": plan.state_bytes or 0}
    sizes = {
        f"`{name}` = {value:,}"
        for entry in entries_of(plan.settings)
        for name, value in entry.items()
        if type(value) is int and value > 1
    }
    memory = memory_of_machine()
    for what, needed in needs.items():
        if needed > memory:
            raise UsageError(
                f"{needed:,} bytes of {what} are needed with {', '.join(sorted(sizes))}, and this machine has "
                f"{memory:,}; choose smaller sizes"
            )


def _check_samples(arguments: ConversionArguments, plan: Plan) -> None:
    """Refuse to compare a model of text and images with its source: the built-in inputs are of one kind."""
    takes_text = plan.stock_class.main_input_name == "input_ids"
    if takes_text and not hasattr(plan.config, "vocab_size") and not arguments.no_verify:
        raise UsageError(
            f"`{plan.config.stock_model_type}` takes more than text, and there are no built-in inputs on which to "
            "compare the result with its source; give `--no_verify`, and compare it yourself"
        )


def _plan(request: Request, source: Source) -> Plan:
    """The plan, without those settings of a preset that the model does not allow."""
    arguments = request.arguments
    options = (arguments.trust_remote_code, arguments.dtype)

    def spread(given: Mapping[str, Any]) -> Any:
        return spread_over_layers(given, source, arguments.trust_remote_code)

    preset: Mapping[str, Any] = {}
    if arguments.preset is not None or request.is_default:
        preset = preset_settings(
            arguments.preset or DEFAULT, source, arguments.trust_remote_code, arguments.cross_attention
        )

    def make(settings: Any) -> Plan:
        plan = make_plan(source, settings, *options)
        if arguments.preset is None:
            return plan
        healed = with_healed_frequencies(settings, plan, arguments.preset)
        return plan if healed == settings else make_plan(source, healed, *options)

    return with_defaults(make, request.settings_over(preset, spread), request.given)


def _open_inputs(arguments: ConversionArguments, source: Source, plan: Plan) -> RealInputs | None:
    ranks = count_of(arguments.softmax_layers) is not None
    if not needs_calibration(plan) and not ranks:
        return None
    path = ranking_file(arguments) if ranks or keeps_exact_keys(plan) else arguments.calibration_file
    return real_inputs(source, plan, path, arguments.trust_remote_code)


def run(conversion: Conversion) -> dict[str, Any]:
    """Convert, write and verify; returns the content of conversion_report.json.

    Raises:
        ConversionError, OSError: if the conversion failed; nothing new is left, and an older result is unchanged.
    """
    if conversion.output_dir is None:
        raise UsageError("`--output_dir` is missing; name the folder to write")
    arguments, plan = conversion.request.arguments, conversion.plan
    with staging(conversion.output_dir, replaces=arguments.overwrite) as folder:
        logger.info("loading %s", conversion.source.name)
        model = load_converted(conversion)
        measured: dict[str, Any] = {"calibration": calibrated(conversion, model)}
        plan = divided = with_divided_keys(conversion, model)
        # With a preset, layers are ranked before its last stage.
        if conversion.training is None and count_of(arguments.softmax_layers) is not None:
            choice = measured[CHOICE] = rank(model, conversion.inputs, arguments)
            plan = plan_without(plan, conversion.source, arguments, choice["layers"])
            model = with_softmax_layers(model, choice["layers"])
        with saving(folder):
            model.save_pretrained(folder)
        share_permissions(folder)
        del model  # the verification below reads the model from its files
        tokenizer = save_tokenizer(conversion.source, folder, arguments.trust_remote_code)
        save_processors(conversion.source, folder, arguments.trust_remote_code)
        copy_sentence_files(conversion.source, folder)
        checks = None
        if not arguments.no_verify:
            logger.info("verifying")
            checks = verify(folder, conversion.source, plan, tokenizer)
        report = build_report(
            conversion.source,
            plan,
            checks,
            **measured,
            dtype=arguments.dtype,
            command=published_words(conversion.request.options),
            card_metadata=source_metadata(conversion.source.root),
            base_model_name=conversion.base_model,
        )
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        write_recipe(folder, conversion.request, divided, conversion.training)
        facts = {"base_model": conversion.source.name, "settings": plan.settings}
        if plan.stock_form is not None and conversion.training is None:
            report |= finish_stock(folder)
        with not_essential("the model card"):  # its title is the final name
            write_model_card(folder, facts, name=conversion.name)
        with not_essential("the page"):
            write_page(folder, conversion.name)
    return report


def calibrated(conversion: Conversion, model: PreTrainedModel) -> dict[str, Any] | None:
    """Calibrate a model in place; returns the entry `calibration` of the report, None if there is nothing to calibrate.

    Without inputs to calibrate on, the model keeps its initial constants and a warning is logged.

    Raises:
        UsageError: if the attention of this model cannot be observed, or the file has no inputs.
    """
    inputs = conversion.inputs
    if not needs_calibration(conversion.plan):
        return None
    if inputs is None:
        logger.warning(
            "not calibrated, because there is nothing to calibrate on; give `--calibration_file`. Without calibration "
            "the features are those of FAVOR+, and exact keys are the newest behind the window"
        )
        return {"inputs": None, "tokens": 0}
    # Qwen2.5-Coder-0.5B with 512 tokens of state, between 2,048 and 4,095 of code.
    better = "; text of the kind that will be read, as `--calibration_file`, is better: .07 nats for a 0.5B and code"
    logger.info("calibrating on %s%s", inputs.name, better if inputs.name == DOCUMENTATION else "")
    count = calibration_tokens(conversion)
    try:
        with ready_to_compute(model):
            batches = inputs.batches(count)
            tokens = within_memory(lambda rows: calibrate(model, progress(rows, "calibrating")), batches)
    except NotImplementedError as error:
        raise UsageError(f"{conversion.plan.mechanisms} with these settings needs calibration, but {error}") from error
    if not tokens:  # `calibrate` has said why
        return {"inputs": None, "tokens": 0}
    if tokens < count / 2 and keeps_exact_keys(conversion.plan):
        logger.warning(
            "%s has %s tokens; up to %s are read, and with fewer the scores of exact keys fit other texts worse: give "
            "a longer text",
            *(inputs.name, f"{tokens:,}", f"{count:,}"),
        )
    return {"inputs": inputs.name, "tokens": tokens}


def within_memory(fit: Callable[[list[Batch]], T], batches: list[Batch]) -> T:
    """`fit(batches)`; if torch has no memory for a row, with rows of half the length, as often as it takes.

    Raises:
        ConversionError: if there is no memory for a row of `SHORTEST_ROW` tokens either.
    """
    while True:
        try:
            return fit(batches)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or "input_ids" not in batches[0]:
                raise
            length = max(batch["input_ids"].shape[1] for batch in batches)
            if length < 2 * SHORTEST_ROW:
                raise ConversionError(f"there is no memory for a row of {length} tokens: {one_line(error)}") from error
        logger.warning("there is no memory for a row of %s tokens; rows are half as long now", f"{length:,}")
        split = ({name: x.chunk(2, dim=1) for name, x in batch.items()} for batch in batches)
        batches = [dict(zip(parts, half)) for parts in split for half in zip(*parts.values())]


def divides_keys(conversion: Conversion) -> bool:
    """Whether exact keys are divided between the layers: on text, where no number of them is given."""
    preset = {} if conversion.training is None else conversion.training.preset.settings.get("causal", {})
    is_given = "num_exact_keys" in {**preset, **conversion.request.given}
    return conversion.inputs is not None and keeps_exact_keys(conversion.plan) and not is_given


def with_divided_keys(conversion: Conversion, model: PreTrainedModel) -> Plan:
    """The plan with a number of exact keys for each layer, which the model gets too, if keys are divided."""
    plan, arguments, inputs = conversion.plan, conversion.request.arguments, conversion.inputs
    if inputs is None or not divides_keys(conversion):
        return plan
    logger.info("dividing exact keys between the layers")
    with ready_to_compute(model):
        batches = inputs.batches(calibration_tokens(conversion))
        numbers = within_memory(lambda rows: divide_exact_keys(model, rows), batches)
    if len({number for number in numbers if number}) < 2:
        return plan
    logger.info("exact keys by layer: %s", ", ".join(map(str, numbers)))
    settings = [{**e, "num_exact_keys": numbers} if e.get("num_exact_keys") else e for e in entries_of(plan.settings)]
    one = settings[0] if isinstance(plan.settings, Mapping) else settings
    return make_plan(conversion.source, one, arguments.trust_remote_code, arguments.dtype)


def written_plan(conversion: Conversion, report: Mapping[str, Any]) -> Plan:
    """The plan of what was written, with what was chosen on the way: softmax layers, and the keys of each layer."""
    if (settings := report["settings"]) == conversion.plan.settings:
        return conversion.plan
    arguments = conversion.request.arguments
    return make_plan(conversion.source, settings, arguments.trust_remote_code, arguments.dtype)


def calibration_tokens(conversion: Conversion) -> int:
    """The most tokens that a conversion is calibrated on."""
    plan = conversion.plan
    if not keeps_exact_keys(plan):
        return CALIBRATION_TOKENS
    fewest = 0 if ranking_file(conversion.request.arguments) is None else SCORE_TOKENS
    widths = (module.linear_attention.shape.hidden_size for module in linear_attention_modules(plan.model).values())
    return max(fewest, TOKENS_PER_WEIGHT * max(widths), FEWEST_ROWS * default_length(plan.config))


def load_converted(conversion: Conversion) -> PreTrainedModel:
    """The converted model with the source's weights; weights that the source lacks are initialised from the seed."""
    arguments, plan, source = conversion.request.arguments, conversion.plan, conversion.source
    torch.manual_seed(arguments.seed or 0)
    with reading(source.weights[0]):
        loaded: Any = plan.linear_class.from_pretrained(
            source.folder,
            config=plan.config,
            dtype=arguments.dtype if arguments.dtype == "auto" else getattr(torch, arguments.dtype),
            use_safetensors=not source.is_pickled,
            output_loading_info=True,
        )
    model, loading = loaded
    plan.confirm(set(loading["missing_keys"]))
    if not arguments.allow_missing:
        dropped = [str(tensor.source) for tensor in plan.dropped]
        check_complete(source.name, model, [str(tensor.target) for tensor in plan.new_base], dropped)
    check_finite(source.name, model)
    if plan.new_base:
        names = ", ".join(str(tensor.target) for tensor in plan.new_base)
        logger.warning("the checkpoint does not contain %s; these weights are random and need training", names)
    return model


def needs_calibration(plan: Plan) -> bool:
    """Whether a mechanism of the layers to convert has constants to fit."""
    entries = entries_of(plan.settings)
    return bool(plan.layers) and any(MECHANISMS[entry["mechanism"]].needs_calibration(entry) for entry in entries)


def _check_calibration_file(arguments: ConversionArguments, plan: Plan) -> None:
    """Refuse a `--calibration_file` that would have no effect."""
    is_read = needs_calibration(plan) or count_of(arguments.softmax_layers) is not None
    if arguments.calibration_file is not None and not is_read:
        has = "has" if len(mechanisms_of(plan.settings)) == 1 else "have"
        raise UsageError(
            f"`--calibration_file` is given, but {plan.mechanisms} with these settings {has} nothing to calibrate; "
            "leave it out"
        )

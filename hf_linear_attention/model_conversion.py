# SPDX-License-Identifier: Apache-2.0
"""`convert` returns a linear copy of a pretrained softmax model, ready to be trained or saved; `calibrate` fits it."""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from .attention.layer import LinearizedCrossAttention
from .attention.transformers_internals import NOT_SAVED, base_model_class, converting, has_adapters
from .attention_observation import ObservedAttention, observe_batches
from .configuration_linear_attention import entries_of, linear_config_class, max_length_of, model_heads
from .default_settings import DEFAULTS, direction_of
from .layer_ranges import is_by_layer, spread
from .mechanisms.base import MechanismInputs
from .mechanisms.registry import MECHANISMS
from .modeling_linear_attention import converted_modules, linear_attention_modules, linear_model_class
from .score_fit import ScoreMoments, hidden_states_as_gates
from .state_size import with_sizes
from .survey import BoundedLayersError, NoRotaryError, RotaryError


logger = logging.get_logger(__name__)
Settings = Mapping[str, Any] | Sequence[Mapping[str, Any]]


def convert_config(
    config: PreTrainedConfig,
    settings: Settings | None = None,
    *,
    model_class: type | None = None,
    dtype: torch.dtype | None = None,
    **linear_attention: Any,
) -> Any:
    """The `Linear<X>Config` for a stock config; `settings` and `linear_attention` are those of `convert`.

    Values by layer and `state_tokens` look at the layers of `model_class`, by default the class that the config names.
    The bytes of `state_tokens` are those of keys and values of this `dtype`, by default that of the config.

    Raises:
        TypeError: for both `settings` and `linear_attention`.
        ValueError: for a model type that is already linear or unknown, for code of a checkpoint's own, or for
            impossible settings.
    """
    if settings is not None and linear_attention:
        names = ", ".join(f"`{name}`" for name in linear_attention)
        raise TypeError(f"Got `settings` and also {names}; put everything into `settings`.")
    model_type = config.model_type
    refuse_converted(config)
    refuse_own_code(type(config))
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"Model type `{model_type}` is not part of transformers, so its attention is unknown here.")
    fields = copy.deepcopy(config.to_dict())
    for name in ("model_type", "transformers_version", "auto_map"):
        fields.pop(name, None)
    given: Any = linear_attention if settings is None else settings
    if isinstance(given, Mapping) and is_by_layer(given):
        given = spread(given, model_class or stock_model_class(config), config)
    filled = [_with_trained_length(entry, config) for entry in entries_of(given)]
    config_class, kind = linear_config_class(model_type), dtype or getattr(config, "dtype", None) or torch.float32

    def layers_of(entry: Mapping[str, Any]) -> list[Any]:
        with torch.device("meta"):
            model = linear_model_class(model_class or stock_model_class(config))(
                config_class(**copy.deepcopy(fields), linear_attention=entry)
            )
        return list(linear_attention_modules(model).values())

    filled = [with_sizes(entry, layers_of, kind) if "state_tokens" in entry else entry for entry in filled]
    is_one = isinstance(given, Mapping)
    return config_class(**fields, linear_attention=filled[0] if is_one else filled)


def refuse_converted(config: PreTrainedConfig) -> None:
    """Raise ValueError for the config of a converted model."""
    if hasattr(config, "linear_attention"):
        raise ValueError(
            f"This model is already converted (model type `{config.model_type}`); convert its softmax source."
        )


def refuse_own_code(own: type) -> None:
    """Refuse (ValueError) a class of neither transformers nor this package, whose code a checkpoint would lack."""
    if own.__module__.partition(".")[0] in ("transformers", __name__.partition(".")[0]):
        return
    raise ValueError(
        f"`{own.__name__}` is code of the checkpoint itself ({own.__module__}), and a converted checkpoint would not "
        "have it; only models of transformers are converted. If transformers has a model for these weights, load that: "
        "without `trust_remote_code`, or as an instance of its class."
    )


def _with_trained_length(settings: Any, config: PreTrainedConfig) -> Any:
    """Settings with the trained length that the config gives, if the mechanism has this option."""
    if not isinstance(settings, Mapping):
        return settings  # `checked_settings` refuses it
    mechanism = MECHANISMS.get(settings.get("mechanism", "linear"))
    known = mechanism is not None and "trained_length" in mechanism.options
    length = max_length_of(config)
    has_length = length is not None and length > 0  # XLNet says -1: it has no limit
    return {"trained_length": length if has_length else None, **settings} if known else dict(settings)


def stock_model_class(config: PreTrainedConfig) -> Any:
    """The class that a checkpoint was saved from (`architectures` in its config), or else the base model's class.

    ValueError if transformers has no class with that name.
    """
    name = (getattr(config, "architectures", None) or [None])[0]
    if name is None:
        return base_model_class(type(config))
    # Configs that were published before transformers had the class spell it as their authors did: `MPTForCausalLM`.
    spelled = {stock.lower(): stock for stock in model_heads(config.model_type).values()}
    model_class = getattr(transformers, spelled.get(name.lower(), name), None)
    if model_class is None and getattr(config, "auto_map", None):
        raise ValueError(
            f"The checkpoint names the class `{name}`, which is code of its own; a converted checkpoint would not have "
            f"it. To convert the weights as a model of transformers, pass its class as `model_class`, or name it under "
            "`architectures` in config.json."
        )
    if model_class is None:
        raise ValueError(
            f"The checkpoint names the class `{name}`, which transformers {transformers.__version__} does not have; "
            "pass `model_class`, or install another version."
        )
    return model_class


def convert(
    model: PreTrainedModel | str | os.PathLike,
    *,
    model_class: type[PreTrainedModel] | None = None,
    from_pretrained: dict[str, Any] | None = None,
    settings: Settings | None = None,
    **linear_attention: Any,
) -> PreTrainedModel:
    """A linear copy of a pretrained model: the same base weights, and new mechanisms in the converted layers.

    Args:
        model: a folder or hub name, or a loaded model (which does not change; its weights are copied).
        model_class: the stock class to load, such as `BertForMaskedLM`; by default the class that the checkpoint names.
        from_pretrained: further arguments of `from_pretrained` when `model` is a folder or name.
        settings: a dict to use instead of `linear_attention`; or, for layers with different settings, a list of dicts,
            each with the numbers of its `layers`.
        **linear_attention: `mechanism`, `layers` and the options of the mechanism; see `LinearAttentionSettings`. The
            default is `hybrid`, and `window` for encoders (`default_settings.py`). `state_tokens` chooses the sizes of
            both for decoders (`state_size.py`). The mechanism and its options may differ by layer, as in
            `mechanism={"0-3": "hybrid", "4-": "linear"}` and `window_size={"0-1": 64, "2-3": 16}`; see `layer_ranges`.

    Returns:
        A `Linear<X>...` model in evaluation mode. Its `save_pretrained` also writes the code that it needs, and unless
        the folder has them, conversion_report.json and a model card.

    Raises:
        TypeError: for a module that is not a transformers model, such as a `PeftModel`, or for both `settings` and
            `linear_attention`.
        ValueError: for impossible settings, an architecture without convertible attention, or a loaded model
            whose weights are not those of `model_class`.
    """
    _check_arguments(model, model_class, from_pretrained)
    arguments = {"dtype": "auto", **(from_pretrained or {})}
    if isinstance(model, PreTrainedModel):
        refuse_converted(model.config)
        refuse_own_code(model_class or type(model))
        return _converted(model, model_class or type(model), settings, linear_attention)
    names = ("revision", "subfolder", "token", "cache_dir", "local_files_only")
    hub = {name: arguments[name] for name in names if name in arguments}
    if arguments.get("trust_remote_code"):
        refuse_own_code(type(AutoConfig.from_pretrained(model, trust_remote_code=True, **hub)))
    stock = AutoConfig.from_pretrained(model, **hub)
    refuse_converted(stock)
    stock_class = model_class or stock_model_class(stock)
    given = arguments["dtype"] if isinstance(arguments["dtype"], torch.dtype) else None
    config = _convert_config(stock, settings, stock_class, given, linear_attention)
    with converting(), _refused_sizes(config):
        loaded: Any = linear_model_class(stock_class).from_pretrained(model, config=config, **arguments)
    # transformers returns (model, loading info) if it is asked for both
    converted = loaded[0] if isinstance(loaded, tuple) else loaded
    if has_adapters(converted):  # of a repository on the Hub
        raise ValueError(ADAPTERS.format(name=model))
    _name(converted, os.fspath(model))
    return loaded


def _name(converted: Any, source: str | None) -> None:
    """Record what a model was converted from, which is not its base: adapters and references do not fit the source.

    PEFT and trl look for the base under `name_or_path`, and show this text where they do not find it. `save_pretrained`
    puts the folder in its place.
    """
    converted.converted_from = source or "a model in memory"
    name = f"a conversion of {converted.converted_from} {NOT_SAVED}"
    converted.name_or_path = converted.config.name_or_path = name


ADAPTERS = "{name} has adapters beside its weights; merge them first (PEFT's `merge_and_unload`), and save the result."


def _check_arguments(model: Any, model_class: Any, from_pretrained: Any) -> None:
    """Refuse what `convert` cannot take, by the type of the argument."""
    if not isinstance(model, (PreTrainedModel, str, os.PathLike)):
        inside = "`model.merge_and_unload()`" if hasattr(model, "merge_and_unload") else "the `PreTrainedModel` in it"
        raise TypeError(
            f"Got a {type(model).__name__}; `convert` takes a transformers model, or the folder or hub name of one. "
            f"Pass {inside}."
        )
    if not isinstance(from_pretrained, (Mapping, type(None))):
        raise TypeError(f"Got `from_pretrained` = {from_pretrained!r}; it must be a dict of keyword arguments.")
    if not (model_class is None or (isinstance(model_class, type) and issubclass(model_class, PreTrainedModel))):
        raise TypeError(f"Got `model_class` = {model_class!r}; it must be a model class, such as `BertForMaskedLM`.")
    if isinstance(model, PreTrainedModel):
        if has_adapters(model):
            raise ValueError(ADAPTERS.format(name=f"This {type(model).__name__}"))
        return
    name = os.fspath(model)
    if os.path.isfile(os.path.join(name, "adapter_config.json")):
        raise ValueError(ADAPTERS.format(name=name))
    if not os.path.isdir(name) and not re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name):
        raise ValueError(f"Got {name!r}, which is neither a folder nor the name of a model on the Hub.")


def _convert_config(
    config: PreTrainedConfig,
    settings: Settings | None,
    model_class: type,
    dtype: torch.dtype | None,
    given: Mapping[str, Any],
) -> Any:
    """`convert_config` with the default settings where no mechanism is named."""
    is_bare = "mechanism" not in given
    may_leave_out = "layers" not in given and not is_by_layer(given) and getattr(config, "layer_types", None)
    if settings is not None or hasattr(config, "linear_attention") or not (is_bare or may_leave_out):
        return convert_config(config, settings, model_class=model_class, dtype=dtype, **given)
    defaults = DEFAULTS[direction_of(config, bool(given.get("cross_attention")))] if is_bare else {}
    complete = {**defaults, **given}

    def make(settings: Any) -> Any:
        found = convert_config(config, model_class=model_class, dtype=dtype, **settings)
        with torch.device("meta"):
            linear_model_class(model_class)(copy.deepcopy(found))
        return found

    return with_defaults(make, complete, given)


def with_defaults(make: Callable[[Any], Any], settings: Any, given: Container[str]) -> Any:
    """`make(settings)`, without those default settings that it refuses; a warning names them.

    A model may have no rotary positions, or not of the usual kind. Exact keys need hidden states and no ALiBi; where
    they are impossible, the window is longer by as many tokens. Layers with a sliding window stay as they are where the
    others have full attention. Errors of `make` for settings that the user chose, whose names are `given`, remain.
    """
    notes: list[str] = []
    while True:
        try:
            made = make(settings)
            break
        except ValueError as error:
            inner = error.__cause__
            cause = inner if isinstance(inner, ValueError) and not isinstance(error, RotaryError) else error
            entries = [_without_refused(entry, cause, given) for entry in entries_of(settings)]
            if entries == [*entries_of(settings)]:
                raise
            settings = entries[0] if isinstance(settings, Mapping) else entries
            if isinstance(cause, BoundedLayersError):
                notes.append(
                    "Layers with a sliding window or chunks of their own stay as they are; those of full attention are "
                    "converted (`layers` = `full_attention`)."
                )
            elif not isinstance(cause, NoRotaryError):
                instead = "`rope` = `before_map`" if isinstance(cause, RotaryError) else "`num_exact_keys` = 0"
                notes.append(f"{str(cause).rstrip('.')}. The model is converted with {instead}.")
    for note in notes:
        logger.warning(note)
    return made


def _without_refused(entry: Mapping[str, Any], error: BaseException, given: Container[str]) -> dict[str, Any]:
    """One entry of settings without the default that is refused by `error`, if there is one."""
    if isinstance(error, BoundedLayersError):
        is_free = "layers" not in given and entry.get("layers", "all") == "all"
        return {**entry, "layers": "full_attention"} if is_free else dict(entry)
    if isinstance(error, RotaryError):
        return {name: value for name, value in entry.items() if name != "rope" or "rope" in given}
    if entry.get("mechanism") != "hybrid" or entry.get("num_exact_keys") == 0 or "num_exact_keys" in given:
        return dict(entry)
    return {**entry, "num_exact_keys": 0}


def _converted(
    model: PreTrainedModel,
    stock_class: type[PreTrainedModel],
    settings: Settings | None,
    linear_attention: Mapping[str, Any],
) -> PreTrainedModel:
    """The linear copy of a loaded model."""
    config = _convert_config(model.config, settings, stock_class, model.dtype, linear_attention)
    with torch.random.fork_rng(devices=[]), _refused_sizes(config):
        converted: Any = linear_model_class(stock_class)(config)
    _leave_out(model, converted)
    _copy_weights(model, converted)
    for module in linear_attention_modules(converted).values():
        module.linear_attention.start_from(module)
    if model.can_generate():
        converted.generation_config = copy.deepcopy(model.generation_config)
    _name(converted, model.name_or_path)
    return converted.to(model.device).eval()


@contextlib.contextmanager
def _refused_sizes(config: PreTrainedConfig) -> Iterator[None]:
    """Turn torch's errors for weights that do not fit into memory into a `ValueError`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error):
            raise
        raise ValueError(
            f"The new weights do not fit into memory with {config.linear_attention}; choose smaller sizes."
        ) from error


def _leave_out(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Remove modules that `source` does not have, such as the pooler with `BertModel(..., add_pooling_layer=False)`."""
    for path, module in source.named_modules():
        with contextlib.suppress(AttributeError):  # `target` has no such module, which `_copy_weights` refuses
            other = target.get_submodule(path)
            for name in [name for name, child in other.named_children() if getattr(module, name, child) is None]:
                setattr(other, name, None)


def _copy_weights(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy weights and buffers to `target`, each in its own dtype; new parameters get the dtype of `source`."""
    weights, places = source.state_dict(), target.state_dict()
    problems = {
        f"{type(target).__name__} does not have": [name for name in weights if name not in places],
        f"{type(source).__name__} lacks": [n for n in places if n not in weights and ".linear_attention." not in n],
    }
    if found := [f"{what} {', '.join(names)}" for what, names in problems.items() if names]:
        raise ValueError(
            f"The weights of the loaded model are not those of its class: {'; '.join(found)}. Pass the model as "
            "transformers loads it, as an instance of `model_class` if you pass one, without adapters (merge them) and "
            "not quantised."
        )
    own = dict(source.named_parameters()) | dict(source.named_buffers())
    for name, tensor in (*target.named_parameters(), *target.named_buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(own[name].dtype if name in own else source.dtype)
    target.load_state_dict(weights, strict=False)
    for name, buffer in source.named_buffers():
        if name not in weights:  # checkpoints do not contain it, such as rotary frequencies
            target.get_buffer(name).data = buffer.detach().to("cpu", copy=True)


@torch.no_grad()
def calibrate(model: PreTrainedModel, batches: Iterable[Mapping[str, Any]]) -> int:
    """Fit the constants of a converted model's mechanisms to its own queries and keys, in place.

    These are FAVOR++'s, and the scores that choose exact keys (`score_fit.py`). Every layer gets the inputs that it has
    in the original softmax model. The constants are fitted to all batches together, so that the result of FAVOR++ does
    not depend on how the tokens are divided into batches and padded. For it all queries and keys are kept in memory
    until the end, and a few thousand tokens are enough. Scores need tens of thousands, in rows longer than the state.

    Args:
        batches: keyword arguments of the base model, as a tokenizer or image processor returns them: `input_ids` and
            `attention_mask`, or `pixel_values`.

    Returns:
        The number of tokens (or patches) that the first layer saw; 0 if there is nothing to fit, in which case no batch
        is read, or if the batches are too short for the scores of every layer.

    Raises:
        ValueError: if the model has no converted layers, or there is something to fit and no token to fit it to.
        NotImplementedError: for a model whose attention cannot be observed (ALiBi families).
    """
    modules = [m for m in converted_modules(model) if m.linear_attention.needs_calibration(m.linear_attention.settings)]
    if not modules:
        return 0
    found = _Observed(modules)
    with hidden_states_as_gates(found.moments):
        num_batches = observe_batches(model, found.add, _checked(batches, model.main_input_name))
    if not all(sum(counts) for counts in found.counts.values()):
        raise ValueError("`batches` has no token to calibrate on; pass at least one batch of real inputs.")
    if not found.fit():
        return 0
    # ALBERT's layers share one module, which then sees every batch several times.
    first = found.counts[modules[0]]
    return sum(first) * num_batches // len(first)


class _Observed:
    """What the layers to calibrate have seen: sums for the scores of exact keys, all queries and keys for the others.

    `counts` has the number of keys in each call of each layer.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        scored = [module for module in modules if getattr(module.linear_attention, "num_exact_keys", 0)]
        self.moments = {module.linear_attention: ScoreMoments.nothing(module.linear_attention) for module in scored}
        self.kept: dict[Any, list[tuple[Tensor, Tensor]]] = {module: [] for module in modules if module not in scored}
        self.counts: dict[Any, list[int]] = {module: [] for module in modules}

    def add(self, seen: ObservedAttention) -> None:
        if seen.module not in self.counts:
            return
        inputs, mechanism = seen.inputs, seen.module.linear_attention
        mask, is_cross = inputs.key_mask, isinstance(seen.module, LinearizedCrossAttention)
        self.counts[seen.module].append(inputs.key[:, 0, :, 0].numel() if mask is None else int(mask.sum()))
        if mechanism in self.moments:
            self.moments[mechanism].add(inputs, mechanism)
        else:
            query = _real_tokens(inputs.query, None if is_cross else mask)
            self.kept[seen.module].append((query, _real_tokens(inputs.key, mask)))

    def fit(self) -> bool:
        """Fit the constants; whether any has been fitted."""
        for module, parts in self.kept.items():
            query, key = (torch.cat(part, dim=2) for part in zip(*parts))
            scaling = module.linear_attention_scaling
            module.linear_attention.calibrate(MechanismInputs(query, key, key, None, scaling, False))
        explained = [moments.fit(mechanism) for mechanism, moments in self.moments.items()]
        shares = [share for share in explained if share is not None]
        if len(shares) < len(explained):
            logger.warning(
                f"In {len(explained) - len(shares)} of {len(explained)} layers the scores of exact keys stay as they "
                "are (the newest keys are kept), because the rows of the text to fit them to are hardly longer than "
                "the window; pass longer rows."
            )
        if shares:
            share = sum(shares) / len(shares)
            logger.info(
                f"The scores of exact keys explain {share:.0%} of what outputs lose without a key, as logarithms."
            )
        return bool(shares or self.kept)


def _checked(batches: Iterable[Any], needed: str) -> Iterator[Mapping[str, Any]]:
    """The batches, which must be mappings to tensors with `needed` among them."""
    for batch in batches:
        _check_batch(batch, needed)
        yield batch


def _check_batch(batch: Any, needed: str) -> None:
    if not isinstance(batch, Mapping) or not all(isinstance(value, Tensor) for value in batch.values()):
        raise TypeError(
            f"Got a batch of type {type(batch).__name__}; it must map names to tensors, as a tokenizer does."
        )
    if needed not in batch:
        raise ValueError(f"Got a batch with {', '.join(map(str, batch)) or 'nothing'}; it must have `{needed}`.")


def _real_tokens(x: Tensor, mask: Tensor | None) -> Tensor:
    """`[B, heads, N, D]` -> `[1, heads, T, D]`, the T tokens where `mask` bool `[B, N]` is True, or all of them."""
    tokens = x.transpose(1, 2)
    tokens = tokens.flatten(0, 1) if mask is None else tokens[mask]
    return tokens.transpose(0, 1).unsqueeze(0)

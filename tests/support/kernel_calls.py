"""Random calls of the kernels, those that fit and those that do not, as `tests/native/fuzz.py` makes them.

Axes as letters, see SPECIFICATIONS: B batch, H and K query and key/value heads, N queries, S keys, D and E head
dimensions, W that of the values, C columns of an affine map, F features, P places of a window, w of a state, s sinks, M
exact keys, L rows of keys with those before the first query.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_linear_attention.torch_kernels.blocks import ELU_PLUS_ONE, EMPTY_MAXIMUM, EXP, HEDGEHOG, PLAIN


def axes(text: str) -> dict[str, str]:
    """The axes of each tensor, by name."""
    return dict(word.split(":") for word in text.split())


# `V` is W + 1 or W + 2. A letter in lower case beside an axis may be 1 instead; "1" must be 1.
AFFINE = "key_weight:kDC key_bias:k1C key_norm:k11 query_weight:hDC"
OF_HEADS = "key_weight:KDC key_bias:K1C key_norm:K11 query_weight:HDC"
SINKS = "sink_key:BKsD sink_value:BKsW seen:BNs"
KEPT = ("kept_key", "kept_value", "kept_score", "kept_age", "kept_position")
SPECIFICATIONS = {
    "attention": axes(f"query:BHND key:BKSD value:BKSW key_mask:BS log_decay:K state:BKFV {AFFINE}"),
    "features": axes("query:BHNF key:BKSF value:BKSW key_mask:BS log_decay:K state:BKFV"),
    "step": axes("query:BH1F key:BK1F value:BK1W state:BKFV log_decay:K"),
    "window": axes(f"query:BHND key:BKPD value:BKPW visible:BP {SINKS} sink_query:BHND"),
    "window_both_ways": axes(f"query:BHND key:BKND value:BKNW visible:BN {SINKS} sink_query:BHND"),
    "hybrid": axes(
        f"query:BHND key:BKLD value:BKLW visible:BL {SINKS} log_decay:K state:BKFV {OF_HEADS} log_scale:H "
        "norm_weight:H kept_key:BKMD kept_value:BKMW kept_score:BKM1 kept_age:BKM1 kept_position:BKM1 score:BKL1 "
        "position:BN key_position:BL"
    ),
    "slots": axes("query:BHND key:BKSD value:BKSW visible:bkS"),
    "hybrid_step": axes(
        "query:BH1E key:BK1E value:BK1W score:B1K slope:K position:B1 key_weight:KEC key_bias:K1C key_norm:K11 "
        "query_weight:HEC log_decay:K log_scale:H norm_weight:H sums:BKFV kept_key:BKME kept_value:BKMW "
        "kept_score:BKM1 kept_age:BKM1 kept_position:BKM1 window_key:BKwE window_value:BKwW kind:Bw sink_key:BKsE "
        "sink_value:BKsW num_seen:B1 window_position:Bw window_score:BKw1"
    ),
    "delta": axes("query:BHNF key:BKNF value:BKNW log_decay:BKN beta:BKN key_mask:BN state:BKFW"),
    "delta_step": axes("query:BH1F key:BK1F value:BK1W log_decay:BK1 beta:BK1 state:BKFW"),
    "elu": axes("x:BHND"),
}
SPECIFICATIONS |= {  # a decay per feature
    "delta_by_feature": SPECIFICATIONS["delta"] | {"log_decay": "BKNF"},
    "delta_step_by_feature": SPECIFICATIONS["delta_step"] | {"log_decay": "BK1F"},
}
OPTIONAL = ("key_mask", "log_decay", "state", "sink_query")
MASKS = ("key_mask", "visible", "seen")
HYBRID_STATE = ("sums", *KEPT, "window_key", "window_value", "kind", "sink_key", "sink_value", "num_seen")
HYBRID_STATE += ("window_position", "window_score")
PLACES = {*HYBRID_STATE, "position", "key_position", "score"} - {"sums"}
LENGTHS = (1, 2, 3, 5, 7, 8, 13, 17, 31, 32, 33, 40, 63, 64, 65, 97, 130, 200)
COLUMNS = (4, 5, 7, 8, 12, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 128, 130)
DECAYS = (0.0, -1e-3, -0.1, -0.9, -5.0, -30.0, -89.0, -300.0)
DTYPES = [
    *[(torch.float32,) * 3] * 11,
    *[(torch.bfloat16,) * 3] * 4,
    *[(torch.float32, torch.float32, torch.bfloat16)] * 2,
    (torch.bfloat16, torch.bfloat16, torch.float32),
    (torch.float16,) * 3,
    (torch.float64,) * 3,
]


class Call(NamedTuple):
    """`entry` names a function of tests/native/fuzz.py; `clean` are the tensors without what masks hide."""

    entry: str
    tensors: dict[str, torch.Tensor | None]
    clean: dict[str, torch.Tensor | None]
    options: dict[str, Any]
    wanted: list[str]
    misfit: str
    expanded: dict[str, int]  # the axis along which a tensor repeats its first numbers

    def __str__(self) -> str:
        described = {k: None if x is None else (str(x.dtype)[6:], *x.shape) for k, x in self.tensors.items()}
        strides = {k: x.stride() for k, x in self.tensors.items() if x is not None and not x.is_contiguous()}
        given = f"{self.options}, expanded {self.expanded}, misfit: {self.misfit or 'none'}"
        return f"{self.entry} {given}\n  {described}\n  strides {strides}"


def widened(x: torch.Tensor) -> torch.Tensor:
    """In float64, with its maximum of an empty state."""
    return torch.where(x < -9e29, EMPTY_MAXIMUM, x.double()) if x.is_floating_point() else x


def rows_of(x: torch.Tensor, kind: str, function: int, std: float) -> torch.Tensor:
    """Queries or keys of which a kernel can make sense, from normal numbers."""
    if kind.startswith("delta"):  # with keys longer than 1 the state of the delta rule grows at every token
        return torch.nn.functional.normalize(x, dim=-1)
    if kind in ("attention", "features", "step") and function == PLAIN:
        return x.abs() + 0.01  # the gradient of a single feature is 0, and rounds in proportion to 1 / feature
    return x * (min(std, 4) if function == ELU_PLUS_ONE else std)  # float32 and so elu1 end at exp(-87)


class Maker:
    """Makes calls from one seed."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.is_packed = False

    def pick(self, numbers: Sequence[int]) -> int:
        """Small ones, the first, more often."""
        return numbers[int(len(numbers) * self.random.random() ** 2.2)]

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def normal(self, shape) -> torch.Tensor:
        return torch.randn(tuple(shape), generator=self.generator)

    def sizes(self, kind: str, is_causal: bool) -> dict[str, int]:
        """A length for every letter of SPECIFICATIONS."""
        kv_heads, thin = self.pick((1, 2, 2, 3)), self.chance(0.05)
        sizes = {"B": self.pick((1, 2, 2, 3)), "K": kv_heads, "H": kv_heads * self.pick((1, 1, 2, 3, 4))}
        for letter in "NS":
            sizes[letter] = 0 if self.chance(0.03) else self.pick(LENGTHS)
        for letter in "DEWCF":
            sizes[letter] = self.random.randint(1, 3) if thin and self.chance(0.5) else self.pick(COLUMNS)
        if self.chance(0.02):
            sizes["B"] = 0
        if sizes["H"] * sizes["N"] > 300:  # one call takes milliseconds, not seconds
            sizes["D"], sizes["F"], sizes["C"] = (min(sizes[letter], 33) for letter in "DFC")
        sizes["S"] = sizes["N"] if is_causal else sizes["S"]
        sizes["w"], sizes["s"] = self.pick((1, 2, 5, 8, 33)), self.pick((0, 1, 4, 4, 40))
        sizes["M"] = self.pick((1, 2, 3, 5, 8, 33))
        sizes["P"] = max(sizes["N"], 1) + self.pick((1, 2, 3, 8, 20, 32, 33, 64, 65)) - 1
        return sizes | {"1": 1}

    def call(self) -> Call:
        """The next one; of three, one does not fit."""
        weights = {"attention": 9, "features": 3, "step": 3, "window": 5, "window_both_ways": 4, "slots": 4}
        weights |= {"hybrid": 12, "hybrid_step": 3, "elu": 1}
        weights |= {"delta": 5, "delta_by_feature": 3, "delta_step": 1, "delta_step_by_feature": 1}
        kind = self.random.choices(list(weights), weights.values())[0]
        is_causal = kind in ("step", "hybrid", "hybrid_step") or kind.startswith("delta") or self.chance(0.6)
        options: dict[str, Any] = {"function": self.pick((EXP, PLAIN, HEDGEHOG, ELU_PLUS_ONE)), "is_causal": is_causal}
        if kind in ("features", "step"):
            options["function"] = self.random.choice((PLAIN, EXP))
        if kind in ("hybrid", "hybrid_step"):
            options["function"] = self.random.choice((EXP, EXP, HEDGEHOG))
        if kind.startswith("delta"):
            options |= {"function": PLAIN, "erases": self.chance(0.7)}
        options["scaling"], sizes = self.random.choice((0.1, 0.3, 1.0)), self.sizes(kind, is_causal)
        self.is_packed = is_causal and self.chance(0.07)
        names = self.given(kind, is_causal, options["function"])
        if kind == "hybrid":
            sizes |= {"B": max(1, sizes["B"]), "N": max(1, sizes["N"])}
            options["window"] = self.pick((1, 2, 5, 8, 20, 32, 33, 34, 64, 65))
            sizes["L"] = sizes["N"] + options["window"] * ("state" in names or self.chance(0.3))
        if kind in ("hybrid", "hybrid_step"):
            options["turns"] = self.turns(sizes["D" if kind == "hybrid" else "E"], "position" in names)
            options["number"] = sizes["M"] * ("score" in names)
            options["is_rate"], options["slope_scale"] = self.chance(0.5), self.random.choice((1.0, 0.25))
        if kind == "window_both_ways":
            options["window"], sizes["N"] = self.pick((1, 2, 5, 16, 17, 33, 70)), max(1, sizes["N"])
        function, is_affine = options["function"], "key_weight" in names
        columns = sizes["C"] if is_affine else sizes["D"]
        if kind in ("attention", "hybrid", "hybrid_step"):
            sizes["F"] = columns * (1 + (function == HEDGEHOG))
        sizes["V"] = sizes["W"] + 1 + (kind == "hybrid_step" or function >= EXP)
        shapes = {name: self.shape(SPECIFICATIONS[kind][name], sizes) for name in names}
        # Scores and what C alone computes are never float64.
        dtypes = self.random.choice(DTYPES[: -1 if kind in ("hybrid", "hybrid_step") else None])
        tensors = self.contents(kind, shapes, dtypes, options, is_affine)
        misfit = self.spoil(kind, tensors, options, sizes) if self.chance(1 / 3) else ""
        expanded = {} if misfit else self.expand(tensors)
        clean = dict(tensors)
        if not misfit and not {"key", "value"} & set(expanded):
            self.hide(tensors, kind)
        wanted = [name for name, x in tensors.items() if x is not None and x.is_floating_point() and self.chance(0.7)]
        wanted = [name for name in wanted if not (kind == "hybrid" and name.endswith("score"))]  # constants
        return Call(kind, tensors, clean, options, wanted, misfit, expanded)

    def turns(self, dim: int, has_positions: bool) -> tuple[torch.Tensor | None, int, bool, int]:
        """Frequencies of rotary pairs, how many the map sees, whether pairs are interleaved, and a trained length."""
        count = self.random.randint(0, dim // 2) if has_positions else 0
        frequencies = [10.0 ** (-3 * self.random.random()) for _ in range(count)]
        first, is_interleaved = self.random.randint(0, count), self.chance(0.5)
        turned = torch.tensor(frequencies) if frequencies or self.chance(0.5) else None
        turned = turned.repeat_interleave(2)[::2] if turned is not None and self.chance(0.3) else turned  # not dense
        return turned, first, is_interleaved, self.random.choice((0, 1, 3, 50, 2**30))

    def given(self, kind: str, is_causal: bool, function: int) -> list[str]:
        is_delta = kind.startswith("delta")
        needed = ("log_decay", "state")[: 1 + ("step" in kind)] if is_delta else ()
        names = [x for x in SPECIFICATIONS[kind] if x not in OPTIONAL or x in needed or self.chance(0.5)]
        affine = ("key_weight", "query_weight", "key_bias", "key_norm")
        if kind == "attention" and self.chance(0.4):
            names = [name for name in names if name not in affine]
        names = [name for name in names if name not in affine[2:] or (function != HEDGEHOG and self.chance(0.5))]
        if not is_causal and "log_decay" in names:
            names.remove("log_decay")
        if kind == "step" and "state" not in names:
            names.append("state")
        if kind == "slots" and self.chance(0.4):
            names.remove("visible")
        if kind in ("hybrid", "hybrid_step") and self.chance(0.4):
            names = [name for name in names if name not in ("score", "slope", "window_score", *KEPT)]
        if kind in ("hybrid", "hybrid_step") and self.chance(0.4):
            names = [name for name in names if "position" not in name]
        if kind == "hybrid" and "state" not in names:
            names = [name for name in names if name not in KEPT]
        return names

    def shape(self, letters: str, sizes: dict[str, int]) -> tuple[int, ...]:
        return tuple(
            1 if letter in "bkh" and self.chance(0.4) else sizes[letter.upper() if letter in "bkh" else letter]
            for letter in letters
        )

    def contents(self, kind, shapes, dtypes, options, is_affine) -> dict[str, torch.Tensor | None]:
        """Numbers of which the kernel can make sense: plain features are not negative, exponents sometimes large."""
        # Torch keeps blocks of fixed length where a decay or packed sequences are to be told apart: exponents that rise
        # by more than 87 within one are beyond it.
        std = self.pick((1, 1, 4, 4 if "log_decay" in shapes or self.is_packed else 30))
        by_name = dict(zip(("query", "key", "value"), dtypes))
        by_name |= {"window_key": dtypes[1], "window_value": dtypes[2], "sink_key": dtypes[1], "sink_value": dtypes[2]}
        by_name |= {"sink_query": dtypes[0], "x": dtypes[0], "kept_key": dtypes[1], "kept_value": dtypes[2]}
        tensors: dict[str, torch.Tensor | None] = {}
        for name, shape in shapes.items():
            x = self.normal(shape)
            if name in ("query", "key", "sink_key", "sink_query", "window_key", "kept_key", "x"):
                x = rows_of(x, kind, options["function"], std)
            elif name in ("key_weight", "query_weight"):
                x = (x.abs() if options["function"] == PLAIN else x) / max(1, shape[1]) ** 0.5
            elif name in ("key_bias", "key_norm"):
                x = x.abs() * (0 if name == "key_norm" and options["function"] < EXP else 0.1)
            elif name == "log_decay":
                x = torch.tensor(DECAYS)[torch.randint(0, len(DECAYS), shape, generator=self.generator)]
                least = self.random.choice((-0.1, -300.0)) if len(shape) > 1 else -300.0
                least = -0.9 if kind == "hybrid" and "score" in shapes else least
                x = x.clamp(min=least)  # near 0: reads far back
            elif name == "beta":
                x = torch.rand(shape, generator=self.generator)
            elif name in ("state", "sums"):
                x = self.state(shape, kind == "hybrid_step" or options["function"] >= EXP, std)
            elif name in MASKS:
                x = self.mask(name, shape)
            elif name in PLACES and name not in by_name:
                x = self.place(name, shape)
                if name == "kept_age":  # all heads have as many keys
                    x = x[:, :1].expand(shape).clone()
            x = x.to(by_name[name]) if name in by_name else x
            is_double = dtypes[2] == torch.float64 and x.dtype == torch.float32
            tensors[name] = widened(x) if is_double else x
        return tensors

    def place(self, name: str, shape) -> torch.Tensor:
        """What the state of a step holds of places: kinds, numbers, positions, scores of which some are equal, ages."""
        if name == "num_seen":
            numbers = (0, 1, 3, 50, -1, -(2**63), 2**63 - 1, 2**31)
            return torch.tensor([[self.random.choice(numbers)] for _ in range(shape[0])]).view(shape).long()
        most = {"kind": 3, "kept_age": 4}.get(name) or 3 * name.endswith("score") or self.pick((60, 2**31 - 1))
        least = -2 if name.endswith("score") else 0
        dtype = torch.float32 if name.endswith("score") else torch.int8 if name == "kind" else torch.int32
        return torch.randint(least, most, shape, generator=self.generator).to(dtype)

    def state(self, shape, log_features: bool, std: float) -> torch.Tensor:
        state = self.normal(shape)
        state[..., -1 - log_features] = state[..., -1 - log_features].abs() + 0.1
        if log_features:
            state[..., -1] *= std
            if self.chance(0.2):  # as at the start
                state[..., :-1], state[..., -1] = 0.0, -1e30
        return state

    def mask(self, name: str, shape) -> torch.Tensor:
        if name == "key_mask" and self.is_packed:
            return torch.randint(0, 2, shape, generator=self.generator).cumsum(dim=1)
        mask = torch.rand(shape, generator=self.generator) < self.random.choice((0.0, 0.3, 0.8, 1.0))
        if name != "seen" and self.chance(0.3):  # padding on the left
            mask[..., : shape[-1] // 2] = False
            mask[..., shape[-1] // 2 :] = True
        return mask

    def expand(self, tensors) -> dict[str, int]:
        expanded = {name: self.random.randrange(x.ndim) for name, x in tensors.items() if self.chance(0.04)}
        expanded = {name: axis for name, axis in expanded.items() if name not in ("state", "sums") or axis < 3}
        for name, axis in expanded.items():
            x = tensors[name]
            tensors[name] = x.narrow(axis, 0, min(1, x.shape[axis])).expand(x.shape).clone()
        return expanded

    def hide(self, tensors, kind: str) -> None:
        """What a mask hides may be anything."""
        mask = next((tensors[name] for name in MASKS if tensors.get(name) is not None), None)
        if mask is None or mask.dtype != torch.bool or self.chance(0.5):
            return
        hidden = ~(mask if kind == "slots" else mask[:, None]).unsqueeze(3)
        for name in ("key", "value"):
            tensors[name] = tensors[name].masked_fill(hidden, self.random.choice((torch.nan, torch.inf, 6e4)))

    def spoil(self, kind: str, tensors, options, sizes) -> str:
        """Change one tensor so that it no longer fits; what was changed, or nothing where nothing can be."""
        ways = [self.spoil_size] * 4 + [self.spoil_axes, self.spoil_dtype]
        ways += [self.spoil_places] if kind == "window" and sizes["N"] > 1 else []
        return self.random.choice(ways)(kind, tensors, options, sizes)

    def spoil_size(self, kind: str, tensors, options, sizes) -> str:
        base = {"V": "W", "F": "C" if "key_weight" in tensors else "D", "b": "B", "k": "K", "h": "H"}
        base = base if kind in ("attention", "hybrid", "hybrid_step") else base | {"F": "F"}
        base |= {"S": "N"} if options["is_causal"] and kind in ("attention", "features") else {}
        specification = {name: SPECIFICATIONS[kind][name] for name in tensors}
        letters = [base.get(letter, letter) for text in specification.values() for letter in text if letter != "h"]
        if kind == "elu":
            return self.spoil_axes(kind, tensors, options, sizes)
        found = []
        for name, text in specification.items():
            for axis, letter in enumerate(text):
                of = base.get(letter, letter)
                if letter in "1VT" or letters.count(of) > 1 - (letter == "H" and sizes["K"] > 1):
                    found.append((name, axis, letter))
        name, axis, letter = self.random.choice(found)
        x = tensors[name]
        assert x is not None
        old = x.shape[axis]
        new = self.random.choice([n for n in (1, 2, 3, old + 1, old - 1, 2 * old, 3 * old) if n >= 0 and n != old])
        if letter in "bkh" and new in (1, sizes[base[letter]]):
            new = sizes[base[letter]] + 2
        if letter == "H":  # 1 more than a multiple is none, if there is another divisor than 1
            new = old + 1
        if letter == "F" and name == "state" and new == old:
            new += 1
        shape = [*x.shape[:axis], new, *x.shape[axis + 1 :]]
        tensors[name] = self.normal(shape).abs().to(x.dtype)
        return f"axis {axis} of {name} is {new}, not {old}"

    def spoil_places(self, kind: str, tensors, options, sizes) -> str:
        places = sizes["N"] - 1
        for name, axis in (("key", 2), ("value", 2), ("visible", 1)):
            tensors[name] = tensors[name].narrow(axis, 0, places)
        return f"{places} keys for {places + 1} queries"

    def spoil_axes(self, kind: str, tensors, options, sizes) -> str:
        # A log decay of the delta rule may have three axes or four.
        name = self.random.choice([name for name in tensors if name != "log_decay" or not kind.startswith("delta")])
        x = tensors[name]
        if self.chance(0.2):
            tensors[name] = torch.zeros((), dtype=x.dtype)
        elif self.chance(0.5) and x.ndim:
            tensors[name] = torch.zeros(x.shape[1:], dtype=x.dtype)
        else:
            tensors[name] = x.unsqueeze(self.random.randint(0, x.ndim))
        return f"{name} has {tensors[name].ndim} axes, not {x.ndim}"

    def spoil_dtype(self, kind: str, tensors, options, sizes) -> str:
        wrong = {"state": torch.bfloat16, "sums": torch.float64, "kind": torch.int32, "num_seen": torch.int32}
        wrong |= {"key_mask": torch.float32, "visible": torch.uint8, "seen": torch.int64, "value": torch.int64}
        wrong |= (
            {"window_key": torch.float16, "sink_value": torch.float64, "kept_age": torch.int64, "score": torch.int32}
            if kind == "hybrid_step"
            else {}
        )
        name = self.random.choice([name for name in tensors if name in wrong] or [""])
        if not name or tensors[name].dtype == wrong[name]:
            return ""
        tensors[name] = torch.zeros(tensors[name].shape, dtype=wrong[name])
        return f"{name} is {wrong[name]}"

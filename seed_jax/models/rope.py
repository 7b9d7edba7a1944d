"""Rotary position embedding: the base, and the scaling that stretches it to longer contexts, as a config states them.

Types: "default" (no scaling; Su et al. 2021, arXiv 2104.09864), "linear" (position interpolation, arXiv 2306.15595),
"llama3" (Llama 3.1: only long wavelengths are stretched) and "yarn" (arXiv 2309.00071). The formulas are those of
`transformers.modeling_rope_utils`, so that a checkpoint means the same here.

Glossary: hd head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TYPES = ("default", "linear", "llama3", "yarn")
DEFAULT_THETA = 10_000.0

# Field of RopeScaling -> name in a config, and which fields a type reads.
_HF_NAMES = {"original_max_position": "original_max_position_embeddings"}
_NEEDED = {"linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "yarn": ("factor",)}
_OPTIONAL = {
    "linear": (),
    "llama3": ("original_max_position",),
    "yarn": (
        "original_max_position", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    ),
}  # fmt: skip
_DEFAULT_SECTIONS = (16, 24, 24)  # of transformers
_SECTIONS = ("rope_scaling", "rope_parameters")  # before transformers 5, and since; the first one given counts


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary embedding. Fields that `kind` does not read keep their default.

    kind: "linear" | "llama3" | "yarn"
    factor: how many times longer the context becomes
    original_max_position: context of the pretraining, in tokens (llama3, yarn)
    low_freq_factor, high_freq_factor: wavelengths above original_max_position / low_freq_factor are stretched, those
        below original_max_position / high_freq_factor are not (llama3)
    beta_fast, beta_slow: frequencies that turn more than beta_fast times in the original context are kept, those that
        turn less than beta_slow times are stretched (yarn)
    attention_factor: multiplies cosines and sines; None follows from factor, mscale and mscale_all_dim (yarn)
    truncate: round the bounds between kept and stretched frequencies to whole indices (yarn)
    """

    kind: str
    factor: float
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in TYPES[1:]:
            raise ValueError(f"rope type {self.kind!r} is not supported; use one of {', '.join(TYPES)}")
        if self.factor < 1:
            raise ValueError(f"factor={self.factor} of rope type {self.kind!r} must be at least 1")
        if self.kind != "linear" and self.original_max_position < 1:
            raise ValueError(
                f"original_max_position={self.original_max_position} of rope type {self.kind!r} must be the context "
                "of the pretraining, in tokens"
            )
        if self.kind == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be positive and less than "
                f"high_freq_factor={self.high_freq_factor}"
            )
        if self.kind == "yarn" and not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(f"beta_slow={self.beta_slow} must be positive and at most beta_fast={self.beta_fast}")


def from_config(config: Mapping[str, Any], max_position: int) -> tuple[float, RopeScaling | None]:
    """(base, scaling) of a parsed config.json, from `rope_parameters` or `rope_scaling` and `rope_theta`.

    max_position: the context when the scaling does not state the original one
    Raises ValueError naming the field for another type, an unknown field, a partial rotation, or a bad number.
    """
    section = next((name for name in _SECTIONS if config.get(name)), None)
    given = dict(config[section]) if section else {}
    theta, partial = (
        next((value for value in (given.pop(name, None), config.get(name)) if value is not None), default)
        for name, default in (("rope_theta", DEFAULT_THETA), ("partial_rotary_factor", 1.0))
    )
    theta, old_type = _number(theta, "rope_theta"), given.pop("type", None)
    kind = given.pop("rope_type", None) or old_type or "default"
    if partial != 1.0:
        raise ValueError(
            f"config field partial_rotary_factor={partial} (it may stand in {' or '.join(_SECTIONS)}) is not "
            "supported; only 1.0 is"
        )
    if kind not in TYPES:
        raise ValueError(f"config field {section}.rope_type={kind!r} is not supported; use one of {', '.join(TYPES)}")
    ours = {_HF_NAMES.get(field.name, field.name): field.name for field in dataclasses.fields(RopeScaling)[1:]}
    unknown = sorted(set(given) - set(ours))
    if unknown:
        raise ValueError(
            f"config field {section}.{unknown[0]}={given[unknown[0]]!r} is not supported; rope type {kind!r} reads "
            f"{', '.join(_hf_fields(kind)) or 'no field but rope_theta'}"
        )
    if kind == "default":
        return theta, None
    values = {ours[name]: value for name, value in given.items() if value is not None}
    # As in transformers: one that stands beside the section wins, and the whole context is the last resort.
    original = config.get("original_max_position_embeddings") or values.get("original_max_position", max_position)
    return theta, _scaling(kind, {**values, "original_max_position": original}, section)


def split_sections(config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """A parsed config.json of M-RoPE (arXiv 2409.12191, section 2.1) -> what `from_config` reads, and the sections.

    The sections are the numbers of pairs of a head that turn by the frame, the row and the column of a position.
    """
    config, found = dict(config), None
    for name in _SECTIONS:
        if config.get(name):
            given = dict(config[name])
            sections = given.pop("mrope_section", None)
            found = sections if found is None else found
            config[name] = {key: "default" if value == "mrope" else value for key, value in given.items()}
    found = _DEFAULT_SECTIONS if found is None else found
    if not isinstance(found, (list, tuple)) or any(type(pairs) is not int or pairs < 1 for pairs in found):
        raise ValueError(f"config field mrope_section={found!r} must be a list of three numbers of pairs")
    return config, tuple(found)


def _scaling(kind: str, values: Mapping[str, Any], section: str) -> RopeScaling:
    """Only the fields that `kind` reads; transformers ignores the others too."""
    for name in _NEEDED[kind]:
        if name not in values:
            raise ValueError(f"config field {section}.{name} is missing; rope type {kind!r} needs it")
    read = {}
    for name in (*_NEEDED[kind], *_OPTIONAL[kind]):
        if name == "truncate":
            read[name] = bool(values.get(name, True))
        elif name in values:
            number = _number(values[name], f"{section}.{_HF_NAMES.get(name, name)}")
            read[name] = int(number) if name == "original_max_position" else number
    try:
        return RopeScaling(kind, **read)
    except ValueError as error:
        raise ValueError(f"config field {section}: {error}") from error


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"config field {field}={value!r} must be a number")
    return float(value)


def _hf_fields(kind: str) -> list[str]:
    return [_HF_NAMES.get(name, name) for name in (*_NEEDED.get(kind, ()), *_OPTIONAL.get(kind, ()))]


def to_config(theta: float, scaling: RopeScaling | None, sections: tuple[int, ...] = ()) -> dict[str, Any]:
    """The fields of config.json, in both spellings, so that old and new `transformers` agree."""
    shared = {"mrope_section": list(sections)} if sections else {}
    if scaling is None:
        old = {"rope_scaling": {"type": "mrope", **shared}} if sections else {}
        return {"rope_theta": theta, **old, "rope_parameters": {"rope_type": "default", "rope_theta": theta, **shared}}
    fields: dict[str, Any] = {"rope_type": scaling.kind, **shared}
    for name in (*_NEEDED[scaling.kind], *_OPTIONAL[scaling.kind]):
        value = getattr(scaling, name)
        if value is not None and not (name == "truncate" and value):
            fields[_HF_NAMES.get(name, name)] = value
    return {"rope_theta": theta, "rope_scaling": fields, "rope_parameters": {**fields, "rope_theta": theta}}


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> jax.Array | np.ndarray:
    """Radians by which each pair of a head turns per position: [hd/2] float32."""
    if scaling is None:
        exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
        return theta**-exponents
    plain = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    if scaling.kind == "linear":
        scaled = plain / scaling.factor
    elif scaling.kind == "llama3":
        turns = scaling.original_max_position * plain / (2 * math.pi)  # in the original context
        keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        scaled = _between(plain, scaling.factor, keep)
    else:
        low, high = _yarn_range(head_dim, theta, scaling)
        ramp = (np.arange(head_dim // 2) - low) / (0.001 if high == low else high - low)
        scaled = _between(plain, scaling.factor, 1 - ramp)
    return scaled.astype(np.float32)


def _between(plain: np.ndarray, factor: float, keep: np.ndarray) -> np.ndarray:
    """Mixture of kept and stretched frequencies; `keep` is clipped to 0 .. 1."""
    keep = np.clip(keep, 0.0, 1.0)
    return plain * keep + plain / factor * (1 - keep)


def _yarn_range(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Indices of the pairs that turn beta_fast and beta_slow times in the original context (YaRN, section 3.2)."""

    def index(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = index(scaling.beta_fast), index(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def magnitude(scaling: RopeScaling | None) -> float:
    """What multiplies cosines and sines; its square multiplies every attention score (YaRN, section 3.4)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return mscale(scaling.mscale) / mscale(scaling.mscale_all_dim)
    return mscale(1.0)

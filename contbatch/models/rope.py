"""Rotary positions that are stretched for long texts: the kinds that are computed, and how a config asks for them.

The one idea: every kind here divides the frequencies by numbers that never change, so a position has one rotation
whatever the length of its text, and cached keys stay right. Left out, and refused by name: `dynamic` (its frequencies
change with the length of the text), `yarn` and `longrope` (they also scale the attention scores).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contbatch.errors import CheckpointError

KINDS = ("linear", "llama3", "divisors")
"""What `RopeScaling.kind` may be; `divisors` is how GGUF files write `llama3`."""


@dataclass(frozen=True)
class RopeScaling:
    """How the frequencies of rotary positions are slowed down; `llama.frequencies` computes with it.

    Args:
        kind: "linear" divides all by `factor`. "llama3" divides by `factor` those that turn fewer than
            `low_freq_factor` times in `original_max_len` tokens, none that turn more than `high_freq_factor` times,
            and blends in between (Grattafiori et al., "The Llama 3 Herd of Models", 2024, and its published code).
            "divisors" gives the number for each frequency.
        original_max_len: tokens that the model was trained on before it was stretched.
        divisors: [head_dim / 2] numbers, for that kind alone.

    Raises:
        CheckpointError: an unknown kind, or numbers that scale nothing sensibly.
    """

    kind: str
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192
    divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise CheckpointError(f"rotary scaling of kind {self.kind!r} is not supported; supported: {KINDS}")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_len"):
            _check_positive(name, getattr(self, name))
        if (self.kind == "divisors") != bool(self.divisors):
            raise CheckpointError(f"rotary scaling of kind {self.kind!r} has {len(self.divisors)} divisors")
        for value in self.divisors:
            _check_positive("a divisor", value)
        if self.low_freq_factor >= self.high_freq_factor:
            raise CheckpointError(
                f"low_freq_factor is {self.low_freq_factor} and high_freq_factor {self.high_freq_factor} "
                "in the checkpoint; the second must be above the first"
            )

    @classmethod
    def from_huggingface(cls, fields: Mapping[str, Any]) -> RopeScaling | None:
        """What a `config.json` asks for, in its old form (`rope_scaling`) or its new one (`rope_parameters`).

        Raises:
            CheckpointError: a kind that is not computed here, or a field that it needs and lacks.
        """
        rope = rope_fields(fields)
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None
        if kind == "linear":
            return cls("linear", _needed(rope, kind, "factor"))
        if kind == "llama3":
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
            return cls("llama3", *(_needed(rope, kind, name) for name in names))
        raise CheckpointError(
            f"{_name(fields)} asks for rotary positions of type {kind!r}, and this is not supported; "
            "supported: default, linear, llama3"
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The value of `rope_scaling` in a `config.json`.

        Raises:
            CheckpointError: the format has no field for divisors.
        """
        if self.kind == "linear":
            return {"rope_type": "linear", "factor": self.factor}
        if self.kind == "llama3":
            return {
                "rope_type": "llama3",
                "factor": self.factor,
                "low_freq_factor": self.low_freq_factor,
                "high_freq_factor": self.high_freq_factor,
                "original_max_position_embeddings": self.original_max_len,
            }
        raise CheckpointError("config.json has no field for the divisors that a GGUF file gave; keep the GGUF file")


def rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with the rotary fields; empty where a `config.json` has none.

    Raises:
        CheckpointError: it is no object, or has one for each kind of layer.
    """
    rope = fields.get(_name(fields)) or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise CheckpointError(
            f"{_name(fields)} is {rope!r} in the checkpoint; one object with the same rotary positions for all layers "
            "is supported"
        )
    return rope


def _name(fields: Mapping[str, Any]) -> str:
    return "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"


def _needed(rope: Mapping[str, Any], kind: str, name: str) -> Any:
    if name not in rope:
        raise CheckpointError(f"rotary positions of type {kind!r} need the field {name!r}; config.json lacks it")
    _check_positive(name, rope[name])
    return rope[name]


def _check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"{name} of the rotary scaling is {value!r}; it must be a number above 0")

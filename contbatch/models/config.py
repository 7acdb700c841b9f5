"""The shape of a decoder, read from a checkpoint's own description.

One idea: a checkpoint is accepted only if every field that changes the mathematics is one this package computes.
A model with a sliding window or scaled rotary positions would load and run, and write nonsense after a while, so
such fields are refused by name. Fields that change nothing at inference (dropout, initialisation) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contbatch.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM",)
"""Architectures that can be loaded, by the name in `config.json`."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Llama-family decoder. All are counts, except `norm_eps` and `rope_theta`.

    Raises:
        CheckpointError: for sizes that no such model can have.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    tied_head: bool = True
    """True if the output head is the embedding matrix."""

    def __post_init__(self) -> None:
        for name in _COUNTS:
            check_count(name, getattr(self, name))
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key/value heads; "
                "the first number must be a multiple of the second"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim is {self.head_dim}; rotary positions need an even one")
        for name in ("norm_eps", "rope_theta"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise CheckpointError(f"{name} is {value!r} in the checkpoint; it must be above 0")

    @classmethod
    def from_huggingface(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face `config.json`.

        Raises:
            CheckpointError: an unsupported architecture or feature, or a missing or impossible field.
        """
        check_architecture(fields.get("architectures") or [fields.get("model_type")])
        _refuse_features(fields)
        rope = fields.get("rope_parameters") or {}  # newer files keep the rotary fields here
        heads, hidden = _required(fields, "num_attention_heads"), _required(fields, "hidden_size")
        return cls(
            vocab_size=_required(fields, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_required(fields, "intermediate_size"),
            num_layers=_required(fields, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_given(fields, "num_key_value_heads", heads),
            head_dim=_given(fields, "head_dim", None) or equal_share(hidden, heads),
            max_model_len=_required(fields, "max_position_embeddings"),
            norm_eps=_given(fields, "rms_norm_eps", 1e-6),
            rope_theta=_given(fields, "rope_theta", _given(rope, "rope_theta", 10_000.0)),
            tied_head=bool(fields.get("tie_word_embeddings", False)),
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The same sizes as the fields of a `config.json`."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_model_len,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied_head,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }


_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_model_len",
)

_ONLY_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": (None, "silu", "swish"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "sliding_window": (None,),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
}


def check_architecture(names: object) -> None:
    """Refuse a checkpoint whose architecture is not one of `ARCHITECTURES`."""
    listed = names if isinstance(names, list) else [names]
    if not any(name in ARCHITECTURES for name in listed):
        shown = ", ".join(str(name) for name in listed)
        raise CheckpointError(f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_features(fields: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY_VALUES.items():
        if fields.get(name) not in allowed:
            raise CheckpointError(
                f"{name} is {fields[name]!r} in the checkpoint, and this is not supported; "
                "choose a checkpoint without it"
            )
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name) or {}
        kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else rope
        if kind != "default":
            raise CheckpointError(
                f"{name} asks for rotary positions of type {kind!r}, and only the default type is "
                "supported; choose a checkpoint without it"
            )


def _given(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field, or `default` where it is missing or null."""
    value = fields.get(name)
    return default if value is None else value


def _required(fields: Mapping[str, Any], name: str) -> int:
    if name not in fields:
        raise CheckpointError(f"config.json has no {name!r}; get the complete file from its source")
    check_count(name, fields[name])
    return int(fields[name])


def check_count(name: str, value: object) -> None:
    """Refuse a size that is not an integer above 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{name} is {value!r} in the checkpoint; it must be an integer above 0")


def equal_share(hidden: int, heads: int) -> int:
    """The size of a head where a checkpoint does not give it: all heads together are `hidden` wide."""
    if hidden % heads:
        raise CheckpointError(
            f"hidden size {hidden} is not a multiple of {heads} attention heads, and the checkpoint gives no head_dim"
        )
    return hidden // heads

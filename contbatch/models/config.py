"""The shape of a decoder, read from a checkpoint's own description.

One idea: a checkpoint is accepted only if every field that changes the mathematics is one this package computes.
A model with a sliding window would load and run, and write nonsense after a while, so such fields are refused by
name. Fields that change nothing at inference (dropout, initialisation) are not read.

The families differ in three switches, and the decoder knows no family, only the switches: a bias on Q, K and V, a
bias on the output projection, and a norm on each head's query and key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contbatch.errors import CheckpointError
from contbatch.models.rope import RopeScaling as RopeScaling
from contbatch.models.rope import rope_fields

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
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
    qkv_bias: bool = False
    """True if the query, key and value projections add a bias (Qwen2)."""
    output_bias: bool = False
    """True if the output projection of attention adds a bias."""
    qk_norm: bool = False
    """True if each head's query and key are normalised before they are rotated (Qwen3)."""
    rope_scaling: RopeScaling | None = None

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
        divisors = self.rope_scaling.divisors if self.rope_scaling else ()
        if divisors and len(divisors) != self.head_dim // 2:
            raise CheckpointError(
                f"{len(divisors)} rotary divisors do not fit heads of {self.head_dim}; one for each pair"
            )

    @classmethod
    def from_huggingface(cls, fields: Mapping[str, Any]) -> ModelConfig:
        """Read the fields of a Hugging Face `config.json`.

        Raises:
            CheckpointError: an unsupported architecture or feature, or a missing or impossible field.
        """
        architecture = check_architecture(fields.get("architectures") or [fields.get("model_type")])
        _refuse_features(fields)
        _refuse_sliding_window(fields, architecture)
        bias = architecture in _CHOOSE_BIAS and _switch(fields, "attention_bias")
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
            rope_theta=_given(rope_fields(fields), "rope_theta", _given(fields, "rope_theta", 10_000.0)),
            tied_head=_switch(fields, "tie_word_embeddings"),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            qk_norm=architecture == "Qwen3ForCausalLM",
            rope_scaling=RopeScaling.from_huggingface(fields),
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The same sizes as the fields of a `config.json`.

        Raises:
            CheckpointError: switches that no family combines like this.
        """
        architecture = self._architecture()
        return {
            "architectures": [architecture],
            "model_type": architecture.removesuffix("ForCausalLM").lower(),
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
            "rope_scaling": self.rope_scaling and self.rope_scaling.to_huggingface(),
            "tie_word_embeddings": self.tied_head,
            "hidden_act": "silu",
            "attention_bias": self.output_bias,
            "mlp_bias": False,
        }

    def _architecture(self) -> str:
        """The family that has these switches."""
        if self.qkv_bias == self.output_bias:
            return "Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"
        if self.qkv_bias and not self.qk_norm:
            return "Qwen2ForCausalLM"
        raise CheckpointError(
            f"no family has qkv_bias={self.qkv_bias}, output_bias={self.output_bias} and qk_norm={self.qk_norm}"
        )


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
    "mlp_bias": (None, False),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}

_CHOOSE_BIAS = ("LlamaForCausalLM", "Qwen3ForCausalLM")
"""Families in which `attention_bias` decides; the others have or lack a bias whatever the field says."""
_SWITCH_WINDOW = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Families whose `sliding_window` counts only if `use_sliding_window` is true."""


def check_architecture(names: object) -> str:
    """The first of `names` that is one of `ARCHITECTURES`; a checkpoint without one is refused."""
    listed = names if isinstance(names, list) else [names]
    for name in listed:
        if name in ARCHITECTURES:
            return str(name)
    shown = ", ".join(str(name) for name in listed)
    raise CheckpointError(f"architecture {shown} is not supported; supported: {', '.join(ARCHITECTURES)}")


def _refuse_features(fields: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY_VALUES.items():
        for value in (fields.get(name), rope_fields(fields).get(name)):
            if value not in allowed:
                raise CheckpointError(
                    f"{name} is {value!r} in the checkpoint, and this is not supported; choose a checkpoint without it"
                )


def _refuse_sliding_window(fields: Mapping[str, Any], architecture: str) -> None:
    """Refuse layers that see the last tokens only, however a family asks for them."""
    absent = 4096 if architecture == "MistralForCausalLM" else None  # what leaving it out means in this family
    asked = {
        "use_sliding_window": _switch(fields, "use_sliding_window"),
        "sliding_window": None if architecture in _SWITCH_WINDOW else fields.get("sliding_window", absent),
        "layer_types": [kind for kind in fields.get("layer_types") or [] if kind != "full_attention"][:1],
    }
    for name, value in asked.items():
        if value:
            raise CheckpointError(
                f"{name} is {value!r} in the checkpoint: layers with a sliding window are not supported; "
                "choose a checkpoint without it"
            )


def _switch(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; false where it is missing or null."""
    value = _given(fields, name, False)
    if not isinstance(value, bool):
        raise CheckpointError(f"{name} is {value!r} in the checkpoint; it must be true or false")
    return value


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

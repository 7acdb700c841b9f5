"""The tokenizer of a GGUF file, rebuilt from its vocabulary and merges.

The one idea: a byte-level BPE is its vocabulary, its merges, and the way a text is cut before merging. The file holds
the first two and only names the third, so the ways that go with the names are written here. They are the published
patterns of the models' own `tokenizer.json`.

Left out: tokenizers of any other kind (SentencePiece, WordPiece). For those, and for names that are not known here,
a `tokenizer.json` beside the file is read instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from contbatch.errors import CheckpointError
from contbatch.models.chat import ChatTemplate
from contbatch.models.tokenizer import Tokenizer

_CONTROL_TOKEN, _USER_TOKEN, _UNUSED_TOKEN = 3, 4, 5


class Fields(Protocol):
    """Metadata of a GGUF file by key."""

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default`."""
        ...

    def __getitem__(self, key: str) -> Any: ...


def read_tokenizer(fields: Fields, path: Path) -> Tokenizer:
    """The tokenizer of the file at `path`: a `tokenizer.json` beside it, or one that is rebuilt from its metadata.

    Raises:
        CheckpointError: it is damaged, or of a kind that cannot be rebuilt.
    """
    ends = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos = frozenset(int(fields.get(key)) for key in ends if fields.get(key) is not None)
    template = _chat_template(fields, path)
    beside = path.with_name("tokenizer.json")
    if beside.is_file():
        return Tokenizer.from_file(beside, eos, template)
    return Tokenizer(_byte_level_bpe(fields), eos, template)


def _chat_template(fields: Fields, path: Path) -> ChatTemplate | None:
    source = fields.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return None
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    texts = {name: _token(fields, kind) for kind, name in names.items()}
    tokens = {name: text for name, text in texts.items() if text is not None}
    return ChatTemplate(source, f"tokenizer.chat_template of {path}", tokens)


def _token(fields: Fields, kind: str) -> str | None:
    """The text of the token for a purpose; None where the file has none."""
    key = f"tokenizer.ggml.{kind}_token_id"
    index = fields.get(key)
    if index is None:
        return None
    tokens = fields["tokenizer.ggml.tokens"]
    if not 0 <= index < len(tokens):
        raise CheckpointError(f"{key} is {index} in the GGUF file, and it has {len(tokens)} tokens; get the file again")
    return str(tokens[index])


def _byte_level_bpe(fields: Fields) -> tokenizers.Tokenizer:
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    if len(tokens) != len(types):
        raise CheckpointError(f"the GGUF file has {len(tokens)} tokens and {len(types)} token types; get it again")
    used = {token: index for index, token in enumerate(tokens) if types[index] != _UNUSED_TOKEN}
    merges = [tuple(merge.split(" ")) for merge in fields.get("tokenizer.ggml.merges", [])]
    name = _name(fields)
    try:
        # Llama 3 takes a word that is in the vocabulary whole, even where no merges lead to it.
        core = tokenizers.Tokenizer(models.BPE(vocab=used, merges=merges, ignore_merges=name == "llama-bpe"))
    except Exception as error:  # the library raises a bare Exception
        raise CheckpointError(f"the GGUF file's tokenizer is damaged: {error}; get the file again") from error
    core.pre_tokenizer = _CUTS[name]()
    if name == "qwen2":
        core.normalizer = normalizers.NFC()
    core.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL_TOKEN, True), (_USER_TOKEN, False)):
        texts = [token for token, its in zip(tokens, types, strict=True) if its == kind]
        added = [AddedToken(text, special=special, normalized=False) for text in texts]
        core.add_special_tokens(added) if special else core.add_tokens(added)
    _begin_with_bos(core, fields, name)
    return core


def _begin_with_bos(core: tokenizers.Tokenizer, fields: Fields, name: str) -> None:
    """Let every text begin with the beginning-of-text token, if the model was trained so."""
    bos = _token(fields, "bos")
    if bos is not None and fields.get("tokenizer.ggml.add_bos_token", name == "llama-bpe"):
        index = int(fields["tokenizer.ggml.bos_token_id"])
        core.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", bos, "$B"], special_tokens=[(bos, index)]
        )


def _name(fields: Fields) -> str:
    """The name of the way to cut, one of `_CUTS`."""
    model, name = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if model == "gpt2" and name in _CUTS:
        return str(name)
    raise CheckpointError(
        f"the GGUF file's tokenizer ({model!r}, {name!r}) cannot be rebuilt; put the model's tokenizer.json beside "
        f"the file. Known: 'gpt2' with {', '.join(_CUTS)}"
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _cut_at_most(digits: int) -> pre_tokenizers.PreTokenizer:
    """The way of GPT-4's successors: at most so many digits together, and line ends kept with what precedes them."""
    number = r"\p{N}" if digits == 1 else rf"\p{{N}}{{1,{digits}}}"
    parts = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        number,
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
    split = pre_tokenizers.Split(Regex("|".join(parts)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CUTS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _cut_at_most(3),
    "qwen2": lambda: _cut_at_most(1),
}

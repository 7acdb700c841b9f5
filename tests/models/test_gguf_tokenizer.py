"""Tokenizers rebuilt from GGUF files cut and merge like those of `transformers` with the same vocabulary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Core
from tokenizers import models, pre_tokenizers, trainers

from contbatch.models import Tokenizer, read_gguf
from tests.models.test_gguf import CONFIG, write_gguf

TEXTS = [
    "It's 12345 o'clock, isn't IT? WE'LL see 37°C: naïve café\r\n\r\n  indented\tcode();  ",
    "日本語 2024年 🦊🦊!!\n\n\n x",
    "½ and Ⅷ  \n end   ",
    "",
    "<|turn|>user\nhi<|end|>",
]
DECOMPOSED = "cafe\u0301"
"""An e and an accent, which NFC makes one character."""


@pytest.fixture(scope="module")
def words_and_merges() -> tuple[list[str], list[str]]:
    """A byte-level BPE trained on the texts as they are, so that its merges go across every border of a cut."""
    core = Core(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([*TEXTS * 3, DECOMPOSED, "caf\u00e9"], trainer)
    learnt = json.loads(core.to_str())["model"]
    words = sorted(learnt["vocab"], key=learnt["vocab"].get)
    return ["<|end|>", "<|turn|>", *words], [" ".join(pair) for pair in learnt["merges"]]


def _read(path: Path, vocabulary: tuple[list[str], list[str]], pre: str, **metadata: Any) -> Tokenizer:
    words, merges = vocabulary
    config = replace(CONFIG, vocab_size=len(words))
    metadata = {"tokenizer__ggml__pre": pre, "tokenizer__ggml__merges": merges, **metadata}
    write_gguf(path, config, words=words, **metadata)
    return read_gguf(path).tokenizer


def test_qwen2(tmp_path: Path, words_and_merges: tuple[list[str], list[str]]) -> None:
    """Single digits, contractions of any case, line ends, and text in its composed form."""
    ours = _read(tmp_path / "m.gguf", words_and_merges, "qwen2")
    words, merges = words_and_merges
    theirs = transformers.Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[tuple(merge.split(" ")) for merge in merges],
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token=None,
        extra_special_tokens=["<|turn|>"],
    )
    for text in [*TEXTS, DECOMPOSED]:
        assert ours.encode(text) == theirs.encode(text), text
    assert ours.decode(ours.encode(DECOMPOSED)) == "caf\u00e9"


@pytest.mark.parametrize("pre", ["llama-bpe", "gpt-2"])
def test_llama_3_and_gpt_2(tmp_path: Path, words_and_merges: tuple[list[str], list[str]], pre: str) -> None:
    """Up to three digits together, or any number with the space before it; text as it is."""
    ours = _read(tmp_path / "m.gguf", words_and_merges, pre)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in [*TEXTS, DECOMPOSED]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text


def test_the_ways_to_cut_differ(tmp_path: Path, words_and_merges: tuple[list[str], list[str]]) -> None:
    """A test that compares one with another would notice."""
    ids = {
        pre: tuple(_read(tmp_path / "m.gguf", words_and_merges, pre).encode(TEXTS[0]))
        for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")
    }
    assert len(set(ids.values())) == 4


def test_a_word_may_be_taken_without_merges(tmp_path: Path) -> None:
    """Llama 3's way: "xyz" is in the vocabulary, and no merges lead to it."""
    vocabulary = ["<|end|>", "<|turn|>", "x", "y", "z", "xyz"], []
    assert _read(tmp_path / "m.gguf", vocabulary, "llama-bpe").encode("xyz") == [5]
    assert _read(tmp_path / "m.gguf", vocabulary, "qwen2").encode("xyz") == [2, 3, 4]


BOS = {"tokenizer__ggml__bos_token_id": 1}


@pytest.mark.parametrize(
    ("pre", "metadata", "begins"),
    [
        ("llama-bpe", BOS, True),
        ("llama-bpe", {}, False),
        ("llama-bpe", {**BOS, "tokenizer__ggml__add_bos_token": False}, False),
        ("gpt-2", BOS, False),
        ("gpt-2", {**BOS, "tokenizer__ggml__add_bos_token": True}, True),
    ],
)
def test_beginning_of_text(tmp_path: Path, pre: str, metadata: dict[str, Any], begins: bool) -> None:
    """The file says whether a text begins with that token; where it is silent, Llama 3's do."""
    tokenizer = _read(tmp_path / "m.gguf", (["<|end|>", "<|turn|>", "x"], []), pre, **metadata)
    assert tokenizer.encode("xx") == [1] * begins + [2, 2]
    assert tokenizer.encode("xx", add_special_tokens=False) == [2, 2]


def test_padding_of_the_vocabulary_is_no_text(tmp_path: Path) -> None:
    """Entries that the file calls unused, as Qwen's has them, are never found in a text and decode to nothing."""
    vocabulary = ["<|end|>", "<|turn|>", "x", "[PAD3]", "y"], []
    tokenizer = _read(tmp_path / "m.gguf", vocabulary, "qwen2", types=[3, 3, 1, 5, 1])
    assert tokenizer.decode([2, 3, 4]) == "xy"
    assert tokenizer.vocab_size == 4 and tokenizer.highest_id == 4
    assert 3 not in tokenizer.encode("x[PAD3]y")

"""The embedded model: small enough, stored and computed as promised, and its examples do not hang on near-ties."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from contbatch import Engine, FinishReason, SamplingParams
from contbatch.models import LoadedModel, load_model
from contbatch.prompts import DEMO_PROMPTS, EXAMPLE_PROMPTS
from training.margins import greedy_margins

MOST_BYTES = 8_000_000
SMALLEST_MARGIN = 1e-3


@pytest.fixture(scope="module")
def pocket() -> LoadedModel:
    return load_model("pocket")


@pytest.fixture(scope="module")
def folder() -> Path:
    import contbatch.models

    return Path(contbatch.models.__file__).parent / "pocket"


def test_folder_is_at_most_eight_megabytes(folder: Path) -> None:
    assert sum(path.stat().st_size for path in folder.iterdir()) <= MOST_BYTES


def test_weights_are_stored_in_16_bits(folder: Path) -> None:
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}


def test_computes_in_32_bits(pocket: LoadedModel) -> None:
    assert pocket.dtype == torch.float32
    assert {weight.dtype for weight in pocket.model.parameters()} == {torch.float32}


def test_tokenizer_and_weights_belong_together(pocket: LoadedModel, folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    assert fields["vocab_size"] == pocket.tokenizer.vocab_size == len(pocket.model.embed_tokens.weight)
    assert pocket.eos_token_ids == {pocket.tokenizer.encode("<|endoftext|>")[0]}


@pytest.mark.parametrize("text", ["Once upon a time", "Zürich, 日本 and 🦊\n\ttabs", "</script><b>&amp;"])
def test_any_text_survives_the_tokenizer(pocket: LoadedModel, text: str) -> None:
    assert pocket.tokenizer.decode(pocket.tokenizer.encode(text)) == text


def test_there_are_sixteen_different_examples_of_several_lengths(pocket: LoadedModel) -> None:
    assert len(set(EXAMPLE_PROMPTS)) == len(EXAMPLE_PROMPTS) >= 16
    assert len(set(DEMO_PROMPTS)) == 8
    assert len({len(pocket.tokenizer.encode(prompt)) for prompt in DEMO_PROMPTS}) >= 4


@pytest.mark.parametrize("prompt", EXAMPLE_PROMPTS)
def test_no_choice_of_a_greedy_example_is_a_near_tie(pocket: LoadedModel, prompt: str) -> None:
    _, margins = greedy_margins(pocket, prompt, tokens=48)
    assert min(margins) > SMALLEST_MARGIN


def test_margins_are_those_of_the_tokens_that_the_engine_chose(pocket: LoadedModel) -> None:
    tokens, margins = greedy_margins(pocket, EXAMPLE_PROMPTS[0], tokens=20)
    assert len(margins) == len(tokens)
    assert all(margin >= 0 for margin in margins)


def test_a_story_ends_by_itself() -> None:
    done = Engine.load("pocket").generate(EXAMPLE_PROMPTS, SamplingParams(max_tokens=250))
    assert {completion.finish_reason for completion in done} == {FinishReason.EOS}
    assert all(completion.text.rstrip().endswith((".", "!", "?", '"')) for completion in done)


def test_demo_prompts_end_at_different_times_and_for_different_reasons() -> None:
    done = Engine.load("pocket").generate(DEMO_PROMPTS, SamplingParams(max_tokens=40))
    assert {completion.finish_reason for completion in done} == {FinishReason.EOS, FinishReason.LENGTH}
    assert len({len(completion.token_ids) for completion in done}) >= 4

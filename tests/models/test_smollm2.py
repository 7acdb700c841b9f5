"""On a real model: 32 requests, 16 at a time, token for token what `transformers` produced one by one.

Runs where the model was fetched before; the recording is described in `golden/README.md`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contbatch import Engine, SamplingParams
from contbatch.models import list_models, load_model

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2_tokens.json"
NAME = "smollm2-135m"
PRESENT = next(info.present for info in list_models() if info.name == NAME)

pytestmark = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(not PRESENT, reason=f"{NAME} is not on this machine; load_model({NAME!r}) fetches it (93 MB)"),
]


@pytest.mark.timeout(1200)
def test_tokens_equal_transformers() -> None:
    """Prompts of 16 to 512 tokens in chunks of at most 256, mixed with decoding, in fp32."""
    recorded = json.loads(GOLDEN.read_text())["requests"]
    engine = Engine.load(NAME, dtype="float32", max_num_seqs=16, max_num_batched_tokens=256, max_model_len=1024)
    sampling = [SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True) for request in recorded]
    done = engine.generate([request["prompt"] for request in recorded], sampling)
    different = [
        request["id"]
        for request, completion in zip(recorded, done, strict=True)
        if list(completion.token_ids) != request["output"]
    ]
    assert different == []
    assert max(len(step.request_ids) for step in engine.trace.steps) == 16


def test_its_tokenizer_is_the_original_one() -> None:
    """Ids of a chat turn as the model's own tokenizer gives them, and the text back."""
    tokenizer = load_model(NAME).tokenizer
    text = "<|im_start|>user\nIn 2024 it's 37°C, naïve?<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert ids[:3] == [1, 4093, 198]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.eos_token_ids == {2}
    assert [tokenizer.decode([token]) for token in tokenizer.encode(" 2024")] == [" ", "2", "0", "2", "4"]


def test_its_chat_template_is_the_one_in_the_file() -> None:
    """A turn of a user, begun by the model's own system message, ends where the model's turn begins."""
    tokenizer = load_model(NAME).tokenizer
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode_chat([{"role": "user", "content": "Hello"}]) == tokenizer.encode(text)

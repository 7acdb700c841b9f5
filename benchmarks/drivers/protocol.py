"""What every driver shares: one engine in a process of its own serves the workload once and says what happened.

`benchmarks/peers.py` starts a driver and writes the settings to its input (JSON). The driver loads its engine, warms it
up, serves all requests, and writes one line of JSON. Engines print what they like: their output goes to the error
stream, so that this line is all there is on the other one. Only the standard library is used here, because each
engine has an environment of its own.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

Tokens = dict[int, list[int]]
Times = dict[int, float]
Serve = Callable[[list[dict[str, Any]], float], tuple[Tokens, Times]]
"""`serve(requests, start)` -> tokens and seconds until the first token, by number of the request."""


def main(load: Callable[[dict[str, Any]], tuple[Serve, dict[str, str]]]) -> None:
    """Run a driver: `load(settings)` returns what serves, and the versions of what it uses."""
    answer, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)
    settings = json.load(sys.stdin)
    serve, versions = load(settings)
    serve([{**settings["requests"][0], "max_tokens": 4}], time.perf_counter())
    busy, own, start = _busy(), _own(), time.perf_counter()
    tokens, first = serve(settings["requests"], start)
    seconds = time.perf_counter() - start
    cpu = _own() - own
    result = {
        "seconds": seconds,
        "tokens": [tokens[number] for number in range(len(settings["requests"]))],
        "ttft": [first.get(number) for number in range(len(settings["requests"]))],
        "cpu_seconds": cpu,
        "others_cores": max(0.0, _busy() - busy - cpu) / seconds,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "versions": versions,
    }
    answer.write(json.dumps(result) + "\n")
    answer.flush()
    os._exit(0)  # some engines do not end their threads


def _busy() -> float:
    """CPU seconds that the whole machine has spent (Linux; elsewhere only our own, so that others count as none)."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(value) for value in file.readline().split()[1:]]
    except OSError:
        return _own()
    return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def _own() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system

"""The GPU path measured: one script, under 8 minutes, every section in a process of its own.

    python benchmarks/gpu.py --json gpu.json         # on a machine with a CUDA device
    python benchmarks/gpu.py --cpu-check --json -    # every section at tiny sizes on the CPU: proves that each one runs

A section has its own budget of seconds and leaves what it has measured when it is stopped; a section that fails is
recorded with its error, and the others go on. Speed is measured on SmolLM2-135M's shape with random weights in
bfloat16, correctness on the embedded model in float32.
"""

from __future__ import annotations

import hashlib
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from contbatch import Engine, SamplingParams, SchedulerConfig
from contbatch.batch import BatchedRequest, FlatBatch, ScheduledBatch
from contbatch.models import Llama, LoadedModel, ModelConfig, ModelExecutor, load_model
from contbatch.models.attention import PagedAttention, PagedCache
from contbatch.models.gpu.forward import TritonAttention, TritonForward, has_kernels
from contbatch.models.gpu.graphs import Forward, GraphForward
from contbatch.models.runner import PlainForward

TOTAL_SECONDS = 460
"""All sections together; under 8 minutes with the start of the script."""
BLOCK_SIZE = 16
SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192, rope_theta=100_000.0, tied_head=True)
TINY = replace(SMOLLM2, vocab_size=512, hidden_size=72, intermediate_size=96, num_layers=2, head_dim=8)

Report = dict[str, Any]
Leave = Callable[[Report], None]


@dataclass(frozen=True)
class Sizes:
    """What is measured."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 512
    steps: int = 30
    prompts: tuple[tuple[int, int], ...] = ((1, 512), (1, 4096), (8, 1024))
    """(prompts, tokens of each) of a prefill step."""
    requests: int = 256
    prompt_range: tuple[int, int] = (32, 512)
    output_range: tuple[int, int] = (64, 256)
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    copy_bytes: int = 1 << 32

    @property
    def config(self) -> ModelConfig:
        """The model's shape."""
        return SMOLLM2 if self.device == "cuda" else TINY


CPU_CHECK = Sizes(
    "cpu", "float32", (1, 3), 20, 3, ((1, 33), (2, 17)), 5, (4, 24), (3, 9), 4, 64, 1 << 22
)  # fmt: skip


def random_model(sizes: Sizes) -> LoadedModel:
    """Weights as a fresh model has them; the tokenizer of the embedded model stands in and is not used."""
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    torch.manual_seed(0)
    model = Llama(sizes.config)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.02)
    model = model.to(device, dtype).requires_grad_(False).eval()
    shell = load_model("pocket")
    return replace(shell, config=sizes.config, model=model, eos_token_ids=frozenset(), device=device, dtype=dtype)


def eager_forward(loaded: LoadedModel) -> Forward:
    """The Triton kernels, or the plain attention where they do not run."""
    return (TritonForward if has_kernels(loaded.device, loaded.dtype) else PlainForward)(loaded.model)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of a call that is waited for, after three that are not counted."""
    times = []
    for _ in range(repeats + 3):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def step_of(parts: list[tuple[int, int]], vocab_size: int) -> tuple[FlatBatch, int]:
    """A step of requests (context, new tokens), and how many blocks it takes."""
    chance, requests, used = random.Random(0), [], 0
    for slot, (context, new) in enumerate(parts):
        blocks = -(-(context + new) // BLOCK_SIZE)
        ids = [chance.randrange(vocab_size) for _ in range(new)]
        table = range(used + 1, used + 1 + blocks)
        requests.append(BatchedRequest.prefill(str(slot), ids, slot, table, context))
        used += blocks
    return ScheduledBatch(0, requests).flatten(BLOCK_SIZE), used


def kernels(sizes: Sizes, leave: Leave) -> None:
    """Attention of a mixed step against the plain one in 64 bits, in every number format of the kernels."""
    device, report = torch.device(sizes.device), {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for heads, kv_heads, head_dim in ((9, 3, 64), (8, 1, 128), (4, 4, 40)):
            config = ModelConfig(9, 16, 16, 1, heads, kv_heads, head_dim, 4096)
            flat, blocks = step_of([(0, 1), (63, 1), (300, 1), (0, 70), (130, 65), (5, 2)], 9)
            ours, exact = (PagedCache(config, blocks, BLOCK_SIZE, device, kind) for kind in (dtype, torch.float64))
            exact.data.copy_(ours.data.normal_())
            q, k, v = (
                torch.randn(flat.num_tokens, count, head_dim, device=device).to(dtype)
                for count in (heads, kv_heads, kv_heads)
            )
            use = TritonAttention if has_kernels(device, dtype) else PagedAttention
            gap = use(ours, flat)(0, q, k, v).double() - PagedAttention(exact, flat)(
                0, q.double(), k.double(), v.double()
            )
            report[f"{dtype} {heads}/{kv_heads} x {head_dim}"] = float(gap.abs().max())
    leave({"greatest_difference": report, "triton": has_kernels(device, torch.float32)})


def correctness(sizes: Sizes, leave: Leave) -> None:
    """The embedded model on the device and on the CPU: logits of the same steps, tokens of the same requests."""
    there, here = load_model("pocket", sizes.device, "float32"), load_model("pocket", "cpu", "float32")
    count = 16 if sizes.device == "cuda" else 3
    prompts, sampling = workload(count, (4, 60), (8, 40), here.config.vocab_size)
    flat, blocks = step_of([(0, 40), (0, 1), (0, 9)], here.config.vocab_size)
    caches = [PagedCache(one.config, blocks, BLOCK_SIZE, one.device, one.dtype) for one in (there, here)]
    got = eager_forward(there).forward(flat, caches[0]).cpu()
    want = PlainForward(here.model).forward(flat, caches[1])
    report: Report = {"prefill_logits_difference": float((got - want).abs().max())}
    leave(report)
    tokens = []
    for loaded, graphs in ((here, False), (there, False), (there, True)):
        done = engine_for(loaded, sizes, graphs).generate(prompts, sampling)
        tokens.append([one.token_ids for one in done])
    for name, ours in (("eager", tokens[1]), ("graphs", tokens[2])):
        report[f"equal_requests_{name}"] = sum(a == b for a, b in zip(ours, tokens[0], strict=True))
    leave({**report, "requests": count})


def bandwidth(sizes: Sizes, device: torch.device) -> float:
    """Bytes per second of a copy, reads and writes counted."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * sizes.copy_bytes / median_ms(lambda: target.copy_(source), device, 10) * 1e3


def decode(sizes: Sizes, leave: Leave) -> None:
    """Decode steps, eager and as graphs, and what fraction of the bound by memory bandwidth they reach.

    The bound reads every weight once and the keys and values of every context once, at the speed of a copy. A step
    ends with the greedy tokens on the host; its arrays were made before.
    """
    loaded = random_model(sizes)
    config, device = loaded.config, loaded.device
    speed = bandwidth(sizes, device)
    weights = sum(weight.numel() * weight.element_size() for weight in loaded.model.parameters())
    token = config.num_layers * 2 * config.num_kv_heads * config.head_dim * loaded.dtype.itemsize
    report: Report = {"copy_GBps": speed / 1e9, "weight_bytes": weights, "context": sizes.context, "batches": {}}
    for batch in sizes.batches:
        flat, blocks = step_of([(sizes.context, 1)] * batch, config.vocab_size)
        cache = PagedCache(config, blocks, BLOCK_SIZE, device, loaded.dtype)
        cache.data.normal_(std=0.5)
        eager = eager_forward(loaded)
        graphs = GraphForward(loaded.model, eager, batch, (batch,))

        def run(forward: Forward, flat: FlatBatch = flat, cache: PagedCache = cache) -> list[int]:
            tokens: list[int] = forward.forward(flat, cache).argmax(-1).tolist()
            return tokens

        equal = run(eager) == run(graphs)
        ways: dict[str, Forward] = {"eager": eager, "graphs": graphs}
        times = {name: median_ms(partial(run, way), device, sizes.steps) for name, way in ways.items()}
        times["replay"] = median_ms(graphs.step(batch, cache), device, sizes.steps)
        bound = (weights + batch * sizes.context * token) / speed * 1e3
        report["batches"][batch] = {
            "bound_ms": bound,
            "equal_greedy_tokens": equal,
            **{f"{name}_ms": value for name, value in times.items()},
            **{f"{name}_tokens_per_s": batch / value * 1e3 for name, value in times.items()},
            **{f"{name}_fraction_of_bound": bound / value for name, value in times.items()},
        }
        leave(report)


def prefill(sizes: Sizes, leave: Leave) -> None:
    """Prompt tokens per second, of whole prompts and of a chunk behind a long context."""
    loaded, report = random_model(sizes), {}
    count, length = sizes.prompts[-1]
    steps = {f"{n} x {size}": [(0, size)] * n for n, size in sizes.prompts}
    steps[f"{length // 2} behind {length * count}"] = [(length * count, length // 2)]
    for name, parts in steps.items():
        flat, blocks = step_of(parts, loaded.config.vocab_size)
        cache = PagedCache(loaded.config, blocks, BLOCK_SIZE, loaded.device, loaded.dtype)
        cache.data.normal_(std=0.5)
        forward = eager_forward(loaded)
        taken = median_ms(partial(forward.forward, flat, cache), loaded.device, 10)
        report[name] = {"ms": taken, "tokens_per_s": flat.num_tokens / taken * 1e3}
        leave(report)


def workload(
    count: int, prompt: tuple[int, int], output: tuple[int, int], vocab_size: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Random prompts, all there from the start, and how many tokens each asks for."""
    chance = random.Random(1)
    prompts = [[chance.randrange(vocab_size) for _ in range(chance.randint(*prompt))] for _ in range(count)]
    return prompts, [SamplingParams(max_tokens=chance.randint(*output), ignore_eos=True) for _ in range(count)]


def engine_for(loaded: LoadedModel, sizes: Sizes, graphs: bool) -> Engine:
    """An engine with room for every running request."""
    blocks = sizes.max_num_seqs * (-(-sum((sizes.prompt_range[1], sizes.output_range[1])) // BLOCK_SIZE) + 8)
    executor = ModelExecutor(loaded, blocks, BLOCK_SIZE, kernels="plain")
    forward = eager_forward(loaded)
    if graphs:
        forward = GraphForward(loaded.model, forward, sizes.max_num_seqs)
        with torch.inference_mode():
            forward.record_all(executor.cache)
    executor._forward = forward
    config = SchedulerConfig(
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=min(loaded.config.max_model_len, 2048),
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        enable_prefix_caching=False,
    )
    return Engine(executor, config)


def summary(tokens: list[list[int]], seconds: float) -> Report:
    """Throughput, and a digest of each request's tokens to compare engines with."""
    count = sum(map(len, tokens))
    digests = [hashlib.sha256(json.dumps(list(one)).encode()).hexdigest()[:12] for one in tokens]
    return {"tokens": count, "seconds": seconds, "tokens_per_s": count / seconds, "digests": digests}


def serve(sizes: Sizes, leave: Leave) -> None:
    """The whole engine on the workload, eager and with graphs; a short one warms up before each."""
    loaded, report = random_model(sizes), {}
    prompts, sampling = workload(sizes.requests, sizes.prompt_range, sizes.output_range, loaded.config.vocab_size)
    for name, graphs in (("graphs", True), ("eager", False)):
        engine = engine_for(loaded, sizes, graphs)
        engine.generate(prompts[:4], SamplingParams(max_tokens=4, ignore_eos=True))
        start = time.perf_counter()
        done = engine.generate(prompts, sampling)
        report[name] = summary([list(one.token_ids) for one in done], time.perf_counter() - start)
        leave(report)


def peer(sizes: Sizes, leave: Leave) -> None:
    """The same weights and workload on the continuous batching of `transformers`."""
    import transformers

    loaded = random_model(sizes)
    fields = loaded.config.to_huggingface()
    fields = {key: value for key, value in fields.items() if key != "architectures"}
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, eos_token_id=None, bos_token_id=None))
    state = {f"model.{name}": tensor for name, tensor in loaded.model.state_dict().items()}
    missing = model.load_state_dict(state, strict=False)
    if missing.unexpected_keys or set(missing.missing_keys) - {"lm_head.weight"}:
        raise RuntimeError(f"weights do not fit the model of transformers: {missing}")
    model.tie_weights()
    model = model.to(loaded.device, loaded.dtype).eval()
    model.set_attn_implementation("sdpa")
    prompts, sampling = workload(sizes.requests, sizes.prompt_range, sizes.output_range, loaded.config.vocab_size)
    limits: dict[str, Any] = {
        "max_batch_tokens": sizes.max_num_batched_tokens,
        "max_requests_per_batch": sizes.max_num_seqs,
        "allow_block_sharing": False,
    }
    if sizes.device == "cpu":
        limits |= {"num_blocks": 64, "page_size": 32, "use_cuda_graph": False, "use_async_batching": False}
    tokens, seconds = continuous(model, transformers, limits, prompts, sampling)
    leave({**summary(tokens, seconds), "attention": model.config._attn_implementation})


def continuous(
    model: Any, transformers: Any, limits: dict[str, Any], prompts: list[list[int]], sampling: list[SamplingParams]
) -> tuple[list[list[int]], float]:
    """Tokens of all requests and the seconds they took, after one request to warm up."""
    generation = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=256)
    tokens: dict[str, list[int]] = {}

    def finish(count: int) -> None:
        while len(tokens) < count:
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if getattr(result, "error", None):
                    raise RuntimeError(f"request {result.request_id} failed: {result.error}")
                tokens[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("the continuous batching manager stopped")

    with (
        torch.no_grad(),
        model.continuous_batching_context_manager(
            generation_config=generation,
            continuous_batching_config=transformers.ContinuousBatchingConfig(**limits),
            block=True,
            timeout=5,
        ) as manager,
    ):
        manager.add_request(prompts[0], request_id="warm", max_new_tokens=8)
        finish(1)
        tokens.clear()
        start = time.perf_counter()
        for number, (prompt, asked) in enumerate(zip(prompts, sampling, strict=True)):
            manager.add_request(prompt, request_id=str(number), max_new_tokens=asked.max_tokens)
        finish(len(prompts))
        seconds = time.perf_counter() - start
    return [tokens[str(number)] for number in range(len(prompts))], seconds


SECTIONS: dict[str, tuple[Callable[[Sizes, Leave], None], int]] = {
    "kernels": (kernels, 60),
    "correctness": (correctness, 70),
    "decode": (decode, 110),
    "prefill": (prefill, 60),
    "serve": (serve, 90),
    "transformers": (peer, 90),
}
"""Each section and the seconds it may take."""


def run_section(name: str, cpu_check: bool, seconds: float) -> Report:
    """One section in a process of its own; what it left, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "left.json"
        command = [sys.executable, __file__, "--section", name, "--json", str(left)]
        start, status = time.perf_counter(), "ok"
        try:
            done = subprocess.run(
                command + ["--cpu-check"] * cpu_check, capture_output=True, text=True, timeout=max(1, seconds)
            )
            if done.returncode:
                status = f"failed with {done.returncode}: {done.stderr[-1500:]}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {seconds:.0f} s"
        result = json.loads(left.read_text(encoding="utf-8")) if left.exists() else None
    if status == "ok" and result is None:
        status = "failed: it left no result"
    return {"status": status, "seconds": round(time.perf_counter() - start, 1), "result": result}


def provenance(sizes: Sizes) -> Report:
    """Device, versions, date and command."""
    device = torch.cuda.get_device_name() if sizes.device == "cuda" else platform.processor() or platform.machine()
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("contbatch", "torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"device": device, "versions": versions, "date": date, "command": " ".join(sys.argv), "sizes": asdict(sizes)}


def compare(sections: Report) -> Report:
    """Requests with equal tokens, and the ratio of speeds, where both sides were measured."""
    ours, theirs = (sections[name]["result"] for name in ("serve", "transformers"))
    if not theirs or not ours or "graphs" not in ours:
        return {}
    graphs = ours["graphs"]
    return {
        "times_transformers": graphs["tokens_per_s"] / theirs["tokens_per_s"],
        "equal_requests": sum(a == b for a, b in zip(graphs["digests"], theirs["digests"], strict=True)),
    }


def main(
    out: Annotated[str, typer.Option("--json", help="Write the figures to this file; - prints them.")] = "-",
    cpu_check: Annotated[bool, typer.Option(help="Tiny sizes on the CPU: does every section run?")] = False,
    section: Annotated[str | None, typer.Option(help="Only this one, in this process.")] = None,
) -> None:
    """Measure every section and write one JSON object."""
    sizes = CPU_CHECK if cpu_check else Sizes()
    if sizes.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no CUDA device here; --cpu-check runs every section at tiny sizes on the CPU")

    def leave(report: Report) -> None:
        text = json.dumps(report, indent=1) + "\n"
        if out == "-":
            print(text, end="")
        else:
            draft = Path(out + ".part")
            draft.write_text(text, encoding="utf-8")
            draft.replace(out)  # whole or not at all: the process may be stopped at any moment

    if sizes.device == "cpu":
        torch.set_num_threads(1)  # tiny operations only
    if section is not None:
        with torch.inference_mode(section != "transformers"):
            SECTIONS[section][0](sizes, leave)
        return
    start, report = time.perf_counter(), provenance(sizes)
    report["sections"] = {}
    for name, (_, seconds) in SECTIONS.items():
        rest = TOTAL_SECONDS - (time.perf_counter() - start)
        report["sections"][name] = run_section(name, cpu_check, min(seconds, rest))
        print(f"{name}: {report['sections'][name]['status']}", file=sys.stderr, flush=True)
        if out != "-":
            leave(report)
    report["comparison"] = compare(report["sections"])
    leave(report)


if __name__ == "__main__":
    typer.run(main)

"""`contbatch demo`: eight prompts served at once, a table of what happened, and a page of the run.

The defaults are small on purpose. A budget of 32 tokens and a pool of 24 blocks make the run show what this package
is about: prompts that are cut into chunks, steps that mix prefill and decode, requests that wait and say why, and a
request that has to give its blocks back.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from contbatch.commands import terminal
from contbatch.commands.bars import model_bars
from contbatch.errors import InvalidConfig
from contbatch.prompts import DEMO_PROMPTS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bars
    from rich.progress import TaskID
    from rich.table import Table

    from contbatch.engine import Engine
    from contbatch.metrics import Metrics, RequestMetrics
    from contbatch.models.stored import Progress

BLOCK_SIZE = 8


def demo(
    model: Annotated[str, typer.Option(help="A name from `contbatch models`, a folder, or a .gguf file.")] = "pocket",
    device: Annotated[str, typer.Option(help="cpu, cuda or mps.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    policy: Annotated[str, typer.Option(help="The scheduling policy.")] = "VllmV1",
    budget: Annotated[int, typer.Option(help="Tokens that one step may compute.")] = 32,
    blocks: Annotated[int, typer.Option(help="Blocks of 8 tokens in the KV cache.")] = 24,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt.")] = 48,
    out: Annotated[Path, typer.Option(help="Where to write the page of the run.")] = Path("contbatch-demo.html"),
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only where the page is.")] = False,
) -> None:
    """Serve eight prompts at once with a real model; show a table and write a page of the run."""
    check_target(out)
    from contbatch.metrics import summarise
    from contbatch.policies import policy_by_name
    from contbatch.viz.export import to_html

    policy_by_name(policy)  # a wrong name is found out before the model is loaded, not after it
    console = terminal()
    start = time.perf_counter()
    with model_bars(console, quiet) as progress:
        engine = _load(model, device, dtype, policy, budget, blocks, progress)
    loaded = time.perf_counter()
    _serve(engine, max_tokens, console, quiet)
    served = time.perf_counter()
    to_html(engine.trace, out, title=f"contbatch demo: {len(DEMO_PROMPTS)} requests, {policy}, {model}")
    if not quiet:
        metrics = summarise(engine.trace)
        console.print(_requests(metrics), _totals(metrics), sep="\n")
        _texts(engine, console)
        console.print(f"\nloading the model took {loaded - start:.1f} s, serving {served - loaded:.1f} s")
    console.print(f"The run, step by step: {out}", soft_wrap=True)
    console.print(f"Open it in a browser: {out.resolve().as_uri()}", soft_wrap=True)
    if not quiet:
        console.print("Then start the lessons: contbatch lab")


def check_target(out: Path) -> None:
    """Find out before the work is done, not after it, that the page cannot be written."""
    folder = out.resolve().parent
    if out.is_dir():
        raise InvalidConfig(f"--out {out} is a folder; name a file in it, such as {out / 'run.html'}")
    if not folder.is_dir():
        raise InvalidConfig(f"--out {out}: the folder {folder} does not exist; make it first")
    if not os.access(out if out.exists() else folder, os.W_OK):
        raise InvalidConfig(f"--out {out} cannot be written; choose another place")


def _load(
    model: str, device: str, dtype: str, policy: str, budget: int, blocks: int, progress: Progress | None = None
) -> Engine:
    from contbatch.engine import Engine

    return Engine.load(
        model,
        device=device,
        dtype=dtype,
        policy=policy,
        progress=progress,
        max_num_seqs=len(DEMO_PROMPTS),
        max_num_batched_tokens=budget,
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
    )


def _serve(engine: Engine, max_tokens: int, console: Console, quiet: bool) -> None:
    """Step the engine until everything is served, with a bar for each request."""
    from contbatch.request import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens)
    names = {engine.add_request(prompt, sampling): prompt for prompt in DEMO_PROMPTS}
    with _bars(names, max_tokens, console, quiet) as (progress, bars):
        while engine.has_unfinished:
            for event in engine.step():
                progress.update(bars[event.request_id], advance=event.token_id is not None)
                if event.finish_reason is not None:
                    progress.update(bars[event.request_id], state=event.finish_reason.value)


@contextmanager
def _bars(
    names: dict[str, str], max_tokens: int, console: Console, quiet: bool
) -> Iterator[tuple[Bars, dict[str, TaskID]]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("{task.fields[name]}", markup=False),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}", markup=False),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield (
            progress,
            {
                name: progress.add_task(_short(prompt, 30), total=max_tokens, name=name, state="")
                for name, prompt in names.items()
            },
        )


def _short(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"


def _requests(metrics: Metrics) -> Table:
    """A line for each request."""
    from rich import box
    from rich.table import Table

    table = Table(title="Requests (times in seconds)", title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", max_width=32)
    for heading in ("in", "out", "TTFT", "TPOT", "E2E", "preempted"):
        table.add_column(heading, justify="right")
    table.add_column("finish")
    for request, prompt in zip(metrics.requests.values(), DEMO_PROMPTS, strict=True):
        table.add_row(*_row(request, prompt))
    return table


def _row(request: RequestMetrics, prompt: str) -> list[str]:
    times = (request.seconds.ttft, request.seconds.tpot, request.seconds.e2e)
    return [
        request.request_id,
        prompt,
        str(request.num_prompt_tokens),
        str(request.num_output_tokens),
        *("n/a" if value is None else f"{value:.3f}" for value in times),
        str(request.num_preemptions),
        request.finish_reason or "unfinished",
    ]


def _totals(metrics: Metrics) -> Table:
    """What the run was as a whole."""
    from rich.table import Table

    table = Table(title="\nThe run", title_justify="left", box=None, show_header=False)
    for name, value in metrics.totals():
        table.add_row(name, value)
    return table


def _texts(engine: Engine, console: Console) -> None:
    from rich.text import Text

    console.print("\nWhat the model wrote")
    for name in engine.trace.requests:
        done = engine.completions[name]
        text = re.sub(r"\s+", " ", done.text)
        console.print(Text.assemble((f"{name} ", "bold"), (done.prompt or "", "dim"), text))

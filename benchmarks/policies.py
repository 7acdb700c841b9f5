"""Write docs/policies.md: every policy, what it decides, what it costs, and how we know.

    python benchmarks/policies.py            # write the page and its pictures
    python benchmarks/policies.py --check    # exit status 1 if the page is not current

Nothing here is timed: every figure is counted in steps and tokens and is the same on every machine.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from contbatch import POLICIES, SchedulerConfig
from contbatch.compare import Comparison, compare, table
from contbatch.verify import verify
from contbatch.viz import plots
from contbatch.workload import Workload, WorkloadRequest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "policies.md"
PICTURES = ROOT / "docs" / "policies"
GOLDEN = ROOT / "tests" / "golden"
WORKLOADS = GOLDEN / "workloads.json"


class Recorded(NamedTuple):
    """What an engine itself did to the two workloads, recorded by running its unmodified scheduler."""

    policy: str
    engine: str
    stall: str
    squeeze: str
    difference: str


RECORDED = [
    Recorded("VllmV1", "vLLM 0.33.0", "60 steps, gap 1", "233 steps, 2,098 tokens, 6 preemptions", "none here"),
    Recorded(
        "NanoVllm",
        "nano-vllm bb823b3",
        "68 steps, gap 9",
        "233 steps, 1,992 tokens, 6 preemptions (its prefix cache cannot be turned off)",
        "With the prefix cache off, as above, more is computed again. `max_num_seqs` caps the running set; "
        "there it caps a step, and more may run than the limit says.",
    ),
    Recorded(
        "SarathiServe",
        "sarathi-serve 96f9911",
        "60 steps, gap 1",
        "480 steps, 5,551 tokens, 31 preemptions",
        "Three faults of the original are not copied: a decode asks for a free block even if its last block has "
        "room, a victim is reset only after the step and can be admitted again in the same one, and `max_tokens` "
        "counts from zero after a preemption, so too much is generated.",
    ),
    Recorded(
        "Orca", "sarathi-serve 96f9911, orca", "260 steps, gap 1", "960 steps, 1,464 tokens, 0 preemptions", "none here"
    ),
    Recorded(
        "HfFifo",
        "transformers 5.20.2, fifo",
        "60 steps, gap 1",
        "251 steps, 2,456 tokens, 8 preemptions",
        "`max_num_seqs` caps the running set; there it caps a batch. No recorded run shows a difference.",
    ),
    Recorded(
        "HfPrefillFirst",
        "transformers 5.20.2, prefill_first",
        "66 steps, gap 7",
        "234 steps, 2,104 tokens, 6 preemptions",
        "as HfFifo",
    ),
]
GOLDEN_FILES = ("vllm_v1", "sarathi_serve", "nano_vllm", "orca", "hf_fifo", "hf_prefill_first")

PICTURED = Workload(
    "eight requests and a long prompt",
    0,
    tuple(
        WorkloadRequest(
            f"r{i}", tuple(range(1000 * i, 1000 * i + prompt)), output, arrival, priority=priority, client=client
        )
        for i, (prompt, output, arrival, priority, client) in enumerate(
            [
                (12, 20, 0, 3, "a"),
                (30, 12, 0, 2, "a"),
                (8, 26, 0, 3, "a"),
                (20, 8, 2, 1, "a"),
                (70, 6, 5, 2, "b"),
                (6, 24, 6, 0, "b"),
                (16, 10, 10, 2, "c"),
                (10, 14, 14, 3, "c"),
            ]
        )
    ),
    SchedulerConfig(
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=96,
        block_size=4,
        num_blocks=32,
        enable_prefix_caching=False,
    ),
)
"""The run of the pictures: lengths, arrivals, priorities and clients differ, and the pool is too small for all."""


def markdown(rows: list[list[str]]) -> str:
    """A table; the first row is its head, and all columns but the first hold numbers."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|---|" + "---:|" * (len(rows[0]) - 1), *body])


def evidence() -> str:
    """A row for each file of recorded decisions."""
    lines = ["| policy | recorded from | equal runs | equal steps | compared |", "|---|---|---:|---:|---|"]
    for name in GOLDEN_FILES:
        path = GOLDEN / f"{name}.json"
        text = path.read_text(encoding="utf-8")
        engine, version = (re.search(rf'"{key}":\s*"([^"]*)"', text) for key in ("engine", "version"))
        report = verify(path)
        compared = "grants, victims, finishes, free blocks" + (", block ids" if '"blocks"' in text else "")
        lines.append(
            f"| `{report.subject}` | {engine[1] if engine else ''} {version[1] if version else ''} "
            f"| {report.equal_cases} of {report.cases} | {report.equal_units:,} of {report.units:,} | {compared} |"
        )
    return "\n".join(lines)


def departures(stall: list[Comparison], squeeze: list[Comparison]) -> str:
    """What the engines themselves did, beside ours."""
    lines = [
        "| engine | it: stall | ours | it: squeeze | ours | where we differ on purpose |",
        "|---|---|---|---|---|---|",
    ]
    for recorded in RECORDED:
        a = next(c for c in stall if c.policy == recorded.policy)
        b = next(c for c in squeeze if c.policy == recorded.policy)
        ours = (
            f"{a.steps} steps, gap {a.worst_gap}",
            f"{b.steps} steps, {b.computed:,} tokens, {b.preemptions} preemptions",
        )
        lines.append(
            f"| {recorded.engine} | {recorded.stall} | {ours[0]} | {recorded.squeeze} | {ours[1]} "
            f"| {recorded.difference} |"
        )
    return "\n".join(lines)


def policy_section(comparison: Comparison) -> str:
    """What a policy is, in the words of its docstring, and its picture."""
    make = POLICIES[comparison.policy]
    about = inspect.cleandoc(make.__doc__ or "").split("\nArgs:")[0].strip()
    caption = str(plots.overview(comparison.trace).get_label())
    picture = f"![{caption}](policies/{comparison.policy}.png)"
    return f"## {comparison.policy}\n\n{about}\n\n{picture}\n\n*{caption}*\n"


def page(stall: list[Comparison], squeeze: list[Comparison], pictured: list[Comparison]) -> str:
    """The whole page."""
    sections = "\n".join(policy_section(comparison) for comparison in pictured)
    return f"""# The policies, compared

Who gets tokens in a step is decided by a policy of 10 to 45 lines ([`policies.py`](../contbatch/policies.py)), written
with the verbs of a step ([`step.py`](../contbatch/step.py)). This page says what each one decides, what that costs, and
how we know that it decides like the engine it is named after. It is written by `python benchmarks/policies.py`, and a
test keeps it current. Nothing on it is timed: steps and tokens are the same on every machine. For a workload of your
own: `contbatch policies FILE.json`.

## Two workloads

Both are in [`tests/golden/workloads.json`](../tests/golden/workloads.json). *Stall*: eight requests decode when a
prompt of 2,000 tokens arrives; the budget is 256 tokens a step. Does it stall them? *Squeeze*: eight requests of
64 + 120 tokens share a pool of 40 blocks of 16, which holds less than half of them at their end. What is computed
twice?

A gap is the number of steps between two neighbouring tokens of a request, the time that it was preempted included; 1 is
a token in every step. *Work of others* is what was computed for other requests within the worst gap, which is what the
wait costs in time. In brackets is what was computed beyond the ideal, in which every token is computed once. The prefix
cache is off.

### Stall

{markdown(table(stall))}

### Squeeze

{markdown(table(squeeze))}

## Equal to the engines

Decisions that were recorded by running the real schedulers, replayed with `contbatch verify tests/golden/*.json` (all
of it runs in CI):

{evidence()}

## Where we differ on purpose

What the engines' own schedulers did to the two workloads (recorded by running them, unmodified, with a model that emits
one token for every row), and what ours does:

{departures(stall, squeeze)}

# One run under every policy

Eight requests of mixed lengths and priorities, of three clients, in a pool of 32 blocks of 4 tokens with a budget of 32
tokens a step; r4 is a prompt of 70 tokens that arrives at step 5, r5 is urgent. The words are those of the classes.

{sections}"""


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if the page is not current.")
    ] = False,
) -> None:
    """Write the page and its pictures, or check them."""
    stall, squeeze = (compare(Workload.load(WORKLOADS, name), POLICIES) for name in ("stall", "squeeze"))
    pictured = compare(PICTURED, POLICIES)
    text = page(stall, squeeze, pictured)
    if check:
        missing = [name for name in POLICIES if not (PICTURES / f"{name}.png").is_file()]
        current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
        if missing or not current:
            print(f"{PAGE.name} is not current; run python benchmarks/policies.py", *missing, file=sys.stderr)
            sys.exit(1)
        return
    PICTURES.mkdir(exist_ok=True)
    for comparison in pictured:
        shown = plots.figure(plots.overview(comparison.trace))
        (PICTURES / f"{comparison.policy}.png").write_bytes(shown.png)
    PAGE.write_text(text, encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)} and {len(pictured)} pictures")


if __name__ == "__main__":
    typer.run(main)

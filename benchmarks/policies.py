"""Write docs/policies.md: every policy, what it decides, what it costs, and how we know.

    python benchmarks/policies.py            # write the page and its pictures
    python benchmarks/policies.py --check    # exit status 1 if the page is not current

Nothing here is timed: every figure is counted in steps and tokens and is the same on every machine.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from contbatch import POLICIES, SchedulerConfig
from contbatch.compare import Comparison, compare, table
from contbatch.verify import Report, verify
from contbatch.viz import plots
from contbatch.workload import Workload, WorkloadRequest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "policies.md"
PICTURES = ROOT / "docs" / "policies"
GOLDEN = ROOT / "tests" / "golden"
WORKLOADS = GOLDEN / "workloads.json"


class Recorded(NamedTuple):
    """What an engine did to the two workloads, recorded by running its unmodified scheduler.

    Args:
        policy: ours of that kind.
        engine: name and version.
        stall: steps, and the worst gap between two tokens.
        squeeze: steps, tokens computed, preemptions.
        prefix_caching: whether its prefix cache was on.
    """

    policy: str
    engine: str
    stall: tuple[int, int]
    squeeze: tuple[int, int, int]
    prefix_caching: bool = False


RECORDED = [
    Recorded("VllmV1", "vLLM 0.33.0", (60, 1), (233, 2098, 6)),
    Recorded("NanoVllm", "nano-vllm bb823b3, prefix cache on", (68, 9), (233, 1992, 6), prefix_caching=True),
    Recorded("SarathiServe", "sarathi-serve 96f9911", (60, 1), (480, 5551, 31)),
    Recorded("Orca", "sarathi-serve 96f9911, Orca", (260, 1), (960, 1464, 0)),
    Recorded("HfFifo", "transformers 5.20.2, fifo", (60, 1), (251, 2456, 8)),
    Recorded("HfPrefillFirst", "transformers 5.20.2, prefill_first", (66, 7), (234, 2104, 6)),
]
CAP = Workload(
    "four requests, two seats",
    0,
    tuple(WorkloadRequest(f"r{i}", tuple(range(100 * i, 100 * i + 8)), 8) for i in range(4)),
    SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, block_size=4, num_blocks=64),
)

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
        num_blocks=30,
        enable_prefix_caching=False,
    ),
)
"""The run of the pictures: lengths, arrivals, priorities and clients differ, and the pool is too small for all."""


class Evidence(NamedTuple):
    """A file of recorded decisions and what its replay found; `victims` counts its steps with a preemption."""

    file: str
    engine: str
    report: Report
    victims: int
    block_ids: bool

    def __str__(self) -> str:
        ids = ", block ids included" if self.block_ids else ""
        victims = f"{self.victims:,} of these steps preempt" if self.victims else "none of these steps preempts"
        return (
            f"[`{self.file}`](../tests/golden/{self.file}), recorded from {self.engine}: "
            f"{self.report.equal_cases} of {self.report.cases} runs and {self.report.equal_units:,} of "
            f"{self.report.units:,} steps are equal{ids}; {victims}."
        )


def replay() -> dict[str, Evidence]:
    """Replay every file of recorded decisions for which there is a policy; by policy, in the order of POLICIES."""
    found = {}
    for path in sorted(GOLDEN.glob("*.json")):
        recording = json.loads(path.read_text(encoding="utf-8"))
        if recording.get("policy") in POLICIES:
            steps = [step for case in recording["cases"] for step in case["steps"]]
            victims, ids = sum(bool(step["preempted"]) for step in steps), any("blocks" in step for step in steps)
            engine = f"{recording['engine']}, {recording['version']}"
            found[recording["policy"]] = Evidence(path.name, engine, verify(path), victims, ids)
    return {name: found[name] for name in POLICIES if name in found}


def markdown(rows: list[list[str]], texts: int = 1) -> str:
    """A table; the first row is its head, and all columns but the first `texts` hold numbers."""
    head, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, "|" + "---|" * texts + "---:|" * (len(rows[0]) - texts), *body])


def wrap(text: str, start: str = "") -> str:
    """Lines of at most 120 characters."""
    return textwrap.fill(text, 120, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)


def bullets(*texts: str) -> str:
    """A list."""
    return "\n".join(wrap(text, "- ") for text in texts)


def both(stall: list[Comparison], squeeze: list[Comparison]) -> str:
    """One table for the two workloads."""
    (policy, *heads), *left = table(stall)
    _, *right = table(squeeze)
    head = [policy, *(f"stall: {head}" for head in heads), *(f"squeeze: {head}" for head in heads)]
    return markdown([head, *([*a, *b[1:]] for a, b in zip(left, right, strict=True))])


def alike(comparisons: list[Comparison]) -> str:
    """Which policies took the same decisions in a run."""
    groups: dict[tuple[frozenset[tuple[str, int]], ...], list[str]] = {}
    for c in comparisons:
        decisions = tuple(frozenset(zip(step.request_ids, step.counts, strict=True)) for step in c.trace.steps)
        groups.setdefault(decisions, []).append(c.policy)
    return "; ".join(f"{', '.join(names[:-1])} and {names[-1]}" for names in groups.values() if len(names) > 1)


def observations(stall: list[Comparison], squeeze: list[Comparison]) -> str:
    """What the table says, in words."""
    a, b = ({c.policy: c for c in comparisons} for comparisons in (stall, squeeze))
    again = [c.excess for c in squeeze if c.preemptions]
    return bullets(
        f"Prefill first stalls: under NanoVllm no decode gets a token for {a['NanoVllm'].worst_gap - 1} steps, under "
        f"HfPrefillFirst for {a['HfPrefillFirst'].worst_gap - 1} (there the first chunk of the prompt still shares a "
        "step with the decodes). Where decodes come first, nobody waits.",
        "Orca and StaticBatching have no token budget: the long prompt is one step of 2,000 tokens. Nobody sees a gap, "
        "because nobody else is between two tokens by then. What they pay is steps: "
        f"{a['Orca'].steps} and {a['StaticBatching'].steps} instead of {a['VllmV1'].steps}.",
        f"Who admits without a reservation computes twice: {min(again):+.0%} to {max(again):+.0%} in squeeze, and a "
        f"victim waits for up to {max(c.worst_gap for c in squeeze)} steps. Orca and PeakMemory never preempt: Orca "
        f"needs {b['Orca'].steps} steps, because it reserves for the longest sequence that there could be, PeakMemory "
        f"{b['PeakMemory'].steps}, because it admits as soon as it foresees that nobody will have to go.",
        f"Alike to the last decision: in stall {alike(stall)}; in squeeze {alike(squeeze)}. All requests have the "
        "same priority and client, so a policy that looks at these has nothing to choose from. The pictures below "
        "show where they part.",
    )


def evidence_table(replayed: dict[str, Evidence]) -> str:
    """A row for each file of recorded decisions."""
    rows = [["policy", "recorded from", "file", "compared", "equal runs", "equal steps", "steps that preempt"]]
    for policy, found in replayed.items():
        report = found.report
        rows.append(
            [
                f"`{policy}`",
                found.engine,
                f"`{found.file}`",
                "grants, victims, finishes, free blocks" + (", block ids" if found.block_ids else ""),
                f"{report.equal_cases} of {report.cases}",
                f"{report.equal_units:,} of {report.units:,}",
                f"{found.victims:,}",
            ]
        )
    return markdown(rows, texts=4)


def side_by_side() -> str:
    """What the engines did to the two workloads, and what ours do under the same limits."""
    rows = [["engine", "stall: the engine", "stall: ours", "squeeze: the engine", "squeeze: ours"]]
    for recorded in RECORDED:
        a, b = (run_as_recorded(name, recorded) for name in ("stall", "squeeze"))
        rows.append(
            [
                recorded.engine,
                _stall(*recorded.stall),
                _stall(a.steps, a.worst_gap),
                _squeeze(*recorded.squeeze, b.ideal),
                _squeeze(b.steps, b.computed, b.preemptions, b.ideal),
            ]
        )
    return markdown(rows, texts=5)


def run_as_recorded(workload: str, recorded: Recorded) -> Comparison:
    """Ours on a workload, with the prefix cache as the engine had it."""
    loaded = Workload.load(WORKLOADS, workload)
    config = replace(loaded.config or SchedulerConfig(), enable_prefix_caching=recorded.prefix_caching)
    (ours,) = compare(loaded, [recorded.policy], config)
    return ours


def _stall(steps: int, gap: int) -> str:
    return f"{steps} steps, gap {gap}"


def _squeeze(steps: int, computed: int, preemptions: int, ideal: int) -> str:
    return f"{steps} steps, {computed:,} tokens ({computed / ideal - 1:+.0%}), {preemptions} preemptions"


def departures() -> str:
    """Where ours differ from the engines on purpose."""
    (sarathi,) = (recorded for recorded in RECORDED if recorded.policy == "SarathiServe")
    ours = run_as_recorded("squeeze", sarathi)
    (capped,) = compare(CAP, ["NanoVllm"])
    return bullets(
        "**SarathiServe when blocks run out.** Three faults of the original are not copied: a decode asks for a free "
        "block even if its last block has room; a victim is reset only after the step and can be admitted again in the "
        "same one, only to be preempted again; `max_tokens` counts from zero after a "
        "preemption, so too much is generated. On squeeze the original took "
        f"{_squeeze(*sarathi.squeeze, ours.ideal)}; ours takes "
        f"{_squeeze(ours.steps, ours.computed, ours.preemptions, ours.ideal)}.",
        "**NanoVllm and `max_num_seqs`.** The original caps a step, not the running set: with `max_num_seqs=2` it ran "
        "4 requests at once, two of them computed and then frozen until the others had ended. Ours runs "
        f"{max(step.num_running for step in capped.trace.steps)}. Blocks planned in a step can be shared in the same "
        "step, too; there only after it.",
        "**VllmV1 and planned blocks.** With priorities and the prefix cache on, a victim that had been granted tokens "
        "in the same step leaves blocks in the index of the original that nobody computed, and can hit them when it "
        "comes back. Ours takes them out again. No recorded step depends on it.",
        "**HfFifo, HfPrefillFirst and `max_num_seqs`.** It caps the running set; there it caps a batch. No recorded "
        "step depends on it.",
        "**A request that outgrows the pool** (prompt 40, 60 new tokens, 3 blocks of 16). nano-vllm ends in an "
        "`assert`; transformers in a `RuntimeError` that ends its loop; vLLM's scheduler preempts it and then grants "
        "it nothing for ever (its engine does not start with such a pool). Ours refuses it when it is added.",
    )


def policy_section(comparison: Comparison, found: Evidence | None) -> str:
    """What a policy is, in the words of its docstring, its evidence and its picture."""
    make = POLICIES[comparison.policy]
    about = inspect.cleandoc(make.__doc__ or "").split("\nArgs:")[0].strip()
    known = found or (
        "no engine's decisions are recorded for it. The rules that hold for every policy are tested in "
        "[`test_rules.py`](../tests/test_rules.py)."
    )
    caption = str(plots.overview(comparison.trace).get_label())
    picture = f"![{caption}](policies/{comparison.policy}.png)"
    return f"### {comparison.policy}\n\n{about}\n\n**Evidence:** {known}\n\n{picture}\n\n*{caption}*\n"


def about_the_run(pictured: list[Comparison]) -> str:
    """What is in the pictures."""
    limits = PICTURED.config or SchedulerConfig()
    return (
        f"Eight requests of mixed lengths and priorities, of three clients, in a pool of {limits.num_blocks} blocks of "
        f"{limits.block_size} tokens with a budget of {limits.max_num_batched_tokens} tokens a step. r4 is a prompt of "
        "70 tokens that arrives at step 5, r5 is urgent. The words are those of the classes. The same decisions, and "
        f"so the same picture: {alike(pictured)}."
    )


def page(pictured: list[Comparison]) -> str:
    """The whole page."""
    stall, squeeze = (compare(Workload.load(WORKLOADS, name), POLICIES) for name in ("stall", "squeeze"))
    replayed = replay()
    sections = "\n".join(policy_section(comparison, replayed.get(comparison.policy)) for comparison in pictured)
    return f"""# The policies, compared

Who gets tokens in a step is decided by a policy, a short class in [`policies.py`](../contbatch/policies.py) written
with the verbs of a step ([`step.py`](../contbatch/step.py)). This page says what each one decides, what that costs, and
how we know that it decides like the engine it is named after. It is written by `python benchmarks/policies.py`, and a
test keeps it current. Nothing on it is timed: steps and tokens are the same on every machine. For a workload of your
own: `contbatch policies FILE.json`.

## Two workloads

Both are in [`tests/golden/workloads.json`](../tests/golden/workloads.json). *Stall*: eight requests decode when a
prompt of 2,000 tokens arrives; the budget is 256 tokens a step. Does it stall them? *Squeeze*: eight requests of
64 + 120 tokens share a pool of 40 blocks of 16, which holds less than half of them at their end. What is computed
twice?

The worst gap is the largest number of steps between two neighbouring tokens of a request, the time that it was
preempted included; 1 is a token in every step. The work of others in it is what was computed for other requests up to
the step that ends it, which is what the wait costs in time. In brackets is what was computed beyond the ideal, in which
every token is computed once (prompt and `max_tokens` - 1). The prefix cache is off.

{both(stall, squeeze)}

{observations(stall, squeeze)}

## Equal to the engines

Decisions that were recorded by running the real schedulers, replayed with `contbatch verify tests/golden/FILE` (all of
it runs in CI):

{evidence_table(replayed)}

## Beside the engines

What the engines' own schedulers did to the two workloads (recorded by running them, unmodified, with a model that emits
one token for every row), and what ours do. nano-vllm always has its prefix cache on, so ours has it here too.

{side_by_side()}

Also recorded: nano-vllm computed 2,000 tokens and prefill_first 1,536 while a decode got nothing. So do ours; the table
further up also counts the step that ends the gap. Under fifo in squeeze a starved request waited 33 steps. So it does
in ours: t7 finds no block in the middle of its prompt, and its next chunk comes 33 steps later. It has no token yet, so
this is no gap.

### Different on purpose

{departures()}

## One run under every policy

{wrap(about_the_run(pictured))}

{sections}"""


def stale(text: str) -> list[str]:
    """What has to be written again: the page, or pictures that are missing or of no policy."""
    drawn = {path.stem for path in PICTURES.glob("*.png")}
    current = PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text
    return [*([] if current else [PAGE.name]), *(f"{name}.png" for name in sorted(drawn ^ set(POLICIES)))]


def main(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit status 1 if the page is not current.")
    ] = False,
) -> None:
    """Write the page and its pictures, or check them."""
    pictured = compare(PICTURED, POLICIES)
    text = page(pictured)
    if check:
        if old := stale(text):
            print("not current:", ", ".join(old) + "; run python benchmarks/policies.py", file=sys.stderr)
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

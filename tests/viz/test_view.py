"""The view-model: what is shown is what the trace says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from contbatch.errors import TraceError
from contbatch.policies import PrefillDecodeBudget, VllmV1
from contbatch.trace import Blocked, FinishRecord, Trace
from contbatch.viz.view import CACHED, FREE, STYLES, BlockState, Cell, View, short_labels
from contbatch.viz.words import why
from tests.viz.runs import engine_run, hand_trace, large_run

RUNS = {
    "vllm": {},
    "tight": {"num_blocks": 16, "seed": 3},
    "no cache": {"num_blocks": 16, "enable_prefix_caching": False, "seed": 4},
    "priority": {"num_blocks": 16, "policy": VllmV1(order="priority"), "seed": 5},
    "static": {"policy": "StaticBatching", "seed": 6},
    "limits": {"policy": PrefillDecodeBudget(16, 4, 20), "num_blocks": 20, "seed": 7},
}


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Trace:
    return engine_run(**RUNS[request.param])


def test_lanes_of_a_run_checked_by_hand() -> None:
    assert View(hand_trace()).lanes == {
        "a": "PDDD     ",
        "b": "PPDXRD   ",
        "c": " WWWWWPPD",
    }


def test_a_cell_says_which_tokens_and_how_many_came_from_the_cache() -> None:
    view = View(hand_trace())
    assert view.frame(0).cells == {"a": Cell("P", 0, 6), "b": Cell("P", 0, 2), "c": Cell(" ")}
    assert view.frame(4).cells["b"] == Cell("R", 4, 3, cached=4)


def test_blocks_of_a_run_checked_by_hand() -> None:
    view = View(hand_trace())

    def states(t: int) -> list[BlockState]:
        return [view.frame(t).blocks[block] for block in (1, 2, 3, 4)]

    a, b, c = (BlockState("owned", (i,)) for i in "abc")
    assert states(0) == [a, a, b, FREE]
    assert states(2) == [a, a, b, b]
    assert states(3) == [a, a, CACHED, a], "block 3 was full, so it is still known; block 4 went to a"
    assert states(4) == [CACHED, CACHED, b, b]
    assert states(6) == [c, c, CACHED, CACHED]
    assert states(8) == [c, c, CACHED, c]


def test_budget_of_a_step_adds_up() -> None:
    use = View(hand_trace()).frame(4).budget
    assert (use.prefill, use.recomputed, use.decode, use.limit, use.used, use.unused) == (0, 3, 0, 8, 3, 5)


def test_queue_says_why_not_admitted() -> None:
    view = View(hand_trace())
    assert view.frame(4).queue == (("c", "W", "needs 3 blocks, 2 free"),)
    assert view.frame(3).queue == (("b", "X", "made room in this step"), ("c", "W", ""))
    assert why(Blocked("budget", 90, 12)) == "needs 90 tokens, 12 left in the budget"
    assert why(Blocked("blocks", 1, 0)) == "needs 1 block, 0 free"
    assert "running" in why(Blocked("sequences", 1, 0))
    assert why(Blocked("policy", 0, 0)) == "held back by the policy"


def test_decisions_in_words() -> None:
    view = View(hand_trace())
    assert [tuple(d) for d in view.frame(3).decisions] == [
        ("D", "a decodes 1 token."),
        ("X", "b is preempted and gives back 2 blocks: 6 tokens must be computed again, 2 output tokens stay."),
        ("W", "1 more waits; the scheduler did not look that far."),
        ("", "a ends: length, 4 output tokens."),
    ]
    assert [tuple(d) for d in view.frame(4).decisions] == [
        ("R", "b comes back: 4 tokens from the prefix cache, 3 tokens computed again, all 7 are done."),
        ("W", "c stays in the queue: needs 3 blocks, 2 free."),
    ]
    assert ("P", "b goes on: 3 tokens computed, all 5 are done.") in view.frame(1).decisions


def test_captions_carry_the_numbers() -> None:
    view = View(hand_trace())
    assert view.frame(3).caption == (
        "Step 3: 1 of 8 tokens (decode 1); 1 running, 2 waiting; 3 of 4 blocks in use; preempted: b; finished: a."
    )
    assert view.summary.startswith(
        "3 requests in 9 steps under VllmV1; 20 prompt tokens (4 taken from the cache, 2 computed again) and "
        "10 output tokens; budget 8 tokens a step, 40 % used; 1 preemption; at most 4 of 4 blocks in use (trace "
    )
    assert view.trace.digest() in view.summary


def test_the_summary_changes_with_any_decision() -> None:
    other = hand_trace()
    other.steps[5].sampled["b"] = 7
    assert View(other).summary != View(hand_trace()).summary


def test_life_of_a_request() -> None:
    view = View(hand_trace())
    assert view.emitted("b") == (1, 2, 4, 5)
    assert view.about("b") == (
        "b: 5 prompt tokens, at most 4 new; priority 2; known from step 0; joined in step 0; 4 tokens from the prefix "
        "cache; sent away in step 3; first token in step 1; ended after 6 steps: length, 4 output tokens."
    )
    head, rows = view.table()
    assert dict(zip(head, rows[1], strict=True))["computed again"] == "2"


def test_every_block_has_one_state_and_the_counts_are_those_of_the_trace(run: Trace) -> None:
    view = View(run)
    for t, step in enumerate(run.steps):
        states = list(view.frame(t).blocks.values())
        assert all((s.state == "owned") == bool(s.owners) for s in states)
        free = [s for s in states if s.state != "owned"]
        assert len(states) == run.config["num_blocks"]
        assert len(free) == step.free_blocks, t
        assert free.count(CACHED) == step.cached_blocks, t


def test_every_request_has_one_letter_in_every_step_of_its_life(run: Trace) -> None:
    view = View(run)
    for request_id, lane in view.lanes.items():
        first, last = run.requests[request_id].arrival_step, run.finished[request_id].step
        assert len(lane) == len(run.steps)
        assert set(lane[first:last]) <= set(STYLES) - {"C"}
        assert not (lane[:first] + lane[last:]).strip()
    for t, step in enumerate(run.steps):
        letters = "".join(lane[t] for lane in view.lanes.values())
        assert sum(letters.count(c) for c in "WXS") == step.num_waiting == len(view.frame(t).queue), t
        assert sum(letters.count(c) for c in "PRD.") == step.num_running, t
        assert view.frame(t).budget.used == step.num_tokens


def test_runs_have_what_they_are_meant_to_test() -> None:
    assert sum(len(step.preempted) for step in engine_run(**RUNS["tight"]).steps) > 1
    assert any("R" in lane for lane in View(engine_run(**RUNS["no cache"])).lanes.values())
    owners = View(engine_run(prompts=(1, 9), num_blocks=60, over_steps=1, seed=2))
    assert any(len(s.owners) > 1 for t in range(owners.num_steps) for s in owners.frame(t).blocks.values())


def test_aborted_between_steps_leaves_before_the_next_step() -> None:
    trace = hand_trace()
    trace.steps = trace.steps[:2]
    trace.finished = {"b": FinishRecord("abort", 1, 0.0, 0)}
    trace.steps[1].request_ids, trace.steps[1].kinds = ["a"], "D"
    trace.steps[1].starts, trace.steps[1].counts = [6], [1]
    trace.steps[1].sampled, trace.steps[1].new_blocks = {"a": 1}, {}
    view = View(trace)
    assert view.lanes["b"] == "P "
    assert view.frame(1).blocks[3] == FREE


def test_swapped_requests_wait_with_their_own_letter() -> None:
    trace = hand_trace()
    trace.steps[3] = replace(trace.steps[3], preempted=[], swapped_out=["b"], reasons={})
    trace.steps[4] = replace(trace.steps[4], resumed=[], swapped_in=["b"], cached={}, starts=[6], counts=[1], kinds="D")
    view = View(trace)
    assert view.lanes["b"][2:5] == "DSD"
    assert view.frame(3).decisions[1].text == "b is swapped out: its 2 blocks move to host memory."


def test_payload_is_plain_and_unrolls_to_the_lanes() -> None:
    view = View(hand_trace())
    payload = json.loads(json.dumps(view.payload()))
    for lane, letters in zip(payload["lanes"], view.lanes.values(), strict=True):
        assert "".join(lane[i] * lane[i + 1] for i in range(0, len(lane), 3)) == letters
    assert payload["lanes"][1][6:] == ["D", 1, 1, "X", 1, 0, "R", 1, [3, 4], "D", 1, 1, " ", 3, 0]
    assert payload["blocks"]["runs"]["3"] == [0, 1, 3, -2, 4, 1, 6, -2]
    assert [payload["said"][n][1] for n in payload["words"][4]] == [d.text for d in view.frame(4).decisions]


def test_payload_stays_small() -> None:
    trace = large_run()
    assert len(trace.requests) == 64 and len(trace.steps) > 400
    text = json.dumps(View(trace).payload(), separators=(",", ":"), ensure_ascii=False)
    assert len(text) < 200_000


def test_same_trace_same_view() -> None:
    assert View(hand_trace()).payload() == View(hand_trace()).payload()


def test_labels_fit_into_a_block() -> None:
    assert short_labels(["r1", "r2", "r10"]) == ["1", "2", "10"]
    assert short_labels(["a", "b"]) == ["a", "b"]
    assert short_labels(["alice", "bob-long"]) == ["1", "2"]
    assert short_labels(["r10", "r11"]) == ["10", "11"]
    assert short_labels(["only"]) == ["1"] and short_labels([]) == []


def test_empty_run_and_unknown_steps() -> None:
    view = View(Trace())
    assert view.payload()["steps"] == 0 and "0 requests in 0 steps" in view.summary
    with pytest.raises(TraceError, match="step 9 is not in this run; its steps are 0 to 8"):
        View(hand_trace()).frame(9)


def test_a_trace_that_names_strangers_is_refused() -> None:
    trace = hand_trace()
    trace.steps[2].new_blocks = {"zoe": [9]}
    with pytest.raises(TraceError, match="step 2 mentions 'zoe'"):
        View(trace)

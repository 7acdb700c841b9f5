"""Cases: who may pass whom, how many run at once, and preemption by recompute.

Each test restates one line of a list of faults that were found in other engines; its id is in the name.
"""

from __future__ import annotations

import pytest

from contbatch.batch import ScheduledBatch
from contbatch.errors import PolicyError
from contbatch.metrics import summarise
from contbatch.policies import VllmV1
from contbatch.request import RequestStatus
from contbatch.step import Step
from tests.cases.common import ALL, Events, Forced, crowded, drive, first_step, grants, preemptions
from tests.toy import Scripted, assert_alone, assert_empty, config, params, prompt, serve, toy_engine

IN_ORDER = ["VllmV1", "PrefillDecodeBudget", "SarathiServe", "NanoVllm"]
"""Policies under which nobody overtakes the head of the queue, and new requests join those that run."""


# Starvation, head-of-line blocking, limits on running requests


@pytest.mark.parametrize("policy", IN_ORDER)
def test_b045_nobody_passes_a_head_that_does_not_fit(policy: str) -> None:
    engine = crowded(policy)
    engine.step()
    assert grants(engine.trace.steps[-1]) == {"R": 1}
    assert engine.trace.steps[-1].reasons["head"] == ("blocks", 8, 5)
    assert "next" not in engine.trace.steps[-1].reasons, "it was not looked at"
    drive(engine)
    assert 3 == first_step(engine.trace, "head") <= first_step(engine.trace, "next")


@pytest.mark.parametrize("policy", IN_ORDER)
def test_b047_when_the_head_is_aborted_the_next_is_admitted_in_the_next_step(policy: str) -> None:
    engine = crowded(policy)
    engine.step()
    engine.abort("head")
    engine.step()
    assert engine.trace.steps[-1].admitted == ["next"]
    drive(engine)
    assert_empty(engine)


def test_b051_a_cap_on_long_prompts_lets_a_short_one_pass_and_leaves_no_budget_idle() -> None:
    engine, _ = toy_engine(config(budget=8, long_cap=4))
    serve(engine, {"long": prompt(40), "short": prompt(4, 1)}, params(2))
    assert any("short" in step.sampled for step in engine.trace.steps[:2])
    assert grants(engine.trace.steps[0]) == {"long": 4, "short": 4}
    engine, _ = toy_engine(config(budget=8, long_cap=4))
    serve(engine, {"long": prompt(40)}, params(1))
    assert [step.num_tokens for step in engine.trace.steps] == [8] * 5


@pytest.mark.parametrize("policy", ALL)
def test_b052_no_more_run_than_there_are_seats(policy: str) -> None:
    engine, toy = toy_engine(config(seqs=2), policy)
    done = serve(engine, {f"r{index}": prompt(4, index) for index in range(5)}, params(3))
    assert_alone(toy, done, params(3))
    assert max(step.num_running for step in engine.trace.steps) <= 2
    assert max(len(step.request_ids) for step in engine.trace.steps) <= 2


def test_b052_an_admission_without_a_seat_is_refused() -> None:
    """The verb raises; a policy that asks `seats_left` first admits nobody."""
    engine, toy = toy_engine(config(seqs=2))
    for index in range(5):
        engine.add_request(prompt(4, index), params(3))
    engine.step()
    assert engine.trace.steps[0].reasons["r2"] == ("sequences", 1, 0)
    named = engine.scheduler.policy
    engine.scheduler.policy = Scripted(lambda step: step.admit(step.waiting.head, 1))
    with pytest.raises(PolicyError, match="all 2 seats"):
        engine.step()
    assert len(engine.scheduler.running) == 2 and len(engine.scheduler.waiting) == 3
    engine.scheduler.policy = named
    drive(engine)
    assert_alone(toy, engine.completions, params(3))


def test_b053_on_demand_runs_four_at_once_and_pays_with_preemptions() -> None:
    """The other half, memory reserved up front, is in test_new_policies.py."""
    engine, toy = toy_engine(config(pool=8, bs=4, mml=32))
    done = serve(engine, {f"r{index}": prompt(4, index) for index in range(4)}, params(None))
    assert engine.trace.steps[0].num_running == 4 and preemptions(engine.trace) > 0
    assert_alone(toy, done, params(32 - 4))


@pytest.mark.parametrize(("policy", "mixes"), [("NanoVllm", False), ("VllmV1", True), ("SarathiServe", True)])
def test_b055_prefill_first_never_mixes_and_the_others_do(policy: str, mixes: bool) -> None:
    engine, _ = toy_engine(config(budget=8), policy)
    engine.add_request(prompt(2), params(8))
    engine.step()
    engine.step()
    engine.add_request(prompt(20, 1), params(8))
    drive(engine)
    assert mixes == any(step.prefill_tokens and step.decode_tokens for step in engine.trace.steps)
    assert any(step.decode_tokens == 2 for step in engine.trace.steps)


# Preemption and recompute


@pytest.mark.parametrize("policy", ALL)
def test_b057_no_range_ends_behind_the_last_known_token(policy: str) -> None:
    prompts = {name: prompt(6, index) for index, name in enumerate("abc")}
    outputs = []
    for prefix in (True, False):
        engine, toy = toy_engine(config(pool=6, bs=4, prefix=prefix, mml=24), policy)
        done = serve(engine, prompts, params(8))
        assert_alone(toy, done, params(8))
        outputs.append({name: completion.token_ids for name, completion in done.items()})
        known = dict.fromkeys(prompts, 6)
        for step in engine.trace.steps:
            for name, start, count in zip(step.request_ids, step.starts, step.counts, strict=True):
                assert start + count <= known[name]
            for name in step.sampled:
                known[name] += 1
        assert policy != "VllmV1" or preemptions(engine.trace) > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize(("budget", "chunks"), [(4, [4, 4, 4, 1]), (5, [5, 5, 3]), (13, [13]), (64, [13])])
def test_b058_a_resumed_request_computes_again_all_it_knows(budget: int, chunks: list[int]) -> None:
    policy = Forced()
    engine, toy = toy_engine(config(budget=budget, prefix=False), policy)
    engine.add_request(prompt(3), params(14), request_id="a")
    engine.run(max_steps=10)
    policy.victims = {"a"}
    engine.step()
    preempted_at = len(engine.trace.steps)
    drive(engine)
    again = engine.trace.steps[preempted_at:]
    assert [step.counts for step in again if step.prefill_tokens] == [[count] for count in chunks]
    assert not any(step.sampled for step in again[: len(chunks) - 1])
    assert_alone(toy, engine.completions, params(14))


@pytest.mark.parametrize("policy", ALL)
def test_b059_a_minimal_pool_changes_no_token(policy: str) -> None:
    prompts = {f"r{index}": prompt(3 + index % 8, index) for index in range(14)}
    results = []
    for pool in (100, 6):
        engine, toy = toy_engine(config(pool=pool, bs=4, mml=24), policy)
        done = serve(engine, prompts, params(12))
        assert_alone(toy, done, params(12))
        results.append({name: completion.token_ids for name, completion in done.items()})
    assert results[0] == results[1]
    assert policy != "VllmV1" or preemptions(engine.trace) >= 10


@pytest.mark.parametrize("order", ["fcfs", "priority"])
def test_b061_the_next_free_seat_goes_to_the_preempted_one(order: str) -> None:
    policy = Forced(order)
    engine, toy = toy_engine(config(seqs=1), policy)
    for index, name in enumerate("AB"):
        engine.add_request(prompt(5, index), params(4), request_id=name, priority=2)
    engine.step()
    policy.victims = {"A"}
    engine.step()
    assert engine.trace.steps[-1].preempted == ["A"]
    assert [request.request_id for request in engine.scheduler.waiting] == ["A", "B"]
    engine.step()
    assert engine.trace.steps[-1].resumed == ["A"] and not engine.trace.steps[-1].admitted
    drive(engine)
    assert_alone(toy, engine.completions, params(4))


@pytest.mark.parametrize("policy", ALL)
def test_b066_after_preemptions_each_output_has_one_time(policy: str) -> None:
    """Log-probabilities are not in this package; tokens, their times and their events are."""
    engine, _ = toy_engine(config(pool=6, bs=4, mml=24), policy)
    events = Events()
    for index in range(5):
        engine.add_request(prompt(5, index), params(12), request_id=f"r{index}", on_event=events)
    drive(engine)
    assert policy != "VllmV1" or preemptions(engine.trace) > 0
    for name, request in summarise(engine.trace).requests.items():
        outputs = engine.completions[name].token_ids
        assert [event.token_id for event in events.of(name)] == list(outputs)
        assert request.num_output_tokens == len(request.steps.tokens) == len(request.seconds.tokens) == len(outputs)
        assert list(request.steps.tokens) == sorted(set(request.steps.tokens)), "one after the other"


def test_b067_a_second_preemption_of_the_same_request_changes_nothing() -> None:
    engine, toy = toy_engine(config(seqs=2))
    for index, name in enumerate("abc"):
        engine.add_request(prompt(5, index), params(4), request_id=name)
    engine.step()
    victim = engine.scheduler.requests["a"]

    def state() -> tuple[object, ...]:
        queue = [request.request_id for request in engine.scheduler.waiting]
        pool = engine.scheduler.pool
        return pool.free_list, pool.num_cached, victim.num_preemptions, victim.status, tuple(victim.token_ids), queue

    def twice(step: Step) -> None:
        step.preempt(victim)
        after_one.append(state())
        step.preempt(victim)

    after_one: list[tuple[object, ...]] = []
    named = engine.scheduler.policy
    for schedule in (twice, lambda step: step.preempt(victim)):
        engine.scheduler.policy = Scripted(schedule)
        with pytest.raises(PolicyError, match=r"<a preempted.* is not running"):
            engine.step()
        engine.scheduler.check()
        assert state() == after_one[0]
    assert victim.num_preemptions == 1 and victim.status is RequestStatus.PREEMPTED
    engine.scheduler.policy = named
    drive(engine)
    assert_alone(toy, engine.completions, params(4))


def test_b068_nobody_is_preempted_between_execute_and_commit() -> None:
    """A step that is planned is closed, so no token can be doubled or lost; the next step may preempt."""
    refused: list[str] = []

    class Keeping(Forced):
        """Keeps the step that it was called with."""

        def schedule(self, step: Step) -> None:
            """As usual."""
            super().schedule(step)
            self.kept = step

    policy = Keeping()

    def before(batch: ScheduledBatch) -> None:
        with pytest.raises(PolicyError, match="step is over"):
            policy.kept.preempt(engine.scheduler.requests["a"])
        refused.append("a")

    engine, toy = toy_engine(config(), policy, before=before)
    engine.add_request(prompt(5), params(9), request_id="a")
    engine.run(max_steps=4)
    known = list(engine.scheduler.requests["a"].token_ids)
    assert len(known) == 5 + 4 and len(refused) == 4
    policy.victims = {"a"}
    engine.step()
    assert engine.scheduler.requests["a"].token_ids == known
    engine.step()
    assert engine.trace.steps[-1].resumed == ["a"]
    assert engine.scheduler.requests["a"].token_ids[:-1] == known, "one more, none twice"
    drive(engine)
    assert_alone(toy, engine.completions, params(9))


def test_b070_a_far_more_urgent_request_is_answered_before_all_that_wait() -> None:
    engine, toy = toy_engine(config(seqs=4), VllmV1("priority"))
    sampling = {f"r{index}": params(3 + index) for index in range(6)} | {"urgent": params(3)}
    for index in range(6):
        engine.add_request(prompt(5, index), sampling[f"r{index}"], request_id=f"r{index}", priority=0)
    engine.step()
    engine.add_request(prompt(5, 9), sampling["urgent"], request_id="urgent", priority=-100)
    drive(engine)
    first = {name: request.steps.tokens[0] for name, request in summarise(engine.trace).requests.items()}
    assert first["urgent"] < min(first["r4"], first["r5"])
    assert_alone(toy, engine.completions, sampling)


def test_b072_an_urgent_request_that_could_not_be_made_room_for_evicts_nobody() -> None:
    """`VllmV1` by priority never preempts for one that waits; `AgedPriority` is in test_new_policies.py."""
    engine, _ = toy_engine(config(pool=6, bs=4), VllmV1("priority"))
    for name, length, priority in (("low", 6, 5), ("lower", 2, 6), ("equal", 6, 0)):
        engine.add_request(prompt(length, ord(name[0]) + priority), params(3), request_id=name, priority=priority)
    engine.step()
    assert engine.scheduler.pool.num_free == 1
    engine.add_request(prompt(18, 9), params(2), request_id="urgent", priority=0)
    engine.step()
    step = engine.trace.steps[-1]
    assert not step.preempted and grants(step) == {"equal": 1, "low": 1, "lower": 1}
    assert step.reasons["urgent"] == ("blocks", 5, 1)
    drive(engine)
    assert preemptions(engine.trace) == 0


@pytest.mark.parametrize("policy", IN_ORDER)
def test_b073_a_prompt_that_does_not_fit_whole_is_not_begun(policy: str) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, budget=4), policy)
    engine.add_request(prompt(17), params(3), request_id="R")
    engine.run(max_steps=5)
    assert engine.scheduler.pool.num_used == 5
    engine.add_request(prompt(20, 1), params(3), request_id="large")
    drive(engine)
    assert preemptions(engine.trace) == 0
    assert [step.step for step in engine.trace.steps if "R" in step.sampled] == [4, 5, 6], "R is undisturbed"
    assert first_step(engine.trace, "large") == 7
    assert_alone(toy, engine.completions, params(3))


@pytest.mark.parametrize("policy", ALL)
def test_b074_five_in_a_pool_for_one_all_finish(policy: str) -> None:
    engine, toy = toy_engine(config(pool=4, bs=4, mml=16), policy)
    done = serve(engine, {f"r{index}": prompt(5, index) for index in range(5)}, params(6))
    assert_alone(toy, done, params(6))


@pytest.mark.parametrize("policy", ["VllmV1", "PrefillDecodeBudget"])
@pytest.mark.parametrize("prefix", [True, False])
def test_b074_nobody_new_is_admitted_between_a_preemption_and_the_next_finish(policy: str, prefix: bool) -> None:
    engine, _ = toy_engine(config(pool=4, bs=4, prefix=prefix), policy)
    serve(engine, {f"r{index}": prompt(5, index) for index in range(5)}, params(6))
    victim_waits = False
    for step in engine.trace.steps:
        assert not (victim_waits and step.admitted)
        victim_waits = (victim_waits or bool(step.preempted)) and not step.finished
    assert preemptions(engine.trace) > 0


@pytest.mark.parametrize("names", ["abc", "cab"])
def test_b075_one_victim_and_two_run(names: str) -> None:
    """a and b need a block each, c does not, and none is free."""
    length = {"a": 7, "b": 7, "c": 5}
    engine, toy = toy_engine(config(pool=6, bs=4, prefix=False))
    for name in names:
        engine.add_request(prompt(length[name], ord(name)), params(6), request_id=name)
    engine.run(max_steps=2)
    assert engine.scheduler.pool.num_free == 0
    engine.step()
    step = engine.trace.steps[-1]
    assert step.preempted == [names[-1]] and grants(step) == {names[0]: 1, names[1]: 1}
    drive(engine)
    assert_alone(toy, engine.completions, params(6))

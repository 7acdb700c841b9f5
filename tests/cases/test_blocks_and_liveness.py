"""Cases: what happens at the edge of a block, and that something always moves.

Each test restates one line of a list of faults that were found in other engines; its id is in the name. Liveness is
checked by `drive`: no step may compute nothing while a request is unfinished, and there is an end.
"""

from __future__ import annotations

import pytest

from contbatch.request import FinishReason
from tests.cases.common import ALL, block_tables, drive, first_step, grants, preemptions
from tests.toy import assert_alone, assert_empty, config, params, prompt, serve, toy_engine

FORESIGHTED = ("Orca", "PeakMemory")
"""Policies that admit nobody whom they would have to preempt."""


# Block-size boundary


def blocks_held(bs: int, length: int, steps: int) -> list[int]:
    """Blocks of a request alone, after each step."""
    engine, _ = toy_engine(config(bs=bs))
    serve(engine, {"a": prompt(length)}, params(steps))
    return [len(tables["a"]) for _, tables in block_tables(engine.trace)]


@pytest.mark.parametrize(("length", "held"), [(3, [1, 1, 2]), (4, [1, 2, 2]), (5, [2, 2, 2])])
def test_b031_a_block_is_taken_when_its_first_token_is_written(length: int, held: list[int]) -> None:
    assert blocks_held(4, length, 3) == held


@pytest.mark.parametrize("bs", [1, 2, 3, 16])
def test_b031_blocks_are_the_tokens_rounded_up(bs: int) -> None:
    for length in range(1, 2 * bs + 2):
        assert blocks_held(bs, length, 6) == [-(-(length + step) // bs) for step in range(6)]


@pytest.mark.parametrize("policy", ALL)
def test_b032_admission_counts_blocks_not_tokens(policy: str) -> None:
    engine, toy = toy_engine(config(pool=4, bs=4, mml=16), policy)
    done = serve(engine, {f"r{index}": prompt(1, index) for index in range(5)}, params(1))
    assert_alone(toy, done, params(1))
    assert max(step.num_running for step in engine.trace.steps) <= 4
    if policy == "VllmV1":
        assert [step.num_tokens for step in engine.trace.steps] == [4, 1]
        assert engine.trace.steps[0].reasons["r4"] == ("blocks", 1, 0)


@pytest.mark.parametrize("blocks", [(1, 1, 1, 1, 1, 1), (1, 2, 1, 3, 2, 1)])
def test_b033_five_blocks_for_six_who_need_one_cost_one_preemption(blocks: tuple[int, ...]) -> None:
    engine, toy = toy_engine(config(pool=sum(blocks) + 5, bs=4, seqs=6, prefix=False))
    for index, count in enumerate(blocks):
        engine.add_request(prompt(4 * count, index), params(8), request_id=f"r{index}")
    engine.step()
    assert engine.trace.steps[0].free_blocks == 5
    engine.step()
    assert engine.trace.steps[1].preempted == ["r5"]
    assert grants(engine.trace.steps[1]) == {f"r{index}": 1 for index in range(5)}
    drive(engine)
    assert_alone(toy, engine.completions, params(8))


# Deadlock, livelock, empty steps


@pytest.mark.parametrize("policy", ALL)
def test_b034_both_finish_with_a_tiny_pool(policy: str) -> None:
    engine, toy = toy_engine(config(pool=7, bs=4, mml=28), policy)
    engine.add_request(prompt(16), params(5), request_id="A")
    engine.add_request(prompt(12, 1), params(5), request_id="B")
    drive(engine)
    assert_alone(toy, engine.completions, params(5))
    assert any(step.num_running == 1 for step in engine.trace.steps), "they do not fit together to the end"
    assert_empty(engine)


def test_b036_one_victim_that_holds_enough_is_one_victim() -> None:
    engine, toy = toy_engine(config(pool=5, bs=4))
    for index, (name, length) in enumerate((("a", 4), ("b", 4), ("c", 12))):
        engine.add_request(prompt(length, index), params(5), request_id=name)
    engine.step()
    assert engine.trace.steps[-1].free_blocks == 0, "each of them needs a block now"
    engine.step()
    assert engine.trace.steps[-1].preempted == ["c"] and grants(engine.trace.steps[-1]) == {"a": 1, "b": 1}
    drive(engine)
    assert_alone(toy, engine.completions, params(5))


@pytest.mark.parametrize("policy", ALL)
def test_b036_preemptions_are_bounded_by_steps(policy: str) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, seqs=8, mml=32), policy)
    done = serve(engine, {f"r{index}": prompt(5, index) for index in range(8)}, params(12))
    assert_alone(toy, done, params(12))
    assert preemptions(engine.trace) <= len(engine.trace.steps)
    assert preemptions(engine.trace) > 0 or policy in FORESIGHTED


@pytest.mark.parametrize("policy", ALL)
def test_b037_aborting_everybody_leaves_nothing_to_do(policy: str) -> None:
    engine, _ = toy_engine(config(), policy)
    for index in range(3):
        engine.add_request(prompt(6, index), params(9))
    engine.step()
    for name in [request.request_id for request in engine.scheduler.running]:
        engine.abort(name)
    engine.abort_all()
    assert engine.step() == [] and not engine.has_unfinished and len(engine.trace.steps) == 1
    assert_empty(engine)


@pytest.mark.parametrize("policy", ALL)
def test_b037_those_who_wait_go_on_when_all_running_ones_are_aborted(policy: str) -> None:
    engine, toy = toy_engine(config(seqs=2), policy)
    names = [engine.add_request(prompt(6, index), params(9)) for index in range(4)]
    engine.step()
    running = [request.request_id for request in engine.scheduler.running]
    for name in running:
        engine.abort(name)
    drive(engine)
    assert_alone(toy, {name: engine.completions[name] for name in set(names) - set(running)}, params(9))


@pytest.mark.parametrize("policy", ALL)
def test_b039_no_more_run_than_there_are_blocks_for(policy: str) -> None:
    engine, toy = toy_engine(config(pool=3, bs=32, seqs=8, budget=8, mml=96), policy)
    done = serve(engine, {f"r{index}": prompt(8, index) for index in range(6)}, params(8))
    assert_alone(toy, done, params(8))
    assert max(step.num_running for step in engine.trace.steps) <= 3


@pytest.mark.parametrize("policy", ALL)
@pytest.mark.parametrize("length", [4, 8, 12])
def test_b040_a_prompt_that_fills_its_blocks_decodes_on(length: int, policy: str) -> None:
    engine, toy = toy_engine(config(bs=4), policy)
    assert_alone(toy, serve(engine, {"a": prompt(length)}, params(6)), params(6))
    assert len(engine.completions["a"].token_ids) == 6


def test_b041_a_newcomer_is_served_right_after_the_hog() -> None:
    """First come, first served promises no fairness; a cap on long prompts does."""
    engine, _ = toy_engine(config(budget=4, seqs=3))
    engine.add_request(prompt(40), params(3), request_id="hog")
    engine.step()
    engine.add_request(prompt(3, 1), params(3), request_id="new")
    drive(engine)
    assert first_step(engine.trace, "new") == 10, "the hog's prompt takes steps 0 to 9"
    assert grants(engine.trace.steps[10]) == {"hog": 1, "new": 3} and "new" in engine.trace.steps[10].sampled


def test_b041_a_cap_on_long_prompts_lets_the_newcomer_in_at_once() -> None:
    engine, _ = toy_engine(config(budget=4, seqs=3, long_cap=1))
    engine.add_request(prompt(40), params(3), request_id="hog")
    engine.step()
    engine.add_request(prompt(3, 1), params(3), request_id="new")
    drive(engine)
    answered = next(step.step for step in engine.trace.steps if "new" in step.sampled)
    begun = next(step.step for step in engine.trace.steps if "hog" in step.sampled)
    assert first_step(engine.trace, "new") == 1 and answered == 3 < begun


@pytest.mark.parametrize("policy", ALL)
def test_b043_a_request_without_a_limit_ends_when_the_pool_is_full(policy: str) -> None:
    engine, toy = toy_engine(config(pool=8, bs=4, mml=64), policy)
    serve(engine, {"A": prompt(9)}, params(3))
    done = serve(engine, {"B": prompt(9)}, params(None))["B"]
    assert done.finish_reason is FinishReason.LENGTH
    assert done.token_ids == toy.alone(prompt(9), params(8 * 4 + 1 - 9)), "the last token needs no slot"
    assert engine.trace.steps[3].cached == {"B": 8}


@pytest.mark.parametrize("policy", ALL)
def test_b044_twenty_chats_one_after_another(policy: str) -> None:
    engine, toy = toy_engine(config(pool=16, bs=4, mml=32), policy)
    for chat in range(20):
        history = prompt(4, chat)
        for turn in range(2):
            engine.add_request(history, params(5), request_id=f"{chat}/{turn}")
            drive(engine)
            done = engine.completions[f"{chat}/{turn}"]
            assert done.token_ids == toy.alone(history, params(5))
            history = [*history, *done.token_ids, *prompt(4, chat + turn)]
    assert_empty(engine)

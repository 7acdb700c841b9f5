"""Cases of the prefix cache: what a hit covers, what it may never confuse, and that it changes no result."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from contbatch import Engine, FinishReason, ScriptedExecutor, VllmV1
from contbatch.errors import InvalidRequest
from tests.cases.common import drive, grants
from tests.toy import assert_alone, config, params, prompt, serve, toy_engine


def cached(engine: Engine, name: str) -> int:
    """Tokens that a request took from the cache when it was first admitted."""
    return sum(step.cached.get(name, 0) for step in engine.trace.steps if name in step.admitted)


def in_turn(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> list[int]:
    """Serve prompts one after the other; what each took from the cache."""
    names = [engine.generate([tokens], params(max_tokens))[0].request_id for tokens in prompts]
    return [cached(engine, name) for name in names]


def test_b109_a_prompt_seen_before_computes_at_least_one_token_and_gets_the_same_logits() -> None:
    from tests.cases.recorded import TOLERANCE, assert_dense, gap, greedy, model_engine
    from tests.models.tiny import tokens

    engine, recorder = model_engine(config(bs=16))
    first, second = (engine.generate([tokens(32)], greedy(3))[0] for _ in range(2))
    assert cached(engine, second.request_id) == 16
    again = next(step for step in engine.trace.steps if second.request_id in step.request_ids)
    assert grants(again) == {second.request_id: 16}
    assert first.token_ids == second.token_ids
    assert gap(recorder.logits[first.request_id], recorder.logits[second.request_id]) < TOLERANCE
    assert_dense(recorder, second.request_id, [*tokens(32), *second.token_ids])


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32)])
def test_b110_hits_cover_whole_blocks(length: int, hit: int) -> None:
    engine, _ = toy_engine(config(bs=16))
    assert in_turn(engine, [prompt(length, length)] * 3) == [0, hit, hit]


@pytest.mark.parametrize("bs", [1, 2, 3, 4, 16])
def test_b110_at_most_all_tokens_but_one_for_any_block_size(bs: int) -> None:
    engine, _ = toy_engine(config(bs=bs, pool=128))
    for length in range(1, 2 * bs + 3):
        hit = (length - 1) // bs * bs
        assert in_turn(engine, [prompt(length, length)] * 3) == [0, hit, hit]


@pytest.mark.parametrize(("budget", "hit"), [(64, 8), (9, 8), (4, 8), (3, 8)])
def test_b114_equal_prompts_added_before_the_first_step(budget: int, hit: int) -> None:
    """With budget 4 the first one's prompt is half computed when the second one could start."""
    outputs = []
    for prefix in (True, False):
        engine, toy = toy_engine(config(budget=budget, prefix=prefix))
        done = serve(engine, {"a": prompt(9), "b": prompt(9)}, params(5))
        assert_alone(toy, done, params(5))
        assert cached(engine, "a") == 0 and cached(engine, "b") == (hit if prefix else 0)
        outputs.append([completion.token_ids for completion in done.values()])
    assert outputs[0] == outputs[1] and outputs[0][0] == outputs[0][1]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([65] * 9, [321] * 9),
        ([0] * 9, [65536] * 9),
        ([1, 23] * 5, [12, 3] * 5),
        ([0] * 9, [256] * 9),
        ([1, 2, 3, 4] * 3, [4, 3, 2, 1] * 3),
    ],
)
def test_b118_tokens_that_look_alike_are_no_hit(one: list[int], other: list[int]) -> None:
    for pair in ([one, other], [other, one]):
        engine = Engine(ScriptedExecutor(), config(bs=4))
        assert in_turn(engine, [*pair, *pair]) == [0, 0, 8, 8]


def test_b119_a_constant_hash_gives_no_wrong_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def constant(*_: object) -> bytes:
        asked.append(1)
        return b"same"

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "contbatch" and hasattr(module, "block_hash"):
            monkeypatch.setattr(module, "block_hash", constant)
    tail = prompt(9, 5)
    prompts = [prompt(13), prompt(13, 1), prompt(13, 2), prompt(4) + tail, prompt(4, 1) + tail, prompt(8, 3) + tail]
    engine, toy = toy_engine(config(bs=4, pool=64))
    for index, tokens in enumerate(prompts):
        done = serve(engine, {str(index): tokens}, params(6))
        assert_alone(toy, done, params(6))
    assert asked and [cached(engine, str(index)) for index in (0, 1, 2)] == [0, 0, 0]


def test_b120_the_key_of_a_block_depends_on_all_tokens_before_it() -> None:
    first, second, shared = prompt(4), prompt(4, 1), prompt(4, 2)
    engine, toy = toy_engine(config(bs=4))
    assert in_turn(engine, [[*first, *shared, 9], [*second, *shared, 9], [*second, *shared, 8]]) == [0, 0, 8]
    assert in_turn(engine, [[*shared, 9]]) == [0], "the same tokens at another place are another block"
    assert_alone(toy, serve(engine, {"a": [*second, *shared, 7]}, params(6)), params(6))


def test_b121_a_hit_that_is_evicted_before_its_turn_is_computed_again() -> None:
    engine, toy = toy_engine(config(pool=6, bs=4, seqs=1), VllmV1("priority"))
    assert in_turn(engine, [prompt(9)]) == [0]
    engine.add_request(prompt(9), params(3), request_id="B")
    assert engine.scheduler.pool.num_cached == 2, "a hit is possible"
    engine.add_request(prompt(24, 1), params(1), request_id="A", priority=-1)
    drive(engine)
    assert cached(engine, "B") == 0
    assert grants(next(step for step in engine.trace.steps if "B" in step.request_ids)) == {"B": 9}
    assert_alone(toy, {"B": engine.completions["B"]}, params(3))
    assert_alone(toy, {"A": engine.completions["A"]}, params(1))


@pytest.mark.parametrize("answer", range(1, 10))
def test_b124_the_next_turn_hits_the_whole_blocks_that_were_computed(answer: int) -> None:
    """The last token of an answer is never computed, so it fills no block: the case counts it, the rules do not."""
    engine, toy = toy_engine(config(bs=4))
    first = engine.generate([prompt(10)], params(answer))[0]
    turn = [*prompt(10), *first.token_ids, *prompt(9, 9)]
    other = [*prompt(10), *first.token_ids[:-1], (first.token_ids[-1] + 1) % 251, *prompt(9, 9)]
    done = serve(engine, {"turn": turn, "other": other}, params(4))
    assert cached(engine, "turn") == (10 + answer - 1) // 4 * 4
    assert cached(engine, "other") == (10 + answer - 1) // 4 * 4, "nothing after the first difference"
    assert_alone(toy, done, params(4))


def test_b125_twenty_prompts_get_the_same_tokens_and_logits_with_the_cache_and_without() -> None:
    from tests.cases.recorded import TOLERANCE, gap, greedy, model_engine
    from tests.models.tiny import tokens

    runs = []
    for prefix in (True, False):
        engine, recorder = model_engine(config(pool=24, bs=4, prefix=prefix, seqs=4, budget=16))
        prompts = {f"r{index}": [*tokens(4 * (index % 4)), *tokens(5, 1 + index)] for index in range(20)}
        done = serve(engine, prompts, greedy(6))
        assert any(step.cached for step in engine.trace.steps) is prefix
        runs.append(({name: completion.token_ids for name, completion in done.items()}, recorder.logits))
    assert runs[0][0] == runs[1][0]
    assert max(gap(runs[0][1][name], runs[1][1][name]) for name in runs[0][0]) < TOLERANCE


@pytest.mark.parametrize("length", range(4))
def test_b127_prompts_shorter_than_a_block(length: int) -> None:
    engine, _ = toy_engine(config(bs=4))
    if not length:
        with pytest.raises(InvalidRequest, match="empty prompt"):
            engine.add_request([], params(1))
    else:
        assert in_turn(engine, [prompt(length)] * 3) == [0, 0, 0]
    assert engine.scheduler.pool.num_cached == 0


def test_b128_a_second_run_takes_as_many_steps_and_gives_the_same_tokens() -> None:
    engine, _ = toy_engine(config(bs=4))
    outputs = []
    for name in "ab":
        before = engine.trace.num_steps
        outputs.append(serve(engine, {name: prompt(8)}, params(3))[name])
        assert engine.trace.num_steps - before == 3
    assert outputs[0].token_ids == outputs[1].token_ids and len(outputs[1].token_ids) == 3
    assert outputs[1].finish_reason is FinishReason.LENGTH


def test_b129_only_what_is_not_cached_counts_against_the_budget() -> None:
    engine, _ = toy_engine(config(budget=8, bs=4))
    serve(engine, {"a": prompt(40)}, params(1))
    assert engine.trace.num_steps == 5
    serve(engine, {"b": prompt(40)}, params(1))
    assert engine.trace.num_steps == 6 and cached(engine, "b") == 36
    assert grants(engine.trace.steps[5]) == {"b": 4}


def test_b130_chunks_that_end_inside_a_block() -> None:
    """Chunks are as large as the budget, not aligned to blocks: 13, 13, 4."""
    engine, toy = toy_engine(config(budget=13, bs=4))
    assert_alone(toy, serve(engine, {"a": prompt(30)}, params(1)), params(1))
    assert [step.counts for step in engine.trace.steps] == [[13], [13], [4]]
    assert engine.scheduler.pool.num_cached == 7
    assert_alone(toy, serve(engine, {"b": prompt(30)}, params(6)), params(6))
    assert cached(engine, "b") == 28

"""The scripted executor: made-up tokens that are the same alone, in a batch, and when a step is run again."""

from __future__ import annotations

import pytest

from contbatch.batch import ScheduledBatch
from contbatch.engine import Engine
from contbatch.errors import StepFailed
from contbatch.executor import Executor, ScriptedExecutor
from tests.toy import config, params, prompt


def test_the_nth_token_comes_from_the_script() -> None:
    engine = Engine(ScriptedExecutor({"a": [7, 8, 9], "b": [5]}), config(budget=4))
    engine.add_request(prompt(6), params(3), request_id="a")
    engine.add_request(prompt(6, 1), params(2), request_id="b")
    engine.run()
    assert engine.completions["a"].token_ids == (7, 8, 9)
    assert engine.completions["b"].token_ids == (5, 1007), "made of the position where the script has ended"


def test_made_up_tokens_stay_in_the_vocabulary() -> None:
    executor: Executor = ScriptedExecutor(vocab_size=10, eos_token_ids=[3], max_model_len=32)
    assert (executor.vocab_size, executor.eos_token_ids, executor.max_model_len) == (10, frozenset([3]), 32)
    done = Engine(executor, config()).generate([[1] * 5], params(9, ignore_eos=True))[0]
    assert done.token_ids == tuple((1000 + position) % 10 for position in range(5, 14))


def test_a_function_may_be_the_script() -> None:
    engine = Engine(ScriptedExecutor(lambda name, position: len(name) * 100 + position), config())
    engine.add_request(prompt(4), params(2), request_id="abc")
    engine.run()
    assert engine.completions["abc"].token_ids == (304, 305)


def test_a_preemption_changes_no_token() -> None:
    scripts = {name: list(range(start, start + 12)) for name, start in (("a", 10), ("b", 50), ("c", 90))}
    engine = Engine(ScriptedExecutor(scripts), config(pool=6, bs=4))
    for index, name in enumerate(scripts):
        engine.add_request(prompt(6, index), params(12), request_id=name)
    engine.run()
    assert any(step.preempted for step in engine.trace.steps)
    assert {name: list(done.token_ids) for name, done in engine.completions.items()} == scripts


@pytest.mark.parametrize("length", [3, 4, 5, 9])
def test_an_id_that_is_used_again_starts_its_script_anew(length: int) -> None:
    engine = Engine(ScriptedExecutor({"a": [7, 8, 9]}), config())
    for tokens in (prompt(4), prompt(length, 1)):
        engine.add_request(tokens, params(3), request_id="a")
        engine.run()
        assert engine.completions["a"].token_ids == (7, 8, 9)


def test_a_step_that_is_run_again_gives_the_same_tokens() -> None:
    class Flaky(ScriptedExecutor):
        """Fails after the work is done, every second time."""

        calls = 0

        def execute(self, batch: ScheduledBatch, sampling: object) -> dict[str, int | Exception]:
            """The tokens, or a failure in their place."""
            tokens = dict(super().execute(batch, {}))
            self.calls += 1
            if self.calls % 2:
                raise RuntimeError("lost on the way")
            return tokens

    engine = Engine(Flaky({"a": [7, 8, 9]}), config())
    engine.add_request(prompt(4), params(3), request_id="a")
    while engine.has_unfinished:
        with pytest.raises(StepFailed):
            engine.step()
        engine.step()
    assert engine.completions["a"].token_ids == (7, 8, 9)

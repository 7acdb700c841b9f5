"""The player and the metrics count the same things."""

from __future__ import annotations

from contbatch import Engine, SamplingParams, SchedulerConfig, ScriptedExecutor, summarise
from contbatch.viz.view import View


def test_tokens_computed_again_are_those_of_the_metrics() -> None:
    """The newest token of a preempted request was never computed: computing it is not computing it again."""
    config = SchedulerConfig(num_blocks=14, block_size=4, max_num_batched_tokens=24, max_num_seqs=6)
    engine = Engine(ScriptedExecutor(), config)
    for index in range(8):
        engine.add_request(range(index * 20, index * 20 + 5 + 2 * index), SamplingParams(max_tokens=8 + index))
    engine.run()
    metrics = summarise(engine.trace)
    assert metrics.preemptions > 0
    assert f"{metrics.recomputed_tokens} computed again" in View(engine.trace).summary

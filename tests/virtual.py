"""An executor whose forward passes move a virtual clock by given times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from contbatch.batch import ScheduledBatch
from contbatch.executor import ScriptedExecutor
from contbatch.request import SamplingParams
from contbatch.simulator import VirtualClock


class TimedExecutor(ScriptedExecutor):
    """Made-up tokens; forward passes take `durations` seconds, in turn."""

    def __init__(self, clock: VirtualClock, durations: Sequence[float] = (1.0,), **scripted: Any) -> None:
        super().__init__(**scripted)
        self._clock, self._durations, self._passes = clock, durations, 0

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        self._clock.advance(self._durations[self._passes % len(self._durations)])
        self._passes += 1
        return super().execute(batch, sampling)

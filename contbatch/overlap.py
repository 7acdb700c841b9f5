"""The loop that plans ahead: the next step is planned and launched while the device works on this one.

The plain loop stands in `contbatch.engine`: plan, execute, commit. Here `step` launches step n + 1, planned as if step
n had succeeded (`contbatch.ahead`), and then waits for the tokens of step n and tells everybody.

Four cases wait for step n before anything else is done, because that is simple and they are rare: a step that brings
requests back from host memory is committed before the next one is planned; a step that copies blocks is launched
when the one before it is done; the step after a failed one is not planned ahead; and neither is one in which nobody
would get a token. A step that failed is undone with the one planned behind it, and planned again by the next call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from contbatch.ahead import Ahead
from contbatch.batch import ScheduledBatch
from contbatch.errors import ContbatchError, InvalidConfig, StepFailed
from contbatch.plan import IterationPlan
from contbatch.request import SamplingParams
from contbatch.trace import StepRecord

if TYPE_CHECKING:
    from contbatch.engine import Engine, TokenEvent


class Handle(Protocol):
    """A launched forward pass."""

    def result(self) -> Mapping[str, int | Exception]:
        """Wait for it: what `Executor.execute` returns. Raising from here fails the step."""
        ...


@runtime_checkable
class Launcher(Protocol):
    """What an executor needs beside `Executor` so that the engine can plan ahead."""

    def launch(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Handle:
        """Start a forward pass and return at once. Launched steps run one after the other, in this order.

        What is needed of `batch` and `sampling` is read before this returns. A decode part whose token is not known
        yet carries `(UNKNOWN_TOKEN,)`: its token is the one that the step before sampled for the same `kv_cache_slot`.
        Raising from here means that nothing was started.
        """
        ...


class Launched:
    """A step on its way.

    Args:
        ahead: its books.
        record: its record so far.
    """

    def __init__(self, ahead: Ahead, record: StepRecord) -> None:
        self.ahead = ahead
        self.record = record
        self.handle: Handle | None = None
        self.gone: set[str] = set()
        """Requests that ended before it was committed."""
        self._outcome: Mapping[str, int | Exception] | Exception | None = None

    def wait(self) -> bool:
        """Have its outcome; False if it failed."""
        if self._outcome is None and self.handle is not None:
            try:
                found: object = self.handle.result()
                if not isinstance(found, Mapping):
                    raise TypeError(f"result returned {type(found).__name__}, not a mapping of tokens")
                self._outcome = found
            except Exception as error:
                self._outcome = error
        return not isinstance(self._outcome, Exception)

    def result(self) -> Mapping[str, int | Exception]:
        """Its tokens.

        Raises:
            StepFailed: what the executor raised is its cause.
        """
        self.wait()
        if isinstance(self._outcome, Exception):
            raise failed(self.record.step, self._outcome) from self._outcome
        return self._outcome or {}


def failed(number: int, error: Exception) -> StepFailed:
    """What is raised for a forward pass that raised."""
    return StepFailed(
        f"the forward pass of step {number} raised {error!r}; call step() to plan and run it again, or abort requests"
    )


class OverlappedLoop:
    """The steps of one engine, planned ahead.

    Args:
        engine: whose steps these are.

    Raises:
        InvalidConfig: its executor cannot launch a step.
    """

    def __init__(self, engine: Engine) -> None:
        executor: object = engine.executor
        if not isinstance(executor, Launcher):
            raise InvalidConfig(
                f"overlap is True and {type(executor).__name__} has no launch(batch, sampling); "
                "use overlap=False, or an executor that can launch a step without waiting for it"
            )
        self._engine = engine
        self._executor = executor
        self._flying: Launched | None = None
        self._fault: ContbatchError | None = None
        """What planning or launching ahead raised; the step before it is committed first."""
        self._victims: list[str] = []
        """Who was sent back to the queue by a plan that was undone, and is in no record yet."""
        self._is_careful = False

    @property
    def is_flying(self) -> bool:
        """True while a step that is not committed is on its way."""
        return self._flying is not None

    def ended(self, request_id: str) -> None:
        """A request ended: what is on its way for it is thrown away."""
        if self._flying is not None:
            self._flying.gone.add(request_id)

    def step(self) -> list[TokenEvent]:
        """Launch the next step, then commit the one that was launched before it.

        Raises:
            StepFailed: launching or computing raised. What was planned is undone; the next call plans again.
            PolicyError, SchedulerStalled: from the policy; its grants are undone.
        """
        self._discard_void()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        if self._flying is None:
            plan, record = self._plan(self._engine.trace.num_steps)
            if not plan.has_work:
                return self._engine._commit(plan, {}, record)
            self._flying = self._launch(plan, record)
        flying, following = self._flying, None
        try:
            following = self._launch_ahead(flying)
            sampled = flying.result()
        except BaseException:
            self._give_up(flying, following)
            raise
        return self._commit(flying, sampled, following)

    def _plan(self, number: int) -> tuple[IterationPlan, StepRecord]:
        engine, start = self._engine, self._engine.now()
        plan = engine._plan()
        engine._next_step = number + 1
        record = engine.record(plan, start)
        record.step = number
        return plan, record

    def _launch(self, plan: IterationPlan, record: StepRecord) -> Launched:
        """Copy what is swapped out, then what is swapped in, and start the forward pass."""
        launched = Launched(Ahead(self._engine.scheduler, plan), record)
        try:
            if plan.swap_out_blocks:
                self._engine.executor.swap_out(plan.swap_out_blocks)
            if plan.swap_in_blocks:
                self._engine.executor.swap_in(plan.swap_in_blocks)
            launched.handle = self._executor.launch(plan.to_scheduled_batch(record.step), self._engine._sampling)
        except BaseException as error:
            self._withdraw(launched)
            self._is_careful = True
            if not isinstance(error, Exception):
                raise
            raise failed(record.step, error) from error
        return launched

    def _launch_ahead(self, flying: Launched) -> Launched | None:
        """Plan and launch what follows `flying`; None where that has to wait."""
        if self._is_careful or flying.ahead.plan.swap_in_requests:
            return None
        engine = self._engine
        engine._half_done = True
        flying.ahead.assume()
        engine._half_done = False
        if not engine.has_unfinished:
            return None
        try:
            plan, record = self._plan(flying.record.step + 1)
            moves = plan.swap_out_blocks or plan.swap_in_blocks
            if not plan.has_work or (moves and not flying.wait()):
                self._withdraw(Launched(Ahead(engine.scheduler, plan), record))
                return None
            return self._launch(plan, record)
        except ContbatchError as error:  # the step that is on its way is committed first
            self._fault = error
            return None

    def _commit(
        self, flying: Launched, sampled: Mapping[str, int | Exception], following: Launched | None
    ) -> list[TokenEvent]:
        engine, ahead = self._engine, flying.ahead
        engine._half_done = True
        if not ahead.is_assumed:
            ahead.assume()
        self._flying, self._is_careful = following, False
        flying.record.drop(flying.gone)
        events = engine._publish(ahead.settle(sampled), flying.record)
        if self._victims:
            self._record_undone()
        engine._half_done = False
        self._discard_void()
        return events

    def _discard_void(self) -> None:
        """Forget a launched step in which nobody is left."""
        flying = self._flying
        if flying is not None and flying.ahead.is_void:
            self._flying = None
            self._withdraw(flying)
            self._record_undone()
            flying.wait()
        if not self._engine.has_unfinished:
            self._fault = None

    def _give_up(self, flying: Launched, following: Launched | None) -> None:
        """A launched step failed: undo it, and before it the one that was planned behind it."""
        self._flying, self._fault, self._is_careful = None, None, True
        if following is not None:
            self._withdraw(following)
        self._withdraw(flying)
        self._record_undone()
        if following is not None:
            following.wait()  # nothing is on its way when the next step is launched

    def _withdraw(self, launched: Launched) -> None:
        engine = self._engine
        engine._half_done = True
        self._victims += launched.ahead.withdraw()
        engine._next_step = launched.record.step
        engine._half_done = False

    def _record_undone(self) -> None:
        """The preemptions of what was undone stand, as a step in which nothing else happened."""
        victims, self._victims = self._victims, []
        self._engine._record_undone(victims)

"""The engine: the loop that serves requests.

One iteration is plan, execute, commit, record. The engine owns the clock, the tokenizer and the trace; the
scheduler decides, the executor computes. It is single-threaded: whoever calls `step`, `run`, `generate` or
iterates a stream drives it. Nothing here knows how a token is computed, and no HTTP server is included.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from contbatch.config import SchedulerConfig
from contbatch.detokenize import Decoder, IncrementalDetokenizer
from contbatch.errors import DeadlineExceeded, DuplicateRequest, InvalidConfig, InvalidRequest, StepFailed
from contbatch.executor import Executor
from contbatch.overlap import OverlappedLoop
from contbatch.plan import Grants, IterationPlan
from contbatch.policies import policy_by_name
from contbatch.policy import Policy
from contbatch.request import LARGEST, FinishReason, Priority, Request, RunningRequest, SamplingParams
from contbatch.scheduler import Output, Scheduler
from contbatch.trace import FinishRecord, RequestRecord, StepRecord, Trace, TraceFile


class Tokenizer(Decoder, Protocol):
    """Text to token ids and back."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


class TokenEvent(NamedTuple):
    """One thing that happened to a request in a step.

    Args:
        request_id: whose event this is.
        token_id: the token that was generated, if any.
        text: text that became final with this event; "" while it is held back.
        finish_reason: set on the last event of a request, and only there.
        step: number of the step.
    """

    request_id: str
    token_id: int | None
    text: str
    finish_reason: FinishReason | None
    step: int


@dataclass(frozen=True)
class Completion:
    """A finished request.

    Args:
        request_id: whose completion this is.
        prompt: the prompt as text, if it was given as text.
        prompt_token_ids, token_ids: prompt and generated tokens.
        text: the generated text, without the stop string that ended it.
        finish_reason: why it ended.
        error: the exception that ended it, with finish reason ERROR.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: Exception | None = None


@dataclass
class _Client:
    """What the engine keeps per unfinished request beside the scheduler's record."""

    detokenizer: IncrementalDetokenizer
    on_event: Callable[[TokenEvent], None] | None
    events: deque[TokenEvent] | None = None
    """Events that a stream has not given out yet; None where nobody streams."""
    error: Exception | None = None
    keeps: bool = True
    """Whether somebody will ask for its completion."""
    is_silent: bool = False
    """True if its tokens give no text and nobody listens."""


class Engine:
    """Serves many requests at once.

    Args:
        executor: runs the forward pass.
        config: limits of the scheduler; `max_model_len` is lowered to what the executor can process.
        policy: a scheduling policy or its name.
        tokenizer: needed for text prompts, text output and stop strings.
        clock: seconds; a virtual clock makes runs repeatable.
        model_name: written into the trace.
        seed: where a sampled request brings no seed, its seed comes from here.
        record_to: write the trace to this file as the run goes on, and keep neither it nor completions in memory.
            Close the engine at the end.
        overlap: plan the next step while the device works on this one; the executor must be able to `launch` (see
            `contbatch.overlap.Launcher`). The tokens are the same.

    Raises:
        InvalidConfig, UnknownName: for limits or a policy that do not exist.
    """

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig | None = None,
        policy: Policy | str = "VllmV1",
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        model_name: str = "",
        seed: int = 0,
        record_to: str | Path | None = None,
        overlap: bool = False,
    ) -> None:
        config = config or SchedulerConfig()
        if executor.max_model_len is not None and executor.max_model_len < config.max_model_len:
            config = replace(config, max_model_len=executor.max_model_len)
        self.executor = executor
        self.config = config
        self.tokenizer = tokenizer
        self.clock = clock
        self._start = clock()
        self._random = random.Random(seed)
        self.scheduler = Scheduler(
            config,
            policy_by_name(policy) if isinstance(policy, str) else policy,
            executor.eos_token_ids,
            executor.vocab_size,
        )
        about = (self.scheduler.policy.name, model_name, asdict(config))
        self.trace = Trace(*about) if record_to is None else TraceFile(record_to, *about)
        self._keeps = record_to is None
        self.completions: dict[str, Completion] = {}
        """The last completion of each request id that was not collected by `generate` or `stream`."""
        self._clients: dict[str, _Client] = {}
        self._sampling: dict[str, SamplingParams] = {}
        self._ahead = OverlappedLoop(self) if overlap else None
        self._pending: IterationPlan | None = None
        """A plan whose forward pass has not succeeded yet."""
        self._moves_done = 0
        """How many kinds of copies (out, in) of that plan were made."""
        self._deadlines: list[tuple[float, int, RunningRequest]] = []
        self._in_step = False
        self._closed = False
        self._half_done = False
        """True while an interrupt would leave the books of a step half written."""
        self._deferred_aborts: list[RunningRequest] = []
        """Requests to abort at the end of the running step."""
        self._interrupt: BaseException | None = None
        """What interrupted a callback, such as Ctrl-C; raised when the step is complete."""
        self._next_step = 0
        """First step that a request added now can be part of."""
        self._num_ids = 0
        self._given_ids: set[str] = set()
        """Ids that callers gave, where the trace forgets them."""

    @classmethod
    def load(
        cls,
        model: str = "pocket",
        *,
        device: str = "cpu",
        dtype: str = "auto",
        policy: Policy | str = "VllmV1",
        seed: int = 0,
        overlap: bool = False,
        kernels: str = "auto",
        progress: Callable[[str, int, int], None] | None = None,
        **limits: Any,
    ) -> Engine:
        """An engine with a real model.

        Args:
            model: "pocket" (the model inside the package), another known name, a folder, or a GGUF file.
            device: "cpu", "cuda" or "mps".
            dtype: "auto", "float32", "bfloat16", "float16" or "float64".
            policy, seed, overlap: as in `Engine`.
            kernels: "native" (compiled for this processor), "plain" (PyTorch only), or "auto": the first that there is.
            progress: called while the model is fetched and loaded, as in `contbatch.models.load_model`.
            limits: fields of `SchedulerConfig`.
        """
        try:
            config = SchedulerConfig(**limits)
        except TypeError as error:
            names = ", ".join(SchedulerConfig.__dataclass_fields__)
            raise InvalidConfig(f"{error}; the limits are {names}") from error
        from contbatch.models import ModelExecutor, load_model

        loaded = load_model(model, device=device, dtype=dtype, progress=progress)
        executor = ModelExecutor(loaded, config.num_blocks, config.block_size, config.num_host_blocks, kernels)
        executor.drop_plain_weights()
        return cls(executor, config, policy, loaded.tokenizer, model_name=loaded.name, seed=seed, overlap=overlap)

    @property
    def has_unfinished(self) -> bool:
        """True while any request is unfinished."""
        return self.scheduler.has_unfinished

    def now(self) -> float:
        """Seconds since the engine was made."""
        return self.clock() - self._start

    # Requests

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = Priority.NORMAL,
        on_event: Callable[[TokenEvent], None] | None = None,
        client: str = "",
        arrival_time: float | None = None,
        timeout: float | None = None,
    ) -> str:
        """Queue a request; returns its id.

        Args:
            prompt: text, or token ids.
            sampling: how to sample and when to stop; default `SamplingParams()`.
            request_id: any string that no unfinished request uses; made up if None.
            priority: lower is more urgent (priority policies only).
            on_event: called with each event of this request. If it raises, this request alone ends with ERROR.
            client: who asks (fair-share policies only).
            arrival_time: seconds since the engine was made, for traffic that came before this call; None is now.
            timeout: seconds after its arrival at which it is aborted if it has not finished; None for no limit.

        Raises:
            InvalidRequest: and its kinds; nothing else is affected.
        """
        self._check_usable()
        sampling = self._seeded(sampling or SamplingParams())
        arrived = self.now() if arrival_time is None else arrival_time
        request = Request(
            self._new_id() if request_id is None else request_id,
            self._encode(prompt),
            sampling,
            priority,
            arrived,
            prompt if isinstance(prompt, str) else None,
            client,
            _deadline(arrived, timeout),
        )
        name = request.request_id
        if name in self._clients:
            raise DuplicateRequest(f"request id {name!r} is in use by an unfinished request; use another id")
        if name in self._given_ids:
            raise DuplicateRequest(f"request id {name!r} was used before in this recorded run; use another id")
        record = self._add(request)
        detokenizer = IncrementalDetokenizer(self.tokenizer, sampling.stop_strings)
        is_silent = on_event is None and self.tokenizer is None
        self._clients[name] = _Client(detokenizer, on_event, keeps=self._keeps, is_silent=is_silent)
        self._sampling[name] = sampling
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, record.index, record))
        if name in self.trace.requests:
            self._free_name(name)
        if request_id is not None and not self._keeps:
            self._given_ids.add(name)
        self.trace.requests[name] = self._request_record(record)
        if not self._in_step:
            self._end_deferred()  # what the policy's `on_add` aborted
        return name

    def _add(self, request: Request) -> RunningRequest:
        """The policy is told of it, and may not drive the engine meanwhile."""
        inside, self._in_step = self._in_step, True
        try:
            return self.scheduler.add(request)
        finally:
            self._in_step = inside

    def _free_name(self, name: str) -> None:
        """An id is used again: the earlier request keeps its place in the trace under another name."""
        number = next(n for n in itertools.count(1) if f"{name}#{n}" not in self.trace.requests)
        self.trace.rename(name, f"{name}#{number}")
        self.completions.pop(name, None)

    def _new_id(self) -> str:
        while True:
            request_id = f"r{self._num_ids}"
            self._num_ids += 1
            if request_id not in self.trace.requests and request_id not in self._given_ids:
                return request_id

    def _encode(self, prompt: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise InvalidRequest("the prompt is text and this engine has no tokenizer; pass token ids or a tokenizer")
        return self.tokenizer.encode(prompt)

    def _seeded(self, sampling: SamplingParams) -> SamplingParams:
        if not isinstance(sampling, SamplingParams):
            return sampling  # `Request` says what is wrong with it
        if sampling.stop_strings and self.tokenizer is None:
            raise InvalidRequest(
                f"stop is {sampling.stop_strings!r} and this engine has no tokenizer; use stop_token_ids"
            )
        if sampling.temperature == 0 or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self._random.getrandbits(31))

    def _request_record(self, record: RunningRequest) -> RequestRecord:
        request = record.request
        return RequestRecord(
            record.request_id,
            record.num_prompt_tokens,
            record.max_tokens,
            int(request.priority),
            self._next_step,
            request.arrival_time,
            request.prompt,
            request.client,
        )

    def abort(self, request_id: str) -> bool:
        """End a request in whatever state it is; False if no unfinished request has this id.

        Called from inside a step, it takes effect at the end of that step.
        """
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return False
        if not self._in_step:
            self._drop_pending()
            if self.scheduler.requests.get(request_id) is request:
                self._end(request, FinishReason.ABORT)
            self._raise_interrupt()
        elif request.num_in_flight and self._ahead is None:
            self.scheduler.abort(request_id)
        else:
            self._deferred_aborts.append(request)
        return True

    def abort_all(self) -> int:
        """Abort every unfinished request; returns how many there were."""
        return sum(self.abort(request_id) for request_id in list(self.scheduler.requests))

    # The loop

    def step(self) -> list[TokenEvent]:
        """One iteration; returns what happened, in batch order.

        Raises:
            StepFailed: the executor raised. Nothing is lost: the next call runs the same plan again.
            PolicyError, SchedulerStalled: from the policy; its grants are undone.
        """
        if self._in_step:
            raise StepFailed("step was called from inside a step; let the running step return first")
        self._check_usable()
        self.scheduler.report_policy_fault()
        try:
            self._in_step = True
            events = self._end_expired()
            if self.has_unfinished:
                events += self._step() if self._ahead is None else self._ahead.step()
        finally:
            self._end_deferred()
            self._in_step = False
        self._raise_interrupt()
        return events

    def _check_usable(self) -> None:
        if self._closed:
            raise StepFailed("this engine is closed; make a new one")
        if self._half_done and not self._in_step:
            raise StepFailed("this engine was interrupted in the middle of its bookkeeping; make a new one")

    def _end_expired(self) -> list[TokenEvent]:
        """Abort the requests whose deadline has passed."""
        events = []
        while self._deadlines and (self._deadlines[0][0] <= self.now() or self._has_ended(self._deadlines[0][2])):
            deadline, _, request = heapq.heappop(self._deadlines)
            if not self._has_ended(request):
                self._drop_pending()
                if self._has_ended(request):
                    continue
                waited = deadline - request.request.arrival_time
                self._clients[request.request_id].error = DeadlineExceeded(
                    f"request {request.request_id!r} had {request.num_output_tokens} of {request.max_tokens} tokens "
                    f"after {waited:g} s, its timeout; allow more time or ask for less"
                )
                events.append(self._end(request, FinishReason.ABORT))
        return events

    def _has_ended(self, request: RunningRequest) -> bool:
        return self.scheduler.requests.get(request.request_id) is not request

    def _step(self) -> list[TokenEvent]:
        start = self.now()
        if self._pending is None:
            self._pending, self._moves_done = self._plan(), 0
        plan = self._pending
        self._next_step = self.trace.num_steps + 1
        sampled = self._execute(plan)
        record = self.record(plan, start)
        self._half_done = True  # until here an interrupt leaves a plan that is run again
        events = self._commit(plan, sampled, record)
        self._half_done = False
        return events

    def _plan(self) -> IterationPlan:
        self._half_done = True
        try:
            plan = self.scheduler.plan()
        except BaseException:
            self.scheduler.check()  # the plan was undone; if not, the engine is of no use any more
            self._half_done = False
            raise
        self._half_done = False
        return plan

    def _commit(
        self, plan: IterationPlan, sampled: Mapping[str, int | Exception], record: StepRecord
    ) -> list[TokenEvent]:
        """Count what was computed, then tell everybody."""
        outputs = self.scheduler.commit(plan, sampled)
        self._pending = None
        return self._publish(outputs, record)

    def _publish(self, outputs: Sequence[Output], record: StepRecord) -> list[TokenEvent]:
        """Tell everybody what a step did, and record it."""
        self.trace.add_step(record)
        record.sampled = {o.request.request_id: o.token_id for o in outputs if o.token_id is not None}
        events: list[TokenEvent] = []
        plain, step = partial(tuple.__new__, TokenEvent), record.step  # half the cost of calling TokenEvent
        for output in outputs:
            name = output.request.request_id
            if output.finish_reason is None and self._clients[name].is_silent:
                events.append(plain((name, output.token_id, "", None, step)))
            else:
                events += self._deliver(output, record)
        events += self._end_deferred(record)
        record.end = self.now()
        for request_id in record.finished:
            self.trace.finished[request_id].time = record.end
        self.trace.settle()
        return events

    def _execute(self, plan: IterationPlan) -> Mapping[str, int | Exception]:
        if not plan.has_work:
            return {}
        number = self.trace.num_steps
        try:
            self._move_blocks(plan)
            sampled = self.executor.execute(plan.to_scheduled_batch(number), self._sampling)
            if not isinstance(sampled, Mapping):
                raise TypeError(f"execute returned {type(sampled).__name__}, not a mapping of tokens")
        except Exception as error:
            raise StepFailed(
                f"the forward pass of step {number} raised {error!r}; call step() to run it again, or abort requests"
            ) from error
        return sampled

    def _move_blocks(self, plan: IterationPlan) -> None:
        """Copy what is swapped out, then what is swapped in; what was copied is not copied again after a failure."""
        if self._moves_done < 1 and plan.swap_out_blocks:
            self.executor.swap_out(plan.swap_out_blocks)
        self._moves_done = max(self._moves_done, 1)
        if self._moves_done < 2 and plan.swap_in_blocks:
            self.executor.swap_in(plan.swap_in_blocks)
        self._moves_done = 2

    def _drop_pending(self) -> None:
        """Give up a plan whose forward pass failed; the next step is planned anew."""
        plan, self._pending = self._pending, None
        if plan is None:
            return
        outputs = self.scheduler.rollback(plan)
        self._record_undone([*plan.evicted_requests, *plan.swap_out_requests])
        for output in outputs:
            self._end(output.request, FinishReason.ABORT)

    def _record_undone(self, names: Sequence[str]) -> None:
        """A plan was undone; the preemptions of it stand, as a step in which nothing else happened."""
        victims = [name for name in dict.fromkeys(names) if name in self.scheduler.requests]
        if victims:
            record = self.record(IterationPlan(evicted_requests=tuple(victims)), self.now())
            record.num_waiting, record.end = len(self.scheduler.waiting), record.start
            self.trace.add_step(record)
            self.trace.settle()
        self._next_step = self.trace.num_steps + (self._ahead is not None and self._ahead.is_flying)
        for request in reversed(self.trace.requests.values()):
            if request.arrival_step <= self._next_step:
                break
            request.arrival_step = self._next_step

    def _end_deferred(self, record: StepRecord | None = None) -> list[TokenEvent]:
        """End what was aborted in this step, and what the callbacks of those abort in turn."""
        events: list[TokenEvent] = []
        while self._deferred_aborts:
            request = self._deferred_aborts.pop(0)
            if self.scheduler.requests.get(request.request_id) is request:
                events.append(self._end(request, FinishReason.ABORT, record))
        return events

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def record(self, plan: IterationPlan, start: float) -> StepRecord:
        scheduler, grants = self.scheduler, plan.grants or Grants()
        return StepRecord(
            step=self.trace.num_steps,
            start=start,
            request_ids=[request.request_id for request in grants.requests],
            starts=grants.starts,
            counts=grants.counts,
            kinds="".join(grants.kinds),
            admitted=list(plan.admitted),
            resumed=list(plan.resumed),
            preempted=list(plan.evicted_requests),
            swapped_out=list(plan.swap_out_requests),
            swapped_in=list(plan.swap_in_requests),
            cached=dict(plan.cached),
            new_blocks={name: list(blocks) for name, blocks in plan.new_blocks.items()},
            reasons=dict(plan.blocked),
            num_waiting=plan.num_waiting,
            num_running=len(scheduler.running),
            budget=plan.token_budget,
            free_blocks=scheduler.pool.num_free,
            cached_blocks=scheduler.pool.num_cached,
        )

    def _deliver(self, output: Output, record: StepRecord) -> list[TokenEvent]:
        """Turn one output into events: text, stop strings, the client's callback, the end."""
        request, token, reason = output.request, output.token_id, output.finish_reason
        client = self._clients[request.request_id]
        client.error = output.error
        if token is None:
            return [self._end(request, reason or FinishReason.ERROR, record)]
        text = ""
        if reason not in (FinishReason.EOS, FinishReason.STOP):
            text = self._text(client, lambda: client.detokenizer.feed(token))
        if client.detokenizer.stopped:
            reason = FinishReason.STOP
        if reason is not None or client.error is not None:
            return [self._end(request, reason or FinishReason.ERROR, record, token, text)]
        event = TokenEvent(request.request_id, token, text, None, record.step)
        self._notify(client, event)
        if client.error is not None:
            return [event, self._end(request, FinishReason.ERROR, record)]
        return [event]

    def _text(self, client: _Client, take: Callable[[], str]) -> str:
        """Text from the detokenizer; if the tokenizer raises, this request alone fails."""
        try:
            return take()
        except Exception as error:
            client.error = client.error or error
        except BaseException as interrupt:  # the step is completed first, as in `_notify`
            self._interrupt = interrupt
        return ""

    def _notify(self, client: _Client, event: TokenEvent) -> None:
        if client.events is not None:
            client.events.append(event)
        try:
            if client.on_event is not None:
                client.on_event(event)
        except Exception as error:  # a callback may raise anything; only its own request ends
            client.error = client.error or error
        except BaseException as interrupt:  # the step is completed first, or events of others would be lost
            self._interrupt = interrupt

    def _end(
        self,
        request: RunningRequest,
        reason: FinishReason,
        record: StepRecord | None = None,
        token: int | None = None,
        text: str = "",
    ) -> TokenEvent:
        """End a request, once: last event, trace, completion. `token` and `text` come with the last event."""
        name = request.request_id
        if self.scheduler.requests.get(name) is request:
            if self._ahead is not None:
                self.scheduler.let_go(request)
            self.scheduler.finish(request, reason)
        if self._ahead is not None:
            self._ahead.ended(name)
        client = self._clients.pop(name)
        del self._sampling[name]
        text += self._text(client, client.detokenizer.flush)
        if client.error is not None and reason is not FinishReason.ABORT:
            reason = FinishReason.ERROR
        elif client.detokenizer.stopped and reason is FinishReason.LENGTH:
            reason = FinishReason.STOP
        if record is not None:
            record.finished[name] = reason.value
        self.trace.finished[name] = FinishRecord(
            reason.value, self.trace.num_steps, self.now(), request.num_output_tokens, client.detokenizer.text
        )
        completion = Completion(
            name,
            request.request.prompt,
            tuple(request.request.prompt_token_ids),
            tuple(request.output_token_ids),
            client.detokenizer.text,
            reason,
            client.error,
        )
        if client.keeps:
            self.completions[name] = completion
        event = TokenEvent(name, token, text, reason, self.trace.num_steps - (record is not None))
        self._notify(client, event)
        if client.error is not completion.error and self.completions.get(name) is completion:
            self.completions[name] = replace(completion, error=client.error)
        return event

    def close(self) -> None:
        """End the run: abort what is unfinished and complete the trace file, if there is one.

        Raises:
            StepFailed: called from inside a step.
        """
        if self._in_step:
            raise StepFailed("close was called from inside a step; let the running step return first")
        self.abort_all()
        self.trace.close()
        self._closed = True

    # Ways to drive the loop

    def run(self, max_steps: int | None = None) -> list[Completion]:
        """Step until every request has finished, or `max_steps` steps; returns what finished, in that order."""
        before = set(self.completions)
        steps = 0
        while self.has_unfinished and (max_steps is None or steps < max_steps):
            self.step()
            steps += 1
        self.scheduler.report_policy_fault()
        return [done for name, done in self.completions.items() if name not in before]

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Serve some prompts together; returns their completions in the order of the prompts.

        Args:
            prompts: texts or token id lists.
            sampling: one for all, or one for each prompt.

        Raises:
            InvalidRequest: one prompt was refused; none of them is served.
        """
        ids: list[str] = []
        try:
            for prompt, params in zip(prompts, self._each(prompts, sampling), strict=True):
                ids.append(self.add_request(prompt, params))
                self._clients[ids[-1]].keeps = True
            while any(request_id in self._clients for request_id in ids):
                self.step()
        finally:
            for request_id in ids:
                self.abort(request_id)
        return [self.completions.pop(request_id) for request_id in ids]

    def _each(
        self,
        prompts: Sequence[object],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> Sequence[SamplingParams | None]:
        if isinstance(prompts, str):
            raise InvalidRequest("prompts is one text; pass a list of prompts")
        if sampling is None or isinstance(sampling, SamplingParams):
            return [sampling] * len(prompts)
        if len(sampling) != len(prompts):
            raise InvalidRequest(
                f"{len(prompts)} prompts and {len(sampling)} sampling parameters; pass one, or one each"
            )
        return sampling

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **request: Any
    ) -> TokenStream:
        """Serve one request and give out its events as they come; other requests go on meanwhile.

        Whoever iterates drives the engine. Closing the stream aborts the request.

        Args:
            prompt, sampling: as in `add_request`.
            request: further arguments of `add_request`.
        """
        request_id = self.add_request(prompt, sampling, **request)
        events: deque[TokenEvent] = deque()
        client = self._clients[request_id]
        client.events, client.keeps, client.is_silent = events, True, False
        return TokenStream(self, request_id, events)


def _deadline(arrived: float, timeout: float | None) -> float | None:
    if timeout is None or not isinstance(arrived, int | float) or abs(arrived) >= LARGEST:
        return None  # `Request` says what is wrong with an arrival time
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < LARGEST:
        raise InvalidRequest(f"timeout is {timeout!r}; use a number of seconds above 0 (below 1e15), or None")
    return arrived + timeout


class TokenStream(Iterator[TokenEvent]):
    """The events of one request, in order; the last one carries the finish reason."""

    def __init__(self, engine: Engine, request_id: str, events: deque[TokenEvent]) -> None:
        self._engine = engine
        self._events = events
        self._ended = False
        self.request_id = request_id

    def __next__(self) -> TokenEvent:
        if self._ended:
            raise StopIteration
        while not self._events:
            if not self._engine.has_unfinished:
                self._ended = True
                raise StopIteration
            self._engine.step()
        event = self._events.popleft()
        if event.finish_reason is not None:
            self._ended = True
            self._engine.completions.pop(self.request_id, None)
        return event

    def close(self) -> None:
        """Abort the request if it has not finished."""
        finished = self._ended or (self._events and self._events[-1].finish_reason is not None)
        self._ended = True
        if not finished:
            self._engine.abort(self.request_id)
            self._engine.completions.pop(self.request_id, None)

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

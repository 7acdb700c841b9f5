"""The queue of requests that hold nothing yet (or nothing any more).

First come, first served with room at the front for preempted requests; or, where a policy gives a key, always the
smallest key first. Looking at the head and joining cost the same however long the queue is.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator

from contbatch.request import RunningRequest

Entry = tuple[tuple[float, ...], int, int, RunningRequest]
"""A request in the heap: its key, its arrival, a number that no other entry has."""
QueueKey = Callable[[RunningRequest], float | tuple[float, ...]]


class QueueView:
    """What a policy sees of the queue: it looks and does not touch."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(list(self._queue))

    @property
    def head(self) -> RunningRequest:
        """The request that is looked at first."""
        return self._queue.head


class WaitingQueue:
    """Waiting requests, in the order in which they will be looked at.

    Args:
        key: orders the queue, equal keys in order of arrival; None keeps the order of arrival. A request's key may
            not change while it waits.
    """

    def __init__(self, key: QueueKey | None = None) -> None:
        self._key = key
        self._fifo: deque[RunningRequest] = deque()
        self._heap: list[Entry] = []
        self._entries: dict[RunningRequest, Entry] = {}
        """Where each request stands in the heap; what else is in there has left and is passed over."""
        self._num_pushed = 0
        self.num_tokens = 0
        """Tokens of all queued requests together."""
        self.fault: BaseException | None = None
        """What the key last raised. The request is queued all the same, before all others."""

    def __len__(self) -> int:
        return len(self._fifo) + len(self._entries)

    def __iter__(self) -> Iterator[RunningRequest]:
        if self._key is None:
            return iter(self._fifo)
        return iter([entry[-1] for entry in sorted(self._entries.values())])

    @property
    def head(self) -> RunningRequest:
        """The request that is looked at first."""
        if self._key is None:
            return self._fifo[0]
        while self._entries.get(self._heap[0][-1]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][-1]

    def push(self, request: RunningRequest) -> None:
        """Queue a request at the back (or where its key puts it)."""
        self.num_tokens += len(request.token_ids)
        if self._key is None:
            self._fifo.append(request)
        else:
            self._num_pushed += 1
            entry = (self._safe_key(request), request.index, self._num_pushed, request)
            self._entries[request] = entry
            heapq.heappush(self._heap, entry)

    def insert(self, place: int, request: RunningRequest) -> None:
        """Queue a request with `place` others before it (or where its key puts it); 0 is the front."""
        if self._key is not None:
            return self.push(request)
        self.num_tokens += len(request.token_ids)
        self._fifo.insert(place, request)

    def remove(self, request: RunningRequest) -> int:
        """Take a request out, wherever it stands; returns its place, for `insert`."""
        place = 0
        if self._key is not None:
            del self._entries[request]
        else:
            place = 0 if self._fifo[0] is request else self._fifo.index(request)
            del self._fifo[place]
        self.num_tokens -= len(request.token_ids)
        return place

    def _safe_key(self, request: RunningRequest) -> tuple[float, ...]:
        """The key, or the smallest one there is if a policy's key raises or cannot be compared."""
        assert self._key is not None
        try:
            found: object = self._key(request)
            key = found if isinstance(found, tuple) else (found,)
            if not all(isinstance(part, int | float) and not math.isnan(part) for part in key):
                raise TypeError(f"queue_key gave {found!r}; return a number or a tuple of numbers")
        except BaseException as error:  # an interrupt must not lose the request either
            self.fault = error
            return ()
        return key

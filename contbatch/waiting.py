"""The queue of requests that hold nothing yet (or nothing any more).

First come, first served with room at the front for preempted requests; or, where a policy gives a key, always the
smallest key first. Looking at the head and joining cost the same however long the queue is.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator

from contbatch.request import RunningRequest

QueueKey = Callable[[RunningRequest], tuple[float, ...]]


class WaitingQueue:
    """Waiting requests, in the order in which they will be looked at.

    Args:
        key: orders the queue; None keeps the order of arrival. Keys must be unique (end them with `index`) and
            may not change while a request waits.
    """

    def __init__(self, key: QueueKey | None = None) -> None:
        self._key = key
        self._fifo: deque[RunningRequest] = deque()
        self._heap: list[tuple[tuple[float, ...], RunningRequest]] = []

    def __len__(self) -> int:
        return len(self._fifo) + len(self._heap)

    def __iter__(self) -> Iterator[RunningRequest]:
        if self._key is None:
            return iter(self._fifo)
        return iter([request for _, request in sorted(self._heap, key=lambda entry: entry[0])])

    @property
    def head(self) -> RunningRequest:
        """The request that is looked at first."""
        return self._fifo[0] if self._key is None else self._heap[0][1]

    def push(self, request: RunningRequest) -> None:
        """Queue a request at the back (or where its key puts it)."""
        if self._key is None:
            self._fifo.append(request)
        else:
            heapq.heappush(self._heap, (self._key(request), request))

    def push_front(self, request: RunningRequest) -> None:
        """Queue a request at the front (or where its key puts it)."""
        if self._key is None:
            self._fifo.appendleft(request)
        else:
            self.push(request)

    def remove(self, request: RunningRequest) -> None:
        """Take a request out, wherever it stands."""
        if self._key is None:
            if self._fifo[0] is request:
                self._fifo.popleft()
            else:
                self._fifo.remove(request)
        elif self._heap[0][1] is request:
            heapq.heappop(self._heap)
        else:
            self._heap = [entry for entry in self._heap if entry[1] is not request]
            heapq.heapify(self._heap)

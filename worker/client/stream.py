"""The events of one request on their way from the reading task to their consumer."""

from __future__ import annotations

import asyncio
from collections import deque

from worker.protocol import Done, Scored, TokenEvent

Event = TokenEvent | Done | Scored


class Stream:
    """A queue for one consumer. It holds no more than the events that the request asked for.

    `deadline_s`: when the next event is due, on the loop's clock. `next_s`: the time allowed between events.
    """

    __slots__ = ("request_id", "deadline_s", "next_s", "abandoned", "finished", "_events", "_waiter")

    def __init__(self, request_id: str, deadline_s: float, next_s: float) -> None:
        self.request_id = request_id
        self.deadline_s = deadline_s
        self.next_s = next_s
        self.abandoned = False  # nobody consumes it, but its final event is still to come
        self.finished = False
        self._events: deque[Event | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: Event | Exception) -> None:
        if self.abandoned:
            return
        self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Event:
        """The next event; raises what ended the request."""
        while not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        return event

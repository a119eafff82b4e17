"""Server-sent events, and the watch on the client: work ends when the connection does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.errors import ClientGone, error_body, to_request_error

logger = logging.getLogger("placewright.server")

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def event(value: Any) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. When the client goes first, `work` is cancelled and ClientGone raised.

    The body must have been read: whatever `receive` still yields is thrown away.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends frames as they come. The 200 waits for the first one, so that a refusal still has a status."""

    def __init__(self, frames: AsyncGenerator[bytes, None], write_timeout_s: float) -> None:
        super().__init__()
        self._frames = frames
        self._write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        started = False
        async with aclosing(self._frames) as frames:
            try:
                async for frame in frames:
                    if not started:
                        await send(_start())
                        started = True
                    await self._write(send, frame)
            except ClientGone:
                raise
            except Exception as error:
                if not started:
                    raise
                await self._write(send, event(error_body(to_request_error(error))))
                logger.warning("stream ended with an error: %s", error)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send, frame: bytes) -> None:
        """Blocks while the client reads slower than frames come; a client that reads nothing is cut off."""
        try:
            async with asyncio.timeout(self._write_timeout_s):
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except TimeoutError:
            raise ClientGone from None


def _start() -> dict[str, Any]:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # proxies must pass each chunk on at once
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}

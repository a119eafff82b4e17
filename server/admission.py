"""Who gets in: how many requests may run and wait, how large and how slow a body may be."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from configs.errors import RequestError
from configs.settings import ServeSettings
from server.errors import ClientGone
from server.supervise import Supervisor

PARALLEL_TOKENIZING = 2  # of /tokenize and /detokenize: prompts must always find a thread and a core
PARALLEL_CHATS = 2  # rendered and tokenized: slow templates, one at a time, must not hold all threads


class Admission:
    """Counts the requests between acceptance and their last event; the engine does the queueing itself."""

    def __init__(self, supervisor: Supervisor, settings: ServeSettings) -> None:
        self._supervisor = supervisor
        self._settings = settings
        self.n_admitted = 0
        self.tokenizing = asyncio.Semaphore(PARALLEL_TOKENIZING)
        self.rendering = asyncio.Semaphore(PARALLEL_CHATS)

    @property
    def n_parallel(self) -> int | None:
        """How many requests the engine runs at a time; None before it was ready once."""
        return self._supervisor.info.max_sequences if self._supervisor.info else None

    @property
    def n_waiting(self) -> int:
        return max(0, self.n_admitted - (self.n_parallel or 0))

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Held while a request runs or waits. Raises RequestError (429) where the queue is full."""
        limit = (self.n_parallel or 1) + self._settings.max_waiting_requests
        if self.n_admitted >= limit:
            raise RequestError(
                f"{self.n_admitted} requests run or wait, which is the limit; try again later",
                code="overloaded",
                status=429,
                details={"retry_after_s": 5},
            )
        self.n_admitted += 1
        try:
            yield
        finally:
            self.n_admitted -= 1


async def read_body(request: Request, settings: ServeSettings) -> bytes:
    """The whole body. Raises RequestError: 413 too large, 408 too slow, 415 compressed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise RequestError("compressed bodies are not supported", code="unsupported_encoding", status=415)
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > settings.max_body_bytes:
        raise _too_large(settings.max_body_bytes)
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > settings.max_body_bytes:
                    raise _too_large(settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.body_timeout_s:g} s"
        raise RequestError(message, code="request_timeout", status=408) from None
    except ClientDisconnect:
        raise ClientGone from None
    return bytes(body)


def _too_large(limit_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than the limit of {limit_bytes} bytes",
        code="body_too_large",
        status=413,
        details={"limit_bytes": limit_bytes},
    )

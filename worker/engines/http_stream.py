"""What engines behind HTTP share: events of a streamed answer, and refusals in the words of OpenAI-like servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec

from configs.errors import RequestFailedError

_CODES = {400: "invalid_request", 422: "invalid_request", 429: "overloaded", 503: "overloaded"}
_CONTEXT_TYPES = {"exceed_context_size_error", "context_length_exceeded"}


async def event_objects(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a `text/event-stream`, until it ends or says [DONE].

    Raises RequestFailedError: refused, or an error event in the middle.
    """
    if response.status_code != 200:
        raise refusal(response.status_code, await response.aread())
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if not line.startswith((b"data:", b"error:")):
                continue
            data = line.partition(b":")[2].strip()
            if data == b"[DONE]":
                return
            value = _object(data)
            if "error" in value or line.startswith(b"error:"):
                raise refusal(500, data)
            yield value


def refusal(status: int, body: bytes) -> RequestFailedError:
    """The server's own words and the code that is closest."""
    try:
        error = _object(body)
    except RequestFailedError:
        error = {"message": body.decode(errors="replace")[:500]}
    nested = error.get("error")
    if isinstance(nested, dict):
        error = nested
    elif isinstance(nested, str):
        error = {"message": nested}
    kinds = {str(error.get("type")), str(error.get("code"))}
    code = "context_length_exceeded" if kinds & _CONTEXT_TYPES else _CODES.get(status, "internal")
    message = str(error.get("message") or f"the engine answered with HTTP status {status}")
    return RequestFailedError(message, code=code)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RequestFailedError(f"the engine sent something that is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestFailedError("the engine sent JSON that is no object")
    return value

"""From exceptions to OpenAI's error bodies: one place decides status, type and headers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from configs.errors import EngineDiedError, PlacewrightError, RequestError, RequestFailedError

ENGINE_CODES = {  # codes of `worker.protocol.Failed` and the status they mean
    "context_length_exceeded": 400,
    "invalid_request": 400,
    "overloaded": 429,
    "shutdown": 503,
    "timeout": 504,
}
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


def unavailable(message: str, retry_after_s: int = 2) -> RequestError:
    return RequestError(message, code="unavailable", status=503, details={"retry_after_s": retry_after_s})


def to_request_error(error: Exception) -> RequestError:
    """Any exception as a refusal. Those that are nobody's fault outside say no more than "internal error"."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDiedError):
        return unavailable(
            "the engine stopped while it worked on this request; it is being replaced, try again"
        )
    if isinstance(error, RequestFailedError):
        status = ENGINE_CODES.get(error.code, 500)
        later: dict[str, int | float | str] = {"retry_after_s": 2} if status in (429, 503) else {}
        return RequestError(str(error), code=error.code, status=status, details=later)
    message = (
        str(error) if isinstance(error, PlacewrightError) else "internal error; the server's log has more"
    )
    return RequestError(message, code="internal_error", status=500)


def error_body(error: RequestError) -> dict[str, Any]:
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    detail = {"message": str(error), "type": kind, "param": error.param, "code": error.code}
    return {"error": detail | error.details}


def error_response(error: Exception) -> Response:
    refusal = to_request_error(error)
    headers = {}
    if "retry_after_s" in refusal.details:
        headers["retry-after"] = str(refusal.details["retry_after_s"])
    if refusal.status == 401:
        headers["www-authenticate"] = "Bearer"
    return json_response(error_body(refusal), refusal.status, headers)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")

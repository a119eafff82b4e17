"""What every request passes before a route sees it, and on its way out. Plain ASGI, outermost first:

Journalist   request id, access log line, 500 for what nobody caught
Linger       an answer sent before the body was read still reaches the client
(CORS)       starlette's
Doorkeeper   how many may be open, which web pages may ask, and the API key
OnePath      with or without /v1, with or without a slash at the end
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from configs.errors import RequestError
from configs.settings import ServeSettings
from server.errors import ClientGone, error_response, unavailable
from server.pages import PageRules

logger = logging.getLogger("placewright.access")

OPEN_PATHS = frozenset({"", "/"})  # the page a browser opens first holds nothing secret
LINGER_S = 2.0
CLIENT_GONE = 499
REQUEST_ID = re.compile(r"[\w.:-]{1,128}")


class Journalist:
    """Gives each request an id and writes one line when it is over. Bodies and keys never reach the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        asked = Headers(scope=scope).get("x-request-id", "")
        request_id = asked if REQUEST_ID.fullmatch(asked) else f"req_{uuid.uuid4().hex}"
        began_at = time.monotonic()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            status = CLIENT_GONE
        except Exception as error:
            logger.exception("%s: unexpected error", request_id)
            if not status:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            took_s = time.monotonic() - began_at
            client = (scope.get("client") or ("?",))[0]
            logger.info(
                "%s %s %s %s %.3f s %s",
                client,
                scope["method"],
                shown_path(scope),
                status,
                took_s,
                request_id,
            )


def shown_path(scope: Scope) -> str:
    """As it was sent: a decoded path could hold line breaks, and so lines that look like ours."""
    raw: bytes = scope.get("raw_path", b"?")
    return raw.decode("latin-1")


class Linger:
    """Reads on for a moment where an answer came before the whole body.

    Closing at once would reset the connection, and the client would see the reset instead of the answer. The
    reading must also go on while the last message is sent: hypercorn's queue of body parts may be full, and
    it puts its own last word into the same queue.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        if "content-length" not in headers and "transfer-encoding" not in headers:
            return await self._app(scope, receive, send)
        unread = True

        async def tracked_receive() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body", False))
            return message

        async def lingering_send(message: Message) -> None:
            is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if not (is_last and unread):
                return await send(message)
            await send({**message, "more_body": True})
            discarding = asyncio.create_task(_discard(receive))
            await asyncio.wait({discarding}, timeout=LINGER_S)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            discarding.cancel()

        await self._app(scope, tracked_receive, lingering_send)


async def _discard(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


class Doorkeeper:
    """Refuses before the body is read: too many open requests, a foreign page, or a wrong API key."""

    def __init__(self, app: ASGIApp, settings: ServeSettings) -> None:
        self._app = app
        self._limit = settings.max_open_requests
        self._pages = PageRules(settings)
        self._key = settings.api_key.encode() if settings.api_key else None
        self._n_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            return await error_response(refusal)(scope, receive, send)
        self._n_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._n_open -= 1

    def _refusal(self, scope: Scope) -> RequestError | None:
        if self._n_open >= self._limit:
            return unavailable(f"{self._n_open} requests are open, which is the limit; try again later")
        headers = Headers(scope=scope)
        if self._key is None:
            return self._pages.refusal(headers)
        if scope["path"] in OPEN_PATHS:
            return None
        given = _given_key(headers)
        if hmac.compare_digest(given.encode("latin-1"), self._key):
            return None
        what = "wrong API key" if given else "no API key; send it as `Authorization: Bearer KEY`"
        return RequestError(what, code="invalid_api_key", status=401)


def _given_key(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")


class OnePath:
    """Clients disagree about `/v1` and about the slash at the end; routes are written without either."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"].rstrip("/")
            if path == "/v1" or path.startswith("/v1/"):
                path = path.removeprefix("/v1")
            scope = {**scope, "path": path or "/"}
        await self._app(scope, receive, send)

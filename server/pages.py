"""Which web pages may use a server that asks for no key.

A page in a browser of this machine can reach a server on loopback. CORS keeps it from reading answers, but not from
asking: a plain POST needs no preflight. And DNS may point a page's own name at 127.0.0.1, which makes it a page of this
server in the browser's eyes. So a request from a page that CORS does not admit is refused, and on loopback one that
calls this server by a name that is not its own. Programs that are no browsers send no `Origin` and our own name.
"""

from __future__ import annotations

import ipaddress
import re

from starlette.datastructures import Headers

from configs.errors import RequestError
from configs.settings import ServeSettings

LOCAL_PAGES = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
PRIVATE_SUFFIXES = (".localhost", ".local", ".internal")  # RFC 6761, RFC 6762, ICANN: never in public DNS


class PageRules:
    """Refusals by `Origin` and `Host`, for a server without a key: no foreign page knows one."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._is_on_loopback = is_loopback(settings.host)

    def refusal(self, headers: Headers) -> RequestError | None:
        origin, host = headers.get("origin", ""), headers.get("host", "")
        if not self._admits_page(origin):
            remedy = (
                "the setting cors_origins admits pages, and with an API key every page that knows it may ask"
            )
            return RequestError(f"a page of {origin} asks; {remedy}", code="foreign_page", status=403)
        if not self._is_own_name(host):
            remedy = "the setting host_names admits names, and with an API key any name will do"
            return RequestError(
                f"this server is not called {host}; {remedy}", code="foreign_name", status=403
            )
        return None

    def _admits_page(self, origin: str) -> bool:
        """Pages of the web have http, https or, in a sandbox, `null`; extensions and programs have other schemes."""
        is_web = origin == "null" or origin.startswith(("http://", "https://"))
        known = self._settings.cors_origins
        return not is_web or "*" in known or origin in known or re.fullmatch(LOCAL_PAGES, origin) is not None

    def _is_own_name(self, host: str) -> bool:
        """Whether nobody can have made DNS say it. Where others may reach the server, it can have any name."""
        name = host_name(host)
        is_private = is_address(name) or "." not in name or name.endswith(PRIVATE_SUFFIXES)
        return not self._is_on_loopback or is_private or name in self._settings.host_names


def host_name(host: str) -> str:
    """`Host` without port and brackets, in lower case."""
    name = re.sub(r":\d*$", "", host) if host.startswith("[") or host.count(":") == 1 else host
    return name.strip("[]").rstrip(".").lower()


def is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(name: str) -> bool:
    """Whether what listens there is reached from this machine alone."""
    return name == "localhost" or (is_address(name) and ipaddress.ip_address(name).is_loopback)

"""The HTTP application: which route answers what, and how refusals look.

Routes are written without `/v1`; `server/gate.py` says what else happens around them. Further APIs get a
module of their own beside `server/chat.py` and a line here.
"""

from __future__ import annotations

from http import HTTPStatus

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from configs.errors import PlacewrightError, RequestError
from configs.settings import ServeSettings
from server import chat, routes
from server.admission import Admission
from server.errors import error_response
from server.gate import Doorkeeper, Journalist, Linger, OnePath, shown_path
from server.model_info import ModelInfo
from server.pages import LOCAL_PAGES
from server.service import Service
from server.stats import ServerStats
from server.supervise import Supervisor
from server.text import Text

ROUTES = [
    Route("/", routes.root, methods=["GET"]),
    Route("/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/completions", chat.completions, methods=["POST"]),
    Route("/models", routes.models, methods=["GET"]),
    Route("/models/{id:path}", routes.model, methods=["GET"]),
    Route("/health", routes.health, methods=["GET"]),
    Route("/stats", routes.stats, methods=["GET"]),
    Route("/props", routes.props, methods=["GET"]),
    Route("/tokenize", routes.tokenize, methods=["POST"]),
    Route("/detokenize", routes.detokenize, methods=["POST"]),
]


def build_app(supervisor: Supervisor, model: ModelInfo, text: Text, settings: ServeSettings) -> Starlette:
    """The application around a supervisor; whoever calls this starts and closes the supervisor."""
    app = Starlette(
        routes=ROUTES,
        middleware=_middleware(settings),
        exception_handlers={
            PlacewrightError: _refuse,
            HTTPException: _refuse_route,
        },
    )
    app.router.redirect_slashes = False
    app.state.service = Service(
        supervisor=supervisor,
        model=model,
        text=text,
        settings=settings,
        admission=Admission(supervisor, settings),
        stats=ServerStats(),
    )
    return app


def _middleware(settings: ServeSettings) -> list[Middleware]:
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(settings.cors_origins),
        allow_origin_regex=LOCAL_PAGES,
        allow_methods=["GET", "POST", "OPTIONS"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )
    return [
        Middleware(Journalist),
        Middleware(Linger),
        cors,
        Middleware(Doorkeeper, settings=settings),
        Middleware(OnePath),
    ]


async def _refuse(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    phrase = HTTPStatus(error.status_code).phrase.lower()
    message = f"{request.method} {shown_path(request.scope)}: {phrase}"
    code = phrase.replace(" ", "_")
    response = error_response(RequestError(message, code=code, status=error.status_code))
    response.headers.update(error.headers or {})
    return response

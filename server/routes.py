"""The small routes: what is served, how it is doing, and the tokenizer by itself."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from configs.errors import RequestError
from server.admission import read_body
from server.checks import check_text_length, decode_body
from server.errors import json_response
from server.schema import DetokenizeRequest, TokenizeRequest
from server.service import service_of


async def root(request: Request) -> Response:
    return json_response({"name": "placewright", "model": service_of(request).model.name})


async def models(request: Request) -> Response:
    return json_response({"object": "list", "data": [service_of(request).model.as_openai()]})


async def model(request: Request) -> Response:
    info = service_of(request).model
    info.check_name(request.path_params["id"])
    return json_response(info.as_openai())


async def health(request: Request) -> Response:
    """200 only while requests can be served; the body says what is going on otherwise."""
    supervisor = service_of(request).supervisor
    if supervisor.state == "ready":
        return json_response({"status": "ok", "state": "ready"})
    body = {
        "status": "unavailable",
        "state": supervisor.state,
        "loading": supervisor.loading if supervisor.state == "starting" else None,
        "last_error": supervisor.last_error,
    }
    return json_response(body, 503, {"retry-after": "2"})


async def stats(request: Request) -> Response:
    service = service_of(request)
    supervisor, admission = service.supervisor, service.admission
    return json_response(
        {
            "state": supervisor.state,
            "model": service.model.name,
            "plan_id": service.model.plan_id,
            "requests_admitted": admission.n_admitted,
            "requests_parallel": admission.n_parallel,
            "requests_waiting": admission.n_waiting,
            "engine_restarts": supervisor.n_restarts,
            **service.stats.as_dict(),
            "engine": await supervisor.engine_stats(),
        }
    )


async def props(request: Request) -> Response:
    """What llama.cpp's clients ask for; `n_ctx` is the context of one request."""
    service = service_of(request)
    defaults = service.settings.sampling.model_dump()
    return json_response(
        {
            "default_generation_settings": {"n_ctx": service.context_length_tokens, "params": defaults},
            "total_slots": service.admission.n_parallel,
            "model_alias": service.model.name,
            "plan_id": service.model.plan_id,
        }
    )


async def tokenize(request: Request) -> Response:
    service = service_of(request)
    body = decode_body(await read_body(request, service.settings), TokenizeRequest)
    check_text_length(body.content, service.settings.max_tokenize_bytes)
    async with service.admission.tokenizing:
        ids = await asyncio.to_thread(
            service.text.tokenizer.encode,
            body.content,
            add_special=body.add_special is True,
            parse_special=body.parse_special is not False,
        )
    return json_response({"tokens": ids})


async def detokenize(request: Request) -> Response:
    service = service_of(request)
    body = decode_body(await read_body(request, service.settings), DetokenizeRequest)
    largest, n_vocab = max(body.tokens, default=0), service.model.n_vocab
    if largest >= n_vocab:
        message = f"tokens: id {largest} is outside of the vocabulary of {n_vocab} tokens"
        raise RequestError(message, param="tokens")
    async with service.admission.tokenizing:
        content = await asyncio.to_thread(service.text.tokenizer.decode, body.tokens)
    return json_response({"content": content})

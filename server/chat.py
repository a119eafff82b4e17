"""The completion routes, top to bottom: body -> job -> engine -> pieces -> chunks. The second page to open.

Chat and plain completions differ in how a prompt is made (`server/prepare.py`) and in how the answer is told
(`server/frames.py`); in between there is one path.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import Response

from server import sse
from server.admission import read_body
from server.checks import decode_body
from server.errors import json_response
from server.frames import ChatFrames, CompletionFrames, Frames
from server.generation import Outcome, Piece, ScoredToken, pieces
from server.job import Job
from server.prepare import prepare_chat, prepare_completion
from server.replies import Reply
from server.schema import ChatRequest, CompletionRequest
from server.service import Service, service_of


async def chat_completions(request: Request) -> Response:
    service = service_of(request)
    body = decode_body(await read_body(request, service.settings), ChatRequest)
    job = await prepare_chat(service, body)
    frames = ChatFrames(job, service.text.tokenizer, service.model.fingerprint)
    return await _answer(request, service, job, frames)


async def completions(request: Request) -> Response:
    service = service_of(request)
    body = decode_body(await read_body(request, service.settings), CompletionRequest)
    job = await prepare_completion(service, body)
    frames = CompletionFrames(job, service.text.tokenizer, service.model.fingerprint)
    return await _answer(request, service, job, frames)


async def _answer(request: Request, service: Service, job: Job, frames: Frames) -> Response:
    if job.stream:
        return sse.EventStream(_stream(service, job, frames), service.settings.write_timeout_s)
    return json_response(await sse.while_connected(request.receive, _whole(service, job, frames)))


async def _generate(service: Service, job: Job) -> AsyncIterator[Piece | Outcome | None]:
    """Admission, then everything the engine says. However this ends, the engine has let go of the request."""
    with service.stats.watch(job) as record, service.admission.slot():
        async with service.supervisor.run(job.generate) as run:
            async for item in pieces(run, service.text, job, service.settings.keep_alive_s):
                record(item)
                yield item


async def _stream(service: Service, job: Job, frames: Frames) -> AsyncGenerator[bytes, None]:
    opening = frames.first()
    async with aclosing(_generate(service, job)) as items:  # type: ignore[type-var]
        async for item in items:
            if opening is not None:
                yield sse.event(opening)
                opening = None
            if item is None:
                yield sse.KEEP_ALIVE
            elif isinstance(item, Outcome):
                yield sse.event(frames.finish(item))
                if job.include_usage:
                    yield sse.event(frames.usage(item))
            elif item.text or item.scored:
                yield sse.event(frames.piece(item))
    yield sse.DONE


async def _whole(service: Service, job: Job, frames: Frames) -> Reply:
    texts: list[str] = []
    scored: list[ScoredToken] = []
    async with aclosing(_generate(service, job)) as items:  # type: ignore[type-var]
        async for item in items:
            if isinstance(item, Piece):
                texts.append(item.text)
                scored += item.scored
            elif isinstance(item, Outcome):
                return frames.whole(Piece("".join(texts), scored), item)
    raise AssertionError("a run ends with an outcome or an exception")

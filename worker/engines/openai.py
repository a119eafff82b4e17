"""A running server that speaks OpenAI's `/v1/completions`, as an engine: vLLM, SGLang, another llama-server, ...

Token ids go in where the server takes them as a prompt. They come out where it returns them
(`return_token_ids`); where it does not, its text is tokenised again with the given codec, so ids may differ
from those that it drew, but not their text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from configs.errors import EngineDiedError, EngineStartError, RequestFailedError
from configs.progress import ProgressCallback
from worker.client import Deadlines
from worker.engines.base import Engine, EngineInfo, TextCodec
from worker.engines.http_stream import event_objects
from worker.protocol import Done, Generate, Scored, Timings, TokenEvent


class OpenAiEngine(Engine):
    """`base_url` ends before `/v1`. `model` None takes the first that the server lists.

    `codec` is needed where the server takes no ids or returns none.
    """

    def __init__(
        self,
        base_url: str,
        deadlines: Deadlines,
        model: str | None = None,
        api_key: str | None = None,
        codec: TextCodec | None = None,
        name: str = "openai",
        context_length_tokens: int = 0,
        max_sequences: int = 1,
    ) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._deadlines = deadlines
        self._model = model
        self._api_key = api_key
        self._codec = codec
        self._name = name
        self._context_length_tokens = context_length_tokens
        self._max_sequences = max_sequences
        self._takes_ids = True
        self._returns_ids = True
        self._http: httpx.AsyncClient | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._alive = False

    # ---- life -----------------------------------------------------------------------------------

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        timeout = httpx.Timeout(self._deadlines.first_token_s, connect=self._deadlines.silence_s)
        self._http = httpx.AsyncClient(base_url=self._base_url, headers=headers, timeout=timeout)
        try:
            async with asyncio.timeout(self._deadlines.load_s):
                model = await self._find_model()
                await self._learn_habits()
        except (TimeoutError, httpx.HTTPError, RequestFailedError) as error:
            await self.close()
            raise EngineStartError(f"the server at {self._base_url} is of no use: {error!r}") from error
        except BaseException:
            await self.close()
            raise
        self._alive = True
        self._watcher = asyncio.get_running_loop().create_task(self._watch())
        context_tokens = model.get("max_model_len") or model.get("context_length")
        return EngineInfo(
            name=self._name,
            version=str(model.get("owned_by", "unknown")),
            context_length_tokens=int(context_tokens or self._context_length_tokens),
            n_vocab=None,
            max_sequences=self._max_sequences,
            kv_capacity_tokens=None,
            memory_bytes={},
            load_s=None,
            feeds_teacher_ids=False,
        )

    async def _find_model(self) -> dict[str, Any]:
        assert self._http is not None
        response = await self._http.get("/v1/models")
        response.raise_for_status()
        models = [item for item in response.json()["data"] if isinstance(item, dict)]
        for model in models:
            if self._model in (None, model.get("id")):
                self._model = str(model["id"])
                return model
        names = [model.get("id") for model in models]
        raise EngineStartError(f"{self._base_url} has no model {self._model!r}; it has {names}")

    async def _learn_habits(self) -> None:
        """One short completion shows whether ids are taken as a prompt and returned."""
        probe = Generate("probe", [1], 1)
        try:
            answers = await self._probe(self._body(probe))
        except RequestFailedError:
            self._takes_ids = False
            self._need_codec("takes no token ids as a prompt")
            answers = await self._probe(self._body(probe))
        self._returns_ids = any("token_ids" in choice for answer in answers for choice in answer["choices"])
        if not self._returns_ids:
            self._need_codec("returns no token ids")

    async def _probe(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        assert self._http is not None
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            return [answer async for answer in event_objects(response) if answer.get("choices")]

    def _need_codec(self, habit: str) -> None:
        if self._codec is None:
            raise EngineStartError(f"{self._base_url} {habit}, and no tokenizer of its model was given")

    async def _watch(self) -> None:
        """Not alive while the server cannot be reached; alive again when it comes back."""
        assert self._http is not None
        while True:
            await asyncio.sleep(self._deadlines.heartbeat_s)
            try:
                await self._http.get("/v1/models", timeout=self._deadlines.silence_s)
                self._alive = True
            except httpx.HTTPError:
                self._alive = False

    def alive(self) -> bool:
        return self._alive

    async def close(self) -> None:
        """Lets go of the connection; the server is not ours to stop."""
        self._alive = False
        if self._watcher is not None:
            self._watcher.cancel()
        if self._http is not None:
            await self._http.aclose()

    # ---- requests -------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        if self._http is None or self._http.is_closed:
            raise EngineDiedError(f"the connection to {self._base_url} is closed")
        if request.sampling.logprobs is not None:
            raise RequestFailedError("this engine reports no log probabilities", code="unsupported")
        clock = _Clock(len(request.prompt_ids))
        reason = "length"
        try:
            async with self._http.stream("POST", "/v1/completions", json=self._body(request)) as response:
                async for answer in event_objects(response):
                    clock.note_usage(answer.get("usage"))
                    for choice in answer.get("choices") or ():
                        reason = choice.get("finish_reason") or reason
                        for token_id in self._ids(choice):
                            if token_id in request.stop_ids:
                                yield Done(request.request_id, "stop", clock.timings(), token_id)
                                return
                            clock.note_token()
                            yield TokenEvent(request.request_id, token_id)
        except httpx.TimeoutException as error:
            raise RequestFailedError("the server sent nothing within the deadline", code="timeout") from error
        except httpx.TransportError as error:
            self._alive = False
            raise EngineDiedError(f"the connection to {self._base_url} broke: {error!r}") from error
        yield Done(request.request_id, "length" if reason == "length" else "stop", clock.timings())

    def _ids(self, choice: dict[str, Any]) -> list[int]:
        if self._returns_ids:
            return [int(token) for token in choice.get("token_ids") or ()]
        text = choice.get("text") or ""
        return self._codec.encode(text) if text and self._codec is not None else []

    def _body(self, request: Generate) -> dict[str, Any]:
        sampling, teacher = request.sampling, request.teacher_ids
        prompt: list[int] | str = request.prompt_ids
        if not self._takes_ids and self._codec is not None:
            prompt = self._codec.decode(request.prompt_ids)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": request.max_tokens if teacher is None else min(request.max_tokens, len(teacher)),
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        # Not OpenAI's own, so only said where they matter: a strict server would refuse what it does not know.
        optional = {
            "return_token_ids": (self._returns_ids, True),
            "ignore_eos": (teacher is not None or not request.stop_ids, True),
            "top_k": (sampling.top_k != 0, sampling.top_k),
            "min_p": (sampling.min_p != 0.0, sampling.min_p),
            "repetition_penalty": (sampling.repeat_penalty != 1.0, sampling.repeat_penalty),
            "seed": (sampling.seed is not None, sampling.seed),
            "logit_bias": (bool(sampling.logit_bias), {str(k): v for k, v in sampling.logit_bias.items()}),
        }
        return body | {name: value for name, (wanted, value) in optional.items() if wanted}

    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        raise RequestFailedError("this engine cannot score given tokens", code="unsupported")

    async def stats(self) -> dict[str, float | int | None]:
        return {}


class _Clock:
    """Times of one request as this side sees them."""

    def __init__(self, n_prompt: int) -> None:
        self._n_prompt = n_prompt
        self._n_cached: int | None = None
        self._n_tokens = 0
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None

    def note_token(self) -> None:
        self._n_tokens += 1
        if self._first_token_s is None:
            self._first_token_s = time.monotonic()

    def note_usage(self, usage: dict[str, Any] | None) -> None:
        details = (usage or {}).get("prompt_tokens_details") or {}
        if details.get("cached_tokens") is not None:
            self._n_cached = int(details["cached_tokens"])

    def timings(self) -> Timings:
        """The queue of the server is part of the prefill: it cannot be told apart from here."""
        now_s = time.monotonic()
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        return Timings(
            queue_s=None,
            prefill_s=first_token_s - self._started_s,
            decode_s=now_s - first_token_s,
            prompt_tokens=self._n_prompt,
            cached_tokens=self._n_cached,
            completion_tokens=self._n_tokens,
        )

"""llama-server's `/completion`: the body that asks, and the events of its answer as ours. No I/O."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

from worker.protocol import Done, Generate, SamplingParams, Timings, TokenEvent

SAMPLERS = ["penalties", "top_k", "top_p", "min_p", "temperature"]

Recover = Callable[[str, int], Awaitable[list[int]]]
"""The ids of a piece of text that stands for so many tokens."""


class AnswerReader:
    """Reads the events of one answer.

    The server sends no event for a token that ends inside a UTF-8 character, so the next one stands for
    several. Their ids come from `recover`; under a teacher only their number matters, and the teacher's ids
    stand in.
    """

    def __init__(
        self, request: Generate, recover: Recover, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._request = request
        self._recover = recover
        self._clock = clock
        self._stop_ids = frozenset(request.stop_ids if request.teacher_ids is None else ())
        self._started_s = clock()
        self._first_token_s: float | None = None
        self._n_counted = 0  # tokens that the server speaks of
        self._n_sent = 0
        self._stop_id: int | None = None
        self.done: Done | None = None

    async def read(self, answer: dict[str, Any]) -> list[TokenEvent]:
        """Token events of one event of the answer; sets `done` at the end."""
        n_new = int(answer.get("tokens_predicted", 0)) - self._n_counted
        ids = [int(token) for token in answer.get("tokens", ())]
        self._n_counted += n_new
        if self._first_token_s is None and n_new:
            self._first_token_s = self._clock()
        if n_new > len(ids) and self._request.teacher_ids is not None:
            first = self._n_counted - n_new
            ids = [*self._request.teacher_ids[first : self._n_counted - len(ids)], *ids]
        elif n_new > len(ids) and answer.get("content"):
            ids = await self._recover(answer["content"], n_new)
        events = self._events(ids, answer)
        if answer.get("stop") and self.done is None:
            self.done = self._end(answer, "length" if answer.get("stop_type") == "limit" else "stop")
        return events

    def _events(self, ids: list[int], answer: dict[str, Any]) -> list[TokenEvent]:
        logprob, top = self._logprobs(answer)
        events = []
        for token_id in ids:
            if token_id in self._stop_ids:
                self._stop_id = token_id
                self.done = self._end(answer, "stop")
                break
            self._n_sent += 1
            events.append(TokenEvent(self._request.request_id, token_id, logprob, top))
        return events

    def _logprobs(self, answer: dict[str, Any]) -> tuple[float | None, list[tuple[int, float]]]:
        wanted = self._request.sampling.logprobs
        found = answer.get("completion_probabilities")
        if wanted is None or not found:
            return None, []
        best = found[-1]["top_logprobs"][:wanted]
        return float(found[-1]["logprob"]), [(int(item["id"]), float(item["logprob"])) for item in best]

    def _end(self, answer: dict[str, Any], reason: str) -> Done:
        """With the server's own times where it gives them."""
        now_s = self._clock()
        first_token_s = self._first_token_s if self._first_token_s is not None else now_s
        server = answer.get("timings") or {}
        knows_prefill = "prompt_ms" in server
        prefill_s = float(server["prompt_ms"]) / 1000 if knows_prefill else first_token_s - self._started_s
        decode_s = float(server.get("predicted_ms", (now_s - first_token_s) * 1000)) / 1000
        timings = Timings(
            queue_s=max(0.0, first_token_s - self._started_s - prefill_s) if knows_prefill else None,
            prefill_s=prefill_s,
            decode_s=decode_s,
            prompt_tokens=len(self._request.prompt_ids),
            cached_tokens=int(server["cache_n"]) if "cache_n" in server else None,
            completion_tokens=self._n_sent,
        )
        return Done(self._request.request_id, reason, timings, self._stop_id)


def completion_body(request: Generate) -> dict[str, Any]:
    """The JSON of `/completion`. Without stop ids the model's own end is ignored too, as native does."""
    teacher = request.teacher_ids
    n_predict = request.max_tokens if teacher is None else min(request.max_tokens, len(teacher))
    body: dict[str, Any] = {
        "prompt": request.prompt_ids,
        "n_predict": n_predict,
        "stream": True,
        "return_tokens": True,
        "cache_prompt": request.cache_prompt,
        "ignore_eos": teacher is not None or not request.stop_ids,
        **_sampling(request.sampling),
    }
    if request.sampling.logprobs is not None:
        body["n_probs"] = max(1, request.sampling.logprobs)
    return body


def _sampling(sampling: SamplingParams) -> dict[str, Any]:
    values: dict[str, Any] = {
        "samplers": SAMPLERS,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "repeat_last_n": sampling.repeat_last_n,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.seed is not None:
        values["seed"] = sampling.seed % (2**32 - 1)  # 2^32 - 1 itself asks for a random one
    if sampling.logit_bias:
        values["logit_bias"] = [[token, bias] for token, bias in sampling.logit_bias.items()]
    return values

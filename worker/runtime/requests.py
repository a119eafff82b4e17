"""One request inside the worker: the check before it is queued, and its state until its final event."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from worker.protocol import Generate, SamplingParams, Score, Timings
from worker.runtime.executor import DRAWN, MAX_TOP, Output, Sampler
from worker.runtime.kv_pages import SequencePages


class Refusal(Exception):
    """A request that cannot be served; `code` is that of `Failed`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a request is checked against. `total_tokens`: prompt plus output of one sequence."""

    n_vocab: int
    context_length_tokens: int
    kv_capacity_tokens: int

    @property
    def total_tokens(self) -> int:
        return min(self.context_length_tokens, self.kv_capacity_tokens)


class Request:
    """A request from `accepted` to its final event. `tokens` are the prompt and what came after it."""

    __slots__ = (
        "request_id",
        "tokens",
        "n_prompt",
        "end_tokens",
        "pages",
        "n_computed",
        "reuse",
        "arrival_s",
        "admitted_s",
        "first_token_s",
        "cached_tokens",
    )

    def __init__(self, request_id: str, tokens: list[int], n_prompt: int, reuse: bool, now_s: float) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.n_prompt = n_prompt
        self.pages: SequencePages | None = None  # None: queued
        self.n_computed = 0  # positions whose KV is in `pages`
        self.reuse = reuse
        self.arrival_s = now_s
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_tokens = 0

    @property
    def n_known(self) -> int:
        """Tokens that can be computed now."""
        return len(self.tokens)

    def outputs(self, first: int, end: int) -> tuple[Output, ...]:
        """What is wanted of a part that computes positions [first, end)."""
        raise TypeError("a request is a generation or a scoring")

    def ahead(self) -> tuple[int, Output] | None:
        """While the last known token is computed: the one behind it, DRAWN where only that step will tell, and what is
        wanted of it. None when there is nothing behind it, or nothing that could be computed before its answer is here.
        """
        return None

    def timings(self, now_s: float) -> Timings:
        """The times that passed so far; a request that never ran has only waited."""
        admitted_s = self.admitted_s if self.admitted_s is not None else now_s
        first_token_s = self.first_token_s if self.first_token_s is not None else now_s
        return Timings(
            queue_s=admitted_s - self.arrival_s,
            prefill_s=first_token_s - admitted_s,
            decode_s=now_s - first_token_s,
            prompt_tokens=self.n_prompt,
            cached_tokens=self.cached_tokens,
            completion_tokens=len(self.tokens) - self.n_prompt,
        )


class Generation(Request):
    """A running `generate`. Ends when `tokens` has `end_tokens` entries, or at a stop id."""

    __slots__ = ("sampler", "stop_ids", "teacher_ids", "history_tokens")

    def __init__(self, message: Generate, seed: int, bounds: Bounds, now_s: float) -> None:
        prompt = list(message.prompt_ids)
        super().__init__(message.request_id, prompt, len(prompt), message.cache_prompt, now_s)
        wanted = message.max_tokens
        if message.teacher_ids is not None:
            wanted = min(wanted, len(message.teacher_ids))
        self.end_tokens = min(len(prompt) + wanted, bounds.total_tokens)
        self.sampler = Sampler.of(message.sampling, seed)
        self.stop_ids = frozenset(message.stop_ids)
        self.teacher_ids = message.teacher_ids
        last_n = message.sampling.repeat_last_n
        self.history_tokens = 0
        if self.sampler.penalises:
            self.history_tokens = bounds.context_length_tokens if last_n < 0 else last_n

    def outputs(self, first: int, end: int) -> tuple[Output, ...]:
        if end < len(self.tokens):
            return ()
        history = self.tokens[-self.history_tokens :] if self.history_tokens else ()
        return (self._output(end - 1 - first, history, len(self.tokens) - self.n_prompt),)

    def ahead(self) -> tuple[int, Output] | None:
        if len(self.tokens) + 1 >= self.end_tokens:
            return None
        draw = len(self.tokens) - self.n_prompt
        token_id = DRAWN if self.teacher_ids is None else self.teacher_ids[draw]
        history: Sequence[int] = ()
        if self.history_tokens:
            history = [*self.tokens, token_id][-self.history_tokens :]
        return token_id, self._output(0, history, draw + 1)

    def _output(self, row: int, history: Sequence[int], draw: int) -> Output:
        if self.teacher_ids is not None and self.sampler.top >= 0:
            return Output(row, target=self.teacher_ids[draw], top=self.sampler.top)
        return Output(row, self.sampler, history, draw)

    def next_token(self, drawn_id: int) -> int:
        """The id that goes on: the drawn one, or the teacher's."""
        if self.teacher_ids is None:
            return drawn_id
        return self.teacher_ids[len(self.tokens) - self.n_prompt]


class Scoring(Request):
    """A running `score`: every position but the last is computed and asked for its successor."""

    __slots__ = ("top", "logprobs", "top_lists")

    def __init__(self, message: Score, now_s: float) -> None:
        ids = list(message.ids)
        super().__init__(message.request_id, ids, len(ids), False, now_s)
        self.end_tokens = len(ids)
        self.top = message.top
        self.logprobs: list[float] = []
        self.top_lists: list[list[tuple[int, float]]] = []

    @property
    def n_known(self) -> int:
        return len(self.tokens) - 1  # the last is only looked up

    def outputs(self, first: int, end: int) -> tuple[Output, ...]:
        return tuple(
            Output(position - first, target=self.tokens[position + 1], top=self.top)
            for position in range(first, end)
        )


# ---- checks -------------------------------------------------------------------------------------


def check_generate(message: Generate, bounds: Bounds) -> None:
    """Raises Refusal. An output that would pass the context is no reason: it ends early, with "length"."""
    _check_ids("prompt_ids", message.prompt_ids, bounds.n_vocab, least=1)
    if message.max_tokens < 1:
        raise Refusal("invalid_request", f"max_tokens is {message.max_tokens}; ask for at least 1")
    if message.teacher_ids is not None:
        _check_ids("teacher_ids", message.teacher_ids, bounds.n_vocab, least=1)
    _check_sampling(message.sampling, bounds.n_vocab)
    _check_length(len(message.prompt_ids), 1, bounds)


def check_score(message: Score, bounds: Bounds) -> None:
    """Raises Refusal."""
    _check_ids("ids", message.ids, bounds.n_vocab, least=2)
    if not 0 <= message.top <= MAX_TOP:
        raise Refusal("invalid_request", f"top is {message.top}; it must be 0 to {MAX_TOP}")
    _check_length(len(message.ids), 0, bounds)


def _check_length(n_prompt: int, n_output: int, bounds: Bounds) -> None:
    if n_prompt + n_output <= bounds.total_tokens:
        return
    if bounds.total_tokens == bounds.context_length_tokens:
        limit = f"the context length is {bounds.context_length_tokens} tokens"
    else:
        limit = f"the key/value cache holds {bounds.kv_capacity_tokens} tokens"
    room = " and at least one of output" if n_output else ""
    raise Refusal(
        "context_length_exceeded",
        f"the prompt has {n_prompt} tokens{room}, {limit}; shorten the prompt or plan with a larger context",
    )


def _check_ids(name: str, ids: list[int], n_vocab: int, least: int) -> None:
    if len(ids) < least:
        raise Refusal("invalid_request", f"{name} has {len(ids)} token ids; at least {least} are needed")
    low, high = min(ids), max(ids)
    if low < 0 or high >= n_vocab:
        wrong = low if low < 0 else high
        raise Refusal(
            "invalid_request", f"{name} holds {wrong}; the ids of this model are 0 to {n_vocab - 1}"
        )


_SMALLEST = 2.0**-126  # kernels compute in single precision: less may be zero there
_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("temperature", 0.0, math.inf, "at least 0"),
    ("top_k", 0, math.inf, "at least 0, 0 switches it off"),
    ("top_p", _SMALLEST, 1.0, "above 0, at most 1"),
    ("min_p", 0.0, 1.0, "0 to 1"),
    ("repeat_last_n", -1, math.inf, "at least -1, which stands for the whole context"),
    ("repeat_penalty", _SMALLEST, math.inf, "above 0"),
    ("presence_penalty", -math.inf, math.inf, "a number"),
    ("frequency_penalty", -math.inf, math.inf, "a number"),
)


def _check_sampling(params: SamplingParams, n_vocab: int) -> None:
    for name, low, high, words in _RANGES:
        value = getattr(params, name)
        if not (low <= value <= high) or not math.isfinite(value):
            raise Refusal("invalid_request", f"{name} is {value}; it must be {words}")
    if params.logprobs is not None and not 0 <= params.logprobs <= MAX_TOP:
        raise Refusal("invalid_request", f"logprobs is {params.logprobs}; it must be 0 to {MAX_TOP}")
    if params.logit_bias:
        _check_ids("logit_bias", list(params.logit_bias), n_vocab, least=1)
        if not all(math.isfinite(value) for value in params.logit_bias.values()):
            raise Refusal("invalid_request", "logit_bias holds a value that is not finite")

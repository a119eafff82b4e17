"""The JSON-lines protocol between a parent and the worker: one message a line, `docs/protocol.md` tells the story.

Parent to worker on stdin, worker to parent on stdout; the worker's stderr is a log file. Token ids cross, never text.
Every accepted `generate` ends with exactly one `done` or `failed`. Unknown fields are skipped, so versions may differ
by additions; `PROTOCOL_VERSION` changes when an old peer would misunderstand.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL_VERSION = 1


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. `temperature` 0 is greedy; 0 or 1 switch the filters off as usual."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None  # None: the worker draws one and returns it in `accepted`
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best (0..20)


# ---- parent to worker ----


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Load a model under a placement. Answered by `progress`... then `ready` or `fatal`."""

    model_path: str
    placement: dict[str, Any]  # plans.placement.Placement as builtins


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """Continue a prompt. Ends at an id of `stop_ids` (reported, not part of the output) or after `max_tokens`.

    `teacher_ids`: instead of sampling, these ids are fed one a step (for measuring: same work for all).
    """

    request_id: str
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop_ids: list[int] = []
    teacher_ids: list[int] | None = None
    cache_prompt: bool = True


class Score(msgspec.Struct, frozen=True, tag="score"):
    """Teacher-forced log probabilities of `ids[1:]`, for `bench quality`; answered by `scored` or `failed`.

    `top`: how many of the best tokens to return per position, with their logprobs.
    """

    request_id: str
    ids: list[int]
    top: int = 0


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    request_id: str


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    pass


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Heartbeat; answered by `pong` between two steps."""

    n: int = 0


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Finish nothing, end running requests with `failed`, say `bye`, exit 0."""


ToWorker = Load | Generate | Score | Cancel | GetStats | Ping | Shutdown


# ---- worker to parent ----


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First line of the worker, before anything is loaded."""

    protocol_version: int
    worker_version: str
    pid: int
    capabilities: list[str]  # "generate", "score", "cancel", ...
    isa: str  # "avx512_vnni", "avx2", ...


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    phase: str  # "mapping", "packing", "warming"
    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    context_length_tokens: int  # of one sequence
    n_vocab: int
    max_sequences: int
    kv_capacity_tokens: int
    memory_bytes: dict[str, int]  # "weights", "kv", "workspace"
    load_s: float


class Accepted(msgspec.Struct, frozen=True, tag="accepted"):
    """The request is queued; from here on exactly one `done` or `failed` follows."""

    request_id: str
    seed: int


class TokenEvent(msgspec.Struct, frozen=True, tag="token", omit_defaults=True):
    request_id: str
    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Timings(msgspec.Struct, frozen=True):
    """Of one request. Times are wall clock of the worker; the first token is part of the prefill.

    None stands for what an engine that is another server does not tell; the worker knows all of it.
    """

    queue_s: float | None
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    cached_tokens: int | None
    completion_tokens: int


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    request_id: str
    reason: str  # "stop" (an id of stop_ids), "length", "cancelled"
    timings: Timings
    stop_id: int | None = None  # the id that ended it, for "stop"; it has no token event


class Scored(msgspec.Struct, frozen=True, tag="scored"):
    request_id: str
    logprobs: list[float]
    top: list[list[tuple[int, float]]] = []


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """One request failed, the worker lives on."""

    request_id: str
    code: str  # "context_length_exceeded", "invalid_request", "overloaded", "internal", "shutdown"
    message: str


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    values: dict[str, float | int | None]


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    n: int


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """Typed last words: the worker exits after this line."""

    code: str
    message: str


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    pass


FromWorker = (
    Hello | Progress | Ready | Accepted | TokenEvent | Done | Scored | Failed | Stats | Pong | Fatal | Bye
)

encode = msgspec.json.Encoder().encode
decode_to_worker = msgspec.json.Decoder(ToWorker).decode
decode_from_worker = msgspec.json.Decoder(FromWorker).decode

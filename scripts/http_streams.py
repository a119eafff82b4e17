"""Times streams of /v1/completions at the socket: the same client for every server that speaks OpenAI's API.

Bytes are stamped when they arrive and read only after the last one, so that the client costs the server nothing.
Requests run to their length (`ignore_eos`), greedily, and reuse no earlier prompt.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

ANSWER_DEADLINE_S = 120.0


class Stream(NamedTuple):
    """One answer. `stamps_s`: when each piece of text arrived; a piece is a token, seldom several."""

    n_tokens: int
    started_s: float
    stamps_s: tuple[float, ...]
    own_tokens_per_s: float | None  # what the server says of itself

    def tokens_in(self, begin_s: float, end_s: float) -> float:
        """Tokens that came after `begin_s`, up to `end_s`."""
        pieces = sum(begin_s < stamp <= end_s for stamp in self.stamps_s)
        return pieces * self.n_tokens / len(self.stamps_s)


class Rates(NamedTuple):
    """Of several streams side by side. `together`: while all of them decode; `whole`: prompts and all, wall clock."""

    together_tokens_per_s: float
    whole_tokens_per_s: float
    own_tokens_per_s: float | None  # the sum of what the server says of each


def rates_of(streams: list[Stream]) -> Rates:
    """Raises ValueError where the first stream ended before the last one began: nothing was decoded side by side."""
    begin_s, end_s = max(s.stamps_s[0] for s in streams), min(s.stamps_s[-1] for s in streams)
    if end_s <= begin_s:
        raise ValueError(f"{len(streams)} streams of {streams[0].n_tokens} tokens never ran at the same time")
    wall_s = max(s.stamps_s[-1] for s in streams) - min(s.started_s for s in streams)
    own = [s.own_tokens_per_s for s in streams if s.own_tokens_per_s is not None]
    return Rates(
        sum(s.tokens_in(begin_s, end_s) for s in streams) / (end_s - begin_s),
        sum(s.n_tokens for s in streams) / wall_s,
        sum(own) if len(own) == len(streams) else None,
    )


def ask_all(url: str, prompts: list[list[int]], n_tokens: int) -> list[Stream]:
    """Answers to all prompts (token ids), asked for at once. Raises OSError, ValueError or TimeoutError."""

    async def ask() -> list[Stream]:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            return await asyncio.gather(*(complete(url, ids, n_tokens) for ids in prompts))

    return asyncio.run(ask())


def measure(url: str, prompts: list[list[int]], n_tokens: int) -> Rates:
    """Rates of `ask_all`. Raises as it and as `rates_of`."""
    return rates_of(ask_all(url, prompts, n_tokens))


async def complete(url: str, prompt_ids: list[int], n_tokens: int) -> Stream:
    body = {
        "prompt": prompt_ids,
        "max_tokens": n_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    started_s = time.perf_counter()
    try:
        writer.write(_request(address.netloc, json.dumps(body).encode()))
        chunks = await _chunks(reader)
    finally:
        writer.close()
        await writer.wait_closed()
    return _stream(list(_events(chunks)), n_tokens, started_s)


def _request(host: str, body: bytes) -> bytes:
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _chunks(reader: asyncio.StreamReader) -> list[tuple[float, bytes]]:
    """Chunks of the body with the time that each arrived at."""
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.split(b"\r\n", 1)[0] or b"chunked" not in head.lower():
        raise ValueError(f"no stream but {head.decode()}{(await reader.read(2000)).decode()}")
    chunks = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        chunks.append((time.perf_counter(), (await reader.readexactly(size + 2))[:-2]))
    return chunks


def _events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events with the time of the chunk that completed each."""
    ends = list(itertools.accumulate(len(data) for _, data in chunks))
    text, position, index = b"".join(data for _, data in chunks), 0, 0
    for event in text.split(b"\n\n")[:-1]:
        position += len(event) + 2
        while ends[index] < position:
            index += 1
        if event.startswith(b"data: {"):
            yield chunks[index][0], json.loads(event[6:])


def _stream(events: list[tuple[float, dict[str, Any]]], n_tokens: int, started_s: float) -> Stream:
    choices = [(stamp, event["choices"][0]) for stamp, event in events if event.get("choices")]
    reasons = [choice["finish_reason"] for _, choice in choices if choice.get("finish_reason")]
    if reasons != ["length"]:
        raise ValueError(f"a stream of {n_tokens} tokens ended with {reasons or events[-1:]}")
    stamps = tuple(stamp for stamp, choice in choices if choice.get("text"))
    timings = [event["timings"] for _, event in events if event.get("timings")]
    return Stream(n_tokens, started_s, stamps, _own_rate(timings[-1]) if timings else None)


def _own_rate(timings: dict[str, float]) -> float:
    """Decoded tokens per second by the server's clock, in our words or in llama.cpp's."""
    if "predicted_per_second" in timings:
        return timings["predicted_per_second"]
    return (timings["completion_tokens"] - 1) / timings["decode_s"]

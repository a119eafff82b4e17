"""Starts workers with a fake model, for the tests of processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from plans.placement import CPU_ONLY, Placement
from worker.client import Deadlines, WorkerClient
from worker.protocol import Done, Generate, Load, SamplingParams, TokenEvent

COMMAND = [sys.executable, str(Path(__file__).with_name("fake_worker.py")), "serve"]
GREEDY = SamplingParams(temperature=0.0)
PLACEMENT = Placement(
    engine="native",
    assignments=CPU_ONLY,
    context_length_tokens=1024,
    max_sequences=4,
    kv_type="f16",
    load_mode="mmap",
    huge_pages=False,
    decode_threads=1,
    prefill_threads=1,
    ubatch_tokens=64,
    kv_budget_bytes=1 << 20,
)
QUICK = Deadlines(heartbeat_s=0.1, silence_s=1.0, stop_s=5.0)

Result = TypeVar("Result")


def run(main: Coroutine[Any, Any, Result], timeout_s: float = 60.0) -> Result:
    """asyncio.run with a limit, so that a hang is a failure."""

    async def limited() -> Result:
        async with asyncio.timeout(timeout_s):
            return await main

    return asyncio.run(limited())


def load_message(**model: object) -> Load:
    return Load(json.dumps(model), msgspec.to_builtins(PLACEMENT))


@asynccontextmanager
async def worker(deadlines: Deadlines = QUICK, **model: object) -> AsyncIterator[WorkerClient]:
    client = WorkerClient(deadlines, command=COMMAND)
    await client.start(load_message(**model))
    try:
        yield client
    finally:
        await client.close()


def request(request_id: str, prompt: list[int], max_tokens: int = 20, **rest: Any) -> Generate:
    return Generate(request_id, prompt, max_tokens, **({"sampling": GREEDY} | rest))


async def collect(client: WorkerClient, message: Generate) -> tuple[list[int], Done]:
    """All ids and the end of one request; raises what generate raises."""
    ids: list[int] = []
    async with contextlib.aclosing(client.generate(message)) as events:  # type: ignore[type-var]
        async for event in events:
            if isinstance(event, TokenEvent):
                ids.append(event.id)
            else:
                return ids, event
    raise AssertionError("the stream ended without an end")

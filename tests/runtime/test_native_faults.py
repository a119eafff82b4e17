"""A real model in a worker that is killed and stopped at random moments: one end per request, unharmed streams."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import msgspec
import pytest

from configs.errors import EngineDiedError
from tests.runtime.workers import GREEDY, PLACEMENT, collect, run
from worker.client import Deadlines, WorkerClient
from worker.protocol import Generate, Load

pytestmark = pytest.mark.slow
N_ROUNDS = 50
N_CLIENTS = 4
DEADLINES = Deadlines(heartbeat_s=0.1, silence_s=1.0)


def load_message() -> Load:
    folder = os.environ.get("PLACEWRIGHT_TEST_MODELS")
    if folder is None:
        pytest.skip("PLACEWRIGHT_TEST_MODELS names no folder with models")
    model = next(Path(folder).glob("SmolLM2-135M*.gguf"))
    placement = msgspec.structs.replace(
        PLACEMENT, ubatch_tokens=256, kv_budget_bytes=1 << 28, decode_threads=2
    )
    return Load(str(model), msgspec.to_builtins(placement))


def requests() -> list[Generate]:
    generator = random.Random(7)
    prompts = [[generator.randrange(1000, 40000) for _ in range(n)] for n in (20, 150, 400, 700)]
    return [Generate(f"r{index}", prompt, 40, GREEDY) for index, prompt in enumerate(prompts)]


@pytest.mark.timeout(600)
def test_killed_and_stopped_at_random_moments() -> None:
    load = load_message()

    async def undisturbed() -> list[list[int]]:
        client = WorkerClient(DEADLINES)
        await client.start(load)
        wanted = [(await collect(client, message))[0] for message in requests()]
        await client.close()
        return wanted

    async def one_round(generator: random.Random, wanted: list[list[int]]) -> int:
        client = WorkerClient(DEADLINES)
        await client.start(load)
        assert client.hello is not None
        tasks = [asyncio.create_task(collect(client, message)) for message in requests()]
        await asyncio.sleep(generator.random() * 0.8)
        os.kill(client.hello.pid, generator.choice([signal.SIGKILL, signal.SIGSTOP]))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()
        for end, ids in zip(ends, wanted, strict=True):
            assert isinstance(end, EngineDiedError) or (isinstance(end, tuple) and end[0] == ids)
        return sum(isinstance(end, EngineDiedError) for end in ends)

    wanted = run(undisturbed())
    generator = random.Random(11)
    hit = sum(run(one_round(generator, wanted)) for _ in range(N_ROUNDS))
    assert 0 < hit <= N_ROUNDS * N_CLIENTS
    assert run(undisturbed()) == wanted

"""The client against real worker processes with a fake model: every fault ends in one clear error, soon."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from configs.errors import EngineDiedError, EngineStartError, RequestFailedError
from tests.runtime.fake_executor import expected_logprobs, expected_tokens
from tests.runtime.fake_worker import BUG, CRASH, POISON, STUCK
from tests.runtime.workers import COMMAND, GREEDY, QUICK, collect, load_message, request, run, worker
from worker.client import Deadlines, WorkerClient
from worker.protocol import Done, SamplingParams, Score, TokenEvent
from worker.runtime.executor import Sampler


def greedy(prompt: list[int], n_tokens: int = 20) -> list[int]:
    return expected_tokens(prompt, n_tokens, Sampler.of(GREEDY, 0))


def pid_of(client: WorkerClient) -> int:
    assert client.hello is not None
    return client.hello.pid


def test_start_generate_score_stats_close() -> None:
    async def main() -> None:
        seen: list[tuple[str, int, int]] = []
        client = WorkerClient(QUICK, command=COMMAND)
        ready = await client.start(load_message(), lambda *progress: seen.append(progress))
        assert ready.n_vocab == 997 and ready.kv_capacity_tokens == 64 * 32 and ready.max_sequences == 4
        assert seen == [("packing", 0, 2), ("packing", 1, 2)]
        ids, done = await collect(client, request("a", [1, 2, 3]))
        assert ids == greedy([1, 2, 3]) and done.reason == "length"
        scored = await client.score(Score("s", [1, 2, 3, 4], top=2))
        assert scored.logprobs == expected_logprobs([1, 2, 3, 4]) and len(scored.top) == 3
        stats = await client.stats()
        assert stats["generated_tokens"] == 20 and stats["resident_bytes"]
        assert client.alive()
        await client.close()
        await client.close()
        assert not client.alive()
        with pytest.raises(EngineDiedError):
            await collect(client, request("b", [1]))

    run(main())


def test_many_streams_at_once() -> None:
    async def main() -> None:
        async with worker() as client:
            prompts = [[index, index + 1] for index in range(12)]
            results = await asyncio.gather(
                *(collect(client, request(f"r{index}", p, 50)) for index, p in enumerate(prompts))
            )
            assert [ids for ids, _ in results] == [greedy(p, 50) for p in prompts]

    run(main())


def test_a_slow_consumer_stalls_nobody() -> None:
    async def main() -> None:
        async with worker() as client:
            slow = client.generate(request("slow", [1], 500))
            await anext(slow)
            ids, _ = await collect(client, request("quick", [2], 500))
            assert ids == greedy([2], 500)
            rest = [event async for event in slow]
            assert len(rest) == 500 and isinstance(rest[-1], Done)

    run(main())


def test_refusals_carry_their_code() -> None:
    async def main() -> None:
        async with worker() as client:
            with pytest.raises(RequestFailedError, match="1024") as caught:
                await collect(client, request("a", [1] * 1024))
            assert caught.value.code == "context_length_exceeded"
            with pytest.raises(RequestFailedError, match="poison"):
                await collect(client, request("b", [POISON]))
            first = asyncio.create_task(collect(client, request("c", [1], 900)))
            await asyncio.sleep(0)
            with pytest.raises(RequestFailedError, match="in use"):
                await collect(client, request("c", [1]))
            await first

    run(main())


def test_leaving_a_stream_cancels_it() -> None:
    async def main() -> None:
        async with worker(step_s=0.01) as client:
            for point in ("first token", "prefill", "queue"):
                prompt = [5] * (900 if point == "prefill" else 1)
                others = [asyncio.create_task(collect(client, request(f"o{i}", [i], 40))) for i in range(4)]
                if point != "queue":
                    await asyncio.gather(*others)
                task = asyncio.create_task(collect(client, request(point, prompt, 1000)))
                await asyncio.sleep(0.05)
                task.cancel()
                await asyncio.gather(*others)
                await asyncio.sleep(0.1)
                stats = await client.stats()
                assert stats["requests_running"] == stats["requests_queued"] == 0, point
            assert (await client.stats())["requests_cancelled"] == 3

    run(main())


def test_cancel_ends_a_stream_with_its_times() -> None:
    async def main() -> None:
        async with worker(step_s=0.01) as client:
            seen: list[TokenEvent | Done] = []
            async for event in client.generate(request("r", [1, 2, 3], 400)):
                seen.append(event)
                if len(seen) == 2:
                    client.cancel("r")
            done = seen[-1]
            assert isinstance(done, Done) and done.reason == "cancelled" and len(seen) < 100
            assert done.timings.prompt_tokens == 3 and done.timings.cached_tokens is not None
            client.cancel("r")  # is over
            client.cancel("never was")
            assert (await client.stats())["requests_cancelled"] == 1

    run(main())


def test_cancel_reaches_into_a_long_step() -> None:
    async def main() -> None:
        async with worker(step_s=20.0) as client:
            task = asyncio.create_task(collect(client, request("a", [1])))
            await asyncio.sleep(0.3)
            task.cancel()
            await asyncio.wait([task])
            started_s = time.monotonic()
            stats = await client.stats()
            assert stats["requests_running"] == 0 and time.monotonic() - started_s < 2

    run(main())


def test_long_steps_are_not_taken_for_death() -> None:
    async def main() -> None:
        async with worker(step_s=2.5) as client:
            ids, _ = await collect(client, request("a", [1], 1))
            assert ids == greedy([1], 1)

    run(main())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV])
def test_worker_gone_in_the_middle(how: signal.Signals) -> None:
    async def main() -> None:
        async with worker(step_s=0.01) as client:
            tasks = [asyncio.create_task(collect(client, request(f"r{i}", [i], 900))) for i in range(6)]
            await asyncio.sleep(0.2)
            os.kill(pid_of(client), how)
            started_s = time.monotonic()
            results = await asyncio.gather(*tasks, client.stats(), return_exceptions=True)
            assert time.monotonic() - started_s < 5
            assert all(isinstance(result, EngineDiedError) for result in results), results
            words = {signal.SIGKILL: "SIGKILL", signal.SIGSTOP: "silent", signal.SIGSEGV: "SIGSEGV"}[how]
            assert words in str(results[0])
            assert not client.alive()
            with pytest.raises(EngineDiedError):
                await client.stats()

    run(main())


def test_crash_in_native_code_leaves_a_trace() -> None:
    async def main() -> None:
        async with worker() as client:
            with pytest.raises(EngineDiedError, match=r"SIGSEGV[\s\S]*in misbehave"):
                await collect(client, request("a", [CRASH]))

    run(main())


def test_a_bug_in_the_executor_is_fatal_and_typed() -> None:
    async def main() -> None:
        async with worker() as client:
            with pytest.raises(RequestFailedError, match="a bug in the executor"):
                await collect(client, request("a", [BUG]))
            with pytest.raises(EngineDiedError, match="internal: ZeroDivisionError"):
                while True:
                    await client.stats()

    run(main())


def test_a_stuck_engine_is_found() -> None:
    async def main() -> None:
        deadlines = Deadlines(heartbeat_s=0.1, silence_s=0.5, stall_s=0.5)
        async with worker(deadlines) as client:
            with pytest.raises(EngineDiedError, match="silent"):
                await collect(client, request("a", [STUCK]))

    run(main())


def test_token_deadline_fails_the_request_only() -> None:
    async def main() -> None:
        deadlines = Deadlines(heartbeat_s=0.1, first_token_s=0.4)
        async with worker(deadlines, step_s=1.2) as client:
            with pytest.raises(RequestFailedError, match="deadline") as caught:
                await collect(client, request("a", [1]))
            assert caught.value.code == "timeout" and client.alive()

    run(main())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"error": "model_file"}, "model_file: the file is broken at byte 12"),
        ({"error": "memory"}, "out_of_memory: no room for 9 GiB"),
        ({"error": "exit"}, "exit code 9[\\s\\S]*last words on stderr"),
        ({"load_s": 3.0}, "no progress for 0.3 s"),
    ],
)
def test_load_failures(model: dict[str, object], words: str) -> None:
    async def main() -> None:
        client = WorkerClient(Deadlines(load_silence_s=0.3, stop_s=0.5), command=COMMAND)
        with pytest.raises(EngineStartError, match=words) as caught:
            await client.start(load_message(**model))
        assert "Traceback" not in str(caught.value)  # a cause that has a name needs no log
        assert not client.alive()
        await client.close()

    run(main())


def test_slow_load_with_progress_is_waited_for() -> None:
    async def main() -> None:
        deadlines = Deadlines(load_silence_s=1.0)
        async with worker(deadlines, load_steps=6, load_s=0.25, print=True) as client:
            assert (await collect(client, request("a", [1])))[0] == greedy([1])

    run(main())


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import time; time.sleep(60)", "no hello within 0.5 s"),
        ("print('what is this')", "no message"),
        ("import sys; sys.exit('no kernels here')", "exit code 1[\\s\\S]*no kernels here"),
    ],
)
def test_not_a_worker(program: str, words: str) -> None:
    async def main() -> None:
        client = WorkerClient(Deadlines(hello_s=0.5), command=[sys.executable, "-c", program])
        with pytest.raises(EngineStartError, match=words):
            await client.start(load_message())

    run(main())


def test_no_such_program() -> None:
    client = WorkerClient(command=["/does/not/exist"])
    with pytest.raises(EngineStartError, match="/does/not/exist"):
        run(client.start(load_message()))


def test_log_file_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        client = WorkerClient(log_path=tmp_path / "logs" / "worker.log", command=COMMAND)
        await client.start(load_message(print=True))
        await client.close()

    run(main())
    text = (tmp_path / "logs" / "worker.log").read_text()
    assert "noise on stdout" in text and "bye" in text


def test_last_words_are_those_of_this_run(tmp_path: Path) -> None:
    log_path = tmp_path / "worker.log"
    log_path.write_text("an old story\n" * 100)

    async def main() -> None:
        client = WorkerClient(QUICK, log_path, COMMAND)
        with pytest.raises(EngineStartError, match="last words on stderr") as caught:
            await client.start(load_message(error="exit"))
        assert "an old story" not in str(caught.value)

    run(main())


def test_a_large_log_is_put_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.client.child.MOST_LOG_BYTES", 100)
    log_path = tmp_path / "worker.log"
    log_path.write_text("an old story\n" * 100)

    async def main() -> None:
        client = WorkerClient(QUICK, log_path, COMMAND)
        await client.start(load_message())
        await client.close()

    run(main())
    assert "an old story" in (tmp_path / "worker.log.old").read_text()
    assert "an old story" not in log_path.read_text()


def test_sampling_and_logprobs_cross_the_pipe() -> None:
    async def main() -> None:
        sampling = SamplingParams(temperature=0.7, seed=11, logprobs=3, logit_bias={5: 1.5})
        async with worker() as client:
            events = [event async for event in client.generate(request("a", [1], 5, sampling=sampling))]
            tokens = [event for event in events if isinstance(event, TokenEvent)]
            assert [event.id for event in tokens] == expected_tokens([1], 5, Sampler.of(sampling, 11))
            assert all(event.logprob == -0.5 and len(event.top) == 3 for event in tokens)

    run(main())


def test_random_disconnects_leave_nothing_behind() -> None:
    async def visitor(client: WorkerClient, name: str, end_s: float) -> None:
        generator = random.Random(name)
        number = 0
        while time.monotonic() < end_s:
            number += 1
            prompt = [generator.randrange(900) for _ in range(generator.randrange(1, 200))]
            message = request(f"{name}.{number}", prompt, generator.randrange(1, 60))
            task = asyncio.create_task(collect(client, message))
            if generator.random() < 0.5:
                await asyncio.sleep(generator.random() * 0.05)
                task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                assert task.result()[0] == greedy(prompt, message.max_tokens)

    async def main() -> None:
        async with worker(n_pages=48, step_s=0.0005) as client:
            end_s = time.monotonic() + 3
            await asyncio.gather(*(visitor(client, f"v{index}", end_s) for index in range(16)))
            await asyncio.sleep(0.2)
            stats = await client.stats()
            assert stats["requests_running"] == stats["requests_queued"] == stats["kv_pages_held"] == 0
            assert stats["requests_cancelled"]

    run(main())


def test_kill_at_random_moments() -> None:
    """Each request has one end, whatever happens; the streams of the next worker are as if nothing had been."""

    async def one_round(generator: random.Random) -> None:
        async with worker(step_s=0.002) as client:
            prompts = [
                [generator.randrange(900) for _ in range(generator.randrange(1, 200))] for _ in range(5)
            ]
            tasks = [
                asyncio.create_task(collect(client, request(f"r{i}", p, 60))) for i, p in enumerate(prompts)
            ]
            await asyncio.sleep(generator.random() * 0.3)
            os.kill(pid_of(client), generator.choice([signal.SIGKILL, signal.SIGSTOP]))
            for prompt, result in zip(
                prompts, await asyncio.gather(*tasks, return_exceptions=True), strict=True
            ):
                if isinstance(result, BaseException):
                    assert isinstance(result, EngineDiedError)
                else:
                    assert result[0] == greedy(prompt, 60)

    for seed in range(6):
        run(one_round(random.Random(seed)))

"""The client that times streams: what it reads from the socket, and what it makes of the times."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PATH = Path(__file__).resolve().parents[2] / "scripts" / "http_streams.py"


@pytest.fixture(scope="module")
def client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("http_streams", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def event(text: str, reason: str | None = None, **more: object) -> bytes:
    choice = {"text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def ask(client: ModuleType, chunks: list[bytes], status: str = "200 OK") -> object:
    """`complete` against a server that answers any request with these chunks."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))
        writer.write(f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):  # the client may have seen enough
            for chunk in [*chunks, b""]:
                writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.close()
            await writer.wait_closed()
        done.set()

    done = asyncio.Event()

    async def run() -> object:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            try:
                return await client.complete(f"http://127.0.0.1:{port}", [1, 2, 3], 3)
            finally:
                await done.wait()

    return asyncio.run(run())


def test_events_may_share_a_chunk_or_be_cut_by_one(client: ModuleType) -> None:
    timings = {"decode_s": 0.5, "completion_tokens": 3}
    text = event("a") + event("b")
    last = event("", "length", timings=timings) + b"data: [DONE]\n\n"
    stream = ask(client, [text[:30], text[30:], event("c"), last])
    assert len(stream.stamps_s) == 3  # type: ignore[attr-defined]
    first, second, third = stream.stamps_s  # type: ignore[attr-defined]
    assert first == second < third
    assert stream.own_tokens_per_s == pytest.approx(4.0)  # type: ignore[attr-defined]


def test_an_answer_that_ended_early_or_failed_is_no_measurement(client: ModuleType) -> None:
    with pytest.raises(ValueError, match="stop"):
        ask(client, [event("a"), event("", "stop")])
    with pytest.raises(ValueError, match="503"):
        ask(client, [b"no"], status="503 Service Unavailable")


def test_rates_count_the_time_that_all_streams_share(client: ModuleType) -> None:
    early = client.Stream(11, 0.0, tuple(1.0 + 0.1 * i for i in range(11)), 10.0)
    late = client.Stream(11, 0.0, tuple(1.5 + 0.1 * i for i in range(11)), 10.0)
    rates = client.rates_of([early, late])
    assert rates.together_tokens_per_s == pytest.approx(20.0, rel=0.11)
    assert rates.whole_tokens_per_s == pytest.approx(22 / 2.5)
    assert rates.own_tokens_per_s == 20.0
    after = client.Stream(11, 0.0, tuple(3.0 + 0.1 * i for i in range(11)), None)
    with pytest.raises(ValueError, match="never ran at the same time"):
        client.rates_of([early, after])


def test_answers_that_never_overlap_warm_up_but_are_no_rate(
    client: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def complete(url: str, prompt_ids: list[int], n_tokens: int) -> object:
        begin_s = float(prompt_ids[0])
        return client.Stream(n_tokens, 0.0, (begin_s, begin_s + 0.5), None)

    monkeypatch.setattr(client, "complete", complete)
    assert len(client.ask_all("http://nowhere", [[0], [1]], 2)) == 2
    with pytest.raises(ValueError, match="2 streams of 2 tokens never ran at the same time"):
        client.measure("http://nowhere", [[0], [1]], 2)

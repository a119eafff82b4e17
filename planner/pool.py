"""Keeps as many candidates' engines running as memory allows, so that interleaved rounds do not reload
models.

An idle engine's threads are parked and cost nothing but memory; the one that was used longest ago is closed
first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from planner.search import Candidate
from plans.placement import Placement
from worker.engines.base import Engine, EngineInfo

EngineFactory = Callable[[Placement], Engine]


class EnginePool:
    """Raises EngineStartError from `get`; `close` stops everything and may be called at any time."""

    def __init__(self, factory: EngineFactory, limit_bytes: int) -> None:
        self._factory = factory
        self._limit_bytes = limit_bytes
        self._running: OrderedDict[str, tuple[Engine, int]] = OrderedDict()
        self.infos: dict[str, EngineInfo] = {}

    async def get(self, candidate: Candidate) -> tuple[Engine, bool]:
        """The running engine of a candidate, and whether it was started just now."""
        label = candidate.label
        if label in self._running:
            self._running.move_to_end(label)
            engine, _ = self._running[label]
            if engine.alive():
                return engine, False
            await self.drop(candidate)
        need = candidate.memory.total_bytes
        while self._running and self._used_bytes() + need > self._limit_bytes:
            await self._close(next(iter(self._running)))
        engine = self._factory(candidate.placement)
        self._running[label] = (engine, need)
        try:
            self.infos[label] = await engine.start()
        except BaseException:
            await self._close(label)
            raise
        return engine, True

    def _used_bytes(self) -> int:
        return sum(need for _, need in self._running.values())

    async def _close(self, label: str) -> None:
        engine, _ = self._running.pop(label)
        await engine.close()

    async def drop(self, candidate: Candidate) -> None:
        """Stops a candidate's engine if it runs."""
        if candidate.label in self._running:
            await self._close(candidate.label)

    async def close(self) -> None:
        for label in list(self._running):
            await self._close(label)

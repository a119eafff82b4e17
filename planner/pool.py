"""Keeps as many candidates' engines running as memory allows, so that interleaved rounds do not reload models.

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

    def __init__(
        self, factory: EngineFactory, limit_bytes: int, gpu_limits_bytes: tuple[int, ...] = ()
    ) -> None:
        self._factory = factory
        self._limits_bytes = (limit_bytes, *gpu_limits_bytes)
        self._running: OrderedDict[str, tuple[Engine, tuple[int, ...]]] = OrderedDict()
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
        need = self._need(candidate)
        while self._running and not self._fits(need):
            await self._close(next(iter(self._running)))
        engine = self._factory(candidate.placement)
        self._running[label] = (engine, need)
        try:
            self.infos[label] = await engine.start()
        except BaseException:
            await self._close(label)
            raise
        return engine, True

    def holds(self, candidate: Candidate) -> bool:
        """Whether the engine of a candidate runs now."""
        return candidate.label in self._running

    def _need(self, candidate: Candidate) -> tuple[int, ...]:
        """Bytes of RAM, then of each GPU by number."""
        on_gpus = [0] * (len(self._limits_bytes) - 1)
        ordinals = candidate.placement.gpu_ordinals
        for ordinal, need in zip(ordinals, candidate.gpu_memory, strict=False):
            on_gpus[ordinal] = need.total_bytes
        return (candidate.memory.total_bytes, *on_gpus)

    def _fits(self, need: tuple[int, ...]) -> bool:
        """Beside what runs. Only what a candidate needs counts: a full GPU is nothing to an engine on the CPU."""
        needs = [running for _, running in self._running.values()]
        sums = [sum(column) for column in zip(need, *needs, strict=True)]
        limits = zip(sums, need, self._limits_bytes, strict=True)
        return all(total <= limit for total, own, limit in limits if own)

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

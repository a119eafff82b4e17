"""What an engine is: something that can run a plan. The planner, the bench and the server know only this page.

An engine takes token ids and yields events. It is used from one asyncio loop; several requests may run at a
time.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from configs.progress import ProgressCallback
from worker.protocol import Done, Generate, Scored, TokenEvent


class EngineInfo(msgspec.Struct, frozen=True):
    """What a started engine can do. Unknown numbers are None."""

    name: str
    version: str
    context_length_tokens: int
    n_vocab: int | None
    max_sequences: int
    kv_capacity_tokens: int | None
    memory_bytes: dict[str, int]
    load_s: float | None
    feeds_teacher_ids: bool = True  # False: with `teacher_ids` it decodes as many tokens, but its own


class TextCodec(Protocol):
    """A model's tokenizer, for engines that take or return text only."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Engine(abc.ABC):
    """Life: `start` once, any number of `generate`, `close` once (safe at any time, also twice)."""

    @abc.abstractmethod
    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        """Load the model. Raises EngineStartError with the engine's last words."""

    @abc.abstractmethod
    def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        """Token events, then exactly one Done. Raises RequestFailedError or EngineDiedError instead of Done.

        Closing the iterator (`aclose`) cancels the request in the engine.
        """

    def cancel(self, request_id: str) -> bool:
        """Ask for an early end. True: a Done of reason "cancelled" with the times so far comes, if none came yet.

        False: the engine cannot do that, and closing the iterator is the only way to end a request.
        """
        return False

    @abc.abstractmethod
    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        """Teacher-forced log probabilities; raises RequestFailedError where the engine cannot."""

    @abc.abstractmethod
    async def stats(self) -> dict[str, float | int | None]:
        """Counters and gauges; {} where the engine has none."""

    @abc.abstractmethod
    def alive(self) -> bool:
        """False as soon as the engine is known to be gone."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Stop it within seconds, by force if need be. Never raises."""

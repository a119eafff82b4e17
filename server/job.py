"""A request that was accepted, in the engine's terms."""

from __future__ import annotations

import msgspec

from worker.protocol import Generate


class Job(msgspec.Struct, frozen=True):
    """Everything behind `server/prepare.py` works on jobs, whatever API they came from."""

    generate: Generate
    stop_strings: tuple[str, ...]
    model_name: str  # as the client called it
    created_unix_s: int
    stream: bool
    include_usage: bool

    @property
    def id(self) -> str:
        return self.generate.request_id

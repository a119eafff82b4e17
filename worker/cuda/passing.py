"""Weights of layers that live in RAM, brought to a device for each step that it computes in place of the CPU.

A feed reads them from the page cache, layer by layer, over and over in the same order. Each layer is laid out in the
one place that all of them share. Readers run ahead until all raw buffers are in use, so that the next layer is copied
while a layer computes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from configs.errors import EngineError
from worker.cuda.device import Device
from worker.cuda.upload import PIECE_BYTES, SLOTS, FeedPlan, Part, fed_parts

PART_BYTES = 4 << 20  # of the file; what is laid out at once
BUFFERS = MOST_READERS = 8  # raw parts, and who reads them: with more readers an H200 host is slower


@dataclass(frozen=True)
class Passing:
    """What of a device's op list has no place of its own there: `layers`, in order, and the embedding where
    `embedding_rows` is not 0. The host looks its rows up, at most so many a step.
    """

    layers: tuple[int, ...] = ()
    embedding_rows: int = 0

    def __bool__(self) -> bool:
        return bool(self.layers)


NOTHING = Passing()


class PassingWeights:
    """Brings the parts of one layer after the other, from the first again after the last. Used from one thread."""

    def __init__(
        self, device: Device, paths: list[str], parts: dict[int, list[Part]], raw_address: int, readers: int
    ) -> None:
        """`parts` by layer, in order. Begins to read ahead, as far as there are raw buffers."""
        self._opened = contextlib.ExitStack()
        files = [os.open(path, os.O_RDONLY) for path in paths]
        for file in files:
            self._opened.callback(os.close, file)
        self._layers, self._parts = list(parts), list(parts.values())
        flat = [part for layer in self._parts for part in layer]
        self._fed = tuple(fed_parts(flat, files, raw_address, BUFFERS))
        plan = FeedPlan(device.stream, self._fed, BUFFERS, readers, SLOTS, PIECE_BYTES, repeats=True)
        self._feed = device.feed(plan)
        self._opened.callback(self._feed.end)  # before the files are closed
        self.first_layer = self._layers[0]
        self._next_layer = self._next_part = 0
        self._failure = ""

    def bring(self, layer: int) -> None:
        """Queue a layer's weights, the next in order. Raises EngineError when the file has changed meanwhile."""
        assert self._layers[self._next_layer] == layer, "layers pass in order"
        self._take(is_wanted=True)

    def rewind(self) -> None:
        """Skip what is left of a round that ended early: a feed only goes forward."""
        while self._next_layer or self._next_part:
            self._take(is_wanted=False)

    def _take(self, *, is_wanted: bool) -> None:
        if self._failure:
            raise EngineError(self._failure)
        try:
            for part in self._parts[self._next_layer]:
                fed = self._fed[self._next_part]
                self._feed.await_part(self._next_part)
                if is_wanted and part.lay_out is not None:
                    part.lay_out(fed.target)
                self._feed.release(fed.buffer)
                self._next_part += 1
        except (OSError, EngineError) as error:
            self._failure = f"weights on their way to the device: {error}"
            raise EngineError(self._failure) from error
        self._next_layer = (self._next_layer + 1) % len(self._layers)
        self._next_part %= len(self._fed)

    def close(self) -> None:
        self._opened.close()

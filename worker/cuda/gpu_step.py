"""One device's part of a forward pass: decode steps as captured graphs, everything else launched op by op.

A decode graph serves one bucket of sequences, one class of contexts, one kind of sampling and one block of the host's
memory. It takes the step's metadata from there and leaves its answers there, so that a decoded token costs one launch;
blocks alternate, so that a step can be queued while the one before it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from worker.cuda.device import Device, Graph
from worker.cuda.lowering import Launch
from worker.cuda.values import StepShape

BUCKETS = (1, 2, 4, 8, 16, 32)
SHORTEST_CONTEXT_TOKENS = 1024
CONTEXT_RATIO = 2  # between the classes of contexts that have a graph of their own
LAYERS_IN_FLIGHT = 4  # how stale the look at the cancel flag may be while a prefill chunk runs


def bucket_for(n_sequences: int) -> int | None:
    """The smallest bucket that holds so many sequences; None when none does."""
    return next((size for size in BUCKETS if size >= n_sequences), None)


def context_limit_for(n_positions: int) -> int:
    """The class of contexts of a step whose positions are all below `n_positions`."""
    limit = SHORTEST_CONTEXT_TOKENS
    while limit < n_positions:
        limit *= CONTEXT_RATIO
    return limit


def n_context_classes(context_length_tokens: int) -> int:
    limit, count = SHORTEST_CONTEXT_TOKENS, 1
    while limit < context_length_tokens:
        limit, count = limit * CONTEXT_RATIO, count + 1
    return count


class Counters(msgspec.Struct):
    """What happened since the load, for the log and for tests."""

    decode_steps: int = 0
    graph_launches: int = 0
    graphs_captured: int = 0
    eager_steps: int = 0


@dataclass(frozen=True)
class Exchange:
    """`before` and `after` queue what a step copies, metadata and residual in, residual out. `receive` and `send` queue
    the kernels by which it takes and leaves the rest; they are a part of a decode step's graph.
    """

    before: Callable[[StepShape], None]
    after: Callable[[StepShape], None]
    receive: Callable[[StepShape], None]
    send: Callable[[StepShape], None]


class GpuStep:
    """Runs `launches` on `device`. Not thread-safe."""

    def __init__(self, device: Device, launches: tuple[Launch, ...], exchange: Exchange) -> None:
        self._device, self._launches, self._exchange = device, launches, exchange
        self._graphs: dict[StepShape, Graph] = {}
        self._seen: set[StepShape] = set()
        self.counters = Counters()

    def has_graph(self, shape: StepShape) -> bool:
        return shape in self._graphs

    def start(self, shape: StepShape) -> Any:
        """Queue a decode step whose shape has a graph, behind all that is queued; the mark of its end."""
        self.counters.decode_steps += 1
        self.counters.graph_launches += 1
        self._exchange.before(shape)
        self._graphs[shape].launch()
        self._exchange.after(shape)
        return self._device.mark()

    def decode(self, shape: StepShape) -> None:
        """Run a decode step to its end. The first of a shape runs op by op, which also loads its kernels; then its
        graph is captured for all later ones.
        """
        if self.has_graph(shape):
            self._device.await_mark(self.start(shape))
            return
        self.counters.decode_steps += 1
        self._exchange.before(shape)
        self._enqueue(shape)
        self._exchange.after(shape)
        self._device.synchronize()
        self._graphs[shape] = self._device.capture(lambda: self._enqueue(shape))
        self.counters.graphs_captured += 1

    def _enqueue(self, shape: StepShape) -> None:
        self._exchange.receive(shape)
        for launch in self._launches:
            launch.enqueue(shape)
        self._exchange.send(shape)

    def eager(self, shape: StepShape, is_cancelled: Callable[[], bool]) -> bool:
        """Run any other step to its end; False when it was cancelled between two layers."""
        self.counters.eager_steps += 1
        self._exchange.before(shape)
        self._exchange.receive(shape)
        layer, marks = -1, []
        for launch in self._launches:
            if launch.layer != layer:
                layer = launch.layer
                marks.append(self._device.mark())
                if len(marks) > LAYERS_IN_FLIGHT:
                    self._device.await_mark(marks.pop(0))
                if is_cancelled():
                    self._device.synchronize()
                    return False
            if shape.n_outputs or not launch.makes_outputs:
                launch.enqueue(shape)
        self._exchange.send(shape)
        self._exchange.after(shape)
        self._device.synchronize()
        return True

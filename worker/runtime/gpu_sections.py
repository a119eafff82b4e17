"""The two kinds of sections of a split pass: a run of layers on a GPU, a run of layers on the CPU.

They exchange the residual stream through one pinned buffer on the host.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.cuda.gpu_step import Counters, Exchange, GpuStep
from worker.cuda.model import DeviceModel
from worker.cuda.step_inputs import InputBlock
from worker.cuda.values import StepShape
from worker.ops.oplist import OpKind
from worker.ops.sections import RESIDUAL
from worker.runtime.executor import CancelFlag, SampledToken, StepBatch, StepCancelled
from worker.runtime.gpu_batch import PreparedStep, read_answers
from worker.runtime.step import NativeExecutor


class ResidualBuffer:
    """Pinned f32 [max_tokens, n_embd]: the residual stream on its way from one section to the next."""

    def __init__(self, model: DeviceModel, max_tokens: int, n_embd: int) -> None:
        self._host = model.device.host_buffer(4 * max_tokens * n_embd)
        self.address, self.row_bytes = self._host.address, 4 * n_embd
        self.rows: NDArray[np.float32] = self._host.array.view(np.float32).reshape(max_tokens, n_embd)

    def close(self) -> None:
        self._host.close()


class SectionRunner(Protocol):
    """Runs one section; answers are those of the section with the head, None from the others."""

    @property
    def counters(self) -> Counters: ...

    def run(
        self, prepared: PreparedStep, batch: StepBatch, cancel: CancelFlag
    ) -> list[SampledToken] | None: ...


class GpuSection:
    """Launches [begin, end) of a device's model. `receives` and `sends` the residual where it is not at an end."""

    def __init__(
        self,
        model: DeviceModel,
        begin: int,
        end: int,
        residual: ResidualBuffer | None,
        receives: bool,
        sends: bool,
    ) -> None:
        self.model = model
        launches = model.launches[begin:end]
        self._residual, self._receives, self._sends = residual, receives, sends
        self._has_head = any(launch.kind == OpKind.SAMPLE for launch in launches)
        exchange = Exchange(self._before, self._after, self._take_inputs, self._leave_answers)
        self._step = GpuStep(model.device, launches, exchange)
        self._step_now: PreparedStep | None = None  # for the exchange

    @property
    def counters(self) -> Counters:
        return self._step.counters

    def _before(self, shape: StepShape) -> None:
        step = self._step_now
        assert step is not None
        own_block(self.model, step).upload(shape.n_sequences)
        if self._receives and self._residual is not None:
            size_bytes = shape.n_tokens * self._residual.row_bytes
            self.model.device.copy_in(self.model.buffer(RESIDUAL).values, self._residual.address, size_bytes)

    def _after(self, shape: StepShape) -> None:
        if self._sends and self._residual is not None:
            size_bytes = shape.n_tokens * self._residual.row_bytes
            self.model.device.copy_out(self._residual.address, self.model.buffer(RESIDUAL).values, size_bytes)

    def _take_inputs(self, shape: StepShape) -> None:
        if shape.is_decode:
            self.model.kernels.receive(shape)

    def _leave_answers(self, shape: StepShape) -> None:
        if self._has_head:
            self.model.kernels.send(shape)

    def run(self, prepared: PreparedStep, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken] | None:
        """Raises StepCancelled, StepFailed for logits that cannot be used."""
        self.model.device.bind()
        self._step_now = prepared
        shape = localised(self.model, prepared)
        if shape.is_decode:
            self._step.decode(shape)
        elif not self._step.eager(shape, cancel.is_set):
            raise StepCancelled("the step was cancelled")
        if not self._has_head or self.model.sampling is None or not prepared.outputs:
            return None
        return None if shape.sampling == "none" else self._read(prepared)

    def can_start(self, prepared: PreparedStep) -> bool:
        return self._step.has_graph(prepared.shape)

    def start(self, prepared: PreparedStep) -> Any:
        """Queue a decode step of a model that is here as a whole; the mark of its end."""
        self._step_now = prepared
        return self._step.start(prepared.shape)

    def finish(self, prepared: PreparedStep, mark: Any) -> list[SampledToken]:
        """The answers of a step that `start` queued."""
        self.model.device.await_mark(mark)
        return self._read(prepared)

    def _read(self, prepared: PreparedStep) -> list[SampledToken]:
        assert self.model.sampling is not None
        return read_answers(prepared, self.model.sampling.blocks[prepared.inputs.slot])


def own_block(model: DeviceModel, prepared: PreparedStep) -> InputBlock:
    """A device's counterpart of the block that was filled."""
    if prepared.shape.is_decode:
        return model.decode_inputs.blocks[prepared.inputs.slot]
    return model.prefill_inputs


def localised(model: DeviceModel, prepared: PreparedStep) -> StepShape:
    """The shape with a device's own addresses; another device's inputs are copied over."""
    own = own_block(model, prepared)
    if own is prepared.inputs:
        return prepared.shape
    own.copy_from(prepared.inputs)
    addresses = (model.decode_inputs if prepared.shape.is_decode else model.prefill_inputs).addresses
    return replace(prepared.shape, inputs=addresses, mailbox=own.mailbox)


class CpuSection:
    """A native executor over the section's ops."""

    def __init__(
        self, executor: NativeExecutor, residual: ResidualBuffer, receives: bool, sends: bool
    ) -> None:
        self.executor, self.counters = executor, Counters()
        self.residual, self.receives, self.sends = residual, receives, sends
        self._has_head = any(op.kind == OpKind.SAMPLE for op in executor.oplist.ops)
        self._rows = executor.step.buffer_view(executor.oplist.buffer_index(RESIDUAL))

    def run(self, prepared: PreparedStep, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken] | None:
        count = batch.n_tokens
        if self.receives:
            _copy_rows(self._rows, self.residual.rows, count)
        answers = self.executor.run(batch, cancel)
        if self.sends:
            _copy_rows(self.residual.rows, self._rows, count)
        return answers if self._has_head else None

    def close(self) -> None:
        self.executor.close()


def _copy_rows(target: NDArray[np.float32], source: NDArray[np.float32], count: int) -> None:
    ctypes.memmove(target.ctypes.data, source.ctypes.data, count * target.shape[1] * 4)

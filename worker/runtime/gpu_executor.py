"""The executor of models on GPUs, wholly or by layers: writes the inputs of a step once, runs its sections in order.

Wholly on one GPU there is one section, and a decoded token is one graph launch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from configs.errors import EngineError
from worker.cuda.gpu_step import Counters
from worker.cuda.model import DeviceModel
from worker.cuda.sampling import SamplingBuffers
from worker.ops.batch import Batch
from worker.runtime.executor import (
    CancelFlag,
    Output,
    SampledToken,
    Sampler,
    SequencePart,
    StepBatch,
    StepFailed,
)
from worker.runtime.gpu_batch import BatchWriter, PreparedStep
from worker.runtime.gpu_sections import CpuSection, GpuSection, ResidualBuffer, SectionRunner

logger = logging.getLogger(__name__)
_GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A queued decode step; `mark` is the device's, for the end of it."""

    step: PreparedStep
    mark: Any


class GpuExecutor:
    """Executor (worker/runtime/executor.py) over sections. Used from one thread, that which made it."""

    def __init__(
        self,
        models: tuple[DeviceModel, ...],
        sections: tuple[SectionRunner, ...],
        writer: BatchWriter,
        residual: ResidualBuffer | None,
        n_pages: int,
        max_outputs: int,
        load_s: float = 0.0,
    ) -> None:
        self.models, self.sections, self._writer, self._residual = models, sections, writer, residual
        self.load_s = load_s
        self.n_pages, self.max_outputs = n_pages, max_outputs
        self.max_tokens = models[0].limits.max_tokens
        self.n_vocab = models[0].oplist.n_vocab
        only = sections[0] if len(sections) == 1 else None
        self._whole = only if isinstance(only, GpuSection) else None

    @property
    def _sampling(self) -> SamplingBuffers | None:
        return next((model.sampling for model in self.models if model.sampling is not None), None)

    def prepare(self, batch: StepBatch) -> PreparedStep:
        """Write a step's inputs into pinned memory."""
        return self._writer.write(batch, self._sampling)

    def submit(self, batch: StepBatch) -> Ticket | None:
        """Queue a decode step of a model that is wholly on one GPU, once its graph is there."""
        section = self._whole
        if section is None or not self._writer.fits_bucket(batch):
            return None
        prepared = self.prepare(batch)
        if not section.can_start(prepared):
            return None
        try:
            return Ticket(prepared, section.start(prepared))
        except EngineError as error:
            self._writer.forget()
            raise StepFailed(str(error)) from error

    def collect(self, ticket: object) -> list[SampledToken]:
        assert isinstance(ticket, Ticket) and self._whole is not None
        return self._whole.finish(ticket.step, ticket.mark)

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        prepared = self.prepare(batch)
        answers: list[SampledToken] | None = None
        try:
            for section in self.sections:
                answers = section.run(prepared, batch, cancel)
        except EngineError as error:
            self._writer.forget()
            raise StepFailed(str(error)) from error
        return answers or []

    def logits(self, batch: Batch) -> NDArray[np.float32]:
        """Logits f32 [n_outputs, n_vocab] of a batch; for tests and measuring."""
        step = step_batch_of(batch)
        head = next((model for model in self.models if model.sampling is not None), None)
        if head is None:
            raise EngineError("the head is on the CPU: its logits are not on a GPU to be read")
        prepared = self._writer.write(step, None)
        for section in self.sections:
            section.run(prepared, step, CancelFlag())
        count = len(batch.output_rows)
        host = head.device.host_buffer(4 * count * self.n_vocab)
        head.device.copy_out(host.address, head.buffer("logits").values, 4 * count * self.n_vocab)
        head.device.synchronize()
        values = host.array.view(np.float32).reshape(count, self.n_vocab).copy()
        host.close()
        return values

    def copy_page(self, source: int, destination: int) -> None:
        for model in self.models:
            model.device.bind()
            model.cache.copy_page(source, destination)
        for section in self.sections:
            if isinstance(section, CpuSection):
                section.executor.copy_page(source, destination)

    @property
    def counters(self) -> Counters:
        """Of the section with the most decode steps' launches; the sum over sections would count a token twice."""
        gpu = [section.counters for section in self.sections if isinstance(section, GpuSection)]
        return max(gpu, key=lambda counters: counters.graph_launches)

    def memory_bytes(self) -> dict[str, int]:
        """By purpose, over all devices, and per GPU."""
        total: dict[str, int] = {"weights": 0, "kv": 0, "workspace": 0}
        for model in self.models:
            for purpose, size_bytes in model.memory_bytes().items():
                total[purpose] = total.get(purpose, 0) + size_bytes
            total[f"gpu{model.device.ordinal}"] = model.memory.total_bytes
        for section in self.sections:
            if isinstance(section, CpuSection):
                for purpose, size_bytes in section.executor.memory_bytes().items():
                    total[purpose] += size_bytes
        return total

    def close(self) -> None:
        counters = self.counters
        logger.info(
            "%d decode steps, %d graph launches, %d graphs captured, %d other steps",
            *(counters.decode_steps, counters.graph_launches, counters.graphs_captured, counters.eager_steps),
        )
        for section in self.sections:
            if isinstance(section, CpuSection):
                section.close()
        for model in self.models:
            model.device.bind()
            model.device.synchronize()  # a queued step may still copy into host memory
            model.close()
        if self._residual is not None:
            self._residual.close()
        for device in {id(model.device): model.device for model in self.models}.values():
            device.close()


def step_batch_of(batch: Batch) -> StepBatch:
    """The same work as the scheduler would give it, for comparisons with the reference."""
    parts = []
    for sequence in range(len(batch.page_tables)):
        begin, end = (int(batch.sequence_first[sequence + i]) for i in (0, 1))
        rows = [int(row) - begin for row in batch.output_rows if begin <= row < end]
        outputs = tuple(Output(row, _GREEDY) for row in rows)
        ids = batch.token_ids[begin:end].tolist()
        parts.append(
            SequencePart(ids, int(batch.positions[begin]), batch.page_tables[sequence].tolist(), outputs)
        )
    return StepBatch(tuple(parts), len(batch.token_ids), len(batch.output_rows))

"""From a model file and a placement with GPUs to an executor: cut the op list by device, load each part, warm up."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from configs.errors import EngineStartError
from configs.progress import ProgressCallback, no_progress
from plans.placement import Placement
from worker.cuda.attention import prefill_tile_rows
from worker.cuda.attention_values import attention_heads
from worker.cuda.cuda_kernels import CudaKernels
from worker.cuda.device import Device
from worker.cuda.gpu_step import BUCKETS, bucket_for
from worker.cuda.kernel_set import KernelSet
from worker.cuda.model import DeviceModel, StepLimits
from worker.cuda.passing import Passing
from worker.cuda.upload import LEAST_READERS, MOST_READERS
from worker.model import archs
from worker.model.gguf import ModelFile, open_model
from worker.ops.batch import PAGE_TOKENS
from worker.ops.lower import lower
from worker.ops.oplist import Op, OpKind, OpList
from worker.ops.sections import RESIDUAL, Section, cut, restrict
from worker.runtime.feed import cuda_device
from worker.runtime.gpu_batch import BatchWriter
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.gpu_passing import PassingSection, can_pass
from worker.runtime.gpu_sections import CpuSection, GpuSection, ResidualBuffer, SectionRunner
from worker.runtime.gpu_warm_up import compile_ahead, usual_batches, warm_up
from worker.runtime.load import native_executor, page_bytes, page_count
from worker.runtime.step import NativeExecutor

logger = logging.getLogger(__name__)
DeviceFactory = Callable[[int], Device]
KernelFactory = Callable[[Device], KernelSet]


def load_gpu(
    model_path: str | Path,
    placement: Placement,
    *,
    max_outputs: int,
    progress: ProgressCallback = no_progress,
    make_device: DeviceFactory = cuda_device,
    make_kernels: KernelFactory = CudaKernels,
    warms_up: bool = True,
) -> GpuExecutor:
    """Ready for the first request, or with `warms_up` False compiling and capturing as steps come.

    Raises ModelFileError for the file, EngineStartError for devices that are missing or too small."""
    started = time.monotonic()
    file = open_model(model_path)
    units = archs.units(file)
    oplist = lower(units)
    sections = cut(oplist, units, placement)
    n_pages = page_count(placement, page_bytes(oplist, placement.kv_type))
    loader = _Loader(file, oplist, placement, sections, n_pages, max_outputs, progress)
    models = {
        name: loader.device_model(name, make_device, make_kernels)
        for name in sorted({section.device for section in sections if section.device != "cpu"})
    }
    if not models:
        raise EngineStartError(
            "no unit of this model matches the placement's GPUs; run `placewright plan` again"
        )
    executor = loader.executor(models)
    batches = list(usual_batches(executor, min(placement.max_sequences, BUCKETS[-1]))) if warms_up else []
    compile_ahead(executor, batches)  # beside the upload
    readers = min(MOST_READERS, max(LEAST_READERS, len(os.sched_getaffinity(0))))
    for model in models.values():
        model.upload(readers, progress)
    warm_up(executor, batches, is_whole=len(sections) == 1)
    for model in models.values():
        model.log_memory()
    executor.load_s = time.monotonic() - started
    progress("ready", 1, 1)
    return executor


class _Loader:
    """What all parts of one load have in common."""

    def __init__(
        self,
        file: ModelFile,
        oplist: OpList,
        placement: Placement,
        sections: tuple[Section, ...],
        n_pages: int,
        max_outputs: int,
        progress: ProgressCallback,
    ) -> None:
        self.file, self.oplist, self.placement, self.sections = file, oplist, placement, sections
        self.n_pages, self.progress = n_pages, progress
        self.limits = step_limits(placement, max_outputs)
        gpus = [section.device for section in sections if section.device != "cpu"]
        self._host_of_guests = gpus[0] if placement.passing_tokens and gpus else ""

    def _ops(self, section: Section) -> tuple[Op, ...]:
        return self.oplist.ops[section.begin : section.end]

    def _passes(self, section: Section) -> bool:
        """Whether the CPU's section may run on a GPU, the one that comes first."""
        return bool(self._host_of_guests) and section.device == "cpu" and can_pass(self._ops(section))

    def _sections_on(self, name: str) -> list[Section]:
        """Those of a device and those that pass through it."""
        is_host = name == self._host_of_guests
        return [item for item in self.sections if item.device == name or (is_host and self._passes(item))]

    def _span(self, name: str, wanted: Section) -> tuple[int, int]:
        """Where a section begins and ends in a device's own list."""
        begin = 0
        for section in self._sections_on(name):
            if section is wanted:
                return begin, begin + section.end - section.begin
            begin += section.end - section.begin
        raise AssertionError("a section of this device")

    def _passing(self, name: str) -> Passing:
        guests = [op for item in self._sections_on(name) if item.device == "cpu" for op in self._ops(item)]
        layers = tuple(sorted({op.layer for op in guests if op.layer >= 0}))
        has_embedding = any(op.kind == OpKind.EMBED for op in guests)
        return Passing(layers, self.limits.max_tokens if has_embedding else 0)

    def device_model(self, name: str, make_device: DeviceFactory, make_kernels: KernelFactory) -> DeviceModel:
        own = tuple(op for section in self._sections_on(name) for op in self._ops(section))
        device = make_device(int(name.removeprefix("gpu")))
        return DeviceModel(
            device,
            make_kernels,
            self.file,
            restrict(self.oplist, own),
            self.limits,
            self.placement.kv_type,
            self.n_pages,
            self.placement.gpu_cap_bytes(device.ordinal),
            self._passing(name),
        )

    def executor(self, models: dict[str, DeviceModel]) -> GpuExecutor:
        sections = self.sections
        first = next(iter(models.values()))
        residual = None
        if len(sections) > 1:
            width = self.oplist.buffers[self.oplist.buffer_index(RESIDUAL)].width
            residual = ResidualBuffer(first, self.limits.max_tokens, width)
        runners: list[SectionRunner] = []
        for index, section in enumerate(sections):
            ends = (index > 0, index + 1 < len(sections))
            if section.device == "cpu":
                assert residual is not None
                cpu = self._cpu_section(section, residual, *ends)
                runners.append(self._passing_section(section, cpu, models) if self._passes(section) else cpu)
                continue
            span = self._span(section.device, section)
            runners.append(GpuSection(models[section.device], *span, residual, *ends))
        return self._assemble(models, tuple(runners), residual)

    def _cpu_section(
        self, section: Section, residual: ResidualBuffer, receives: bool, sends: bool
    ) -> CpuSection:
        native: NativeExecutor = native_executor(
            self.file,
            restrict(self.oplist, self._ops(section)),
            self.placement,
            n_pages=self.n_pages,
            max_outputs=self.limits.max_outputs,
            progress=self.progress,
        )
        return CpuSection(native, residual, receives, sends)

    def _passing_section(
        self, section: Section, cpu: CpuSection, models: dict[str, DeviceModel]
    ) -> PassingSection:
        name = self._host_of_guests
        span = self._span(name, section)
        return PassingSection(cpu, models[name], self.file, *span, self.placement.passing_tokens)

    def _assemble(
        self,
        models: dict[str, DeviceModel],
        runners: tuple[SectionRunner, ...],
        residual: ResidualBuffer | None,
    ) -> GpuExecutor:
        first = next(iter(models.values()))
        writer = BatchWriter(
            first.decode_inputs, first.prefill_inputs, tile_rows_of(self.oplist), first.cache.scratch_page
        )
        return GpuExecutor(
            tuple(models.values()), runners, writer, residual, self.n_pages, self.limits.max_outputs
        )


def step_limits(placement: Placement, max_outputs: int) -> StepLimits:
    """Room for the plan's steps and for the padding of the largest decode bucket that they use."""
    bucket = bucket_for(min(placement.max_sequences, BUCKETS[-1]))
    assert bucket is not None
    return StepLimits(
        max_tokens=max(placement.ubatch_tokens, placement.max_sequences, bucket),
        max_sequences=placement.max_sequences + 1,  # one more for a score request
        max_outputs=max(max_outputs, bucket),
        context_length_tokens=placement.context_length_tokens,
        max_pages=-(-placement.context_length_tokens // PAGE_TOKENS) + 1,
        decode_bucket=bucket,
    )


def tile_rows_of(oplist: OpList) -> int:
    """Query rows of a tile of prefill attention, right for every layer."""
    return min(map(prefill_tile_rows, attention_heads(oplist)), default=64)

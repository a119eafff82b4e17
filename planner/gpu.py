"""Placements on GPUs: which layers go where, how many bytes that takes of each device, how long it is predicted to run.

Whole layers are placed. The first ones stay on the CPU where a model is larger than the memory that may be used, so
that the residual stream changes sides once a token; the rest, and the head, fill the GPUs in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from planner.cost import Prediction, Work, predict_decode_s, predict_prefill_s, work_of
from planner.gpu_memory import (
    CONTEXT_BYTES,
    LIBRARIES_BYTES,
    MIB,
    DeviceUse,
    StepSizes,
    device_need,
    distinct_tensors,
)
from planner.memory import KV_BYTES_PER_ELEMENT, host_limit_bytes, host_process_bytes, kv_bytes
from plans.card import ModelCard
from plans.machine import GpuRates, MachineReport
from plans.placement import CPU_ONLY, NATIVE, Assignment, KvType, Placement
from plans.plan import Limits, MemoryNeed, RequestMix, Workload
from plans.units import Unit

UBATCHES = (512, 1024, 2048, 4096)
SMALL_UBATCHES = (128, 256)  # of models that are split: the room of a larger step may hold a layer more
MARGIN_MIB = 512  # of what is free, left to others where no cap is given
_LAUNCHES_PER_LAYER = 10
_HANDOVER_S = 30e-6  # residual to the other side and back, with both waits
_FEED_SHARE = 0.8  # of the link's rate, at which weights in file order arrive
_FEWEST_PASSING_TOKENS = 64  # above every decode step
_ROUTED_PREFILL_SHARE = 0.5  # rate of grouped experts against that of one large matrix


def cap_bytes(gpu: GpuRates, limits: Limits) -> int:
    """What a plan may use of a device."""
    free = max(0, gpu.memory_free_bytes - MARGIN_MIB * MIB)
    return free if limits.gpu_memory_mib is None else min(free, limits.gpu_memory_mib * MIB)


def usable_bytes(gpu: GpuRates, limits: Limits) -> int:
    """What placements may fill of it: less where a context of this card takes more than `device_need` counts."""
    excess_bytes = (gpu.context_bytes or 0) + LIBRARIES_BYTES - CONTEXT_BYTES
    return cap_bytes(gpu, limits) - max(0, excess_bytes)


def fill(
    card: ModelCard, caps: list[tuple[int, int]], sizes: StepSizes, *, passes: bool = False
) -> tuple[DeviceUse, ...]:
    """Devices (ordinal, cap in bytes) with as many layers as fit, the last layers and the head first; () when not even
    the head and one layer do. `passes`: the last device has room for the other layers to pass through.
    """
    uses: list[DeviceUse] = []
    end = card.n_layers or 0
    for ordinal, cap in caps:
        passes_here = passes and ordinal == caps[-1][0]
        use = _widest(card, ordinal, cap, end, not uses, sizes, passes_here)
        if use is None:
            break
        uses.append(use)
        end = use.first
        if end == 0:
            break
    return tuple(reversed(uses)) if uses and (not passes or uses[-1].n_passing) else ()


def _widest(
    card: ModelCard, ordinal: int, cap: int, end: int, has_head: bool, sizes: StepSizes, passes: bool
) -> DeviceUse | None:
    """The use with the most layers up to `end` that fits; the embedding comes along when all layers do."""
    for first in range(end):
        for has_embedding in (True, False) if first == 0 else (False,):
            use = DeviceUse(ordinal, first, end, has_embedding, has_head, first if passes else 0)
            if device_need(card, use, sizes).total_bytes <= cap:
                return use
    return None


def assignments_of(uses: tuple[DeviceUse, ...], n_layers: int) -> tuple[Assignment, ...]:
    """Everything on the CPU, or on the first device where all of it is on devices; then what the others take."""
    lines, others = list(CPU_ONLY), uses
    if is_whole(uses, n_layers):
        name = f"gpu{uses[0].ordinal}"
        lines, others = [Assignment("*", name, name)], uses[1:]
    for use in others:
        name = f"gpu{use.ordinal}"
        lines += [Assignment(f"layer.{layer}.*", name, name) for layer in range(use.first, use.end)]
        if use.has_head:
            lines.append(Assignment("head", name, name))
    return tuple(lines)


def is_whole(uses: tuple[DeviceUse, ...], n_layers: int) -> bool:
    """Whether devices hold a model of so many layers, with embedding and head."""
    first, last = uses[0], uses[-1]
    return first.has_embedding and last.has_head and first.first == 0 and last.end == n_layers


class GpuCandidate(msgspec.Struct, frozen=True):
    """A placement with its devices in the order of layers, their needs by number, and what stays in RAM."""

    placement: Placement
    uses: tuple[DeviceUse, ...]
    needs: tuple[MemoryNeed, ...]
    host_need: MemoryNeed

    @property
    def n_gpu_layers(self) -> int:
        return sum(use.n_layers for use in self.uses)


class _Filling(msgspec.Struct, frozen=True):
    """Devices that hold what they can of steps and a cache of some size."""

    sizes: StepSizes
    uses: tuple[DeviceUse, ...]

    @property
    def is_whole(self) -> bool:
        return is_whole(self.uses, self.uses[-1].end)

    @property
    def n_layers(self) -> int:
        return sum(use.n_layers for use in self.uses)


ENGINES = (NATIVE, "llama-server")
"""Engines whose placements on GPUs are known how to be asked for."""


def gpu_candidates(
    card: ModelCard, report: MachineReport, workload: Workload, limits: Limits, engine: str
) -> Iterator[GpuCandidate]:
    """For each KV type and step size, as many layers on the GPUs as may be; CPU threads vary where some stay there."""
    if not report.gpus or not card.units or engine not in ENGINES:
        return
    usable = report.gpus if engine == NATIVE else report.gpus[:1]
    caps = [(gpu.ordinal, usable_bytes(gpu, limits)) for gpu in usable]
    cores = report.host.cpus[0].cores_available
    halves = (limits.threads,) if limits.threads else sorted({cores, max(1, cores // 2)})
    for kv_type in workload.kv_types:
        for filling in _fillings(card, caps, kv_type, workload, limits, engine):
            for decode_threads in (1,) if filling.is_whole else halves:
                prefill_threads = 1 if filling.is_whole else limits.threads or cores
                threads = (decode_threads, prefill_threads)
                placement = _placement(card, report, limits, engine, filling, threads)
                host_need = _host_need(card, placement, filling.uses)
                if filling.uses[0].n_passing:
                    passing_tokens = _fewest_passing(card, report, placement, filling.uses)
                    spare_bytes = host_limit_bytes(report, limits) - host_need.total_bytes
                    if passing_tokens is None or _passing_bytes(card, filling.uses) > spare_bytes:
                        continue
                    placement = msgspec.structs.replace(placement, passing_tokens=passing_tokens)
                by_number = sorted(filling.uses, key=lambda use: use.ordinal)
                needs = tuple(device_need(card, use, filling.sizes) for use in by_number)
                yield GpuCandidate(placement, filling.uses, needs, host_need)


def _fillings(
    card: ModelCard,
    caps: list[tuple[int, int]],
    kv_type: KvType,
    workload: Workload,
    limits: Limits,
    engine: str,
) -> list[_Filling]:
    """Every step size with which all layers fit; where none is, those that stand for a larger step or a layer more."""
    sizes = ubatches(workload, limits)
    filled = [found for size in sizes if (found := _filling(card, caps, kv_type, workload, size))]
    whole = [filling for filling in filled if filling.is_whole]
    if whole or engine != NATIVE:
        return whole or filled
    kept: list[_Filling] = []
    small = SMALL_UBATCHES if limits.ubatch_tokens is None else ()
    for passes in (False, True):
        most_layers = 0
        for size in (sizes[0], *reversed(small)):
            filling = _filling(card, caps, kv_type, workload, size, passes=passes)
            if filling is not None and filling.n_layers > most_layers:
                most_layers = filling.n_layers
                kept.append(filling)
    return kept


def _filling(
    card: ModelCard,
    caps: list[tuple[int, int]],
    kv_type: KvType,
    workload: Workload,
    ubatch: int,
    *,
    passes: bool = False,
) -> _Filling | None:
    """The whole model with room for one sequence's prefix beside those that run, or without; else what fits of it."""
    found = None
    for spare in (1, 0) if not passes else (0,):
        sizes = StepSizes(
            kv_type,
            workload.context_length_tokens,
            workload.concurrency,
            workload.concurrency + spare,
            ubatch,
        )
        uses = fill(card, caps, sizes, passes=passes)
        found = _Filling(sizes, uses) if uses else None
        if found is not None and found.is_whole:
            return found
    return found


def ubatches(workload: Workload, limits: Limits) -> tuple[int, ...]:
    """Steps that a prompt of the mix can fill, and the one above."""
    if limits.ubatch_tokens is not None:
        return (min(limits.ubatch_tokens, workload.context_length_tokens),)
    fitting = [size for size in UBATCHES if size <= max(UBATCHES[0], workload.context_length_tokens)]
    fills = min((size for size in fitting if size >= workload.mix.prompt_tokens), default=fitting[-1])
    return tuple(size for size in fitting if size in (fills, min(2048, fitting[-1])))


def _placement(
    card: ModelCard,
    report: MachineReport,
    limits: Limits,
    engine: str,
    filling: _Filling,
    threads: tuple[int, int],
) -> Placement:
    """`threads`: of decode and of prefill."""
    sizes, highest = filling.sizes, max(use.ordinal for use in filling.uses)
    caps = [0] * (highest + 1)
    for gpu in report.gpus:
        if gpu.ordinal <= highest:
            caps[gpu.ordinal] = cap_bytes(gpu, limits) // MIB
    return Placement(
        engine=engine,
        assignments=assignments_of(filling.uses, card.n_layers or 0),
        context_length_tokens=sizes.context_length_tokens,
        max_sequences=sizes.max_sequences,
        kv_type=sizes.kv_type,
        load_mode=limits.load_mode or "packed",
        huge_pages=report.huge_pages and limits.load_mode != "mmap",
        decode_threads=threads[0],
        prefill_threads=threads[1],
        ubatch_tokens=sizes.ubatch_tokens,
        kv_budget_bytes=kv_bytes(card, sizes.kv_type, sizes.context_length_tokens, sizes.cached_sequences),
        gpu_memory_mib=tuple(caps),
    )


def _fewest_passing(
    card: ModelCard, report: MachineReport, placement: Placement, uses: tuple[DeviceUse, ...]
) -> int | None:
    """From how many tokens on a step is faster when the CPU's layers pass through a GPU; None where no step is."""
    brought_s = _bringing_s(card, report, uses)
    part, work = _left_on_host(card, uses)
    computed_s = predict_prefill_s(part, work, placement, report, placement.ubatch_tokens)
    if brought_s is None or computed_s is None:
        return None
    tokens = math.ceil(brought_s / computed_s * placement.ubatch_tokens / 32) * 32
    fewest = max(_FEWEST_PASSING_TOKENS, tokens)
    return fewest if fewest <= placement.ubatch_tokens else None


def _bringing_s(card: ModelCard, report: MachineReport, uses: tuple[DeviceUse, ...]) -> float | None:
    """Seconds in which the weights of the CPU's layers pass through the first GPU."""
    gpu = next(gpu for gpu in report.gpus if gpu.ordinal == uses[0].ordinal)
    rate = gpu.copy_bytes_per_s("pinned in")
    return None if rate is None else _passing_bytes(card, uses) / (_FEED_SHARE * rate)


def _passing_bytes(card: ModelCard, uses: tuple[DeviceUse, ...]) -> int:
    """Of the file, which the page cache has to keep."""
    return sum(unit.bytes for unit in card.units if uses[0].lets_pass(unit))


def _left_on_host(card: ModelCard, uses: tuple[DeviceUse, ...]) -> tuple[ModelCard, Work]:
    """What the CPU's layers are as a model of their own, and their work."""
    left = on_host(card, uses)
    layers = sum(unit.kind == "attention" for unit in left)
    return msgspec.structs.replace(card, n_layers=layers, kv_layers=card.kv_layers[:layers]), work_of(
        card, left
    )


def on_host(card: ModelCard, uses: tuple[DeviceUse, ...]) -> list[Unit]:
    return [unit for unit in card.units if not any(use.holds(unit) for use in uses)]


def _host_need(card: ModelCard, placement: Placement, uses: tuple[DeviceUse, ...]) -> MemoryNeed:
    """RAM: the process, the pinned buffers, and the layers that stay."""
    left = on_host(card, uses)
    layers = {unit.layer for unit in left if unit.layer >= 0}
    share = len(layers) / max(1, card.n_layers or 0)
    residual = 4 * placement.ubatch_tokens * (card.n_embd or 4096)
    return MemoryNeed(
        weights_bytes=int(1.03 * sum(tensor.bytes for tensor in distinct_tensors(left))),
        kv_bytes=int(placement.kv_budget_bytes * share),
        workspace_bytes=host_process_bytes() + 128 * MIB + 16 * residual,
    )


def predict_gpu(
    card: ModelCard, candidate: GpuCandidate, report: MachineReport, mix: RequestMix
) -> Prediction | None:
    """Seconds on the devices, plus those of the CPU's layers, plus the hand-overs. None where a rate is missing, and
    for engines whose kernels were not probed.
    """
    if candidate.placement.engine != NATIVE:
        return None
    middle = mix.prompt_tokens + mix.output_tokens // 2
    decode_s = prefill_s = 0.0
    for use in candidate.uses:
        gpu = next(gpu for gpu in report.gpus if gpu.ordinal == use.ordinal)
        work = work_of(card, [unit for unit in card.units if use.holds(unit)])
        one = _device_decode_s(card, work, use, gpu, candidate.placement.kv_type, middle)
        many = _device_prefill_s(work, gpu, mix.prompt_tokens)
        if one is None or many is None:
            return None
        decode_s, prefill_s = decode_s + one, prefill_s + many
    if on_host(card, candidate.uses):
        part, work = _left_on_host(card, candidate.uses)
        cpu_decode = predict_decode_s(part, work, candidate.placement, report, middle)
        cpu_prefill = _left_prefill_s(card, candidate, report, mix.prompt_tokens)
        if cpu_decode is None or cpu_prefill is None:
            return None
        steps = math.ceil(mix.prompt_tokens / candidate.placement.ubatch_tokens)
        decode_s, prefill_s = (
            decode_s + cpu_decode + _HANDOVER_S,
            prefill_s + cpu_prefill + steps * _HANDOVER_S,
        )
    return Prediction(decode_s, prefill_s, prefill_s + mix.output_tokens * decode_s)


def _left_prefill_s(
    card: ModelCard, candidate: GpuCandidate, report: MachineReport, prompt_tokens: int
) -> float | None:
    """Seconds that the CPU's layers add to a prompt, where they are computed."""
    part, work = _left_on_host(card, candidate.uses)
    placement = candidate.placement
    if not placement.passing_tokens or prompt_tokens < placement.passing_tokens:
        return predict_prefill_s(part, work, placement, report, prompt_tokens)
    gpu = next(gpu for gpu in report.gpus if gpu.ordinal == candidate.uses[0].ordinal)
    brought_s, computed_s = (
        _bringing_s(card, report, candidate.uses),
        _device_prefill_s(work, gpu, prompt_tokens),
    )
    if brought_s is None or computed_s is None:
        return None
    return max(math.ceil(prompt_tokens / placement.ubatch_tokens) * brought_s, computed_s)


def _device_decode_s(
    card: ModelCard, work: Work, use: DeviceUse, gpu: GpuRates, kv_type: KvType, cached_tokens: int
) -> float | None:
    if gpu.read_bytes_per_s is None:
        return None
    layers = use.n_layers
    seconds = layers * _LAUNCHES_PER_LAYER * (gpu.graph_node_s or 1e-6)
    for type_name, count in work.decode_bytes.items():
        rate = gpu.kernel(type_name)
        seconds += count / ((rate and rate.decode_bytes_per_s) or gpu.read_bytes_per_s / 2)
    share = layers / max(1, len(card.kv_layers))
    kv = cached_tokens * card.kv_elements_per_token * KV_BYTES_PER_ELEMENT[kv_type] * share
    return seconds + kv / (gpu.read_bytes_per_s / 2)


def _device_prefill_s(work: Work, gpu: GpuRates, prompt_tokens: int) -> float | None:
    seconds = 0.0
    for type_name, macs in work.prefill_macs.items():
        rate = gpu.kernel(type_name)
        known = [r.prefill_macs_per_s for r in gpu.kernels if r.prefill_macs_per_s]
        speed = (rate and rate.prefill_macs_per_s) or min(known, default=None)
        if speed is None:
            return None
        is_routed = work.stored_bytes[type_name] > 4 * work.decode_bytes[type_name]
        seconds += prompt_tokens * macs / (speed * (_ROUTED_PREFILL_SHARE if is_routed else 1.0))
    return seconds

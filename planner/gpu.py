"""Placements on GPUs: which layers go where, how many bytes that takes of each device, how long it is predicted to run.

Whole layers are placed. The first ones stay on the CPU where a model is larger than the memory that may be used, so
that the residual stream changes sides once a token; the rest, and the head, fill the GPUs in order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import msgspec

from planner.cost import Prediction, Work, predict_decode_s, predict_prefill_s, work_of
from planner.memory import KV_BYTES_PER_ELEMENT, host_process_bytes, kv_bytes
from plans.card import ModelCard
from plans.machine import GpuRates, MachineReport
from plans.placement import CPU_ONLY, Assignment, KvType, Placement
from plans.plan import Limits, MemoryNeed, RequestMix, Workload
from plans.units import MoeShape, TensorRef, Unit

MIB = 1 << 20
UBATCHES = (512, 1024, 2048, 4096)
MARGIN_MIB = 512  # of what is free, left to others where no cap is given
CONTEXT_BYTES = 640 * MIB  # driver, cuBLAS, kernels
LIBRARIES_BYTES = 112 * MIB  # of it, what comes after the context
GRAPH_BYTES = 2 * MIB
UPLOAD_BYTES = 24 * MIB  # raw buffers while weights are uploaded, which lie where keys and values will be
_PLANAR_FACTOR = 1.02  # rows are padded to 16 bytes
_MOST_HALVES_BYTES = 256 * MIB  # the largest matrix that is unpacked to f16 for prefill
_LAUNCHES_PER_LAYER = 10
_HANDOVER_S = 30e-6  # residual to the other side and back, with both waits
_ROUTED_PREFILL_SHARE = 0.5  # rate of grouped experts against that of one large matrix


def cap_bytes(gpu: GpuRates, limits: Limits) -> int:
    """What a plan may use of a device."""
    free = max(0, gpu.memory_free_bytes - MARGIN_MIB * MIB)
    return free if limits.gpu_memory_mib is None else min(free, limits.gpu_memory_mib * MIB)


def usable_bytes(gpu: GpuRates, limits: Limits) -> int:
    """What placements may fill of it: less where a context of this card takes more than `device_need` counts."""
    excess_bytes = (gpu.context_bytes or 0) + LIBRARIES_BYTES - CONTEXT_BYTES
    return cap_bytes(gpu, limits) - max(0, excess_bytes)


class DeviceUse(msgspec.Struct, frozen=True):
    """Layers [first, end) on one GPU, and whether embedding and head are there too."""

    ordinal: int
    first: int
    end: int
    has_embedding: bool
    has_head: bool

    def holds(self, unit: Unit) -> bool:
        if unit.layer >= 0:
            return self.first <= unit.layer < self.end
        return self.has_embedding if unit.kind == "embedding" else self.has_head


def _distinct(units: list[Unit]) -> list[TensorRef]:
    return list({tensor.name: tensor for unit in units for tensor in unit.tensors.values()}.values())


def device_need(
    card: ModelCard, use: DeviceUse, kv_type: KvType, context: int, max_sequences: int, ubatch: int
) -> MemoryNeed:
    """Bytes of one device, an upper estimate within a few percent of what the worker takes."""
    units = [unit for unit in card.units if use.holds(unit)]
    weights = sum(tensor.bytes for tensor in _distinct(units)) * _PLANAR_FACTOR
    tied = use.has_embedding and use.has_head and len(_distinct(units)) < sum(len(u.tensors) for u in units)
    if tied:  # rows for the lookup stay beside the matrix of the head
        weights += next(unit.bytes for unit in units if unit.kind == "embedding")
    share = (use.end - use.first) / max(1, len(card.kv_layers))
    pages = -(-context // 32) * (max_sequences + 1) + 1
    kv = pages * 32 * card.kv_elements_per_token * KV_BYTES_PER_ELEMENT[kv_type] * share
    return MemoryNeed(
        weights_bytes=int(weights),
        kv_bytes=int(kv),
        workspace_bytes=_workspace_bytes(card, units, use, context, max_sequences, ubatch),
        context_bytes=CONTEXT_BYTES
        + max(_n_graphs(context, max_sequences) * GRAPH_BYTES, 0 if kv >= UPLOAD_BYTES else UPLOAD_BYTES),
    )


def _n_graphs(context: int, max_sequences: int) -> int:
    """At most: one for each power of two of sequences and of contexts from 1,024 on, greedy or not, and as many for the
    steps that are queued behind others."""
    buckets = (min(max_sequences, 32) - 1).bit_length() + 1
    classes = (max(context, 1024) - 1).bit_length() - 9
    return 2 * 2 * buckets * classes


def _workspace_bytes(
    card: ModelCard, units: list[Unit], use: DeviceUse, context: int, max_sequences: int, ubatch: int
) -> int:
    tokens = max(ubatch, 32)
    outputs = max(16, 1 << (max(1, min(max_sequences, 32)) - 1).bit_length(), max_sequences)
    widths = _buffer_widths(card, units)
    size = tokens * sum(widths) * 6.25  # f32, codes, scales and sums, or halves
    if use.has_head:
        n_vocab = card.n_vocab or 150_000
        size += outputs * (12 * n_vocab + 16 * (card.n_embd or 4096)) + MIB
    size += max((_scratch_bytes(unit, tokens) for unit in units), default=0)
    size += _folded_router_bytes(card, units)
    return int(size) + 24 * MIB + 4 * (max_sequences + 40) * (context // 32 + 2)


def _buffer_widths(card: ModelCard, units: list[Unit]) -> list[int]:
    """One width per buffer of a step: residual and norm, attention's, the gated products'."""
    width = card.n_embd or 4096
    widths = {"residual": width, "normed": width, "projected": width}
    for unit in units:
        for role in ("q", "k", "v", "gate", "up"):
            tensor = unit.tensors.get(role)
            if tensor is not None:
                widths[role] = max(widths.get(role, 0), tensor.rows)
    return [*widths.values(), widths.get("q", 0)]


def _folded_router_bytes(card: ModelCard, units: list[Unit]) -> int:
    """Rows of routers that run inside of attention's projection: halves, as wide as its input and the residual."""
    heads = max((unit.tensors["q"].rows for unit in units if "q" in unit.tensors), default=0)
    routed = (unit.shape.n_experts for unit in units if isinstance(unit.shape, MoeShape))
    return 2 * sum(routed) * (heads + (card.n_embd or 4096))


def _scratch_bytes(unit: Unit, tokens: int) -> float:
    """What the largest product of a unit wants beside its inputs and outputs."""
    if isinstance(unit.shape, MoeShape):
        width = unit.tensors["down_experts"].rows
        slots = tokens * unit.shape.n_experts_used
        sorted_rows = slots * (2 * unit.shape.n_ff_expert + 4 * width + 16) + 2 * tokens * width
        return sorted_rows + 4 * tokens * unit.shape.n_experts
    matrices = [tensor for tensor in unit.tensors.values() if len(tensor.shape) == 2]
    halves = [size for t in matrices if (size := 2 * t.rows * t.columns) <= _MOST_HALVES_BYTES]
    return max(halves, default=0) + 2 * tokens * max((t.columns for t in matrices), default=0)


def fill(
    card: ModelCard,
    caps: list[tuple[int, int]],
    kv_type: KvType,
    context: int,
    max_sequences: int,
    ubatch: int,
) -> tuple[DeviceUse, ...]:
    """Devices (ordinal, cap in bytes) with as many layers as fit, the last layers and the head first; () when not even
    the head and one layer do.
    """
    n_layers = card.n_layers or 0
    uses: list[DeviceUse] = []
    end = n_layers
    for ordinal, cap in caps:
        use = _widest(card, ordinal, cap, end, not uses, kv_type, context, max_sequences, ubatch)
        if use is None:
            break
        uses.append(use)
        end = use.first
        if end == 0:
            break
    return tuple(reversed(uses))


def _widest(
    card: ModelCard,
    ordinal: int,
    cap: int,
    end: int,
    has_head: bool,
    kv_type: KvType,
    context: int,
    max_sequences: int,
    ubatch: int,
) -> DeviceUse | None:
    """The use with the most layers up to `end` that fits; the embedding comes along when all layers do."""
    for first in range(end):
        for has_embedding in (True, False) if first == 0 else (False,):
            use = DeviceUse(ordinal, first, end, has_embedding, has_head)
            need = device_need(card, use, kv_type, context, max_sequences, ubatch)
            if need.total_bytes <= cap:
                return use
    return None


def assignments_of(uses: tuple[DeviceUse, ...], n_layers: int) -> tuple[Assignment, ...]:
    """Everything on the CPU, then what the devices take; one line when a device takes all."""
    if len(uses) == 1 and uses[0] == DeviceUse(uses[0].ordinal, 0, n_layers, True, True):
        name = f"gpu{uses[0].ordinal}"
        return (Assignment("*", name, name),)
    lines = list(CPU_ONLY)
    for use in uses:
        name = f"gpu{use.ordinal}"
        if use.has_embedding:
            lines.append(Assignment("embedding", name, name))
        lines += [Assignment(f"layer.{layer}.*", name, name) for layer in range(use.first, use.end)]
        if use.has_head:
            lines.append(Assignment("head", name, name))
    return tuple(lines)


class GpuCandidate(msgspec.Struct, frozen=True):
    """A placement with its devices and their needs, and what stays in RAM."""

    placement: Placement
    uses: tuple[DeviceUse, ...]
    needs: tuple[MemoryNeed, ...]
    host_need: MemoryNeed

    @property
    def n_gpu_layers(self) -> int:
        return sum(use.end - use.first for use in self.uses)


ENGINES = ("native", "llama-server")
"""Engines whose placements on GPUs are known how to be asked for."""


def gpu_candidates(
    card: ModelCard, report: MachineReport, workload: Workload, limits: Limits, engine: str
) -> Iterator[GpuCandidate]:
    """For each KV type and step size, as many layers on the GPUs as may be; CPU threads vary where some stay there."""
    if not report.gpus or not card.units or engine not in ENGINES:
        return
    usable = report.gpus if engine == "native" else report.gpus[:1]
    caps = [(gpu.ordinal, usable_bytes(gpu, limits)) for gpu in usable]
    context, n_layers = workload.context_length_tokens, card.n_layers or 0
    for kv_type, ubatch in product(workload.kv_types, ubatches(workload, limits)):
        uses = fill(card, caps, kv_type, context, workload.concurrency, ubatch)
        if not uses:
            continue
        is_whole = uses[0].first == 0 and uses[0].has_embedding
        cores = report.host.cpus[0].cores_available
        for threads in (
            (1,) if is_whole else sorted({limits.threads or cores, limits.threads or max(1, cores // 2)})
        ):
            placement = _placement(card, report, workload, limits, engine, uses, kv_type, ubatch, threads)
            needs = tuple(
                device_need(card, use, kv_type, context, workload.concurrency, ubatch) for use in uses
            )
            yield GpuCandidate(placement, uses, needs, _host_need(card, placement, uses, n_layers))


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
    workload: Workload,
    limits: Limits,
    engine: str,
    uses: tuple[DeviceUse, ...],
    kv_type: KvType,
    ubatch: int,
    threads: int,
) -> Placement:
    context, highest = workload.context_length_tokens, max(use.ordinal for use in uses)
    caps = [0] * (highest + 1)
    for gpu in report.gpus:
        if gpu.ordinal <= highest:
            caps[gpu.ordinal] = cap_bytes(gpu, limits) // MIB
    return Placement(
        engine=engine,
        assignments=assignments_of(uses, card.n_layers or 0),
        context_length_tokens=context,
        max_sequences=workload.concurrency,
        kv_type=kv_type,
        load_mode=limits.load_mode or "packed",
        huge_pages=report.huge_pages and limits.load_mode != "mmap",
        decode_threads=threads,
        prefill_threads=threads,
        ubatch_tokens=ubatch,
        kv_budget_bytes=kv_bytes(card, kv_type, context, workload.concurrency + 1),
        gpu_memory_mib=tuple(caps),
    )


def on_host(card: ModelCard, uses: tuple[DeviceUse, ...]) -> list[Unit]:
    return [unit for unit in card.units if not any(use.holds(unit) for use in uses)]


def _host_need(
    card: ModelCard, placement: Placement, uses: tuple[DeviceUse, ...], n_layers: int
) -> MemoryNeed:
    """RAM: the process, the pinned buffers, and the layers that stay."""
    left = on_host(card, uses)
    layers = {unit.layer for unit in left if unit.layer >= 0}
    share = len(layers) / max(1, n_layers)
    residual = 4 * placement.ubatch_tokens * (card.n_embd or 4096)
    return MemoryNeed(
        weights_bytes=int(1.03 * sum(tensor.bytes for tensor in _distinct(left))),
        kv_bytes=int(placement.kv_budget_bytes * share),
        workspace_bytes=host_process_bytes() + 128 * MIB + 16 * residual,
    )


def predict_gpu(
    card: ModelCard, candidate: GpuCandidate, report: MachineReport, mix: RequestMix
) -> Prediction | None:
    """Seconds on the devices, plus those of the CPU's layers, plus the hand-overs. None where a rate is missing, and
    for engines whose kernels were not probed.
    """
    if candidate.placement.engine != "native":
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
    left = on_host(card, candidate.uses)
    if left:
        layers = sum(unit.kind == "attention" for unit in left)
        part = msgspec.structs.replace(card, n_layers=layers, kv_layers=card.kv_layers[:layers])
        work = work_of(card, left)
        cpu_decode = predict_decode_s(part, work, candidate.placement, report, middle)
        cpu_prefill = predict_prefill_s(part, work, candidate.placement, report, mix.prompt_tokens)
        if cpu_decode is None or cpu_prefill is None:
            return None
        steps = math.ceil(mix.prompt_tokens / candidate.placement.ubatch_tokens)
        decode_s, prefill_s = (
            decode_s + cpu_decode + _HANDOVER_S,
            prefill_s + cpu_prefill + steps * _HANDOVER_S,
        )
    return Prediction(decode_s, prefill_s, prefill_s + mix.output_tokens * decode_s)


def _device_decode_s(
    card: ModelCard, work: Work, use: DeviceUse, gpu: GpuRates, kv_type: KvType, cached_tokens: int
) -> float | None:
    if gpu.read_bytes_per_s is None:
        return None
    layers = use.end - use.first
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

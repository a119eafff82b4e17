"""Which placements are worth measuring. Pure and deterministic: same card, report, workload, same answer.

Every candidate ends as a finalist or as a rejection with its reason. Pins narrow the ladders below, they
never switch the search off; a pin that nothing can satisfy is a refusal that names it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product

import msgspec

from configs.errors import PlanError
from planner.cost import Prediction, predict, work_of
from planner.gpu import gpu_candidates, predict_gpu
from planner.memory import host_limit_bytes, kv_bytes, predict_memory, resident_need, shortage
from plans.card import ModelCard
from plans.machine import Host, MachineReport
from plans.placement import CPU_ONLY, NATIVE, KvType, LoadMode, Placement
from plans.plan import Limits, MemoryNeed, Rejected, RequestMix, Workload

UBATCH_LADDER = (64, 128, 256, 512, 1024)
LOAD_MODES: tuple[LoadMode, ...] = ("packed", "mmap")
# Predictions of one kernel family rank well but are off by up to this factor in absolute terms, so a
# candidate that is predicted slower than this against the best of its engine is not measured.
PRUNE_RATIO = 1.5
# Below this the prediction cannot tell two candidates apart; the one that takes less stands for both.
NOISE_RATIO = 1.02


class Candidate(msgspec.Struct, frozen=True):
    """A placement with a name that a person can read, e.g. `native d2 p2 u512 packed f16`."""

    label: str
    placement: Placement
    memory: MemoryNeed  # of RAM
    prediction: Prediction | None
    gpu_memory: tuple[MemoryNeed, ...] = ()  # of each GPU in use, by ascending number

    @property
    def thrift(self) -> tuple[int, int, int]:
        """Less is better where speed does not decide: threads, then bytes."""
        placement = self.placement
        return (placement.decode_threads, placement.prefill_threads, self.memory.total_bytes)


def request_s(
    candidate: Candidate, card: ModelCard, report: MachineReport, planned: RequestMix, mix: RequestMix
) -> float | None:
    """Predicted seconds of a request of another mix than the planned one."""
    known = candidate.prediction
    if not candidate.placement.gpu_ordinals or known is None:
        again = predict(card, work_of(card), candidate.placement, report, mix)
        return None if again is None else again.request_s
    prefill_s = known.prefill_s * mix.prompt_tokens / planned.prompt_tokens
    return prefill_s + mix.output_tokens * known.decode_token_s


class SearchResult(msgspec.Struct, frozen=True):
    finalists: tuple[Candidate, ...]  # most promising first
    rejected: tuple[Rejected, ...]
    considered: int


def thread_ladder(cores: int) -> tuple[int, ...]:
    """1, 2, 3, 4, then steps of about a third, always ending at `cores`."""
    ladder = [1]
    while ladder[-1] < cores:
        ladder.append(min(cores, ladder[-1] + max(1, ladder[-1] // 3)))
    return tuple(ladder)


def check_limits(here: Host, limits: Limits) -> None:
    """Raises PlanError for pins and caps that nothing here can satisfy."""
    cores = here.cpus[0].cores_available
    if limits.threads is not None and not 1 <= limits.threads <= cores:
        raise PlanError(
            f"--threads {limits.threads} cannot be met: this process may use {cores} cores; use 1 to {cores}"
        )
    if limits.ubatch_tokens is not None and not 1 <= limits.ubatch_tokens <= 8192:
        raise PlanError(f"--ubatch {limits.ubatch_tokens} is out of range; use 1 to 8192 (usual: 64 to 1024)")
    if limits.gpu_memory_mib is not None and not here.gpus:
        raise PlanError(
            f"--gpu-memory-mib {limits.gpu_memory_mib} caps a GPU, but there is none: "
            f"{here.gpus_absent_reason}; leave the flag out"
        )


def label_of(placement: Placement) -> str:
    pages = " huge" if placement.huge_pages else ""
    if placement.gpu_ordinals:
        return _gpu_label(placement)
    return (
        f"{placement.engine} d{placement.decode_threads} p{placement.prefill_threads} "
        f"u{placement.ubatch_tokens} {placement.load_mode}{pages} {placement.kv_type}"
    )


def _gpu_label(placement: Placement) -> str:
    """Such as `native gpu0 u2048 f16`, or `native gpu0 30 layers + cpu d16 p16 u2048 f16`."""
    where = " ".join(f"gpu{ordinal}" for ordinal in placement.gpu_ordinals)
    if any(item.device == "cpu" for item in placement.assignments):
        layers = sum(item.units.startswith("layer.") for item in placement.assignments)
        where += f" {layers} layers + cpu d{placement.decode_threads} p{placement.prefill_threads}"
    if placement.passing_tokens:
        where += f" passing {placement.passing_tokens}"
    return f"{placement.engine} {where} u{placement.ubatch_tokens} {placement.kv_type}"


def _ubatches(workload: Workload, limits: Limits) -> tuple[int, ...]:
    if limits.ubatch_tokens is not None:
        return (min(limits.ubatch_tokens, workload.context_length_tokens),)
    longest = max(UBATCH_LADDER[0], workload.context_length_tokens)
    return tuple(size for size in UBATCH_LADDER if size <= longest)


def enumerate_placements(
    card: ModelCard, report: MachineReport, workload: Workload, limits: Limits, engines: tuple[str, ...]
) -> Iterator[Placement]:
    """Every combination of the ladders, narrowed by the pins, in a fixed order."""
    cores = report.host.cpus[0].cores_available
    threads = (limits.threads,) if limits.threads else thread_ladder(cores)
    modes = (limits.load_mode,) if limits.load_mode else LOAD_MODES
    ladders = (engines, workload.kv_types, modes, threads, threads, _ubatches(workload, limits))
    for engine, kv_type, mode, decode, prefill, ubatch in product(*ladders):
        yield _placement(card, report, workload, engine, kv_type, mode, decode, prefill, ubatch)


def _placement(
    card: ModelCard,
    report: MachineReport,
    workload: Workload,
    engine: str,
    kv_type: KvType,
    mode: LoadMode,
    decode: int,
    prefill: int,
    ubatch: int,
) -> Placement:
    context = workload.context_length_tokens
    return Placement(
        engine=engine,
        assignments=CPU_ONLY,
        context_length_tokens=context,
        max_sequences=workload.concurrency,
        kv_type=kv_type,
        load_mode=mode,
        huge_pages=report.huge_pages and mode == "packed",
        decode_threads=decode,
        prefill_threads=prefill,
        ubatch_tokens=ubatch,
        kv_budget_bytes=kv_bytes(card, kv_type, context, workload.concurrency),
    )


def _structural_reason(placement: Placement, workload: Workload, cores: int, limits: Limits) -> str | None:
    """Why a combination is not worth a prediction."""
    if placement.prefill_threads < placement.decode_threads:
        return "prefill is bound by arithmetic: it never gains from fewer threads than decode"
    ubatches = _ubatches(workload, limits)
    fills = min((size for size in ubatches if size >= workload.mix.prompt_tokens), default=ubatches[-1])
    if placement.ubatch_tokens > fills:
        return f"no prompt of the mix ({workload.mix.prompt_tokens} tokens) fills a step larger than {fills}"
    if placement.engine != NATIVE:
        if placement.load_mode != (limits.load_mode or "mmap"):
            return "other engines arrange their weights themselves; their default load mode is measured"
        if placement.ubatch_tokens not in (min(512, fills), fills):
            return "kernels of other engines are not probed; their default step of 512 is measured"
        if placement.prefill_threads != (limits.threads or cores):
            return "kernels of other engines are not probed; their prefill gets every core"
        if placement.decode_threads not in (limits.threads or cores, max(1, cores // 2)):
            return "kernels of other engines are not probed; all cores and half of them are measured"
    return None


class _Ledger:
    """Collects rejections, one row per stage and reason, with a count and one candidate as example."""

    def __init__(self) -> None:
        self._count: Counter[tuple[str, str]] = Counter()
        self._example: dict[tuple[str, str], str] = {}
        self.rows: list[Rejected] = []

    def family(self, stage: str, reason: str, label: str) -> None:
        self._count[stage, reason] += 1
        self._example.setdefault((stage, reason), label)

    def one(self, label: str, stage: str, reason: str) -> None:
        self.rows.append(msgspec.convert({"candidate": label, "stage": stage, "reason": reason}, Rejected))

    def all(self) -> tuple[Rejected, ...]:
        families = [
            msgspec.convert(
                {"candidate": self._example[entry], "stage": entry[0], "reason": entry[1], "count": count},
                Rejected,
            )
            for entry, count in self._count.items()
        ]
        return (*families, *self.rows)


def _request_s(candidate: Candidate) -> float:
    return candidate.prediction.request_s if candidate.prediction else float("inf")


def _rank(candidate: Candidate) -> tuple[float, int, tuple[int, int, int]]:
    """Predicted ones by prediction; without one, more threads are the better guess. Ties by thrift."""
    threads = 0 if candidate.prediction else -candidate.placement.decode_threads
    return (_request_s(candidate), threads, candidate.thrift)


def _prune_by_cost(candidates: list[Candidate], ledger: _Ledger) -> list[Candidate]:
    best = min((_request_s(item) for item in candidates), default=float("inf"))
    kept = []
    for item in candidates:
        if item.prediction and _request_s(item) > PRUNE_RATIO * best:
            ratio = _request_s(item) / best
            ledger.one(
                item.label,
                "cost",
                f"predicted {ratio:.2f} times the best prediction of {best:.3g} s a request",
            )
        else:
            kept.append(item)
    return kept


def _twins(left: Placement, right: Placement, cores: int) -> bool:
    """Whether one may stand for the other. All cores are a choice of their own: the model knows least about them."""
    if (left.decode_threads == cores) != (right.decode_threads == cores):
        return False
    return _kind(left) == _kind(right)


def _kind(placement: Placement) -> tuple[object, ...]:
    return (
        placement.engine,
        placement.kv_type,
        placement.load_mode,
        placement.gpu_ordinals,
        placement.passing_tokens > 0,
    )


def _prune_equals(candidates: list[Candidate], cores: int, ledger: _Ledger) -> list[Candidate]:
    """Where the prediction cannot tell two apart, the one with fewer threads and bytes stands for both.

    The largest step stays beside the smallest that predicts the same: what a step costs besides its kernels is
    not probed.
    """
    largest = max((item.placement.ubatch_tokens for item in candidates), default=0)
    kept: list[Candidate] = []
    for item in sorted(candidates, key=lambda item: (item.thrift, _request_s(item))):
        twin = next(
            (
                other
                for other in kept
                if item.prediction
                and _twins(item.placement, other.placement, cores)
                and (item.placement.ubatch_tokens == largest) == (other.placement.ubatch_tokens == largest)
                and _request_s(other) <= _request_s(item) * NOISE_RATIO
            ),
            None,
        )
        if twin is None:
            kept.append(item)
        else:
            ledger.one(item.label, "cost", f"predicted no faster than {twin.label}, which takes less")
    return kept


def _axes(item: Candidate) -> tuple[tuple[object, ...], ...]:
    """What tells candidates apart, the most important first: a prediction may be wrong about any of it."""
    engine, placement = item.placement.engine, item.placement
    return (
        (engine,),
        (engine, placement.gpu_ordinals),
        (engine, "passing", placement.passing_tokens > 0),
        (engine, placement.kv_type),
        (engine, "decode", placement.decode_threads),
        (engine, "ubatch", placement.ubatch_tokens),
        (engine, placement.load_mode),
        (engine, "prefill", placement.prefill_threads),
    )


def pick_finalists(candidates: list[Candidate], most: int) -> tuple[list[Candidate], list[Candidate]]:
    """At most `most` (but one an engine): the best of each value on each axis, then the rest; and those left out."""
    ranked = sorted(candidates, key=_rank)
    order: list[Candidate] = []
    for axis in range(len(_axes(ranked[0]))):
        taken = {_axes(item)[axis] for item in order}
        for item in ranked:
            if _axes(item)[axis] not in taken:
                taken.add(_axes(item)[axis])
                order.append(item)
    order += [item for item in ranked if item not in order]
    n_engines = len({item.placement.engine for item in candidates})
    count = max(most, n_engines)
    return sorted(order[:count], key=_rank), order[count:]


def search(
    card: ModelCard,
    report: MachineReport,
    workload: Workload,
    limits: Limits,
    engines: tuple[str, ...],
    most_finalists: int = 6,
) -> SearchResult:
    """Raises PlanError when no candidate fits into memory, with the number of bytes that is short."""
    check_limits(report.host, limits)
    ledger = _Ledger()
    candidates, considered, shortest = _fitting(card, report, workload, limits, engines, ledger)
    if not candidates:
        raise PlanError(_memory_refusal(card, workload, limits, shortest))
    cores = report.host.cpus[0].cores_available
    remaining = _prune_equals(_prune_by_cost(candidates, ledger), cores, ledger)
    finalists, others = pick_finalists(remaining, most_finalists)
    for item in others:
        ledger.one(item.label, "cost", f"ranked behind the {len(finalists)} finalists that the budget allows")
    return SearchResult(tuple(finalists), ledger.all(), considered)


def _fitting(
    card: ModelCard,
    report: MachineReport,
    workload: Workload,
    limits: Limits,
    engines: tuple[str, ...],
    ledger: _Ledger,
) -> tuple[list[Candidate], int, str]:
    """Candidates that fit; how many were looked at; the shortage of the one that came closest."""
    limit, cores, work = host_limit_bytes(report, limits), report.host.cpus[0].cores_available, work_of(card)
    candidates: list[Candidate] = []
    considered, closest, words = 0, float("inf"), ""
    for placement in enumerate_placements(card, report, workload, limits, engines):
        considered += 1
        need = predict_memory(card, placement)
        if reason := _structural_reason(placement, workload, cores, limits):
            ledger.family("cost", reason, label_of(placement))
            continue
        resident = resident_need(need, placement.load_mode, limits.allow_storage_streaming)
        if short := shortage(resident, limit):
            ledger.one(label_of(placement), "memory", short)
            if resident.total_bytes < closest:
                closest, words = resident.total_bytes, short
        else:
            prediction = predict(card, work, placement, report, workload.mix)
            candidates.append(Candidate(label_of(placement), placement, need, prediction))
    on_gpus, more = _fitting_on_gpus(card, report, workload, limits, engines, ledger)
    return [*on_gpus, *candidates], considered + more, words


def _fitting_on_gpus(
    card: ModelCard,
    report: MachineReport,
    workload: Workload,
    limits: Limits,
    engines: tuple[str, ...],
    ledger: _Ledger,
) -> tuple[list[Candidate], int]:
    """Placements on GPUs whose part in RAM fits too; how many were looked at."""
    candidates: list[Candidate] = []
    considered = 0
    for item in (one for name in engines for one in gpu_candidates(card, report, workload, limits, name)):
        considered += 1
        label, placement = label_of(item.placement), item.placement
        limit = host_limit_bytes(report, limits)
        resident = resident_need(item.host_need, placement.load_mode, limits.allow_storage_streaming)
        if short := shortage(resident, limit):
            ledger.one(label, "memory", short)
            continue
        prediction = predict_gpu(card, item, report, workload.mix)
        candidates.append(Candidate(label, placement, item.host_need, prediction, item.needs))
    return candidates, considered


def _memory_refusal(card: ModelCard, workload: Workload, limits: Limits, shortest: str) -> str:
    remedies = [f"a smaller --ctx (now {workload.context_length_tokens})"]
    if workload.concurrency > 1:
        remedies.append(f"a smaller --concurrency (now {workload.concurrency})")
    if "q8_0" not in workload.kv_types:
        remedies.append("--kv q8_0")
    if limits.host_memory_mib is not None:
        remedies.append(f"a larger --host-memory-mib (now {limits.host_memory_mib})")
    if not limits.allow_storage_streaming:
        remedies.append("--allow-storage-streaming (slow)")
    remedies.append("a smaller quant of the model")
    return f"{card.name} does not fit: the smallest placement {shortest}; try {', '.join(remedies)}"

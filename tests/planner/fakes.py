"""A machine, a model and engines that exist only in numbers: speeds by placement, noise by seed, time by hand."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable

import msgspec

from configs.errors import EngineStartError, RequestFailedError
from configs.progress import ProgressCallback
from planner.prompt_texts import PromptText
from plans.card import CARD_VERSION, KvLayer, ModelCard, TypeBytes
from plans.machine import (
    REPORT_VERSION,
    CopyRate,
    Cpu,
    Gpu,
    GpuKernelRate,
    GpuRates,
    Host,
    KernelRate,
    MachineReport,
    PeakRate,
    ReadRate,
)
from plans.placement import CPU_ONLY, Placement
from plans.units import AttentionShape, EmbeddingShape, FfnShape, HeadShape, TensorRef, Unit
from worker.engines.base import Engine, EngineInfo
from worker.protocol import Done, Generate, Scored, Timings, TokenEvent

N_EMBD, N_FF, N_VOCAB, N_LAYERS = 1024, 4096, 32_000, 16
Speeds = Callable[[Placement], tuple[float, float]]  # prefill and decode tokens per second


def tensor(name: str, columns: int, rows: int, type_name: str = "Q4_0") -> TensorRef:
    size = columns * rows * 18 // 32 if type_name == "Q4_0" else columns * rows * 4
    return TensorRef(name, type_name, (columns, rows), size, 0, 0)


def units() -> tuple[Unit, ...]:
    embedding = tensor("token_embd.weight", N_EMBD, N_VOCAB)
    found = [Unit("embedding", "embedding", -1, {"token_embd": embedding}, EmbeddingShape(N_VOCAB, N_EMBD))]
    attention = AttentionShape(16, 4, 64, 64, "half", (1.0,), 0.125, 1e-5)
    for layer in range(N_LAYERS):
        sizes = {"q": N_EMBD, "k": 256, "v": 256, "output": N_EMBD}
        blocks = {role: tensor(f"blk.{layer}.{role}", N_EMBD, rows) for role, rows in sizes.items()}
        found.append(Unit(f"layer.{layer}.attention", "attention", layer, blocks, attention))
        feed = {
            "gate": tensor(f"blk.{layer}.gate", N_EMBD, N_FF),
            "up": tensor(f"blk.{layer}.up", N_EMBD, N_FF),
            "down": tensor(f"blk.{layer}.down", N_FF, N_EMBD),
        }
        found.append(Unit(f"layer.{layer}.ffn", "dense_ffn", layer, feed, FfnShape(N_FF, "silu", 1e-5)))
    found.append(Unit("head", "head", -1, {"output": embedding}, HeadShape(N_VOCAB, N_EMBD, 1e-5)))
    return tuple(found)


def card(native_reason: str | None = None) -> ModelCard:
    parts = units()
    distinct = {item.name: item for unit in parts for item in unit.tensors.values()}
    total = sum(item.bytes for item in distinct.values())
    parameters = sum(item.columns * item.rows for item in distinct.values())
    return ModelCard(
        card_version=CARD_VERSION,
        name="Fake 200M",
        architecture="llama",
        paths=("/models/fake.gguf",),
        file_bytes=total,
        parameters=parameters,
        n_layers=N_LAYERS,
        n_embd=N_EMBD,
        n_vocab=N_VOCAB,
        context_length_tokens=8192,
        n_experts=None,
        n_experts_used=None,
        tokenizer="gpt2",
        pre_tokenizer="smollm",
        has_chat_template=True,
        types=(TypeBytes("Q4_0", total, len(distinct), parameters),),
        kinds=(),
        kv_layers=(KvLayer(4, 64, 64),) * N_LAYERS,
        native_reason=native_reason,
        units=() if native_reason else parts,
    )


def machine_host(cores: int = 4, fingerprint: str = "f00d") -> Host:
    cpu = Cpu("Fake CPU", cores, cores, tuple(range(cores)), ("avx2",), 32 << 10, 1 << 20, 32 << 20, 1)
    return Host((cpu,), 32 << 30, (), fingerprint, "no NVIDIA driver (made up)")


def machine(cores: int = 4, available_bytes: int = 24 << 30, measured: bool = True) -> MachineReport:
    """Memory saturates at three threads, arithmetic scales with every thread; file order is slower by two."""
    counts = range(1, cores + 1)
    reads = tuple(ReadRate(n, True, min(n, 3) * 20e9) for n in counts)
    kernels = tuple(
        KernelRate("Q4_0", form, n, min(n, 3) * 18e9 * factor, n * 150e9 * factor)
        for form, factor in (("packed", 1.0), ("file", 0.5))
        for n in counts
    )
    return MachineReport(
        report_version=REPORT_VERSION,
        host=machine_host(cores),
        isa="avx512_vnni" if measured else None,
        library_sha256=None,
        ram_available_bytes=available_bytes,
        ram_read=reads if measured else (),
        int8_peak=tuple(PeakRate(n, n * 230e9) for n in counts) if measured else (),
        kernels=kernels if measured else (),
        disk_folder="/cache",
        disk=(),
        huge_pages=True,
        missing=(),
        measured_at="2026-01-01T00:00:00+00:00",
        probe_s=1.0,
    )


def gpu(free_mib: int = 16_384, ordinal: int = 0) -> GpuRates:
    """A card that is ten times as fast as the fake machine's memory."""
    return GpuRates(
        ordinal=ordinal,
        name="Fake GPU",
        driver_version="999.1",
        capability=90,
        n_processors=100,
        memory_total_bytes=16 << 30,
        memory_free_bytes=free_mib << 20,
        copies=(CopyRate("pinned in", 1 << 20, 50e9),),
        read_bytes_per_s=600e9,
        graph_node_s=1e-6,
        kernels=(GpuKernelRate("Q4_0", 400e9, 20e12),),
    )


def gpu_machine(*gpus: GpuRates, cores: int = 4, available_bytes: int = 24 << 30) -> MachineReport:
    report = machine(cores, available_bytes)
    names = tuple(Gpu(item.name, item.driver_version) for item in gpus)
    here = msgspec.structs.replace(report.host, gpus=names, gpus_absent_reason=None)
    return msgspec.structs.replace(report, host=here, gpus=gpus)


def placement(**changes: object) -> Placement:
    values: dict[str, object] = {
        "engine": "native",
        "assignments": CPU_ONLY,
        "context_length_tokens": 4096,
        "max_sequences": 1,
        "kv_type": "f16",
        "load_mode": "packed",
        "huge_pages": True,
        "decode_threads": 2,
        "prefill_threads": 4,
        "ubatch_tokens": 512,
        "kv_budget_bytes": 1 << 26,
    }
    return Placement(**{**values, **changes})  # type: ignore[arg-type]


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeEngine(Engine):
    """Moves the clock as far as its speeds say, with noise; may refuse to start, fail or stop short."""

    def __init__(self, farm: EngineFarm, placement: Placement) -> None:
        self._farm, self._placement = farm, placement
        self._running = False

    async def start(self, progress: ProgressCallback | None = None) -> EngineInfo:
        self._farm.started.append(self._placement)
        self._farm.clock.advance(self._farm.start_s)
        if self._placement.engine in self._farm.broken:
            raise EngineStartError(f"{self._placement.engine} said: out of luck")
        self._running = True
        return EngineInfo(self._placement.engine, "1.0", 4096, N_VOCAB, 1, None, {}, 0.1)

    async def generate(self, request: Generate) -> AsyncIterator[TokenEvent | Done]:
        farm = self._farm
        farm.requests.append((self._placement.engine, tuple(request.prompt_ids)))
        if self._placement.engine in farm.failing:
            raise RequestFailedError(f"{self._placement.engine} said: no")
        prefill, decode = farm.speeds(self._placement)
        noise = farm.random.lognormvariate(0.0, farm.noise)
        count = request.max_tokens - (1 if self._placement.engine in farm.short else 0)
        for position in range(count):
            seconds = len(request.prompt_ids) / prefill if position == 0 else 1 / decode
            farm.clock.advance(seconds * noise)
            yield TokenEvent(request.request_id, 7)
        cached = len(request.prompt_ids) if self._placement.engine in farm.caching else 0
        timings = Timings(0.0, 0.0, 0.0, len(request.prompt_ids), cached, count)
        yield Done(request.request_id, "length", timings)

    async def score(self, request_id: str, ids: list[int], top: int = 0) -> Scored:
        raise RequestFailedError("a fake engine scores nothing")

    async def stats(self) -> dict[str, float | int | None]:
        return {}

    def alive(self) -> bool:
        return self._running

    async def close(self) -> None:
        self._running = False
        self._farm.closed.append(self._placement)


class EngineFarm:
    """Makes the engines of a test and remembers what happened to them. Sets of engine names misbehave."""

    def __init__(self, speeds: Speeds, noise: float = 0.01, seed: int = 1) -> None:
        self.speeds, self.noise = speeds, noise
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.start_s = 0.5
        self.broken: set[str] = set()
        self.failing: set[str] = set()
        self.short: set[str] = set()
        self.caching: set[str] = set()
        self.started: list[Placement] = []
        self.closed: list[Placement] = []
        self.requests: list[tuple[str, tuple[int, ...]]] = []

    def factory(self, placement: Placement) -> Engine:
        return FakeEngine(self, placement)


def texts() -> list[PromptText]:
    """Numbers as words, different in every text, long enough for any passage."""
    generator = random.Random(5)
    rows = []
    for name, split in (("a", "train"), ("b", "train"), ("c", "heldout")):
        words = " ".join(str(generator.randrange(20_000)) for _ in range(1500))
        rows.append(PromptText(name, "heldout" if split == "heldout" else "train", words))
    return rows


def encode(text: str) -> list[int]:
    return [int(word) for word in text.split()]

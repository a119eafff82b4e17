"""A model under a cap of GPU memory that does not hold it: what `plan` makes of it, and llama.cpp under the same cap.

    gpu_split.py MODEL.gguf FOLDER [LLAMA_BIN]

Our figures are those of the saved plan's placement, run in this process: decode behind 512 tokens, prefill in steps of
the plan's size, each section's share of a token's time, and the peak of memory that the driver saw.

llama-bench gets as many layers as fit under the cap beside a cache of the same context; of a mixture, as many layers as
fit with their experts, while the experts of the others stay in RAM. Of its numbers of threads the faster one counts.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_processes import placewright, run_for_model
from gpu_model_bench import pages_of, warm_page_cache

from planner.inspect import read_card
from plans.card import ModelCard
from plans.placement import Placement
from plans.units import MoeShape
from worker.cuda import nvml
from worker.ops.traffic import weight_bytes_per_token
from worker.runtime.executor import CancelFlag, Output, Sampler, SequencePart, StepBatch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.gpu_sections import CpuSection, GpuSection
from worker.runtime.load_gpu import load_gpu

MIB = 1 << 20
GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
CONTEXT_TOKENS, DECODE_AT, DECODE_STEPS = 4096, 512, 40
PROMPTS = (512, 2048)
SLOW_S = 0.5  # a prompt that takes longer is not followed by a longer one
CAPS_MIB = {"qwen3moe": 10_000}  # by architecture
OTHER_CAP_MIB = 3_000
PLAN_BUDGET_S, PLAN_DEADLINE_S, BENCH_DEADLINE_S = 15, 120.0, 60.0
MOST_LLAMA_RUNS = 2
Row = tuple[str, str]


class Peak:
    """The most that is taken of a device while a block runs, above what was taken before; asked once a millisecond."""

    def __init__(self, bus_id: str) -> None:
        self._bus_id, self._is_over = bus_id, threading.Event()
        self._before = self._most = nvml.used_bytes(bus_id) or 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self._most = max(self._most, nvml.used_bytes(self._bus_id) or 0)

    def __enter__(self) -> Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        return (self._most - self._before) / MIB


def measure_split(path: Path, folder: Path, llama_bin: Path | None) -> Iterator[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    warm_page_cache(path)
    card = read_card(path)
    cap_mib = CAPS_MIB.get(card.architecture, OTHER_CAP_MIB)
    plan = plan_of(path, cap_mib)
    placement = msgspec.convert(plan["placement"], Placement)
    yield from plan_rows(plan, cap_mib)
    ours: dict[str, float] = {}
    with Peak(bus_id()) as peak:
        executor = load_gpu(path, placement, max_outputs=16)
        yield from speed_rows(executor, ours)
        predicted_mib = sum(model.need.total for model in executor.models) / MIB
        executor.close()
    words = "within the cap" if peak.mib <= cap_mib else "ABOVE THE CAP"
    yield "memory", f"predicted {predicted_mib:,.0f} MiB, peak {peak.mib:,.0f} of {cap_mib:,}: {words}"
    if llama_bin is not None:
        yield from llama_rows(path, card, placement, cap_mib, llama_bin / "llama-bench", ours)
    if peak.mib > cap_mib:
        raise RuntimeError("the cap was exceeded")


def bus_id() -> str:
    """Of the first device, without a context on it."""
    query = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]


def plan_of(path: Path, cap_mib: int) -> dict[str, Any]:
    """A saved plan, made the way a user makes it."""
    sizes = ["--gpu-memory-mib", str(cap_mib), "--ctx", str(CONTEXT_TOKENS), "--budget-s", str(PLAN_BUDGET_S)]
    done = placewright("plan", str(path), *sizes, "--json", timeout_s=PLAN_DEADLINE_S)
    print(done.stderr, file=sys.stderr, flush=True)
    return json.loads(done.stdout)


def plan_rows(plan: dict[str, Any], cap_mib: int) -> Iterator[Row]:
    needs = plan["gpu_memory"][0]
    parts = ", ".join(f"{name.removesuffix('_bytes')} {size / MIB:,.0f}" for name, size in needs.items())
    yield "plan", f"{plan['id'][:12]} under {cap_mib:,} MiB: {parts} MiB"
    for rates in plan["evidence"]["candidates"]:
        prefill, decode = rates["prefill_tokens_per_s"], rates["decode_tokens_per_s"]
        speed = f"prefill {prefill:,.0f}, decode {decode:.1f} tok/s" if decode else "not measured"
        predicted = f"{rates['predicted_s']:.2f} s predicted" if rates["predicted_s"] else "no prediction"
        measured = f"{rates['score_s']:.2f} s measured" if rates["score_s"] else ""
        yield f"  {rates['candidate']}", f"{speed}; {predicted}, {measured}"
    read = [
        f"{rate['threads']}: {rate['bytes_per_s'] / 1e9:.0f}"
        for rate in plan["ram_read"]
        if rate["huge_pages"]
    ]
    yield "RAM read by threads", f"{', '.join(read)} GB/s"


def speed_rows(executor: GpuExecutor, ours: dict[str, float]) -> Iterator[Row]:
    yield "load", f"{executor.load_s:.1f} s"
    for length in PROMPTS:
        seconds = prompt_s(executor, length)
        ours[f"prefill {length}"] = length / seconds
        steps = f"in steps of {min(length, executor.max_tokens)}"
        yield f"prefill {length}", f"{length / seconds:,.0f} tok/s {steps}"
        if seconds > SLOW_S:
            break
    whole_s, parts = decode_parts_s(executor)
    ours["decode"] = 1 / whole_s
    yield f"decode at {DECODE_AT}", f"{1 / whole_s:,.1f} tok/s ({whole_s * 1e3:.2f} ms)"
    for section, seconds in zip(executor.sections, parts, strict=True):
        yield f"  {type(section).__name__}", section_words(section, seconds)
    yield "  everything else of a token", f"{(whole_s - sum(parts)) * 1e6:.0f} us"


def prompt_s(executor: GpuExecutor, length: int) -> float:
    """Best of two, after a first one."""
    ids, pages = [(7919 * i) % executor.n_vocab for i in range(length)], pages_of(executor, 0, length)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        for begin in range(0, length, executor.max_tokens):
            end = min(length, begin + executor.max_tokens)
            outputs = (Output(end - begin - 1, GREEDY),) if end == length else ()
            part = SequencePart(ids[begin:end], begin, pages, outputs)
            executor.run(StepBatch((part,), end - begin, len(outputs)), CancelFlag())
        times.append(time.perf_counter() - started)
    return min(times[1:])


def section_words(section: object, seconds: float) -> str:
    if isinstance(section, CpuSection):
        oplist = section.executor.oplist
    else:
        assert isinstance(section, GpuSection)
        oplist = section.model.oplist
    rate = weight_bytes_per_token(oplist) / seconds
    return f"{seconds * 1e6:,.0f} us, {rate / 1e9:.1f} GB/s of weights"


def decode_parts_s(executor: GpuExecutor) -> tuple[float, list[float]]:
    """Median seconds of a decode step, and of each section in it as Python sees it."""
    pages = pages_of(executor, 0, DECODE_AT + DECODE_STEPS + 1)
    steps: list[list[float]] = []
    for step in range(DECODE_STEPS):
        part = SequencePart([1 + step], DECODE_AT + step, pages, (Output(0, GREEDY),))
        batch = StepBatch((part,), 1, 1)
        marks = [time.perf_counter()]
        prepared = executor.prepare(batch)
        for section in executor.sections:
            marks.append(time.perf_counter())
            section.run(prepared, batch, CancelFlag())
        marks.append(time.perf_counter())
        steps.append([marks[-1] - marks[0], *(b - a for a, b in zip(marks[1:-1], marks[2:], strict=True))])
    whole_s, *parts = (statistics.median(column) for column in zip(*steps[DECODE_STEPS // 4 :], strict=True))
    return whole_s, parts


def llama_rows(
    path: Path, card: ModelCard, placement: Placement, cap_mib: int, program: Path, ours: dict[str, float]
) -> Iterator[Row]:
    """The first guess is our number of layers; what it takes says how many more or fewer fit."""
    n_layers = card.n_layers or 0
    moved = layer_bytes(card) + cache_bytes(card, CONTEXT_TOKENS)
    if has_experts(card):
        moved = expert_bytes(card)
    count = sum(item.units.startswith("layer.") for item in placement.assignments)
    count += placement.passing_tokens > 0  # the room that our layers pass through
    tried: dict[int, tuple[float, dict[str, float]]] = {}
    for _ in range(MOST_LLAMA_RUNS):
        if count in tried:
            break
        peak_mib, rates = llama_run(path, card, count, program)
        missing = CONTEXT_TOKENS - PROMPTS[-1]
        cached = n_layers if has_experts(card) else count
        taken_mib = peak_mib + cache_bytes(card, missing) * cached / MIB
        tried[count] = taken_mib, rates
        yield f"llama.cpp, {count} layers", f"{taken_mib:,.0f} MiB at this context; {rates}"
        count = min(n_layers, count + int((cap_mib - taken_mib) * MIB // moved))
    fitting = [found for found, (taken_mib, _) in tried.items() if taken_mib <= cap_mib]
    if not fitting:
        yield "llama.cpp", "nothing that was tried fits under the cap"
        return
    rates = tried[max(fitting)][1]
    for work, rate in ours.items():
        best = max(value for name, value in rates.items() if name.startswith(f"{work} t"))
        yield f"{work} against llama.cpp", f"{rate:,.1f}, {best:,.1f} tok/s: {rate / best:.2f}x"


def has_experts(card: ModelCard) -> bool:
    return any(isinstance(unit.shape, MoeShape) for unit in card.units)


def layer_bytes(card: ModelCard) -> int:
    return max(sum(u.bytes for u in card.units if u.layer == layer) for layer in range(card.n_layers or 0))


def expert_bytes(card: ModelCard) -> int:
    return max(unit.bytes for unit in card.units if isinstance(unit.shape, MoeShape))


def cache_bytes(card: ModelCard, tokens: int) -> int:
    """Of one layer, f16."""
    return 2 * tokens * card.kv_elements_per_token // max(1, card.n_layers or 0)


def llama_run(path: Path, card: ModelCard, count: int, program: Path) -> tuple[float, dict[str, float]]:
    """MiB at most, and tokens per second by work and threads. Weights that stay in RAM are pinned there, not mapped,
    so that prompts can be computed on the GPU at the link's rate."""
    n_layers = card.n_layers or 0
    where = ["-ngl", str(count + 1)]  # the head counts as one
    if has_experts(card):
        where = ["-ngl", "99", "-ncmoe", str(n_layers - count)]
    command = [str(program), "-m", str(path), *where, "-fa", "1", "-lm", "none", "-t", "8,16"]
    command += ["-p", ",".join(map(str, PROMPTS)), "-n", "24", "-r", "2", "-o", "json"]
    with Peak(bus_id()) as peak:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BENCH_DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
    rates = {}
    for row in json.loads(done.stdout):
        work = f"prefill {row['n_prompt']}" if row["n_prompt"] else "decode"
        rates[f"{work} t{row['n_threads']}"] = round(float(row["avg_ts"]), 1)
    return peak.mib, rates


if __name__ == "__main__":
    sys.exit(run_for_model(str(__doc__), measure_split))

"""Races the native engine against llama-bench on one file: prefill 512 and decode 128, same threads, interleaved.

    bench-model.py MODEL.gguf... --llama-bench PATH [--threads 1 2] [--rounds 3]

Per row: tokens per second (medians), the ratio, and the share of the ceiling: of the measured read bandwidth for decode
(bytes of the packed weights a token reads), of the measured int8 peak for prefill (multiply-adds of the matrices).
The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plans.placement import CPU_ONLY, Placement
from worker.cpu.library import load_library
from worker.ops.oplist import MoeInts, OpKind
from worker.runtime.executor import CancelFlag, Output, Sampler, SequencePart, StepBatch
from worker.runtime.load import load_native
from worker.runtime.step import NativeExecutor

PREFILL_TOKENS, DECODE_TOKENS = 512, 128
GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
MEASURE_BYTES = 1 << 30
CPUS = tuple(sorted(os.sched_getaffinity(0)))  # before a team pins this thread


def load(model: Path, threads: int) -> NativeExecutor:
    placement = Placement(
        engine="native",
        assignments=CPU_ONLY,
        context_length_tokens=PREFILL_TOKENS + DECODE_TOKENS,
        max_sequences=1,
        kv_type="f16",
        load_mode="packed",
        huge_pages=True,
        decode_threads=threads,
        prefill_threads=threads,
        ubatch_tokens=PREFILL_TOKENS,
        kv_budget_bytes=2 << 30,
        cpus=CPUS[:threads],
    )
    return load_native(model, placement, max_outputs=16)


def run_native(executor: NativeExecutor) -> tuple[float, float]:
    """Tokens per second of prefill and of decode after a short prompt, on random token ids as llama-bench uses."""
    cancel, pages = CancelFlag(), list(range(executor.n_pages))
    ids = np.random.default_rng(0).integers(0, executor.n_vocab, PREFILL_TOKENS + DECODE_TOKENS).tolist()

    def step(first: int, count: int) -> float:
        part = SequencePart(ids[first : first + count], first, pages, (Output(count - 1, GREEDY),))
        started = time.perf_counter()
        executor.run(StepBatch((part,), count, 1), cancel)
        return time.perf_counter() - started

    prefill_s = step(0, PREFILL_TOKENS)
    step(0, 1)
    decode_s = sum(step(position, 1) for position in range(1, DECODE_TOKENS + 1))
    return PREFILL_TOKENS / prefill_s, DECODE_TOKENS / decode_s


def run_llama_bench(program: Path, model: Path, threads: int) -> tuple[float, float]:
    command = [str(program), "-m", str(model), "-t", str(threads), "-p", str(PREFILL_TOKENS)]
    command += ["-n", str(DECODE_TOKENS), "-r", "1", "-o", "json"]
    os.sched_setaffinity(0, CPUS)  # a team left this thread, and so its children, on one CPU
    rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    by_kind = {row["n_gen"] > 0: row["avg_ts"] for row in rows}
    return by_kind[False], by_kind[True]


def work_of(executor: NativeExecutor) -> tuple[int, int]:
    """Packed bytes that one decode step reads and multiply-adds of one prefill token, experts counted as used."""
    oplist, structs = executor.oplist, executor.weight_structs
    read_bytes = multiply_adds = 0
    for op in oplist.ops:
        if op.kind not in (OpKind.LINEAR, OpKind.ROUTER, OpKind.MOE):
            continue
        used = MoeInts(*op.ints).n_used if op.kind == OpKind.MOE else 1
        is_head = op.layer < 0
        for index in op.weights:
            struct = structs[index]
            read_bytes += struct.packed_expert_bytes * used
            multiply_adds += 0 if is_head else struct.rows * struct.cols * used
    return read_bytes, multiply_adds


def ceilings(executor: NativeExecutor, threads: int) -> tuple[float, float]:
    """Bytes per second of reading and int8 multiply-adds per second, best of three."""
    library = executor.library
    memory = library.arena(MEASURE_BYTES)
    memory.view()[::4096] = 1
    team = library.team_create(threads, CPUS[:threads], 2000)
    read = max(library.read_bandwidth(team, threads, memory) for _ in range(3))
    peak = max(library.int8_peak(team, threads) for _ in range(3))
    team.close()
    memory.close()
    return read, peak


def race(model: Path, program: Path, threads: int, rounds: int) -> dict[str, object]:
    executor = load(model, threads)
    run_native(executor)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(run_native(executor))
        theirs.append(run_llama_bench(program, model, threads))
    read_bytes, multiply_adds = work_of(executor)
    read_rate, peak_rate = ceilings(executor, threads)
    executor.close()
    prefill, decode = (statistics.median(row[i] for row in ours) for i in (0, 1))
    prefill_theirs, decode_theirs = (statistics.median(row[i] for row in theirs) for i in (0, 1))
    return {
        "model": model.name,
        "threads": threads,
        "prefill": round(prefill, 1),
        "prefill_llama": round(prefill_theirs, 1),
        "prefill_ratio": round(prefill / prefill_theirs, 2),
        "prefill_share": round(prefill * multiply_adds / peak_rate, 3),
        "decode": round(decode, 1),
        "decode_llama": round(decode_theirs, 1),
        "decode_ratio": round(decode / decode_theirs, 2),
        "decode_share": round(decode * read_bytes / read_rate, 3),
        "read_gb_per_s": round(read_rate / 1e9, 1),
        "int8_gmac_per_s": round(peak_rate / 1e9, 1),
        "load_s": round(executor.load_s, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--isa", choices=["avx2", "avx512_vnni"], help="instead of the widest this CPU has")
    options = parser.parse_args()
    if options.isa:
        load_library().set_isa(options.isa)
    rows = []
    for model in options.models:
        for threads in options.threads:
            rows.append(race(model, options.llama_bench, threads, options.rounds))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), file=sys.stderr, flush=True)
    print(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

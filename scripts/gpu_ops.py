"""The kernel benchmarks with shares of what this card was measured to do; a few rows stand for all of them.

    gpu_ops.py

All lines go to stderr. A kernel that is bound by memory is given as a share of the rate at which memory can be read,
one bound by arithmetic as a share of a large product of halves by cuBLAS.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import cupy
except ImportError:
    sys.exit("gpu_ops.py needs CuPy: pip install 'placewright[cuda13]' or [cuda12]")

from worker.cuda.driver import Launcher
from worker.cuda.rates import read_rate

SCRIPTS = ("bench-cuda-kernels", "bench-cuda-ops")
LIMIT_S = 120.0
READ_BYTES = 2 << 30
SHOWN = re.compile(
    r"30B-A3B (norm, qkv|o |head|experts.*Q6_K).*T=(1|16|512|4096)\b"
    r"|8B (gate \+ up|down)[^,]* T=(1|16|2048)\b|4096 x 4096 \w+"
    r"|decode (30B-A3B|8B) f16 batch (1|16) at (512|4096|8192|32768)$|prefill (30B-A3B|8B) f16 (512|4096) after 0$"
    r"|greedy 1 x 151936"
)
LINE = re.compile(
    r"(?P<what>\S.*?) +(?P<us>[\d.]+) us(?: +(?P<gbs>[\d.]+) GB/s(?: +[\d.]+ %)?)?(?: +(?P<tflops>[\d.]+) TFLOP/s)?"
)
Row = tuple[str, str]


class Peaks(NamedTuple):
    read_bytes_per_s: float
    flop_per_s: float


def measure_peaks() -> Peaks:
    stream = cupy.cuda.Stream(non_blocking=True)
    memory = cupy.zeros(READ_BYTES // 4, cupy.uint32)
    read = read_rate(Launcher(0, stream.ptr), stream, int(memory.data.ptr), READ_BYTES)
    return Peaks(read, product_flop_per_s(8192))


def product_flop_per_s(size: int) -> float:
    """Of a square product of random halves, the best of ten."""
    a, b = (
        cupy.random.standard_normal((size, size), dtype=cupy.float32).astype(cupy.float16) for _ in range(2)
    )
    times = []
    for _ in range(13):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
    return 2.0 * size**3 / min(times[3:])


def bench_ops() -> list[Row]:
    """Raises RuntimeError after the last benchmark where one failed."""
    peaks = measure_peaks()
    words = f"{peaks.read_bytes_per_s / 1e9:,.0f} GB/s, {peaks.flop_per_s / 1e12:,.0f} TFLOP/s (f16)"
    rows, failed = [("memory read, product of halves", words)], []
    for script in SCRIPTS:
        text, problem = run(script)
        print(f"---- {script}\n{text}", file=sys.stderr, flush=True)
        matches = (LINE.match(line) for line in text.splitlines())
        rows += [row_of(match, peaks) for match in matches if match and SHOWN.match(match["what"])]
        failed += [f"{script}: {problem}"] if problem else []
    if failed:
        raise RuntimeError("; ".join(failed))
    return rows


def run(script: str) -> tuple[str, str | None]:
    """What a benchmark printed, and what went wrong."""
    command = [sys.executable, str(Path(__file__).resolve().parent / script)]
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        return (error.stdout or b"").decode(errors="replace"), f"stopped after {LIMIT_S:.0f} s"  # type: ignore[union-attr]
    problem = f"ended with code {done.returncode}: {done.stdout[-300:]}" if done.returncode else None
    return done.stdout, problem


def row_of(match: re.Match[str], peaks: Peaks) -> Row:
    words = [f"{float(match['us']):,.1f} us"]
    if match["gbs"]:
        share = 1e11 * float(match["gbs"]) / peaks.read_bytes_per_s
        words.append(f"{float(match['gbs']):,.0f} GB/s ({share:.0f} %)")
    if match["tflops"]:
        share = 1e14 * float(match["tflops"]) / peaks.flop_per_s
        words.append(f"{float(match['tflops']):,.1f} TFLOP/s ({share:.0f} %)")
    return match["what"], ", ".join(words)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    for name, value in bench_ops():
        print(f"{name:<60}  {value}")

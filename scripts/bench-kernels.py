"""Times the matrix kernels of this machine on one thread, without a model.

    bench-kernels.py [--types Q4_K,Q6_K] [--isa avx2] [--small 1,2,4,8] [--pack] [--json]

stream    GB/s of packed weights read from memory for few tokens: at least --stream-mib of different bytes on huge
          pages, and its share of the measured read bandwidth (1 token is a decode step)
prefill   10^9 multiply-adds per second at --tokens tokens, and the share of the measured int8 peak; "all" is with
          preparing the activations for this one matrix
pack      seconds per GB of the file's bytes
Each number is the best of --repeats: on a shared machine the fastest run is the one that was disturbed least.
The table goes to stderr; --json writes one document to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from worker.cpu.library import Library, load_library
from worker.cpu.matrix import FILL_BYTE, Matrix
from worker.model.types import BY_NAME

TYPES = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
SHAPES = ((1536, 576), (4864, 896))
K_SHAPES = ((8960, 1536), (1536, 8960))
PREFILL_MACS = 2e9  # multiply-adds of one timing
BANDWIDTH_BYTES = 1 << 30

Row = dict[str, str | int | float]


def ceilings(library: Library, repeats: int) -> tuple[float, float]:
    """Bytes per second of reading memory and int8 multiply-adds per second, one thread."""
    team, memory = library.team_create(1), library.arena(BANDWIDTH_BYTES)
    memory.view()[:] = 1
    read = max(library.read_bandwidth(team, 1, memory) for _ in range(repeats))
    peak = max(library.int8_peak(team, 1) for _ in range(repeats))
    memory.close()
    team.close()
    return read, peak


def best_seconds(matrix: Matrix, x: NDArray[np.float32], experts: int, repeats: int) -> tuple[float, float]:
    """Seconds of preparing x and of multiplying it with each of the experts; the first run warms up."""
    y = np.zeros((len(x), matrix.struct.rows), np.float32)
    seconds = np.zeros((repeats + 1, 2))
    for row in seconds:
        matrix.multiply(x, y, experts=(0, experts), seconds=row)
    prepare_s, multiply_s = seconds[1:].min(axis=0)
    return float(prepare_s), float(multiply_s)


def pack_seconds_per_gb(matrix: Matrix, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        matrix.pack()
        times.append(time.perf_counter() - start_s)
    return min(times) / (matrix.struct.file_expert_bytes * matrix.struct.experts) * 1e9


def measure(library: Library, name: str, rows: int, cols: int, options: argparse.Namespace) -> Row:
    type_id = BY_NAME[name].id
    packed_bytes = library.packed_bytes(type_id, rows, cols)
    experts = max(1, -(-options.stream_mib * 2**20 // packed_bytes))
    file = np.full(library.file_bytes(type_id, rows, cols) * experts, FILL_BYTE, np.uint8)
    matrix = Matrix(library, type_id, rows, cols, file, experts=experts)
    x = np.random.default_rng(1).standard_normal((options.tokens, cols), np.float32)
    row: Row = {"type": name, "rows": rows, "cols": cols, "isa": library.isa}
    for n_tokens in options.small:
        _, seconds = best_seconds(matrix, x[:n_tokens], experts, options.repeats)
        row[f"stream_gb_per_s_{n_tokens}"] = packed_bytes * experts / seconds / 1e9
    n_macs = rows * cols * options.tokens
    few = max(1, min(experts, int(PREFILL_MACS // n_macs)))
    prepare_s, multiply_s = best_seconds(matrix, x, few, options.repeats)
    row["prefill_gmac_per_s"] = n_macs * few / multiply_s / 1e9
    row["prefill_all_gmac_per_s"] = n_macs / (multiply_s / few + prepare_s) / 1e9
    if options.pack:
        row["pack_s_per_gb"] = pack_seconds_per_gb(matrix, 3)
    return row


def header(options: argparse.Namespace) -> str:
    streams = "".join(f"{f'{n} tok GB/s':>17}" for n in options.small)
    return f"{'type':5} {'shape':>11} {'level':12}{streams}{'prefill GMAC/s':>20}{'all':>7}{'pack s/GB':>11}"


def table_line(row: Row, options: argparse.Namespace, read: float, peak: float) -> str:
    shape = f"{row['rows']}x{row['cols']}"
    rates = [float(row[f"stream_gb_per_s_{n}"]) for n in options.small]
    streams = "".join(f"{rate:10.1f} ({rate * 1e11 / read:3.0f}%)" for rate in rates)
    prefill = float(row["prefill_gmac_per_s"])
    prefill_text = f"{prefill:13.1f} ({prefill * 1e11 / peak:3.0f}%)"
    pack = f"{row['pack_s_per_gb']:11.2f}" if options.pack else f"{'-':>11}"
    left = f"{row['type']:5} {shape:>11} {row['isa']:12}"
    return f"{left}{streams}{prefill_text}{row['prefill_all_gmac_per_s']:7.1f}{pack}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--shapes", help="ROWSxCOLS,... (default: two per type)")
    parser.add_argument("--isa", action="append", help="avx512_vnni or avx2; may be repeated (default: best)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the prefill timing")
    parser.add_argument("--small", default="1", help="token counts of the stream timing, e.g. 1,2,4,8")
    parser.add_argument("--stream-mib", type=int, default=320)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pack", action="store_true", help="time packing too")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.small = [int(n) for n in options.small.split(",")]
    return options


def shapes_of(name: str, options: argparse.Namespace) -> list[tuple[int, int]]:
    if not options.shapes:
        return list(K_SHAPES if name.endswith("_K") else SHAPES)
    pairs = (shape.split("x") for shape in options.shapes.split(","))
    return [(int(rows), int(cols)) for rows, cols in pairs]


def main() -> None:
    options = parse_arguments()
    library = load_library()
    levels, results = options.isa or [library.isa], []
    for level in levels:
        library.set_isa(level)
        read, peak = ceilings(library, options.repeats)
        print(f"{level}: read {read / 1e9:.1f} GB/s, int8 peak {peak / 1e9:.0f} GMAC/s", file=sys.stderr)
        print(header(options), file=sys.stderr)
        for name in options.types.split(","):
            for rows, cols in shapes_of(name, options):
                row = measure(library, name, rows, cols, options)
                row |= {"read_bandwidth": read, "int8_peak": peak}
                results.append(row)
                print(table_line(row, options, read, peak), file=sys.stderr, flush=True)
    if options.json:
        json.dump(results, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()

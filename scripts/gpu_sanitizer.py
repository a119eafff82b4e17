"""The GPU tests under compute-sanitizer: memcheck over all of them, racecheck over small cases of every kernel family.

    gpu_sanitizer.py FOLDER [SECONDS] [RUN...]    runs such as "racecheck executor"; all without any

All runs go side by side, each a process with a log in FOLDER. Racecheck slows kernels down by orders of magnitude, so
its cases are few; it sees hazards in shared memory only, memcheck sees the rest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 200.0  # the longest takes 80 s beside the others, more where tests run meanwhile too
ERROR_CODE = 86
Row = tuple[str, str]

MATMUL, FEW_MOE, EXECUTOR = "test_matmul_gpu.py", "test_few_moe_gpu.py", "test_executor_gpu.py"
SMALL_MATMUL = (
    "(test_matrix_vector and 37-544 and (Q4_K or Q6_K or Q5_0 or F16)) or (test_norm_in_the_kernel and True-Q4_K)"
    " or (test_tensor_cores and 37-256 and (Q4_K or Q6_K or F16)) or test_parts_of_different_types"
)
ALL_MATMUL = (
    "(test_matrix_vector and not 640) or test_norm_in_the_kernel or (test_tensor_cores and not 520) or test_parts"
    " or test_dispatch or (test_blas and (Q4_K or F16))"
)
SMALL_MOE = "(test_mixture and Q6_K) or test_router_of_one_token or (test_grouped_experts and 16-Q6_K)"
ALL_MOE = "test_mixture or test_router or (test_grouped_experts and not 700) or (test_dense_network and 2)"
STEPS = (
    "tiny-moe and (without_warm_up or one_graph or later_chunks or mixed or several_sequences or sampling)"
)


class Run(NamedTuple):
    """One process: a tool over the tests of a file that match `cases` (an expression of pytest -k)."""

    tool: str
    name: str
    file: str
    cases: str = ""

    @property
    def title(self) -> str:
        return f"{self.tool} {self.name}"


RUNS = (
    Run("memcheck", "matmul", MATMUL, ALL_MATMUL),
    Run("memcheck", "moe", MATMUL, ALL_MOE),
    Run("memcheck", "moe, few tokens", FEW_MOE, "not test_experts or (16 and Q6_K)"),
    Run("memcheck", "ops", "test_ops_gpu.py"),
    Run("memcheck", "attention", "test_attention_gpu.py"),
    Run("memcheck", "sampler", "test_sampler_gpu.py"),
    Run("memcheck", "executor", EXECUTOR, STEPS),
    Run("racecheck", "matmul", MATMUL, SMALL_MATMUL),
    Run("racecheck", "moe", MATMUL, SMALL_MOE),
    Run(
        "racecheck", "moe, few tokens", FEW_MOE, "(test_many_experts and not 31) or test_norm or test_choice"
    ),
    Run("racecheck", "ops, router", "test_ops_gpu.py"),
    Run("racecheck", "attention", "test_attention_gpu.py"),
    Run("racecheck", "sampler", "test_sampler_gpu.py", "not 20011 and not 9001"),
    Run("racecheck", "executor", EXECUTOR, "without_warm_up"),
)


def command(program: str, run: Run) -> list[str]:
    tool = [program, "--tool", run.tool, "--error-exitcode", str(ERROR_CODE), "--print-limit", "30"]
    plugins = ["-p", "no:benchmark", "-p", "no:xdist", "-p", "no:cacheprovider"]
    cases = ["-k", run.cases] if run.cases else []
    tests = ["-m", "pytest", "-v", "-m", "gpu", "--tb=short", *plugins, f"tests/cuda/{run.file}", *cases]
    return [*tool, sys.executable, *tests]


def sanitize(folder: Path, limit_s: float = LIMIT_S, runs: tuple[Run, ...] = RUNS) -> Iterator[Row]:
    """A row for each run, in their order. Raises RuntimeError after the last where one found something."""
    program = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if program is None:
        raise RuntimeError("compute-sanitizer is not on PATH; it comes with the CUDA toolkit")
    folder.mkdir(parents=True, exist_ok=True)
    deadline_s = time.monotonic() + limit_s
    started = [(run, log_of(folder, run), start(program, run, folder)) for run in runs]
    bad = []
    for run, log, process in started:
        verdict, is_clean = finish(process, log, max(1.0, deadline_s - time.monotonic()))
        bad += [] if is_clean else [run.title]
        yield run.title, verdict
    if bad:
        raise RuntimeError(f"not clean: {', '.join(bad)}; see {folder}")


def log_of(folder: Path, run: Run) -> Path:
    return folder / f"{run.title.replace(', ', '-').replace(' ', '-')}.log"


def start(program: str, run: Run, folder: Path) -> subprocess.Popen[bytes]:
    with log_of(folder, run).open("wb") as log:
        return subprocess.Popen(
            command(program, run), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )


def finish(process: subprocess.Popen[bytes], log: Path, limit_s: float) -> tuple[str, bool]:
    """What a run found, in words, and whether that was nothing. One that hits its limit counts as far as it came."""
    try:
        process.wait(limit_s)
        state = ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool and the tests below it
        process.wait()
        state = f"stopped after {limit_s:.0f} s, "
    text = log.read_text(errors="replace")
    found = re.findall(r"^={9} (?:Error|Warning|Invalid|Race|Program hit)[^\n]*", text, re.MULTILINE)
    passed, failed = (len(re.findall(rf" {word}\b", text)) for word in ("PASSED", "FAILED"))
    first = f": {found[0][10:]}" if found else ""
    is_clean = not found and not failed and (bool(state) or process.returncode == 0) and passed > 0
    return f"{state}{passed} passed, {failed} failed, {len(found)} reports{first}", is_clean


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the logs go")
    parser.add_argument("limit_s", type=float, nargs="?", default=LIMIT_S, help="seconds of each run")
    parser.add_argument("titles", nargs="*", help=f"some of: {', '.join(run.title for run in RUNS)}")
    options = parser.parse_args()
    runs = tuple(run for run in RUNS if run.title in options.titles) if options.titles else RUNS
    for name, value in sanitize(options.folder, options.limit_s, runs):
        print(f"{name}: {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

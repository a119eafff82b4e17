"""llama-bench on a GPU beside our figures for the same file: rows with both numbers and their ratio."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

LIMIT_S = 240.0
RUNS = (["-p", "512,2048,4096", "-n", "128"], ["-p", "0", "-n", "64", "-d", "8192,32768"])
Row = tuple[str, str]


def llama_rates(program: Path, model: Path) -> Iterator[tuple[str, float]]:
    """(work, tokens per second); every layer on the GPU, flash attention, the step size that is best for prefill."""
    base = [str(program), "-m", str(model), "-ngl", "99", "-fa", "1", "-ub", "2048", "-b", "4096", "-r", "3"]
    for extra in RUNS:
        done = subprocess.run([*base, *extra, "-o", "json"], capture_output=True, text=True, timeout=LIMIT_S)
        if done.returncode:
            raise RuntimeError(f"llama-bench ended with code {done.returncode}: {done.stderr.strip()[-300:]}")
        for row in json.loads(done.stdout):
            depth = row.get("n_depth", 0)
            yield (
                f"prefill {row['n_prompt']}" if row["n_prompt"] else f"decode at {depth}",
                float(row["avg_ts"]),
            )


def compared(ours: list[Row], program: Path, model: Path) -> Iterator[Row]:
    """llama.cpp's figures, behind each the ratio of ours for the same work. Its decode at 0 meets ours at 64."""
    known = {work: rate for work, words in ours if (rate := rate_in(words)) is not None}
    known["decode at 0"] = known.get("decode at 64", 0.0)
    for work, rate in llama_rates(program, model):
        ratio = f", ours {known[work]:,.0f}: {known[work] / rate:.2f}x" if known.get(work) else ""
        yield f"llama.cpp {work}", f"{rate:,.1f} tok/s{ratio}"


def rate_in(words: str) -> float | None:
    match = re.match(r"([\d,.]+) tok/s", words)
    return float(match[1].replace(",", "")) if match else None

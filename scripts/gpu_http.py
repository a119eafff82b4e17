"""A model on the GPU over HTTP, one stream and many, beside the same decode steps in the library and a llama-server.

    gpu_http.py MODEL.gguf FOLDER [LLAMA_BIN]

Every figure is decoded tokens per second at the same contexts in the same run. FOLDER gets the logs. `own` is what the
server says of its streams, the rest is measured at the client's socket.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine_processes import llama_serving, placewright, run_for_model, serving
from gpu_model_bench import DECODE_STEPS, decode_s, placement
from http_streams import Rates, ask_all, measure

from planner.inspect import read_card
from worker.runtime.load_gpu import load_gpu

N_SEQUENCES = 16
PROMPT_TOKENS, OUTPUT_TOKENS = 512, 192
WARM_UP_TOKENS = 64
CONTEXT_TOKENS = 1024
ROUNDS = 3
PLAN_BUDGET_S, PLAN_DEADLINE_S, RACE_DEADLINE_S = 12, 150.0, 120.0
Row = tuple[str, str]


def measure_http(path: Path, folder: Path, llama_bin: Path | None) -> Iterator[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    started_s = time.monotonic()
    plan = plan_of(path)
    placed = plan["placement"]
    devices = ", ".join(item["device"] for item in placed["assignments"])
    yield (
        "plan",
        f"{plan['id'][:12]} on {devices}, step of {placed['ubatch_tokens']}, {time.monotonic() - started_s:.0f} s",
    )
    library = dict(library_tokens_per_s(path))
    n_vocab = read_card(path).n_vocab
    assert n_vocab is not None
    with serving(plan["id"], folder / "serve.log") as url:
        for count, rates in served(url, n_vocab):
            share = f"{100 * rates.together_tokens_per_s / library[count]:.1f} % of the library's {library[count]:,.0f}"
            yield f"http, {streams(count)}", f"{words(rates)}, {share}"
    if llama_bin is not None:
        yield from llama_rows(path, folder, llama_bin, n_vocab)
        yield raced(plan["id"], llama_bin)


def plan_of(path: Path) -> dict[str, Any]:
    """A saved plan for N_SEQUENCES at a time, made the way a user makes it."""
    arguments = [
        "--concurrency",
        str(N_SEQUENCES),
        "--ctx",
        str(CONTEXT_TOKENS),
        "--budget-s",
        str(PLAN_BUDGET_S),
    ]
    done = placewright("plan", str(path), *arguments, "--json", timeout_s=PLAN_DEADLINE_S)
    print(done.stderr, file=sys.stderr, flush=True)
    return json.loads(done.stdout)


def library_tokens_per_s(path: Path) -> Iterator[tuple[int, float]]:
    """By number of sequences, around the middle of the contexts that the streams run through."""
    executor = load_gpu(path, placement(), max_outputs=32)
    middle = PROMPT_TOKENS + (OUTPUT_TOKENS - DECODE_STEPS) // 2
    for count in (1, N_SEQUENCES):
        yield count, count / decode_s(executor, count, middle)
    executor.close()


def served(url: str, n_vocab: int) -> Iterator[tuple[int, Rates]]:
    """Medians over the rounds, for one stream and for many, after a round that warms up.

    Prompts are read one after the other, a token of the earlier ones between two steps of theirs. Warm-up answers are
    so long that the last one usually begins before the first one ends, and nothing is measured if it does not.
    """
    for count in (1, N_SEQUENCES):
        ask_all(url, prompts(count, 0, n_vocab), WARM_UP_TOKENS)
        numbers = range(1, ROUNDS + 1)
        rounds = [measure(url, prompts(count, number, n_vocab), OUTPUT_TOKENS) for number in numbers]
        yield count, median(rounds)


def prompts(count: int, number: int, n_vocab: int) -> list[list[int]]:
    """Token ids that no two prompts begin with alike."""
    starts = [1000 * number + 37 * index for index in range(count)]
    return [[(start + 7919 * i) % n_vocab for i in range(PROMPT_TOKENS)] for start in starts]


def median(rounds: list[Rates]) -> Rates:
    own = [rates.own_tokens_per_s for rates in rounds if rates.own_tokens_per_s is not None]
    return Rates(
        statistics.median(rates.together_tokens_per_s for rates in rounds),
        statistics.median(rates.whole_tokens_per_s for rates in rounds),
        statistics.median(own) if len(own) == len(rounds) else None,
    )


def llama_rows(path: Path, folder: Path, llama_bin: Path, n_vocab: int) -> Iterator[Row]:
    """With a cache for each slot, and with one that all slots share."""
    total = str(CONTEXT_TOKENS * N_SEQUENCES)
    base = ["-ngl", "99", "-fa", "on", "-ub", "2048", "-b", "4096", "-c", total, "-np", str(N_SEQUENCES)]
    for name, extra in (("own caches", ["-no-kvu"]), ("one cache", ["-kvu"])):
        log = folder / f"llama-server-{name.replace(' ', '-')}.log"
        with llama_serving(llama_bin / "llama-server", path, [*base, *extra], log) as url:
            for count, rates in served(url, n_vocab):
                yield f"llama-server, {name}, {streams(count)}", words(rates)


def raced(plan_id: str, llama_bin: Path) -> Row:
    """`bench run`: one request at a time, through both engines' workers."""
    os.environ["PATH"] = f"{llama_bin}{os.pathsep}{os.environ['PATH']}"
    arguments = ["bench", "run", plan_id, "--baseline", "llama-server", "--rounds", "5", "--json"]
    result = json.loads(placewright(*arguments, timeout_s=RACE_DEADLINE_S).stdout)
    ratios = []
    for name in ("prefill", "decode"):
        ours, theirs = (result[side][f"{name}_tokens_per_s"] for side in ("plan", "baseline"))
        ratios.append(f"{name} {ours:,.0f} against {theirs:,.0f}: {result[f'{name}_speedup']['ratio']:.2f}x")
    return "bench run", f"{', '.join(ratios)}; tuned: {'; '.join(result['tuning'])}"


def streams(count: int) -> str:
    return "1 stream" if count == 1 else f"{count} streams"


def words(rates: Rates) -> str:
    own = "" if rates.own_tokens_per_s is None else f", own {rates.own_tokens_per_s:,.0f}"
    return f"{rates.together_tokens_per_s:,.0f} tok/s (with prompts {rates.whole_tokens_per_s:,.0f}{own})"


if __name__ == "__main__":
    sys.exit(run_for_model(str(__doc__), measure_http))

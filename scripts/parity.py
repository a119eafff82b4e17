"""Compares our executor with llama.cpp on the same file and the same tokens: KL divergence, top-1, perplexity.

    parity.py MODEL.gguf TEXT [TEXT...] --llama-perplexity PATH [--also fa-off,no-repack,ub-128,exact] [--json]

Quantised files are computed with activations in 8 bits, so two correct engines differ by rounding; the other rows of
the table say what such a difference is worth. `fa-off`, `no-repack` and `ub-128` are llama.cpp once more with -fa off,
--no-repack or -ub 128; `exact` is our numpy executor in f32, which rounds nothing.

"clear" are the tokens at which the best is ahead of the second by more than rounding moves that lead: by more than it
moves in 99 % of the tokens between llama.cpp and its fa-off run. Perplexity: second against first, with twice the
standard error of the paired difference. The table goes to stdout; --json writes a document a line instead.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plans.placement import CPU_ONLY, Placement
from scripts.llama_logits import KNOWN_NATS, SPAN_TOKENS, Block, Floats, LlamaLogits, LlamaPerplexity
from worker.model import archs
from worker.model.gguf import open_model
from worker.model.tokenizer import load_tokenizer
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.ops.lower import lower
from worker.ops.reference import ReferenceExecutor, reference_weights
from worker.runtime.load import load_native

LLAMA = "llama.cpp"
VARIANTS = {
    "fa-off": ["-fa", "off"],
    "no-repack": ["-fa", "on", "--no-repack"],
    "ub-128": ["-fa", "on", "-ub", "128"],
}
NOISE_PERCENTILE = 99
HEADER = (
    "file",
    "text",
    "first",
    "second",
    "tokens",
    "mean KL",
    "top-1",
    "clear",
    "top-1 of clear",
    "perplexity",
    "",
)

Run = Callable[[Batch], Floats]
Side = Callable[[int], Iterator[Block]]  # the blocks of a chunk
Columns = npt.NDArray[np.float64]


class Tokens(NamedTuple):
    """Of each scored token, [n]: KL divergence of the second from the first, whether the best token is the same, the
    first's lead of its best over its second token and that lead by the second side, log probability of the text."""

    divergence: Columns
    same: Columns
    lead: Columns
    lead_by_second: Columns
    logprob: Columns
    logprob_by_second: Columns


class Agreement(NamedTuple):
    tokens: int
    mean_kl: float
    max_kl: float
    top1: float
    clear: float | None
    top1_of_clear: float | None
    perplexity_first: float
    perplexity_second: float
    perplexity_error: float


def compare(first: Block, second: Block, targets: npt.NDArray[np.int32]) -> Tokens:
    x, y, rows = first.logprobs, second.logprobs, np.arange(len(targets))
    terms = np.where(first.known & second.known, np.exp(x) * (x - y), 0)
    best, runner_up = best_two(x)
    columns = (
        terms.sum(axis=-1, dtype=np.float64),
        best == y.argmax(axis=-1),
        x[rows, best] - x[rows, runner_up],
        y[rows, best] - y[rows, runner_up],
        text_logprob(x, targets),
        text_logprob(y, targets),
    )
    return Tokens(*(np.asarray(column, np.float64) for column in columns))


def best_two(logprobs: Floats) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Ids [n] of the best and of the second token; several times faster than a partition of each row."""
    best, others = logprobs.argmax(axis=-1), logprobs.copy()
    others[np.arange(len(best)), best] = -np.inf
    return best, others.argmax(axis=-1)


def text_logprob(logprobs: Floats, targets: npt.NDArray[np.int32]) -> Floats:
    """Of the tokens that the text has, [n]; cut where llama.cpp's file cuts, or a few rare tokens would differ."""
    floor = logprobs.max(axis=-1) - KNOWN_NATS
    return np.asarray(np.maximum(logprobs[np.arange(len(targets)), targets], floor), np.float32)


def joined(parts: list[Tokens]) -> Tokens:
    return Tokens(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def lead_noise(tokens: Tokens) -> float:
    """Nats by which the lead of the best token moves in all but 1 % of the tokens."""
    return float(np.percentile(np.abs(tokens.lead_by_second - tokens.lead), NOISE_PERCENTILE))


def agreement(tokens: Tokens, noise: float | None) -> Agreement:
    """`noise`: what lead_noise says of two runs that differ in rounding only; None: not measured."""
    clear = None if noise is None else tokens.lead > noise
    gain = tokens.logprob_by_second - tokens.logprob
    return Agreement(
        tokens=len(tokens.same),
        mean_kl=float(tokens.divergence.mean()),
        max_kl=float(tokens.divergence.max()),
        top1=float(tokens.same.mean()),
        clear=None if clear is None else float(clear.mean()),
        top1_of_clear=None if clear is None or not clear.any() else float(tokens.same[clear].mean()),
        perplexity_first=float(np.exp(-tokens.logprob.mean())),
        perplexity_second=float(np.exp(-tokens.logprob_by_second.mean())),
        perplexity_error=float(2 * gain.std() / np.sqrt(len(gain))),
    )


def native_run(options: argparse.Namespace) -> Run:
    placement = Placement(
        engine="native",
        assignments=CPU_ONLY,
        context_length_tokens=options.context + PAGE_TOKENS,
        max_sequences=1,
        kv_type=options.kv,
        load_mode=options.load_mode,
        huge_pages=True,
        decode_threads=options.threads,
        prefill_threads=options.threads,
        ubatch_tokens=SPAN_TOKENS,
        kv_budget_bytes=4 << 30,
    )
    return load_native(options.model, placement, max_outputs=SPAN_TOKENS).logits


def reference_run(options: argparse.Namespace) -> Run:
    file = open_model(options.model)
    n_pages = options.context // PAGE_TOKENS + 1
    return ReferenceExecutor(lower(archs.units(file)), reference_weights(file), n_pages).run


def log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    return np.asarray(shifted - np.log(total), np.float32)


def executor_side(run: Run, base: LlamaLogits) -> Side:
    """An executor fed with the ids of llama.cpp's file, and its log probabilities at the same positions."""
    pages = list(range(base.n_context // PAGE_TOKENS + 1))

    def blocks(chunk: int) -> Iterator[Block]:
        ids = base.token_ids[chunk].tolist()
        for span in base.spans():
            scored = span.start >= base.first
            part = ids[span.start : span.stop]
            logits = run(Batch.of_sequence(part, span.start, pages, all_outputs=scored))
            if scored:
                yield Block(log_softmax(logits), np.ones((), np.bool_))

    return blocks


def measure(base: LlamaLogits, sides: dict[str, Side]) -> dict[tuple[str, str], Tokens]:
    """All sides in step, so that no more than a block of each is in memory; per pair, what happened at each token."""
    pairs = [(LLAMA, name) for name in sides if name != LLAMA]
    pairs += [("exact", name) for name in (LLAMA, "ours") if "exact" in sides]
    parts: dict[tuple[str, str], list[Tokens]] = {pair: [] for pair in pairs}
    for chunk in range(base.n_chunks):
        streams = zip(*(side(chunk) for side in sides.values()), strict=True)
        for targets, blocks in zip(base.targets(chunk), streams, strict=True):
            by_name = dict(zip(sides, blocks, strict=True))
            for first, second in pairs:
                parts[first, second].append(compare(by_name[first], by_name[second], targets))
    return {pair: joined(tokens) for pair, tokens in parts.items()}


def run_text(options: argparse.Namespace, llama: LlamaPerplexity, runs: dict[str, Run], text: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = llama.logits(text, ["-fa", "on"], Path(folder) / "base.bin")
        sides: dict[str, Side] = {LLAMA: base.blocks}
        sides |= {name: executor_side(run, base) for name, run in runs.items()}
        for name in options.also:
            if name in VARIANTS:
                sides[name] = llama.logits(text, VARIANTS[name], Path(folder) / f"{name}.bin").blocks
        measured = measure(base, sides)
    noise = lead_noise(measured[LLAMA, "fa-off"]) if "fa-off" in sides else None
    for pair, tokens in measured.items():
        show(options, text, pair, agreement(tokens, noise))


def show(options: argparse.Namespace, text: Path, pair: tuple[str, str], found: Agreement) -> None:
    names = {"file": options.model.name, "text": text.name, "first": pair[0], "second": pair[1]}
    if options.json:
        values = {k: round(v, 6) if isinstance(v, float) else v for k, v in found._asdict().items()}
        print(json.dumps(names | values), flush=True)
        return
    change = found.perplexity_second / found.perplexity_first - 1
    cells = [
        options.model.stem,
        text.stem,
        *pair,
        f"{found.tokens:,}",
        f"{found.mean_kl:.5f}",
        percent(found.top1),
    ]
    cells += [percent(found.clear), percent(found.top1_of_clear)]
    cells += [f"{found.perplexity_first:.3f}, {found.perplexity_second:.3f}"]
    cells += [f"{100 * change:+.2f} ± {100 * found.perplexity_error:.2f} %"]
    print("| " + " | ".join(cells) + " |", flush=True)


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--also", type=lambda value: value.split(",") if value else [], default=["fa-off"])
    parser.add_argument("--context", type=int, default=1024, help="tokens a chunk; the second half is scored")
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", choices=["f16", "q8_0"], default="f16")
    parser.add_argument("--load-mode", choices=["packed", "mmap"], default="packed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    wrong = [name for name in options.also if name not in (*VARIANTS, "exact")]
    if wrong:
        parser.error(f"--also knows {', '.join(VARIANTS)} and exact, not {', '.join(wrong)}")
    if options.context <= 0 or options.context % (2 * SPAN_TOKENS):
        parser.error(f"--context {options.context} is not a multiple of {2 * SPAN_TOKENS}")
    return options


def main() -> int:
    options = parse()
    tokenizer = load_tokenizer(open_model(options.model).metadata)
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    llama = LlamaPerplexity(
        options.llama_perplexity, options.model, options.context, options.chunks, options.threads, bos_id
    )
    runs = {"ours": native_run(options)}
    if "exact" in options.also:
        runs["exact"] = reference_run(options)
    if not options.json:
        print("| " + " | ".join(HEADER) + " |\n" + "|---" * len(HEADER) + "|")
    for text in options.texts:
        run_text(options, llama, runs, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

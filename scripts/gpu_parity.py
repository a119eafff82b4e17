"""The GPU engine against llama.cpp's CUDA build on the same file and the same tokens: KL divergence, top-1, perplexity.

    gpu_parity.py MODEL.gguf... --texts TEXT... --llama-perplexity PATH [--chunks 3] [--threads 8]

Each row scores the second half of every context against llama.cpp with flash attention. Ours computes it in steps of
128 tokens as for a prompt, of 16 as for a batch, and of one; `cpu` is our own CPU engine. How far llama.cpp is from
itself, with flash attention off and with another step size, is the yardstick; `parity.py` says what clear tokens are.
Perplexities are differences to llama.cpp's, which stands above the rows, or to the side that the row is against.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plans.placement import CPU_ONLY, GPU_ONLY, Assignment, Placement
from scripts.llama_logits import SPAN_TOKENS, Block, LlamaLogits, LlamaPerplexity
from scripts.parity import (
    Agreement,
    Run,
    Side,
    Tokens,
    agreement,
    compare,
    joined,
    lead_noise,
    log_softmax,
)
from worker.model.gguf import open_model
from worker.model.tokenizer import load_tokenizer
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.runtime.load import load_native
from worker.runtime.load_gpu import load_gpu

Row = tuple[str, str]
CONTEXT_TOKENS = 1024
PAGES = CONTEXT_TOKENS // PAGE_TOKENS + 1
STEPS = (SPAN_TOKENS, 16, 1)
ON_GPU = ["-ngl", "99"]
LLAMA, FA_OFF, PROMPTS, CPU = "llama.cpp", "llama.cpp fa off", f"steps of {SPAN_TOKENS}", "cpu"
VARIANTS = {FA_OFF: ["-fa", "off", *ON_GPU], "llama.cpp ub 64": ["-fa", "on", "-ub", "64", *ON_GPU]}


class Task(NamedTuple):
    model: Path
    llama_perplexity: Path
    chunks: int
    threads: int


def placement(task: Task, assignments: tuple[Assignment, ...]) -> Placement:
    return Placement(
        engine="native",
        assignments=assignments,
        context_length_tokens=CONTEXT_TOKENS + PAGE_TOKENS,
        max_sequences=len(STEPS),
        kv_type="f16",
        load_mode="packed",
        huge_pages=True,
        decode_threads=task.threads,
        prefill_threads=task.threads,
        ubatch_tokens=SPAN_TOKENS,
        kv_budget_bytes=2 << 30,
    )


def side(run: Run, base: LlamaLogits, step_tokens: int, first_page: int) -> Side:
    """An executor fed with llama.cpp's ids, so many at a time, with pages of its own."""
    pages = list(range(first_page, first_page + PAGES))

    def blocks(chunk: int) -> Iterator[Block]:
        ids = base.token_ids[chunk].tolist()
        for span in base.spans():
            scored, parts = span.start >= base.first, []
            for start in range(span.start, span.stop, step_tokens):
                step = ids[start : min(start + step_tokens, span.stop)]
                parts.append(run(Batch.of_sequence(step, start, pages, all_outputs=scored)))
            if scored:
                yield Block(log_softmax(np.concatenate(parts)), np.ones((), np.bool_))

    return blocks


def measure(base: LlamaLogits, sides: dict[str, Side]) -> dict[tuple[str, str], Tokens]:
    """Every side against llama.cpp, and our GPU engine against our CPU engine; a block of each in memory at a time."""
    pairs = [*((LLAMA, name) for name in sides), (CPU, PROMPTS)]
    parts: dict[tuple[str, str], list[Tokens]] = {pair: [] for pair in pairs}
    for chunk in range(base.n_chunks):
        streams = zip(base.blocks(chunk), *(blocks(chunk) for blocks in sides.values()), strict=True)
        for targets, found in zip(base.targets(chunk), streams, strict=True):
            by_name = dict(zip((LLAMA, *sides), found, strict=True))
            for first, second in pairs:
                parts[first, second].append(compare(by_name[first], by_name[second], targets))
    return {pair: joined(tokens) for pair, tokens in parts.items()}


def compare_text(task: Task, text: Path) -> Iterator[Row]:
    tokenizer = load_tokenizer(open_model(task.model).metadata)
    bos_id = tokenizer.bos_id if tokenizer.add_bos else None
    llama = LlamaPerplexity(
        task.llama_perplexity, task.model, CONTEXT_TOKENS, task.chunks, task.threads, bos_id
    )
    gpu = load_gpu(task.model, placement(task, GPU_ONLY), max_outputs=SPAN_TOKENS, warms_up=False)
    cpu = load_native(task.model, placement(task, CPU_ONLY), max_outputs=SPAN_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        base = llama.logits(text, ["-fa", "on", *ON_GPU], Path(folder) / "base.bin")
        sides = {
            f"steps of {step}": side(gpu.logits, base, step, index * PAGES)
            for index, step in enumerate(STEPS)
        }
        sides[CPU] = side(cpu.logits, base, SPAN_TOKENS, 0)
        for index, (name, flags) in enumerate(VARIANTS.items()):
            sides[name] = llama.logits(text, flags, Path(folder) / f"{index}.bin").blocks
        measured = measure(base, sides)
    gpu.close()
    cpu.close()
    yield from rows(f"{task.model.stem}, {text.stem}", measured)


def rows(title: str, measured: dict[tuple[str, str], Tokens]) -> Iterator[Row]:
    """A row that says of what, and one for each pair below it."""
    noise = lead_noise(measured[LLAMA, FA_OFF])
    found = {pair: agreement(tokens, noise) for pair, tokens in measured.items()}
    yardstick = found[LLAMA, FA_OFF]
    yield title, f"{yardstick.tokens:,} tokens, perplexity of llama.cpp {yardstick.perplexity_first:.3f}"
    for (first, second), of_pair in found.items():
        yield f"  {second}" + ("" if first == LLAMA else f" against {first}"), words(of_pair)


def words(found: Agreement) -> str:
    change = 100 * (found.perplexity_second / found.perplexity_first - 1)
    clear = "" if found.top1_of_clear is None else f", of clear tokens {100 * found.top1_of_clear:5.1f} %"
    return f"KL {found.mean_kl:.5f}, top-1 {100 * found.top1:5.1f} %{clear}, perplexity {change:+.2f} %"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--texts", type=Path, nargs="+", required=True)
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=3)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    for model, text in itertools.product(options.models, options.texts):
        task = Task(model, options.llama_perplexity, options.chunks, options.threads)
        for name, value in compare_text(task, text):
            print(f"{name}: {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

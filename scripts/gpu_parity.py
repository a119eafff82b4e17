"""The GPU engine against llama.cpp's CUDA build on the same file and the same tokens: KL divergence, top-1, perplexity.

    gpu_parity.py MODEL.gguf TEXT [TEXT...] --llama-perplexity PATH [--chunks 2] [--threads 8]

Each row scores the second half of every context against llama.cpp with flash attention. Ours runs it as prompts, as
single tokens, and as steps of as many tokens as batches have; `cpu` is our own CPU engine. How far llama.cpp is from
itself, with flash attention off and with another step size, is the yardstick: both programs round activations to 8
bits, and where roundings fall elsewhere near ties turn.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from parity import Agreement, BaseLogits, log_softmax, per_token, read_base_logits, summary

from plans.placement import CPU_ONLY, GPU_ONLY, Assignment, Placement
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.runtime.load import load_native
from worker.runtime.load_gpu import load_gpu

Floats = npt.NDArray[np.float32]
Row = tuple[str, str]
CONTEXT_TOKENS = 1024
PROMPT_STEP_TOKENS = 512
OUTPUT_ROWS = 128


class Task(NamedTuple):
    model: Path
    llama_perplexity: Path
    chunks: int
    threads: int


def llama_logits(
    task: Task, text: Path, *, flash_attention: str = "on", ubatch: int = 512
) -> list[BaseLogits]:
    """llama-perplexity on the GPU over the first chunks of a text."""
    with tempfile.TemporaryDirectory() as folder:
        out, context = Path(folder) / "base.bin", str(CONTEXT_TOKENS)
        command = [
            str(task.llama_perplexity),
            "-m",
            str(task.model),
            "-f",
            str(text),
            "--no-escape",
            "-ngl",
            "99",
        ]
        command += ["-c", context, "-b", context, "-ub", str(ubatch), "-fa", flash_attention]
        command += ["--chunks", str(task.chunks), "--kl-divergence-base", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        return read_base_logits(out)


def placement(task: Task, assignments: tuple[Assignment, ...]) -> Placement:
    return Placement(
        engine="native",
        assignments=assignments,
        context_length_tokens=CONTEXT_TOKENS + PAGE_TOKENS,
        max_sequences=1,
        kv_type="f16",
        load_mode="packed",
        huge_pages=True,
        decode_threads=task.threads,
        prefill_threads=task.threads,
        ubatch_tokens=PROMPT_STEP_TOKENS,
        kv_budget_bytes=2 << 30,
    )


def logprobs(base: BaseLogits, run: Callable[[Batch], Floats], step_tokens: int) -> Floats:
    """Log probabilities of the scored positions, teacher-forced on the ids of the base in steps of one size."""
    ids, parts = base.token_ids[:-1], []
    pages = list(range(len(ids) // PAGE_TOKENS + 1))
    for start in range(0, len(ids), step_tokens):
        chunk = ids[start : start + step_tokens]
        first = max(0, min(base.first - start, len(chunk) - 1))
        batch = Batch.of_sequence(chunk, start, pages, all_outputs=False)
        logits = run(dataclasses.replace(batch, output_rows=np.arange(first, len(chunk), dtype=np.int32)))
        if start + first >= base.first:
            parts.append(log_softmax(logits))
    return np.concatenate(parts)


def our_logprobs(task: Task, base: list[BaseLogits]) -> Iterator[tuple[str, list[Floats]]]:
    """By way of computing: prompts on the GPU, steps of 1 and 16 tokens there, prompts on the CPU."""
    gpu = load_gpu(task.model, placement(task, GPU_ONLY), max_outputs=PROMPT_STEP_TOKENS, warms_up=False)
    for name, step in (("prompts", PROMPT_STEP_TOKENS), ("1 token a step", 1), ("16 tokens a step", 16)):
        yield name, [logprobs(chunk, gpu.logits, step) for chunk in base]
    gpu.close()
    cpu = load_native(task.model, placement(task, CPU_ONLY), max_outputs=OUTPUT_ROWS)
    yield "cpu", [logprobs(chunk, cpu.logits, OUTPUT_ROWS) for chunk in base]
    cpu.close()


def compare(task: Task, text: Path) -> Iterator[Row]:
    base = llama_logits(task, text)
    title = f"{task.model.stem} {text.stem}"
    for name, ours in our_logprobs(task, base):
        yield f"{title}: {name}", words(agreement(base, ours))
        if name == "prompts":
            on_gpu = ours
        if name == "cpu":
            yield f"{title}: gpu against our cpu", words(own_agreement(base, on_gpu, ours))
    for name, options in (("fa off", {"flash_attention": "off"}), ("ub 64", {"ubatch": 64})):
        again = [chunk.logprobs()[0] for chunk in llama_logits(task, text, **options)]  # type: ignore[arg-type]
        yield f"{title}: llama.cpp {name}", words(agreement(base, again))


def agreement(base: list[BaseLogits], ours: list[Floats]) -> Agreement:
    """Of our log probabilities with llama.cpp's."""
    return summary(np.concatenate([per_token(*pair) for pair in zip(base, ours, strict=True)]))


def own_agreement(base: list[BaseLogits], ours: list[Floats], others: list[Floats]) -> Agreement:
    """Of log probabilities of ours with others of ours; of `base` only the text counts."""
    tokens = []
    for chunk, a, b in zip(base, ours, others, strict=True):
        rows, targets = np.arange(len(a)), chunk.targets()
        divergence = np.sum(np.exp(b.astype(np.float64)) * (b - a), axis=-1)
        same = a.argmax(-1) == b.argmax(-1)
        tokens.append(np.stack([divergence, same, b[rows, targets], a[rows, targets]], axis=-1))
    return summary(np.concatenate(tokens))


def words(found: Agreement) -> str:
    change = 100 * (found.perplexity / found.perplexity_base - 1)
    perplexity = f"perplexity {found.perplexity_base:.3f}, {found.perplexity:.3f} ({change:+.2f} %)"
    return f"KL {found.mean_kl:.5f}, top-1 {100 * found.top1:.1f} %, {perplexity}, {found.tokens:,} tokens"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--chunks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=8)
    options = parser.parse_args()
    task = Task(options.model, options.llama_perplexity, options.chunks, options.threads)
    for text in options.texts:
        for name, value in compare(task, text):
            print(f"{name}: {value}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

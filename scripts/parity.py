"""Compares our executors with llama.cpp on the same file and the same tokens: KL divergence, top-1, perplexity.

    parity.py MODEL.gguf TEXT [TEXT...] --llama-perplexity PATH [--executor native|reference] [--context 1024]

llama.cpp writes its log probabilities of the second half of a context (llama-perplexity --kl-divergence-base, 16 bits a
value over the top 16 nats); the first half is context only. Ours are computed teacher-forced on the ids in that file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from plans.placement import CPU_ONLY, Placement
from worker.model.describe import describe_file
from worker.model.gguf import open_model
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.ops.lower import lower
from worker.ops.reference import ReferenceExecutor
from worker.runtime.load import load_native, reference_weights

Floats = npt.NDArray[np.float32]
CHUNK_TOKENS = 128


class BaseLogits(NamedTuple):
    """Of one text: token ids [n_context] and log probabilities [n_scored, n_vocab] for positions first.. .

    `known` is False where the file only says "more than 16 nats below the best": those have no value of their own.
    """

    token_ids: list[int]
    first: int
    logprobs: Floats
    known: npt.NDArray[np.bool_]


class Agreement(NamedTuple):
    tokens: int
    mean_kl: float
    max_kl: float
    top1: float
    perplexity_base: float
    perplexity: float


def base_logits(program: Path, model: Path, text: Path, context: int, threads: int) -> BaseLogits:
    """Run llama-perplexity over the first 2 * context tokens' first chunk and read what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "base.bin"
        command = [str(program), "-m", str(model), "-f", str(text), "-c", str(context), "-b", str(context)]
        command += ["--chunks", "1", "--no-escape", "-t", str(threads), "--kl-divergence-base", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        return read_base_logits(out)


def read_base_logits(path: Path) -> BaseLogits:
    data = path.read_bytes()
    assert data[:8] == b"_logits_", "not a file of log probabilities"
    n_context, n_vocab, n_chunks = np.frombuffer(data, np.int32, 3, 8)
    ids = np.frombuffer(data, np.int32, int(n_context * n_chunks), 20)[:n_context]
    first, width = int(n_context) // 2, 2 * ((int(n_vocab) + 1) // 2) + 4
    rows = np.frombuffer(data, np.uint16, offset=20 + 4 * int(n_context * n_chunks)).reshape(-1, width)
    rows = rows[: int(n_context) - 1 - first]
    scale, lowest = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
    codes = rows[:, 4 : 4 + int(n_vocab)]
    logprobs = codes * scale[:, None] + lowest[:, None]
    return BaseLogits([int(i) for i in ids], first, logprobs.astype(np.float32), codes > 0)


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def compare(base: BaseLogits, ours: Floats) -> Agreement:
    terms = np.exp(base.logprobs.astype(np.float64)) * (base.logprobs - ours)
    divergence = np.sum(np.where(base.known, terms, 0.0), axis=-1)
    targets = np.asarray(base.token_ids[base.first + 1 : base.first + 1 + len(ours)])
    rows = np.arange(len(ours))
    return Agreement(
        tokens=len(ours),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        top1=float((base.logprobs.argmax(-1) == ours.argmax(-1)).mean()),
        perplexity_base=float(np.exp(-base.logprobs[rows, targets].mean())),
        perplexity=float(np.exp(-ours[rows, targets].mean())),
    )


def native_logprobs(model: Path, base: BaseLogits, threads: int, kv_type: str, load_mode: str) -> Floats:
    placement = Placement(
        engine="native",
        assignments=CPU_ONLY,
        context_length_tokens=len(base.token_ids) + PAGE_TOKENS,
        max_sequences=1,
        kv_type=kv_type,  # type: ignore[arg-type]
        load_mode=load_mode,  # type: ignore[arg-type]
        huge_pages=True,
        decode_threads=threads,
        prefill_threads=threads,
        ubatch_tokens=CHUNK_TOKENS,
        kv_budget_bytes=4 << 30,
    )
    executor = load_native(model, placement, max_outputs=CHUNK_TOKENS)
    try:
        return _chunked(base, executor.logits)
    finally:
        executor.close()


def reference_logprobs(model: Path, base: BaseLogits) -> Floats:
    file = open_model(model)
    oplist = lower(describe_file(file).units)
    executor = ReferenceExecutor(oplist, reference_weights(file), len(base.token_ids) // PAGE_TOKENS + 1)
    return _chunked(base, executor.run)


def _chunked(base: BaseLogits, run) -> Floats:  # type: ignore[no-untyped-def]
    ids, parts = base.token_ids[:-1], []
    pages = list(range(len(ids) // PAGE_TOKENS + 1))
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[start : start + CHUNK_TOKENS]
        logits = run(Batch.of_sequence(chunk, start, pages, all_outputs=True))
        keep = max(0, base.first - start)
        if keep < len(chunk):
            parts.append(log_softmax(logits[keep:]))
    return np.concatenate(parts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--executor", choices=["native", "reference"], default="native")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", choices=["f16", "q8_0"], default="f16")
    parser.add_argument("--load-mode", choices=["packed", "mmap"], default="packed")
    options = parser.parse_args()
    for text in options.texts:
        base = base_logits(options.llama_perplexity, options.model, text, options.context, options.threads)
        if options.executor == "reference":
            ours = reference_logprobs(options.model, base)
        else:
            ours = native_logprobs(options.model, base, options.threads, options.kv, options.load_mode)
        row = compare(base, ours)._asdict() | {"model": options.model.name, "text": text.name}
        print(
            json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

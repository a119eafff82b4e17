"""Compares our executors with llama.cpp on the same file and the same tokens: KL divergence, top-1, perplexity.

    parity.py MODEL.gguf TEXT [TEXT...] --llama-perplexity PATH [--executor native|reference] [--chunks 4]

llama.cpp writes its log probabilities of the second half of each context (llama-perplexity --kl-divergence-base, 16
bits a value over the top 16 nats); the first half is context only. Ours are teacher-forced on the ids in that file.
Both sides round activations to 8 bits, each in its own places, so two correct engines differ: --executor llama.cpp
shows by how much llama.cpp without flash attention differs from itself.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
    """Of one chunk: token ids [n_context] and uint16 [n_scored, 4 + n_vocab] for positions first.. ."""

    token_ids: list[int]
    first: int
    rows: npt.NDArray[np.uint16]

    def logprobs(self) -> tuple[Floats, npt.NDArray[np.bool_]]:
        """f32 [n_scored, n_vocab], and where they are known: code 0 only says "16 nats below the best, or more"."""
        scale, lowest = np.ascontiguousarray(self.rows[:, :4]).view(np.float32).T
        codes = self.rows[:, 4:]
        return (codes * scale[:, None] + lowest[:, None]).astype(np.float32), codes > 0

    def targets(self) -> npt.NDArray[np.int64]:
        return np.asarray(self.token_ids[self.first + 1 : self.first + 1 + len(self.rows)])


class Agreement(NamedTuple):
    tokens: int
    mean_kl: float
    max_kl: float
    top1: float
    perplexity_base: float
    perplexity: float


def base_logits(options: argparse.Namespace, text: Path, flash_attention: str) -> list[BaseLogits]:
    """Run llama-perplexity over the first chunks of a text and read what it wrote, one value a chunk."""
    with tempfile.TemporaryDirectory() as folder:
        out, context = Path(folder) / "base.bin", str(options.context)
        command = [str(options.llama_perplexity), "-m", str(options.model), "-f", str(text), "--no-escape"]
        command += ["-c", context, "-b", context, "--chunks", str(options.chunks), "-t", str(options.threads)]
        command += ["-fa", flash_attention, "--kl-divergence-base", str(out)]
        subprocess.run(command, check=True, capture_output=True)
        return read_base_logits(out)


def read_base_logits(path: Path) -> list[BaseLogits]:
    """The layout is that of llama.cpp's tools/perplexity: header, ids, then 16-bit codes with scale and offset."""
    data = np.memmap(path, np.uint8, "r")
    assert bytes(data[:8]) == b"_logits_", "not a file of log probabilities"
    n_context, n_vocab, n_chunks = (int(n) for n in data[8:20].view(np.int32))
    ids = data[20 : 20 + 4 * n_context * n_chunks].view(np.int32).reshape(n_chunks, n_context)
    first, width = n_context // 2, 2 * ((n_vocab + 1) // 2) + 4
    rows = data[20 + 4 * n_context * n_chunks :].view(np.uint16).reshape(n_chunks, -1, width)
    return [
        BaseLogits(chunk_ids.tolist(), first, chunk_rows[:, : 4 + n_vocab].copy())
        for chunk_ids, chunk_rows in zip(ids, rows, strict=True)
    ]


def log_softmax(logits: Floats) -> Floats:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))).astype(np.float32)


def per_token(base: BaseLogits, ours: Floats) -> npt.NDArray[np.float64]:
    """[n_scored, 4]: divergence, whether the best token is the same, log probability of the text by each side."""
    theirs, known = base.logprobs()
    terms = np.exp(theirs.astype(np.float64)) * (theirs - ours)
    divergence = np.sum(np.where(known, terms, 0.0), axis=-1)
    rows, targets = np.arange(len(ours)), base.targets()
    same = theirs.argmax(-1) == ours.argmax(-1)
    return np.stack([divergence, same, theirs[rows, targets], ours[rows, targets]], axis=-1)


def summary(tokens: npt.NDArray[np.float64]) -> Agreement:
    divergence, same, theirs, ours = tokens.T
    return Agreement(
        tokens=len(tokens),
        mean_kl=float(divergence.mean()),
        max_kl=float(divergence.max()),
        top1=float(same.mean()),
        perplexity_base=float(np.exp(-theirs.mean())),
        perplexity=float(np.exp(-ours.mean())),
    )


Run = Callable[[Batch], Floats]


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
        ubatch_tokens=CHUNK_TOKENS,
        kv_budget_bytes=4 << 30,
    )
    return load_native(options.model, placement, max_outputs=CHUNK_TOKENS).logits


def reference_run(options: argparse.Namespace) -> Run:
    file = open_model(options.model)
    oplist = lower(describe_file(file).units)
    n_pages = options.context // PAGE_TOKENS + 1
    return ReferenceExecutor(oplist, reference_weights(file), n_pages).run


def llama_run(options: argparse.Namespace, text: Path) -> list[Floats]:
    """llama.cpp once more, without flash attention."""
    return [chunk.logprobs()[0] for chunk in base_logits(options, text, "off")]


def logprobs_of(base: BaseLogits, run: Run) -> Floats:
    ids, parts = base.token_ids[:-1], []
    pages = list(range(len(ids) // PAGE_TOKENS + 1))
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[start : start + CHUNK_TOKENS]
        logits = run(Batch.of_sequence(chunk, start, pages, all_outputs=True))
        keep = max(0, base.first - start)
        if keep < len(chunk):
            parts.append(log_softmax(logits[keep:]))
    return np.concatenate(parts)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--llama-perplexity", type=Path, required=True)
    parser.add_argument("--executor", choices=["native", "reference", "llama.cpp"], default="native")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kv", choices=["f16", "q8_0"], default="f16")
    parser.add_argument("--load-mode", choices=["packed", "mmap"], default="packed")
    return parser.parse_args()


def main() -> int:
    options = parse()
    runs = {"native": native_run, "reference": reference_run}
    run = runs[options.executor](options) if options.executor in runs else None
    for text in options.texts:
        base = base_logits(options, text, "on")
        ours = [logprobs_of(chunk, run) for chunk in base] if run else llama_run(options, text)
        agreement = summary(np.concatenate([per_token(b, o) for b, o in zip(base, ours, strict=True)]))
        row = agreement._asdict() | {
            "model": options.model.name,
            "text": text.name,
            "executor": options.executor,
        }
        print(
            json.dumps({key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

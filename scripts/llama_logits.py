"""Runs llama-perplexity and reads the log probabilities that it writes (--kl-divergence-base), a block at a time.

The text is cut into chunks of one context each. The first half of a chunk is context only; of the second half it
writes every position, 16 bits a value over the KNOWN_NATS below the best. The layout is that of its tools/perplexity.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
KNOWN_NATS = 16  # what lies further below the best of its row is written as if it lay there
LAST_WORDS = 1500  # characters of a failure
SPAN_TOKENS = 128  # rows of a block; contexts are multiples of twice as many


class Block(NamedTuple):
    """Log probabilities f32 [n, n_vocab] of consecutive positions; `known`: where llama.cpp's 16 bits say the value."""

    logprobs: Floats
    known: npt.NDArray[np.bool_]


class LlamaLogits:
    """One file. `token_ids` i32 [n_chunks, n_context]; positions from `first` to the last but one are scored."""

    def __init__(self, path: Path, bos_id: int | None) -> None:
        data = np.memmap(path, np.uint8, "r")
        if bytes(data[:8]) != b"_logits_":
            raise ValueError(f"{path} does not hold log probabilities of llama-perplexity")
        self.n_context, self.n_vocab, n_chunks = (int(n) for n in data[8:20].view(np.int32))
        self.first = self.n_context // 2
        ids_end = 20 + 4 * self.n_context * n_chunks
        self.token_ids = data[20:ids_end].view(np.int32).reshape(n_chunks, self.n_context).copy()
        if bos_id is not None:  # llama.cpp computes each chunk behind one, and writes the ids without it
            self.token_ids[:, 0] = bos_id
        row_codes = 2 * ((self.n_vocab + 1) // 2) + 4
        self._rows = data[ids_end:].view(np.uint16).reshape(n_chunks, -1, row_codes)

    @property
    def n_chunks(self) -> int:
        return len(self.token_ids)

    def spans(self) -> list[range]:
        """The positions of a chunk that are computed, in steps of SPAN_TOKENS; the last token is only a target."""
        end = self.n_context - 1
        return [range(start, min(start + SPAN_TOKENS, end)) for start in range(0, end, SPAN_TOKENS)]

    def targets(self, chunk: int) -> Iterator[npt.NDArray[np.int32]]:
        """Per block of `blocks`, the token that the text has next: i32 [n]."""
        for span in self.spans():
            if span.start >= self.first:
                yield self.token_ids[chunk, span.start + 1 : span.stop + 1]

    def blocks(self, chunk: int) -> Iterator[Block]:
        for span in self.spans():
            if span.start >= self.first:
                yield self._block(self._rows[chunk, span.start - self.first : span.stop - self.first])

    def _block(self, rows: npt.NDArray[np.uint16]) -> Block:
        scale, lowest = np.ascontiguousarray(rows[:, :4]).view(np.float32).T
        codes = rows[:, 4 : 4 + self.n_vocab]
        return Block(codes * scale[:, None] + lowest[:, None], codes > 0)


class LlamaPerplexity(NamedTuple):
    """The program and what its runs have in common: `context` tokens a chunk, `bos_id` if the model wants one first."""

    program: Path
    model: Path
    context: int
    chunks: int
    threads: int
    bos_id: int | None

    def logits(self, text: Path, flags: Sequence[str], out: Path) -> LlamaLogits:
        """Raises RuntimeError with the end of what llama-perplexity said where it fails; else its words are dropped."""
        context = str(self.context)
        command = [str(self.program), "-m", str(self.model), "-f", str(text), "--no-escape", "-c", context]
        command += ["-b", context, "--chunks", str(self.chunks), "-t", str(self.threads), *flags]
        command += ["--kl-divergence-base", str(out)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode:
            words = done.stderr.decode(errors="replace")[-LAST_WORDS:]
            raise RuntimeError(f"{self.program.name} ended with code {done.returncode}: {words}")
        return LlamaLogits(out, self.bos_id)

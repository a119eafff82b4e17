"""scripts/parity.py: reading what llama-perplexity writes, the numbers of a pair, and the whole program on a tiny model
whose "llama.cpp" is a stand-in that writes our own exact answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts import parity
from scripts.llama_logits import KNOWN_NATS, Block, LlamaLogits, LlamaPerplexity
from tests.tiny import write_model
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.batch import PAGE_TOKENS, Batch
from worker.ops.lower import lower
from worker.ops.reference import ReferenceExecutor, reference_weights

N_CONTEXT, N_CHUNKS, BOS_ID = 256, 2, 3
RESOLUTION_NATS = KNOWN_NATS / 65535


def write_logits(path: Path, token_ids: np.ndarray, logprobs: list[np.ndarray]) -> None:
    """llama-perplexity's file: header, ids [chunks, context], then per row scale and offset (f32) and 16-bit codes."""
    n_vocab = logprobs[0].shape[1]
    with path.open("wb") as out:
        out.write(b"_logits_" + np.array([token_ids.shape[1], n_vocab, len(token_ids)], np.int32).tobytes())
        out.write(token_ids.astype(np.int32).tobytes())
        for row in np.concatenate(logprobs):
            lowest = row.max() - KNOWN_NATS
            codes = np.clip(np.rint((row - lowest) / RESOLUTION_NATS), 0, 65535).astype(np.uint16)
            out.write(np.array([RESOLUTION_NATS, lowest], np.float32).tobytes() + codes.tobytes())
            out.write(b"\0\0" * (n_vocab % 2))


def random_logprobs(n_vocab: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return parity.log_softmax(rng.normal(0, 4, (N_CONTEXT // 2 - 1, n_vocab)).astype(np.float32))


@pytest.mark.parametrize("n_vocab", [10, 11])
def test_reads_back_ids_and_values(tmp_path: Path, n_vocab: int) -> None:
    token_ids = np.arange(N_CHUNKS * N_CONTEXT).reshape(N_CHUNKS, N_CONTEXT) % n_vocab
    wanted = random_logprobs(n_vocab)
    write_logits(tmp_path / "base.bin", token_ids, [wanted, -wanted[::-1] - 9])
    logits = LlamaLogits(tmp_path / "base.bin", BOS_ID)
    assert logits.token_ids[:, 0].tolist() == [BOS_ID, BOS_ID]
    np.testing.assert_array_equal(logits.token_ids[:, 1:], token_ids[:, 1:])
    np.testing.assert_array_equal(np.concatenate([*logits.targets(1)]), token_ids[1, N_CONTEXT // 2 + 1 :])
    got = [*logits.blocks(0)]
    values, known = (np.concatenate(parts) for parts in zip(*got, strict=True))
    assert abs(values - wanted)[known].max() <= RESOLUTION_NATS
    np.testing.assert_array_equal(
        known, wanted > wanted.max(axis=1, keepdims=True) - KNOWN_NATS + RESOLUTION_NATS / 2
    )


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(ValueError, match="does not hold log probabilities"):
        LlamaLogits(tmp_path / "x", None)


def test_only_a_failure_shows_what_llama_perplexity_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "llama-perplexity"
    program.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    program.chmod(0o755)
    llama = LlamaPerplexity(program, tmp_path / "m.gguf", N_CONTEXT, N_CHUNKS, 1, None)
    with pytest.raises(RuntimeError, match="llama-perplexity ended with code 3: out of memory"):
        llama.logits(tmp_path / "text", [], tmp_path / "out.bin")
    assert capfd.readouterr() == ("", "")


def test_numbers_of_a_pair() -> None:
    first = np.log(np.array([[0.5, 0.4, 0.1], [0.7, 0.2, 0.1]], np.float32))
    second = np.log(np.array([[0.4, 0.5, 0.1], [0.6, 0.3, 0.1]], np.float32))
    known = np.array([[True, True, True], [True, True, False]])
    tokens = parity.compare(Block(first, known), Block(second, np.ones((), np.bool_)), np.array([1, 0]))
    assert tokens.same.tolist() == [0, 1]
    np.testing.assert_allclose(tokens.divergence[0], 0.1 * np.log(1.25), rtol=1e-5)
    np.testing.assert_allclose(tokens.lead, np.log([1.25, 3.5]), rtol=1e-5)
    np.testing.assert_allclose(tokens.lead_by_second, np.log([0.8, 2.0]), rtol=1e-5)
    found = parity.agreement(tokens, noise=0.5)
    assert (found.tokens, found.top1, found.clear, found.top1_of_clear) == (2, 0.5, 0.5, 1.0)
    np.testing.assert_allclose(found.perplexity_first, (0.4 * 0.7) ** -0.5, rtol=1e-5)
    np.testing.assert_allclose(found.perplexity_second, (0.5 * 0.6) ** -0.5, rtol=1e-5)
    assert parity.agreement(tokens, noise=None).clear is None


def exact_answer(model: Path, token_ids: np.ndarray) -> list[np.ndarray]:
    """Log probabilities of the second half of each chunk, each chunk behind a BOS as llama.cpp computes it."""
    file = open_model(model)
    pages = list(range(N_CONTEXT // PAGE_TOKENS))
    executor = ReferenceExecutor(lower(archs.units(file)), reference_weights(file), len(pages))
    answers = []
    for ids in token_ids:
        fed = [file.metadata.integer("tokenizer.ggml.bos_token_id"), *ids[1:-1].tolist()]
        logits = executor.run(Batch.of_sequence(fed, 0, pages, all_outputs=True))
        answers.append(parity.log_softmax(logits[N_CONTEXT // 2 :]))
    return answers


def test_whole_program_on_a_tiny_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path, "gemma3", "Q8_0", tokenizer="spm", embedding_quant="F32")
    token_ids = np.random.default_rng(2).integers(3, 200, (N_CHUNKS, N_CONTEXT))
    write_logits(tmp_path / "answer.bin", token_ids, exact_answer(model, token_ids))
    program = tmp_path / "llama-perplexity"
    program.write_text(f"#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\ncp {tmp_path}/answer.bin $1\n")
    program.chmod(0o755)
    arguments = [str(model), str(tmp_path / "text"), "--llama-perplexity", str(program), "--threads", "1"]
    arguments += ["--context", str(N_CONTEXT), "--json", "--also", "fa-off,exact"]
    monkeypatch.setattr(sys, "argv", ["parity.py", *arguments])
    assert parity.main() == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_pair = {(row["first"], row["second"]): row for row in rows}
    assert len(by_pair) == len(rows) == 5
    exact, ours = by_pair["llama.cpp", "exact"], by_pair["llama.cpp", "ours"]
    assert exact["tokens"] == N_CHUNKS * (N_CONTEXT // 2 - 1)
    assert abs(exact["mean_kl"]) < 1e-5 and exact["top1_of_clear"] == 1.0
    assert exact["perplexity_second"] == pytest.approx(exact["perplexity_first"], rel=1e-4)
    assert exact["mean_kl"] < ours["mean_kl"] < 0.01  # 8-bit activations

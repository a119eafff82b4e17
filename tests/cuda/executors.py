"""Loading tiny models into GPU executors and comparing them with the reference; for the host stand-in and real GPUs."""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from plans.placement import GPU_ONLY, Assignment, Placement
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.batch import Batch
from worker.ops.lower import lower
from worker.ops.reference import ReferenceExecutor, reference_weights
from worker.runtime.executor import CancelFlag, Output, SampledToken, Sampler, SequencePart, StepBatch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.load_gpu import load_gpu

GREEDY = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0)
GREEDY_WITH_TOP = Sampler(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, 0, top=5)
SPLIT = (*GPU_ONLY, Assignment("layer.1.*", "ram", "cpu"), Assignment("layer.2.*", "ram", "cpu"))


def synthetic_model(folder: Path, shape: str) -> Path:
    """A tiny model of scripts/synthetic-model."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "synthetic-model"
    loader = SourceFileLoader("synthetic_model", str(script))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module: Any = module_from_spec(spec)
    # dataclasses look their module up by name
    import sys

    sys.modules[loader.name] = module
    loader.exec_module(module)
    path = folder / f"{shape}.gguf"
    module.write_model(path, shape)
    return path


def placement(assignments: tuple[Assignment, ...] = GPU_ONLY, **changes: Any) -> Placement:
    values: dict[str, Any] = {
        "engine": "native",
        "assignments": assignments,
        "context_length_tokens": 256,
        "max_sequences": 4,
        "kv_type": "f16",
        "load_mode": "packed",
        "huge_pages": False,
        "decode_threads": 1,
        "prefill_threads": 1,
        "ubatch_tokens": 64,
        "kv_budget_bytes": 256 << 20,
    }
    return Placement(**(values | changes))


def load(path: Path, place: Placement | None = None, **factories: Any) -> GpuExecutor:
    """With `factories` for a stand-in device, which then is not warmed up, without for the real one."""
    return load_gpu(path, place or placement(), max_outputs=64, warms_up=not factories, **factories)


def reference_logits(path: Path, batches: list[Batch], n_pages: int = 16) -> list[NDArray[np.float32]]:
    file = open_model(path)
    executor = ReferenceExecutor(lower(archs.units(file)), reference_weights(file), n_pages)
    return [executor.run(batch) for batch in batches]


def prompt(length: int, n_vocab: int, seed: int = 3) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, n_vocab - 1, length).tolist()
    return tokens


def prefill_decode_and_mixed(n_vocab: int, pages: list[list[int]]) -> list[Batch]:
    """A prompt, its next token, and the token after that beside a second prompt."""
    ids = prompt(40, n_vocab)
    return [
        Batch.of_sequence(ids[:33], 0, pages[0], all_outputs=True),
        Batch.of_sequence(ids[33:34], 33, pages[0], all_outputs=True),
        Batch(
            np.asarray([ids[34], *ids[:12]], np.int32),
            np.asarray([34, *range(12)], np.int32),
            np.asarray([0, 1, 13], np.int32),
            np.asarray([pages[0], pages[1]], np.int32),
            np.asarray([0, 5, 12], np.int32),
        ),
    ]


def relative_error(actual: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Root of the mean square error over the spread of the expected logits."""
    return float(np.sqrt(np.mean(np.square(actual - expected))) / expected.std())


def decode(
    executor: GpuExecutor, ids: list[list[int]], first: int, pages: list[list[int]], sampler: Sampler = GREEDY
) -> list[SampledToken]:
    """One decode step of several sequences, each with its token, all at the same position."""
    parts = tuple(
        SequencePart(tokens, first, page_ids, (Output(0, sampler),))
        for tokens, page_ids in zip(ids, pages, strict=True)
    )
    return executor.run(StepBatch(parts, len(parts), len(parts)), CancelFlag())


def read_silently(executor: GpuExecutor, ids: list[int], pages: list[int]) -> None:
    """The beginning of a prompt, as a step that wants no answer."""
    part = SequencePart(ids, 0, pages, ())
    assert not executor.run(StepBatch((part,), len(ids), 0), CancelFlag())


def generate(
    executor: GpuExecutor,
    prompts: list[list[int]],
    n_tokens: int,
    pages: list[list[int]],
    sampler: Sampler = GREEDY,
) -> list[list[int]]:
    """Prefill each prompt, all of one length, then decode all together; the chosen ids per sequence."""
    chosen: list[list[int]] = []
    for ids, page_ids in zip(prompts, pages, strict=True):
        part = SequencePart(ids, 0, page_ids, (Output(len(ids) - 1, sampler),))
        chosen.append([executor.run(StepBatch((part,), len(ids), 1), CancelFlag())[0].id])
    for step in range(n_tokens - 1):
        answers = decode(executor, [[ids[-1]] for ids in chosen], len(prompts[0]) + step, pages, sampler)
        for ids, answer in zip(chosen, answers, strict=True):
            ids.append(answer.id)
    return chosen

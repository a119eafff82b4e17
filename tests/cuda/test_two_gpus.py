"""Models over two GPUs, on two stand-ins on the host: cut as the planner cuts them, and in ways that it does not.

The answers must be those of the reference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import EngineStartError
from planner.gpu import assignments_of
from planner.gpu_memory import DeviceUse
from plans.placement import CPU_ONLY, Assignment
from tests.cuda.executors import (
    GREEDY_WITH_TOP,
    generate,
    load,
    placement,
    prefill_decode_and_mixed,
    prompt,
    reference_logits,
    relative_error,
    synthetic_model,
)
from tests.cuda.host_device import HostDevice
from tests.cuda.numpy_kernels import NumpyKernels
from worker.cpu.library import built_library_path
from worker.ops.batch import Batch
from worker.runtime.executor import CancelFlag, Output, SequencePart, StepBatch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.gpu_passing import PassingSection

EXACT = 2e-3  # keys and values are rounded to f16
N_VOCAB, N_LAYERS = 1024, 4
PAGES = [[0, 1], [2, 3], [4, 5], [6, 7]]
PLANNED = assignments_of((DeviceUse(1, 0, 2, True, False), DeviceUse(0, 2, 4, False, True)), N_LAYERS)
UPWARDS = assignments_of((DeviceUse(0, 0, 1, True, False), DeviceUse(1, 1, 4, False, True)), N_LAYERS)
THERE_AND_BACK = (
    Assignment("*", "gpu1", "gpu1"),
    *(Assignment(f"layer.{i}.*", "gpu0", "gpu0") for i in (1, 2)),
)
THREE_PARTS = assignments_of((DeviceUse(1, 1, 2, False, False), DeviceUse(0, 2, 4, False, True)), N_LAYERS)


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("models"), request.param)


def on_two(
    path: Path, assignments: tuple[Assignment, ...], **changes: Any
) -> tuple[GpuExecutor, dict[int, HostDevice]]:
    devices = {ordinal: HostDevice(ordinal) for ordinal in (0, 1)}
    place = placement(assignments, **changes)
    return load(path, place, make_device=devices.__getitem__, make_kernels=NumpyKernels), devices


@pytest.mark.parametrize("assignments", [PLANNED, UPWARDS, THERE_AND_BACK])
def test_logits_are_those_of_the_reference(model: Path, assignments: tuple[Assignment, ...]) -> None:
    executor, _ = on_two(model, assignments)
    batches = prefill_decode_and_mixed(N_VOCAB, PAGES)
    for batch, expected in zip(batches, reference_logits(model, batches), strict=True):
        assert relative_error(executor.logits(batch), expected) < EXACT
    executor.close()


@pytest.mark.parametrize("assignments", [PLANNED, UPWARDS, THERE_AND_BACK])
def test_sequences_side_by_side_go_on_as_alone_on_one_card(
    model: Path, assignments: tuple[Assignment, ...]
) -> None:
    """From prompts over pages that fill up to graphs that are launched again; three in a bucket of four."""
    prompts = [prompt(28, N_VOCAB, seed) for seed in range(3)]
    one, _ = on_two(model, (Assignment("*", "gpu0", "gpu0"),))
    expected = [generate(one, [ids], 9, [pages])[0] for ids, pages in zip(prompts, PAGES, strict=False)]
    one.close()
    two, devices = on_two(model, assignments)
    assert generate(two, prompts, 9, PAGES[:3]) == expected
    assert all(device.graph_launches for device in devices.values())
    assert two.submit(StepBatch((SequencePart([1], 40, PAGES[0], (Output(0),)),), 1, 1)) is None
    two.close()


def test_each_card_is_predicted_and_capped(model: Path) -> None:
    executor, _ = on_two(model, PLANNED)
    for part in executor.models:
        taken = part.memory.taken
        assert (part.need.weights, part.need.kv, part.need.workspace) == (
            taken["weights"],
            taken["kv"],
            taken["workspace"],
        )
        assert executor.memory_bytes()[f"gpu{part.device.ordinal}"] == part.memory.total_bytes
    executor.close()
    with pytest.raises(EngineStartError, match="gpu1 .* would need"):
        on_two(model, PLANNED, gpu_memory_mib=(4096, 650))


def test_pages_are_copied_on_both(model: Path) -> None:
    executor, _ = on_two(model, PLANNED)
    ids = prompt(33, N_VOCAB)
    executor.logits(Batch.of_sequence(ids[:32], 0, PAGES[0], all_outputs=False))
    executor.copy_page(0, 6)
    first, second = (
        executor.logits(Batch.of_sequence(ids[32:], 32, pages, all_outputs=False))
        for pages in ([0, 1], [6, 7])
    )
    assert np.array_equal(first, second)
    executor.close()


@pytest.mark.parametrize("passing_tokens", [0, 8])
def test_the_rest_stays_on_the_cpu(model: Path, passing_tokens: int) -> None:
    try:
        built_library_path()
    except EngineStartError as error:
        pytest.skip(str(error))
    executor, devices = on_two(model, THREE_PARTS, passing_tokens=passing_tokens)
    assert THREE_PARTS[: len(CPU_ONLY)] == CPU_ONLY and len(executor.sections) == 3
    assert isinstance(executor.sections[0], PassingSection) == (passing_tokens > 0)
    ids = prompt(34, N_VOCAB)
    batch = Batch.of_sequence([*ids], 0, PAGES[0], all_outputs=False)
    logits = reference_logits(model, [batch])[0][0].astype(np.float64)
    expected = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    executor.run(StepBatch((SequencePart(ids[:33], 0, PAGES[0], ()),), 33, 0), CancelFlag())
    part = SequencePart(ids[33:], 33, PAGES[0], (Output(0, GREEDY_WITH_TOP),))
    for _ in range(2):  # op by op, then from graphs
        (answer,) = executor.run(StepBatch((part,), 1, 1), CancelFlag())
    assert answer.logprob == pytest.approx(expected[answer.id], abs=0.05 * logits.std())
    assert bool(devices[1].log.count("move_pages")) == (passing_tokens > 0), (
        "through the card that comes next"
    )
    executor.close()

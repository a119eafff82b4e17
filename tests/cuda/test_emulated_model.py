"""Whole tiny models on the real CUDA sources, compiled for the CPU: lowering and kernels together, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cuda.emulated_model import emulated_kernels
from tests.cuda.executors import load, placement, prompt, reference_logits, relative_error, synthetic_model
from tests.cuda.host_device import HostDevice
from tests.cuda.tolerances import RouterMargins, rounding_bounds
from worker.cuda.cuda_kernels import CudaKernels
from worker.ops.batch import Batch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not here to compile the kernels"),
]
N_LAYERS = 4
SEED = 5  # of a prompt whose last token meets no router in doubt
DECIDED = 0.08  # of a router's logits' spread: four times what 8 bits may make of logits here


def test_a_folded_router_agrees_with_one_of_its_own(tmp_path: Path) -> None:
    """The same to the rounding of its rows to halves, where that does not make another expert the best, and one launch
    a layer less."""
    path, place = synthetic_model(tmp_path, "tiny-moe"), placement(max_sequences=1, ubatch_tokens=32)
    logits, launches = [], []
    for folds in (False, True):
        device = HostDevice()

        def kernels(device: HostDevice, folds: bool = folds) -> CudaKernels:
            return emulated_kernels(device, folds)

        executor = load(path, place, make_device=lambda _, device=device: device, make_kernels=kernels)
        before = len(device.log)
        logits.append(executor.logits(Batch.of_sequence([7], 0, [3, 1], all_outputs=True)))
        launches.append(len(device.log) - before)
        executor.close()
    assert launches[0] - launches[1] == 4
    assert 0 < relative_error(logits[1], logits[0]) < 0.01


@pytest.mark.parametrize("shape", ["tiny-dense", "tiny-moe"])
def test_prompts_and_a_decoded_token_match_the_reference(
    tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, device = synthetic_model(tmp_path, shape), HostDevice()
    place = placement(max_sequences=1, ubatch_tokens=32)
    executor = load(path, place, make_device=lambda _: device, make_kernels=emulated_kernels)
    ids = prompt(13, 1024, SEED)
    batches = [
        Batch.of_sequence(ids[:3], 0, [3, 1], all_outputs=True),
        Batch.of_sequence(ids[3:12], 3, [3, 1], all_outputs=True),
        Batch.of_sequence(ids[12:], 12, [3, 1], all_outputs=True),
    ]
    margins = RouterMargins(monkeypatch)
    exact = reference_logits(path, batches)
    assert all(margin > DECIDED for margin in margins.smallest[2 * N_LAYERS :])
    for batch, expected, bound in zip(batches, exact, rounding_bounds(path, batches, exact), strict=True):
        assert relative_error(executor.logits(batch), expected) < bound, len(batch.token_ids)
    executor.close()

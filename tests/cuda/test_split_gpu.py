"""A model larger than its cap on a real device: the planner leaves half of the layers to the CPU or to another device,
and the logits stay what the CPU alone and the GPU alone give.

Tolerance: as in test_executor_gpu.py; both sides round activations to 8 bits, each in its own places.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from planner.gpu import assignments_of, fill
from planner.gpu_memory import MIB, DeviceUse, StepSizes, device_need
from planner.inspect import read_card
from plans.placement import CPU_ONLY, GPU_ONLY, Placement
from tests.cuda.executors import load, placement, prompt, relative_error, synthetic_model
from worker.cpu.library import built_library_path
from worker.cuda.device import gpu_absence
from worker.ops.batch import Batch
from worker.runtime.gpu_executor import GpuExecutor
from worker.runtime.gpu_passing import PassingSection
from worker.runtime.gpu_sections import CpuSection, GpuSection
from worker.runtime.load import load_native

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_absence() is not None, reason=f"no GPU: {gpu_absence()}"),
    pytest.mark.filterwarnings("default"),  # CuPy and its CUDA libraries warn about themselves
]
TOLERANCE = 0.05
CONTEXT_TOKENS, SEQUENCES, UBATCH_TOKENS = 2048, 4, 64
N_VOCAB, N_LAYERS = 1024, 4
PAGES = [0, 1, 2]
Logits = list[NDArray[np.float32]]


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels() -> None:
    try:
        built_library_path()
    except Exception as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic_model(tmp_path_factory.mktemp("models"), request.param)


def sized(**changes: Any) -> Placement:
    sizes = {
        "context_length_tokens": CONTEXT_TOKENS,
        "max_sequences": SEQUENCES,
        "ubatch_tokens": UBATCH_TOKENS,
    }
    return placement(**(sizes | changes))


SIZES = StepSizes("f16", CONTEXT_TOKENS, SEQUENCES, SEQUENCES + 1, UBATCH_TOKENS)


def half_on_the_cpu(path: Path, passing_tokens: int) -> Placement:
    """What the planner makes of a cap that holds the last two of four layers and the head; where others pass, of what
    that is predicted to take, though so small a model as a whole takes less.
    """
    card, n_passing = read_card(path), N_LAYERS // 2 if passing_tokens else 0
    half = DeviceUse(0, N_LAYERS // 2, N_LAYERS, False, True, n_passing)
    cap_mib = -(-device_need(card, half, SIZES).total_bytes // MIB)
    if not passing_tokens:
        uses = fill(card, [(0, cap_mib * MIB)], SIZES)
        assert uses == (half,), "one layer more would need more than a MiB"
    assignments = assignments_of((half,), N_LAYERS)
    return sized(assignments=assignments, gpu_memory_mib=(cap_mib,), passing_tokens=passing_tokens)


def half_on_another(path: Path) -> Placement:
    """What the planner makes of two cards of which none holds more than half."""
    card = read_card(path)
    halves = (
        DeviceUse(1, 0, N_LAYERS // 2, True, False),
        DeviceUse(0, N_LAYERS // 2, N_LAYERS, False, True),
    )
    cap_mib = max(-(-device_need(card, half, SIZES).total_bytes // MIB) for half in halves)
    uses = fill(card, [(ordinal, cap_mib * MIB) for ordinal in (0, 1)], SIZES)
    assert uses == halves
    return sized(assignments=assignments_of(uses, N_LAYERS), gpu_memory_mib=(cap_mib, cap_mib))


def logits_of(run: Callable[[Batch], NDArray[np.float32]]) -> Logits:
    """A prompt, one more chunk and two decoded tokens."""
    ids = prompt(70, N_VOCAB)
    spans = [(0, 50), (50, 68), (68, 69), (69, 70)]
    return [run(Batch.of_sequence(ids[a:b], a, PAGES, all_outputs=True)).copy() for a, b in spans]


def close_to(actual: Logits, expected: Logits, what: str) -> None:
    errors = [relative_error(a, e) for a, e in zip(actual, expected, strict=True)]
    assert max(errors) < TOLERANCE, f"{what}: relative errors {errors}"


@pytest.mark.parametrize("passing_tokens", [0, 16])
def test_a_model_above_its_cap_runs_half_on_the_cpu(model: Path, passing_tokens: int) -> None:
    """Its two chunks of a prompt are large enough to pass."""
    place = half_on_the_cpu(model, passing_tokens)
    split = load(model, place)
    assert isinstance(split, GpuExecutor)
    cpu = PassingSection if passing_tokens else CpuSection
    assert [type(section) for section in split.sections] == [cpu, GpuSection]
    assert split.models[0].memory.total_bytes <= place.gpu_memory_mib[0] * MIB
    actual = logits_of(split.logits)
    split.close()
    whole = load(model, sized(assignments=GPU_ONLY))
    close_to(actual, logits_of(whole.logits), "against all on the GPU")
    whole.close()
    alone = load_native(model, sized(assignments=CPU_ONLY), max_outputs=UBATCH_TOKENS)
    close_to(actual, logits_of(alone.logits), "against all on the CPU")
    alone.close()


def n_gpus() -> int:
    import cupy

    return int(cupy.cuda.runtime.getDeviceCount())


def test_a_model_above_one_card_runs_on_two(model: Path) -> None:
    if n_gpus() < 2:
        pytest.skip("one GPU")
    place = half_on_another(model)
    split = load(model, place)
    assert [section.model.device.ordinal for section in split.sections] == [1, 0]  # type: ignore[attr-defined]
    for part, cap_mib in zip(split.models, place.gpu_memory_mib, strict=True):
        assert part.memory.total_bytes <= cap_mib * MIB
    actual = logits_of(split.logits)
    split.close()
    whole = load(model, sized(assignments=GPU_ONLY))
    close_to(actual, logits_of(whole.logits), "against all on one GPU")
    whole.close()

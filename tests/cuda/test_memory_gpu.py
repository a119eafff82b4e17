"""What a process takes of a real device: never more than was predicted, hence never more than its cap.

Everything else that uses the device meanwhile is counted as ours, so `scripts/gpu-check` runs these tests alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.executors import synthetic_model
from worker.cuda.device import gpu_absence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpu_absence() is not None, reason=f"no GPU: {gpu_absence()}"),
    pytest.mark.filterwarnings("default"),  # CuPy and its CUDA libraries warn about themselves
]
ROOT = Path(__file__).resolve().parents[2]
CONTEXT_TOKENS, SEQUENCES, UBATCH_TOKENS = 2048, 32, 512
ENOUGH_MIB = 4096


def peak_of(model: Path, cap_mib: int) -> subprocess.CompletedProcess[str]:
    sizes = [str(size) for size in (cap_mib, CONTEXT_TOKENS, SEQUENCES, UBATCH_TOKENS)]
    command = [sys.executable, "-m", "tests.cuda.memory_peak", str(model), *sizes]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("shape", ["tiny-dense", "tiny-moe"])
def test_the_peak_stays_below_the_prediction_and_the_cap(tmp_path: Path, shape: str) -> None:
    """With exactly the predicted memory as its cap: load, a prompt as long as the context, up to 32 sequences."""
    model = synthetic_model(tmp_path, shape)
    free = peak_of(model, ENOUGH_MIB)
    assert free.returncode == 0, free.stderr[-2000:]
    predicted_mib = json.loads(free.stdout.splitlines()[-1])["predicted"]
    cap_mib = int(predicted_mib) + 1
    done = peak_of(model, cap_mib)
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["graphs"] > 12
    assert max(answer["peak"].values()) <= cap_mib, f"{shape}: {answer}"
    below = peak_of(model, int(predicted_mib) - 1)
    assert below.returncode != 0 and "would need" in below.stderr

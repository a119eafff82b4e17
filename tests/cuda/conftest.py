"""`machine`: every kernel test runs emulated, and on a GPU where `-m gpu` asks for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.cuda.machine import Machine


def gpu_absence() -> str | None:
    try:
        import cupy

        return None if cupy.cuda.runtime.getDeviceCount() else "no CUDA device"
    except Exception as error:  # whatever is missing, the reason is shown with the skip
        return str(error).splitlines()[0] if str(error) else type(error).__name__


@pytest.fixture(scope="session")
def emulated_machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not here to compile the emulated kernels")
    folder: Path = tmp_path_factory.mktemp("kernels")
    return Machine.emulated(folder)


@pytest.fixture(scope="session")
def gpu_machine() -> Machine:
    if (reason := gpu_absence()) is not None:
        pytest.skip(f"no GPU to test on: {reason}")
    return Machine.gpu()


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.getfixturevalue(f"{request.param}_machine")  # type: ignore[no-any-return]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()

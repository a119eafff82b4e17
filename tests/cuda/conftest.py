"""`machine`: a kernel test that takes it runs emulated, and on a GPU where `-m gpu` asks for it."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.devices import GpuDevice, why_no_emulator, why_no_gpu
from tests.cuda.machine import Machine, emulated_machine


@pytest.fixture(scope="session")
def host_machine() -> Machine:
    if reason := why_no_emulator():
        pytest.skip(reason)
    return emulated_machine()


@pytest.fixture(scope="session")
def gpu_machine() -> Machine:
    if reason := why_no_gpu():
        pytest.skip(reason)
    return Machine(GpuDevice())


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest) -> Machine:
    return request.getfixturevalue(f"{request.param}_machine")  # type: ignore[no-any-return]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng()

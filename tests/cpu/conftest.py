"""The CPU library for tests: skipped with a reason where it is not built, and run on every level this CPU has."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from configs.errors import EngineStartError
from worker.cpu.handles import Team
from worker.cpu.library import Library, load_library

_SEED = int(os.environ.get("PLACEWRIGHT_TEST_SEED") or np.random.SeedSequence().entropy % 2**32)  # type: ignore[operator]


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return load_library()
    except EngineStartError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["avx512_vnni", "avx2"])
def level(request: pytest.FixtureRequest, library: Library) -> Iterator[str]:
    """Each instruction set level in turn; what is made inside the test runs on it."""
    best = library.isa
    if request.param != best and request.param != "avx2":
        pytest.skip(f"this CPU has no {request.param}")
    library.set_isa(request.param)
    yield request.param
    library.set_isa(best)


@pytest.fixture
def rng() -> np.random.Generator:
    """Fresh data on each run; a failure prints the seed that repeats it."""
    print(f"PLACEWRIGHT_TEST_SEED={_SEED}")
    return np.random.default_rng(_SEED)


@pytest.fixture(scope="module")
def team(library: Library) -> Iterator[Team]:
    team = library.team_create(4, spin_us=50)
    yield team
    team.close()

"""The thread team: many tiny steps, every number of threads, cancelling, teams that come and go."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from configs.errors import EngineError, RequestFailedError
from tests.cpu.steps import Case, batch_of
from worker.cpu.handles import Team
from worker.cpu.library import Library
from worker.ops.oplist import OpKind


def chain(library: Library, rng: np.random.Generator, n_layers: int, width: int = 32) -> tuple[Case, int]:
    """Alternating norms and products: each op needs all of the one before it."""
    case = Case(library, rng)
    source, other = case.given(rng.standard_normal((64, width), np.float32)), case.buffer(width)
    norm = case.vector(np.ones(width, np.float32))
    weight = case.matrix(width, width, scale=width**-0.5)
    for layer in range(n_layers):
        case.add(
            OpKind.RMS_NORM,
            layer,
            inputs=(source,),
            outputs=(other,),
            weights=(norm,),
            ints=(0,),
            floats=(1e-5,),
        )
        case.add(
            OpKind.LINEAR,
            layer,
            inputs=(other,),
            outputs=(source,),
            weights=(weight,),
            biases=(-1,),
            ints=(1, 1),
            floats=(0.0, 0.0),
        )
    return case, source


@pytest.mark.parametrize("spin_us", [0, 20, 1000])
def test_many_tiny_steps_on_changing_threads(
    library: Library, rng: np.random.Generator, spin_us: int
) -> None:
    case, out = chain(library, rng, 6, 48)
    team = library.team_create(4, spin_us=spin_us)
    step = case.step(team)
    expected = {}
    for n_tokens in (1, 2, 17):
        _, native = batch_of([(list(range(n_tokens)), 0, [0])], outputs=[])
        assert step.run(native.struct, 1)
        expected[n_tokens] = step.buffer(out)[:n_tokens]
    for i in range(300):
        n_tokens = (1, 2, 17)[i % 3]
        _, native = batch_of([(list(range(n_tokens)), 0, [0])], outputs=[])
        assert step.run(native.struct, 1 + i % 4)
        np.testing.assert_array_equal(step.buffer(out)[:n_tokens], expected[n_tokens])
        if i % 50 == 49:
            time.sleep(0.002)  # let the workers park
    team.close()


def test_teams_come_and_go(library: Library, rng: np.random.Generator) -> None:
    case, _ = chain(library, rng, 2)
    _, native = batch_of([([0, 1, 2], 0, [0])], outputs=[])
    before = threading.active_count()
    for n_threads in [1, 2, 3, 4] * 5:
        team = library.team_create(n_threads, cpus=[0] * n_threads if n_threads == 2 else None, spin_us=10)
        step = case.step(team)
        assert step.run(native.struct, n_threads)
        step.close()
        team.close()
    assert threading.active_count() == before


def test_two_callers_with_a_team_each(library: Library, rng: np.random.Generator) -> None:
    case, out = chain(library, rng, 4)
    results: list[np.ndarray] = []

    def work() -> None:
        step = case.step(library.team_create(2, spin_us=20))
        _, native = batch_of([([3, 4], 0, [0])], outputs=[])
        for _ in range(100):
            assert step.run(native.struct, 2)
        results.append(step.buffer(out)[:2])

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 3
    for result in results:
        np.testing.assert_array_equal(result, results[0])


@pytest.mark.parametrize("n_threads", [1, 3])
def test_a_step_cancelled_before_and_while_it_runs(
    library: Library, team: Team, rng: np.random.Generator, n_threads: int
) -> None:
    case, _ = chain(library, rng, 2000, 256)
    step = case.step(team)
    _, native = batch_of([(list(range(64)), 0, [0, 1])], outputs=[])
    native.cancel[0] = 1
    before = time.perf_counter()
    assert not step.run(native.struct, n_threads)
    assert time.perf_counter() - before < 0.2

    def cancel_soon() -> None:
        time.sleep(0.05)
        native.cancel[0] = 1

    native.cancel[0] = 0
    thread = threading.Thread(target=cancel_soon)
    thread.start()
    finished = step.run(native.struct, n_threads)
    thread.join()
    assert not finished
    native.cancel[0] = 0
    _, small = batch_of([([0], 0, [0])], outputs=[])
    assert step.run(small.struct, n_threads)


def test_profile_and_counter(library: Library, team: Team, rng: np.random.Generator) -> None:
    case, _ = chain(library, rng, 3)
    step = case.step(team)
    _, native = batch_of([([0], 0, [0])], outputs=[])
    before = library.step_calls
    for _ in range(5):
        step.run(native.struct, 2)
    assert library.step_calls == before + 5
    profile = step.profile()
    assert set(profile) == {"embed", "rms_norm", "linear"}
    assert all(0 < seconds < 5 for seconds in profile.values())
    assert step.profile() == {}


def test_more_threads_than_the_team_are_refused(
    library: Library, team: Team, rng: np.random.Generator
) -> None:
    case, _ = chain(library, rng, 1)
    step = case.step(team)
    _, native = batch_of([([0], 0, [0])], outputs=[])
    with pytest.raises(RequestFailedError, match="5 threads of a team of 4"):
        step.run(native.struct, 5)
    with pytest.raises(EngineError, match="1 to 1024 threads"):
        library.team_create(0)


def test_measured_rates_are_possible_ones(library: Library, level: str, team: Team) -> None:
    memory = library.arena(8 << 20)
    memory.view()[:] = 1
    assert 1e8 < library.read_bandwidth(team, 2, memory) < 1e13
    assert 1e9 < library.int8_peak(team, 1) < 1e13

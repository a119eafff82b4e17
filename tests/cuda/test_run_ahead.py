"""Steps queued ahead give the tokens of steps run one by one: on the host stand-in, and on a GPU with `-m gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import EngineError
from tests.cuda.devices import why_no_gpu
from tests.cuda.executors import load, placement, prompt, synthetic_model
from tests.cuda.host_device import HostDevice, HostGraph, view
from tests.cuda.numpy_kernels import numpy_kernels
from tests.cuda.run_ahead import (
    DRAWN,
    GREEDY,
    SAMPLING,
    CountingAhead,
    OneByOne,
    check_same_events,
    events_of,
    request,
)
from worker.protocol import Generate
from worker.runtime.gpu_executor import GpuExecutor

PLACEMENT = placement(context_length_tokens=256, kv_budget_bytes=16 << 20)


@pytest.fixture(scope="module", params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GpuExecutor]:
    path: Path = synthetic_model(tmp_path_factory.mktemp("models"), "tiny-dense")
    if request.param == "gpu":
        if reason := why_no_gpu():
            pytest.skip(reason)
        loaded = load(path, PLACEMENT)
    else:
        device = HostDevice()
        loaded = load(path, PLACEMENT, make_device=lambda _: device, make_kernels=numpy_kernels)
    yield loaded
    loaded.close()


@pytest.mark.parametrize("name", SAMPLING)
def test_one_stream_is_the_same(executor: GpuExecutor, name: str) -> None:
    n_ahead = check_same_events(executor, [request("a", SAMPLING[name])])
    assert n_ahead == 14  # all but the prefill's and the first decode step's


def several() -> list[Generate]:
    """More than run at a time, of all kinds, which end one after the other."""
    return [
        request(name, sampling, n_prompt=5 + i, max_tokens=30 - 3 * i)
        for i, (name, sampling) in enumerate(SAMPLING.items())
    ]


def test_streams_that_join_and_end_are_the_same(executor: GpuExecutor) -> None:
    assert check_same_events(executor, several()) > 20


def test_streams_that_come_at_any_time_have_their_tokens(executor: GpuExecutor) -> None:
    if not isinstance(executor.models[0].device, HostDevice):
        pytest.skip("on a GPU who else is in a step decides how sums are rounded")
    alone = events_of(OneByOne(executor), [request("a", DRAWN)])["a"]
    requests = [*several(), request("stops", DRAWN, stop_ids=[new_id_of(alone)])]
    one_by_one = events_of(OneByOne(executor), requests, every=7)
    ahead = events_of(CountingAhead(executor), requests, every=7)
    assert one_by_one["stops"][-1][0] == "stop"
    for name, expected in one_by_one.items():
        assert [event[0] for event in ahead[name]] == [event[0] for event in expected]


def new_id_of(events: list[Any]) -> int:
    """A token of the later ones that did not come before."""
    ids = [event[0] for event in events[:-1]]
    return int(next(ids[i] for i in range(4, len(ids)) if ids[i] not in ids[:i]))


def test_a_stream_that_stops_takes_nothing_from_others(executor: GpuExecutor) -> None:
    """The step behind its last one has run: its token is dropped."""
    others = [
        request("goes on", GREEDY, n_prompt=9),
        request("goes on too", SAMPLING["penalised"], n_prompt=11),
        request("is longest", DRAWN, n_prompt=33, max_tokens=24),
    ]
    undisturbed = events_of(OneByOne(executor), [request("stops", DRAWN), *others])
    stop = new_id_of(undisturbed["stops"])
    requests = [request("stops", DRAWN, stop_ids=[stop]), *others]
    assert events_of(OneByOne(executor), requests)["stops"][-1] == ("stop", stop)
    check_same_events(executor, requests)


def test_teacher_tokens_are_queued_too(executor: GpuExecutor) -> None:
    teacher = prompt(12, 1000, seed=8)
    requests = [
        request("a", GREEDY, teacher_ids=teacher),
        request("b", SAMPLING["with log probabilities"], n_prompt=8, teacher_ids=teacher),
    ]
    check_same_events(executor, requests)


def test_streams_cross_pages(executor: GpuExecutor) -> None:
    assert check_same_events(executor, [request("a", DRAWN, n_prompt=20, max_tokens=50)]) == 48


def test_a_launch_that_fails_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not the page that a step would have named to the device: prompts of 20 tokens reach a second one."""
    path, device = synthetic_model(tmp_path, "tiny-dense"), HostDevice()
    executor = load(path, PLACEMENT, make_device=lambda _: device, make_kernels=numpy_kernels)
    requests = [request("a", DRAWN, n_prompt=20, max_tokens=30)]
    expected = events_of(OneByOne(executor), requests)
    events_of(OneByOne(executor), [*requests, request("b", DRAWN, n_prompt=20)])  # has other second pages
    launch, n_launches = HostGraph.launch, 0

    def fail_every_other(graph: HostGraph) -> None:
        nonlocal n_launches
        n_launches += 1
        if n_launches % 2:
            raise EngineError("no launch")
        launch(graph)

    monkeypatch.setattr(HostGraph, "launch", fail_every_other)
    assert events_of(CountingAhead(executor), requests) == expected
    inputs = executor.models[0].decode_inputs
    pages, used = inputs.held_tables[0]
    assert used == 2 and view(inputs.addresses.page_tables, (used,), np.int32).tolist() == pages[:used]
    executor.close()

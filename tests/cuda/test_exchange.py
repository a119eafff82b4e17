"""The two kernels at the ends of a decode step: what they take, what they leave alone, what they return."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cuda.machine import Machine
from worker.cuda import exchange
from worker.cuda.sampler import SAMPLED, SAMPLER
from worker.cuda.values import InputAddresses, Mailbox, Sampling, StepShape

MAX_PAGES = 7
BEFORE = -77


def step_shape(machine: Machine, n_rows: int, rows: np.ndarray, sampling: Sampling) -> StepShape:
    samplers = np.arange(n_rows * SAMPLER.itemsize // 4, dtype=np.int32)
    inputs = InputAddresses(
        token_ids=machine.put(np.full(n_rows, BEFORE, np.int32)),
        positions=machine.put(np.full(n_rows, BEFORE, np.int32)),
        sequence_of_token=0,
        output_rows=0,
        samplers=machine.put(np.full(len(samplers), BEFORE, np.int32)),
        tiles=0,
        page_tables=machine.put(np.full((n_rows, MAX_PAGES), BEFORE, np.int32)),
        max_pages=MAX_PAGES,
    )
    box = Mailbox(machine.put(rows), machine.put(samplers))
    return StepShape(n_rows, n_rows, n_rows, 1024, True, inputs, 0, sampling, box)


@pytest.mark.parametrize("sampling", ["greedy", "full"])
@pytest.mark.parametrize("n_rows", [1, 4, 32])
def test_a_row_changes_what_it_names(machine: Machine, n_rows: int, sampling: Sampling) -> None:
    generator = np.random.default_rng(n_rows)
    rows = generator.integers(0, MAX_PAGES, (n_rows, 4)).astype(np.int32)
    rows[1::3, 0] = -1  # drawn by the step before
    rows[::2, 2] = -1  # no new page
    shape = step_shape(machine, n_rows, rows, sampling)
    exchange.receive(machine.launcher, shape)
    tokens = np.where(rows[:, 0] < 0, BEFORE, rows[:, 0])
    tables = np.full((n_rows, MAX_PAGES), BEFORE, np.int32)
    for row, (_, _, index, page) in enumerate(rows):
        if index >= 0:
            tables[row, index] = page
    assert machine.get(shape.inputs.token_ids).tolist() == tokens.tolist()
    assert machine.get(shape.inputs.positions).tolist() == rows[:, 1].tolist()
    assert machine.get(shape.inputs.page_tables).tolist() == tables.tolist()
    samplers = machine.get(shape.inputs.samplers)
    expected = np.arange(len(samplers)) if sampling == "full" else np.full(len(samplers), BEFORE)
    assert samplers.tolist() == expected.tolist()


@pytest.mark.parametrize("n_outputs", [1, 5, 32])
@pytest.mark.parametrize("sampling", ["greedy", "full"])
def test_answers_are_sent_whole(machine: Machine, n_outputs: int, sampling: Sampling) -> None:
    n_words = n_outputs * (1 if sampling == "greedy" else SAMPLED.itemsize // 4)
    answers = np.arange(n_words + 3, dtype=np.int32)
    target = machine.put(np.full(n_words + 3, BEFORE, np.int32))
    exchange.send(machine.launcher, machine.put(answers), target, sampling, n_outputs, pdl=False)
    assert machine.get(target).tolist() == [*range(n_words), BEFORE, BEFORE, BEFORE]

"""What Python costs per decoded token: scheduler, protocol and JSON, with an executor that answers at once."""

from __future__ import annotations

import os
import time

import pytest

from tests.runtime.workers import GREEDY
from worker.protocol import Generate
from worker.runtime.executor import CancelFlag, SampledToken, StepBatch
from worker.runtime.pipes import EventWriter
from worker.runtime.scheduler import Limits, Scheduler

N_TOKENS = 8000
MOST_S_PER_TOKEN = 100e-6


class Instant:
    """Computes nothing."""

    n_vocab, n_pages, max_tokens, max_outputs = 1000, 1024, 512, 16

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        return [SampledToken(7)] * batch.n_outputs

    def copy_page(self, source: int, destination: int) -> None:
        pass

    def memory_bytes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def seconds_per_token(n_sequences: int) -> float:
    descriptor = os.open(os.devnull, os.O_WRONLY)
    writer = EventWriter(descriptor)
    scheduler = Scheduler(Instant(), Limits(N_TOKENS + 10, n_sequences), writer.emit)
    for index in range(n_sequences):
        scheduler.submit(Generate(f"request-{index}", [1], N_TOKENS // n_sequences, GREEDY))
    started_s = time.perf_counter()
    while scheduler.has_work():
        scheduler.step()
        writer.flush()
    elapsed_s = time.perf_counter() - started_s
    os.close(descriptor)
    return elapsed_s / N_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("n_sequences", [1, 8])
def test_python_time_per_token(n_sequences: int) -> None:
    best_s = min(seconds_per_token(n_sequences) for _ in range(3))
    print(f"{n_sequences} sequences: {best_s * 1e6:.1f} us per token")
    assert best_s < MOST_S_PER_TOKEN

"""What a captured decode step takes from pinned memory of the host and leaves there: two small kernels."""

from __future__ import annotations

import ctypes

from worker.cuda.driver import Launcher
from worker.cuda.sampler import SAMPLED, SAMPLER
from worker.cuda.values import Sampling, StepShape

_SOURCE = "exchange.cu"
_THREADS = 256

c_int = ctypes.c_int32


def receive(launcher: Launcher, shape: StepShape) -> None:
    """Token ids, positions, new pages and, where tokens are drawn, samplers of `shape.mailbox` to `shape.inputs`."""
    inputs, box = shape.inputs, shape.mailbox
    n_sampler_words = SAMPLER.itemsize // 4 * shape.n_outputs if shape.sampling == "full" else 0
    args = (
        box.rows,
        c_int(shape.n_sequences),
        inputs.token_ids,
        inputs.positions,
        inputs.page_tables,
        c_int(inputs.max_pages),
        box.samplers,
        inputs.samplers,
        c_int(n_sampler_words),
    )
    # not early: what is read from here on may have been written by the host just before
    launcher.launch(launcher.function(_SOURCE, "receive_inputs"), 1, _THREADS, 0, args, False)


def send(
    launcher: Launcher, answers: int, target: int, sampling: Sampling, n_outputs: int, *, pdl: bool
) -> None:
    """The `tokens` of greedy sampling, or else the `SAMPLED` records, to pinned memory."""
    n_words = n_outputs * (1 if sampling == "greedy" else SAMPLED.itemsize // 4)
    function = launcher.function(_SOURCE, "send_answers")
    launcher.launch(function, 1, _THREADS, 0, (answers, target, c_int(n_words)), pdl)

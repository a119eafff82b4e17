"""Choosing tokens on the GPU: greedy, or the sampler of worker/cpu with the same definitions, order of filters and
random numbers. Logits never leave the device; what does is one `SAMPLED` record per row.
"""

from __future__ import annotations

import ctypes

import numpy as np

from worker.cuda.driver import Launcher

MAX_TOP = 20
"""Most alternatives with log probabilities per token."""

SAMPLER = np.dtype(
    [
        ("seed", np.uint64),
        ("draw", np.uint64),  # number of this token in its sequence
        ("temperature", np.float32),  # <= 0: greedy
        ("top_k", np.int32),  # 0 = off
        ("top_p", np.float32),  # 1 = off
        ("min_p", np.float32),  # 0 = off
        ("repeat_penalty", np.float32),  # 1 = off
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("first_history", np.int32),  # index into `history`
        ("n_history", np.int32),
        ("first_bias", np.int32),  # index into `bias_ids` and `bias_values`
        ("n_bias", np.int32),
        ("n_top", np.int32),  # -1: no log probabilities, else 0..MAX_TOP
        ("target", np.int32),  # -1: draw; else report on this token and draw nothing
        ("reserved", np.int32),
    ]
)
"""Parameters of one row, as the kernel reads them."""

SAMPLED = np.dtype(
    [
        ("token", np.int32),
        ("status", np.int32),  # one of STATUS_WORDS
        ("logprob", np.float32),  # NaN when not asked for
        ("n_top", np.int32),
        ("top_ids", np.int32, MAX_TOP),
        ("top_logprobs", np.float32, MAX_TOP),
    ]
)
"""Answer for one row. `token` is 0 when `status` is not."""

STATUS_WORDS = (
    "",
    "the model's logits hold NaN",
    "the model's logits hold no finite largest value",
    "penalties and bias leave no token that can be chosen",
)

_SOURCE = "sampler.cu"
_GREEDY_CHUNK = 8192  # logits of one block

c_int = ctypes.c_int32


def workspace_bytes(max_rows: int, n_vocab: int) -> int:
    """Scratch of both functions; it has to be zeroed once, before the first call."""
    return max_rows * (16 + 8 * n_vocab)


def greedy(
    launcher: Launcher,
    logits: int,
    n_rows: int,
    n_vocab: int,
    tokens: int,
    workspace: int,
    *,
    pdl: bool = False,
) -> None:
    """tokens i32 [n_rows]: the lowest index of the largest of logits f32 [n_rows, n_vocab]; -1 where the row holds NaN
    or has no finite largest value.
    """
    function = launcher.function(_SOURCE, "greedy")
    grid = (-(-n_vocab // _GREEDY_CHUNK), n_rows)
    launcher.launch(function, grid, 1024, 0, (logits, c_int(n_vocab), tokens, workspace), pdl)


def sample(
    launcher: Launcher,
    logits: int,
    n_rows: int,
    n_vocab: int,
    samplers: int,
    history: int,
    bias_ids: int,
    bias_values: int,
    sampled: int,
    tokens: int,
    workspace: int,
    *,
    pdl: bool = False,
) -> None:
    """sampled: SAMPLED [n_rows] from logits f32 [n_rows, n_vocab] by samplers: SAMPLER [n_rows].

    `history` i32, `bias_ids` i32 and `bias_values` f32 are pools that the samplers index; they may lie in pinned memory
    of the host. `tokens` (i32 [n_rows], or 0) gets the chosen ids as well, for the next step. An id of -1 in a row's
    history is the one that is there now.
    """
    function = launcher.function(_SOURCE, "sample")
    args = (logits, c_int(n_vocab), samplers, history, bias_ids, bias_values, sampled, tokens, workspace)
    launcher.launch(function, n_rows, 1024, 0, args, pdl)

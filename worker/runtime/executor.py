"""What the scheduler asks of the model: the values of one step and the `Executor` that runs it.

A step is one forward pass over tokens of several sequences. The scheduler builds it as plain values, which are
msgspec structs because making those is cheap; the executor (`worker/runtime/step.py`, or a fake one in tests) turns
them into arrays and makes one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from configs.progress import ProgressCallback
from plans.placement import Placement
from worker.protocol import SamplingParams

DRAWN = -1
"""Stands for a token id that nobody knows yet: the one that the step before draws for the part of the same index."""

MAX_TOP = 20
"""Most alternatives with log probabilities per token (PW_MAX_TOP of the kernels)."""


class StepFailed(Exception):
    """The step could not be run; the KV of its tokens is undefined, all else is as before."""


class StepCancelled(StepFailed):
    """The step ended early because the cancel flag was set; the KV of its tokens is undefined."""


class CancelFlag:
    """An int32 that another thread may set while a step runs; the kernels poll it at `address`."""

    __slots__ = ("_word", "address")

    def __init__(self) -> None:
        self._word = ctypes.c_int32(0)
        self.address: int = ctypes.addressof(self._word)

    def set(self) -> None:
        self._word.value = 1

    def clear(self) -> None:
        self._word.value = 0

    def is_set(self) -> bool:
        return self._word.value != 0


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """How tokens of one request are chosen; made once per request, so executors may cache by identity.

    `bias_ids` and `bias_values` have equal length. `top`: -1 no log probabilities at all, n >= 0: the log
    probability of the chosen token and the n best. `seed` is in [0, 2^64).
    """

    temperature: float  # <= 0: greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    min_p: float  # 0 = off
    repeat_penalty: float  # 1 = off
    presence_penalty: float
    frequency_penalty: float
    seed: int
    bias_ids: tuple[int, ...] = ()
    bias_values: tuple[float, ...] = ()
    top: int = -1

    @property
    def penalises(self) -> bool:
        """True when `Output.history` matters."""
        return self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @staticmethod
    def of(params: SamplingParams, seed: int) -> Sampler:
        return Sampler(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            repeat_penalty=params.repeat_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=seed % 2**64,
            bias_ids=tuple(params.logit_bias),
            bias_values=tuple(params.logit_bias.values()),
            top=-1 if params.logprobs is None else params.logprobs,
        )


class Output(msgspec.Struct, frozen=True, eq=False):
    """A row of a sequence's part whose logits are wanted: exactly one of `sampler` and `target` is given.

    With a `sampler` a token is drawn (`history` and `draw` are those of this token). With a `target` nothing
    is drawn: the answer is the log probability of that id and the `top` best.
    """

    row: int  # 0 .. len(token_ids) - 1 of its SequencePart
    sampler: Sampler | None = None
    history: Sequence[int] = ()  # the tokens that penalties look at; empty when none is in use
    draw: int = 0  # number of this token in its request; its random number depends on (seed, draw) alone
    target: int | None = None
    top: int = 0  # with a target: how many of the best, 0..MAX_TOP


class SequencePart(msgspec.Struct, frozen=True, eq=False):
    """The next tokens of one sequence: token `i` stands at position `first_position + i`.

    `page_ids[p // PAGE_TOKENS]` holds position p; it covers all positions up to the last of this part and may be
    longer. From step to step the same list only grows: where entries change, another list is given. Pages that this
    part writes to belong to this sequence alone.
    """

    token_ids: Sequence[int]
    first_position: int
    page_ids: Sequence[int]
    outputs: tuple[Output, ...] = ()  # ascending rows


class StepBatch(msgspec.Struct, frozen=True, eq=False):
    """At most `Executor.max_tokens` tokens and `Executor.max_outputs` outputs; at least one part.

    `is_decode`: every part has one token and one output, so the decode team's size is right for it.
    `tokens_are_drawn`: every part has the one token DRAWN, and a penalised output's history ends with DRAWN.
    """

    parts: tuple[SequencePart, ...]
    n_tokens: int
    n_outputs: int
    tokens_are_drawn: bool = False

    @property
    def is_decode(self) -> bool:
        return self.n_tokens == len(self.parts)


class SampledToken(msgspec.Struct, frozen=True):
    """Answer to one `Output`: the drawn token, or the target. `logprob` is None when none was asked for."""

    id: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []  # best first


class Executor(Protocol):
    """Runs steps of one loaded model. Used from one thread."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_pages(self) -> int:
        """Pages of the KV cache; page ids are 0 .. n_pages - 1."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens in one step."""
        ...

    @property
    def max_outputs(self) -> int:
        """Most outputs in one step; at least the placement's `max_sequences`."""
        ...

    def run(self, batch: StepBatch, cancel: CancelFlag) -> list[SampledToken]:
        """One answer per output, in order of parts and rows. Blocks and releases the GIL.

        Raises StepCancelled soon after the flag is set (it is not cleared here), StepFailed when the step
        went wrong.
        """
        ...

    def copy_page(self, source: int, destination: int) -> None:
        """Copy a KV page, all layers."""
        ...

    def memory_bytes(self) -> dict[str, int]:
        """Bytes held, by purpose: "weights", "kv", "workspace"."""
        ...

    def close(self) -> None:
        """Free everything; the executor is not used afterwards."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """An executor that can queue a decode step behind the one that it is running.

    Steps run in the order in which they were submitted, and so do `run` and `copy_page` between them: pages may be
    given to another sequence while a step that writes to them is still queued.
    """

    def submit(self, batch: StepBatch) -> object | None:
        """Queue a step, with at most one other whose answers were not collected yet; a ticket for its answers. None,
        and nothing queued, when this batch has to go through `run`. Raises StepFailed as `run` does.

        With `tokens_are_drawn` the step submitted before had the same sequences in the same order.
        """
        ...

    def collect(self, ticket: object) -> list[SampledToken]:
        """Wait for the answers of a step, the oldest one first; as `Executor.run` gives them."""
        ...


ExecutorFactory = Callable[[str, Placement, ProgressCallback], Executor]
"""Loads a model file under a placement. Raises errors of `configs.errors`, OSError or MemoryError."""

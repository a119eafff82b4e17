"""A step between its beginning and the delivery of its answers: who takes part, and what it computes."""

from __future__ import annotations

import msgspec

from worker.runtime.executor import DRAWN, SequencePart, StepBatch
from worker.runtime.requests import Request

Seats = list[tuple[Request, int]]  # who takes part in a step, and with how many tokens


class Flight(msgspec.Struct, frozen=True, eq=False):
    """A step that began at `began_s`. `ticket` None: it runs only when its answers are asked for."""

    seats: Seats
    batch: StepBatch
    began_s: float
    ticket: object | None

    @property
    def n_prompt_tokens(self) -> int:
        """What it computes of prompts."""
        if self.batch.is_decode:
            return 0
        return self.batch.n_tokens - sum(1 for _, n_tokens in self.seats if n_tokens == 1)

    def living(self) -> Seats:
        """Those who still want their part; others ended while it was queued."""
        return [seat for seat in self.seats if seat[0].pages is not None]


def batch_of(seats: Seats) -> StepBatch:
    """The next tokens of everyone who has a seat."""
    parts: list[SequencePart] = []
    n_tokens = n_outputs = 0
    for request, count in seats:
        assert request.pages is not None
        first = request.n_computed
        outputs = request.outputs(first, first + count)
        tokens = request.tokens[first : first + count]
        parts.append(SequencePart(tokens, first, request.pages.page_ids, outputs))
        n_tokens += count
        n_outputs += len(outputs)
    return StepBatch(tuple(parts), n_tokens, n_outputs)


def batch_behind(seats: Seats) -> StepBatch | None:
    """The step behind a running one in which everyone decodes, before that one's tokens are known.

    None when somebody's last token is being computed, or when some tokens are known and others are not.
    """
    parts: list[SequencePart] = []
    n_drawn = 0
    for request, _ in seats:
        ahead = request.ahead()
        if ahead is None or request.pages is None:
            return None
        token_id, output = ahead
        n_drawn += token_id == DRAWN
        parts.append(SequencePart((token_id,), request.n_known, request.pages.page_ids, (output,)))
    if 0 < n_drawn < len(parts):
        return None
    return StepBatch(tuple(parts), len(parts), len(parts), n_drawn > 0)

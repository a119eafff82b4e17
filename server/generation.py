"""From token events to text: whole characters only, cut before a stop string, each token with its logprob.

Knows nothing of any API; `server/frames.py` turns pieces into chunks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from configs.errors import RequestFailedError
from server.job import Job
from server.replies import FinishReason
from server.supervise import EngineRun
from server.text import Text
from worker.protocol import Done, Timings, TokenEvent


class ScoredToken(msgspec.Struct, frozen=True):
    """A token with its logprob; `start` is the character of the completion at which its text begins."""

    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    start: int


class Piece(msgspec.Struct, frozen=True):
    text: str
    scored: list[ScoredToken]


class Outcome(msgspec.Struct, frozen=True):
    """How a completion ended. `timings` is None where a stop string cut it and the engine could not tell."""

    reason: FinishReason
    completion_tokens: int
    timings: Timings | None


class Assembler:
    """Text and logprobs of one completion, in step with each other."""

    def __init__(self, text: Text, job: Job) -> None:
        self._decoder = text.new_decoder()
        self._stops = text.new_stop_matcher(job.stop_strings) if job.stop_strings else None
        self._keeps_logprobs = job.generate.sampling.logprobs is not None
        self._held: list[ScoredToken] = []
        self._decoded_chars = 0
        self._shown_chars = 0
        self.stopped = False  # a stop string was hit

    def push(self, event: TokenEvent) -> Piece:
        """What may be shown after this token; often empty while something is held back."""
        start = self._decoded_chars
        text = self._decoder.push(event.id)
        if self._keeps_logprobs:
            self._held.append(ScoredToken(event.id, event.logprob, event.top, start))
        return self._show(text)

    def finish(self) -> Piece:
        """The rest. After a stop string there is none."""
        if self.stopped:
            return Piece("", [])
        shown = self._show(self._decoder.flush())
        if self._stops is None or self.stopped:
            return Piece(shown.text, shown.scored + self._held)
        text = shown.text + self._stops.flush()
        return Piece(text, shown.scored + self._held)

    def _show(self, text: str) -> Piece:
        self._decoded_chars += len(text)
        if self._stops is not None and text:
            text, hit = self._stops.push(text)
            self.stopped = hit is not None
        self._shown_chars += len(text)
        if not self._held or not text:
            return Piece(text, [])
        n_covered = sum(token.start < self._shown_chars for token in self._held)
        covered, self._held = self._held[:n_covered], self._held[n_covered:]
        return Piece(text, covered)


async def pieces(
    run: EngineRun, text: Text, job: Job, silence_s: float
) -> AsyncIterator[Piece | Outcome | None]:
    """Pieces that hold something, then one Outcome; None whenever the engine was silent for `silence_s`."""
    assembler = Assembler(text, job)
    end_ids = frozenset(job.generate.stop_ids)
    n_tokens = 0
    async for event in run.events(silence_s):
        if event is None:
            yield None
        elif isinstance(event, Done):
            yield assembler.finish()
            yield _outcome(event, n_tokens)
        elif event.id not in end_ids:
            n_tokens += 1
            piece = assembler.push(event)
            if piece.text:
                yield piece
            if assembler.stopped:
                yield Outcome("stop", n_tokens, await run.stop())
                return


def _outcome(done: Done, n_tokens: int) -> Outcome:
    if done.reason not in ("stop", "length"):
        raise RequestFailedError(f"the engine ended the request early: {done.reason}")
    reason: FinishReason = "length" if done.reason == "length" else "stop"
    return Outcome(reason, n_tokens, done.timings)

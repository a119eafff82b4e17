"""Pieces and outcomes in the shapes of OpenAI's two APIs, as chunks of a stream or as one whole answer."""

from __future__ import annotations

from typing import Protocol

from server.generation import Outcome, Piece, ScoredToken
from server.job import Job
from server.replies import (
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    CompletionChoice,
    CompletionLogprobs,
    PromptDetails,
    Reply,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from server.text import Tokenizer

Choices = list[ChatChoice] | list[ChatChunkChoice] | list[CompletionChoice]


class Frames(Protocol):
    """One API's way to tell a completion."""

    def first(self) -> Reply | None:
        """What a stream opens with."""
        ...

    def piece(self, piece: Piece) -> Reply: ...

    def finish(self, outcome: Outcome) -> Reply: ...

    def usage(self, outcome: Outcome) -> Reply: ...

    def whole(self, piece: Piece, outcome: Outcome) -> Reply: ...


class _Frames:
    """What both APIs share: the envelope and the usage chunk."""

    chunk_object: str
    whole_object: str

    def __init__(self, job: Job, tokenizer: Tokenizer, fingerprint: str) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint

    def usage(self, outcome: Outcome) -> Reply:
        return self._reply(self.chunk_object, [], outcome, with_usage=True)

    def _reply(
        self, kind: str, choices: Choices, outcome: Outcome | None = None, with_usage: bool = False
    ) -> Reply:
        return Reply(
            id=self._job.id,
            object=kind,
            created=self._job.created_unix_s,
            model=self._job.model_name,
            system_fingerprint=self._fingerprint,
            choices=choices,
            usage=usage_of(self._job, outcome) if outcome and with_usage else None,
            timings=outcome.timings if outcome else None,
        )

    def _token(self, id: int) -> tuple[str, list[int]]:
        raw = self._tokenizer.piece_bytes(id)
        return raw.decode("utf-8", "replace"), list(raw)


class ChatFrames(_Frames):
    chunk_object = "chat.completion.chunk"
    whole_object = "chat.completion"

    def first(self) -> Reply | None:
        return self._chunk(ChatChunkChoice(ChatDelta(role="assistant", content="")))

    def piece(self, piece: Piece) -> Reply:
        return self._chunk(ChatChunkChoice(ChatDelta(content=piece.text), None, self._logprobs(piece.scored)))

    def finish(self, outcome: Outcome) -> Reply:
        return self._reply(self.chunk_object, [ChatChunkChoice(ChatDelta(), outcome.reason)], outcome)

    def whole(self, piece: Piece, outcome: Outcome) -> Reply:
        choice = ChatChoice(ChatMessage(piece.text), outcome.reason, self._logprobs(piece.scored))
        return self._reply(self.whole_object, [choice], outcome, with_usage=True)

    def _chunk(self, choice: ChatChunkChoice) -> Reply:
        return self._reply(self.chunk_object, [choice])

    def _logprobs(self, scored: list[ScoredToken]) -> ChatLogprobs | None:
        if self._job.generate.sampling.logprobs is None:
            return None
        return ChatLogprobs([self._token_logprob(token) for token in scored])

    def _token_logprob(self, token: ScoredToken) -> TokenLogprob:
        top = [TopLogprob(*_with_logprob(self._token(id), logprob)) for id, logprob in token.top]
        text, raw = self._token(token.id)
        return TokenLogprob(text, token.logprob, raw, top)


class CompletionFrames(_Frames):
    chunk_object = "text_completion"
    whole_object = "text_completion"

    def first(self) -> Reply | None:
        return None

    def piece(self, piece: Piece) -> Reply:
        choice = CompletionChoice(piece.text, None, self._logprobs(piece.scored))
        return self._reply(self.chunk_object, [choice])

    def finish(self, outcome: Outcome) -> Reply:
        return self._reply(self.chunk_object, [CompletionChoice("", outcome.reason)], outcome)

    def whole(self, piece: Piece, outcome: Outcome) -> Reply:
        choice = CompletionChoice(piece.text, outcome.reason, self._logprobs(piece.scored))
        return self._reply(self.whole_object, [choice], outcome, with_usage=True)

    def _logprobs(self, scored: list[ScoredToken]) -> CompletionLogprobs | None:
        if self._job.generate.sampling.logprobs is None:
            return None
        named = [self._token(token.id) for token in scored]
        return CompletionLogprobs(
            tokens=[text for text, _ in named],
            token_logprobs=[token.logprob for token in scored],
            top_logprobs=[{self._token(id)[0]: value for id, value in token.top} for token in scored],
            text_offset=[token.start for token in scored],
            bytes=[raw for _, raw in named],
        )


def _with_logprob(named: tuple[str, list[int]], logprob: float) -> tuple[str, float, list[int]]:
    return named[0], logprob, named[1]


def usage_of(job: Job, outcome: Outcome) -> Usage:
    n_prompt = len(job.generate.prompt_ids)
    return Usage(
        prompt_tokens=n_prompt,
        completion_tokens=outcome.completion_tokens,
        total_tokens=n_prompt + outcome.completion_tokens,
        prompt_tokens_details=PromptDetails(outcome.timings.cached_tokens if outcome.timings else None),
    )

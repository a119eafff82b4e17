"""How many prompt tokens fit into a step: running estimates that turn a time budget into a chunk size."""

from __future__ import annotations

LEAST_CHUNK_TOKENS = 8
FIRST_CHUNK_TOKENS = 32  # before anything was measured
NO_BOUND = 1 << 30
WEIGHT_OF_FASTER, WEIGHT_OF_SLOWER = 0.25, 0.7  # of the newest step; the budget is a promise to other streams


class Pace:
    """Estimates of a decode step's time and of the time that each prompt token adds to a step.

    A step costs about `decode_s + prompt tokens * token_s`: the weights are read once, whoever shares the step.
    Chunks of less than `least_chunk_tokens` are not asked for: where weights are brought for a chunk, a small one
    may be computed elsewhere and tells nothing of large ones.
    """

    __slots__ = ("decode_s", "least_chunk_tokens", "token_s")

    def __init__(self, least_chunk_tokens: int = LEAST_CHUNK_TOKENS) -> None:
        self.least_chunk_tokens = least_chunk_tokens
        self.decode_s: float | None = None
        self.token_s: float | None = None

    def note(self, step_s: float, prompt_tokens: int) -> None:
        """Learn from a step that took step_s and held prompt_tokens tokens of prompts."""
        if prompt_tokens == 0:
            self.decode_s = _blend(self.decode_s, step_s)
        elif prompt_tokens >= LEAST_CHUNK_TOKENS:
            # never less than a fifth of the step, or one slow decode estimate would promise an endless chunk
            added_s = max(step_s - (self.decode_s or 0.0), step_s / 5)
            self.token_s = _blend(self.token_s, added_s / prompt_tokens)

    def chunk_tokens(self, budget_s: float, alone: bool = False) -> int:
        """Prompt tokens that add about budget_s to a step; at least a few, so that prompts always advance.

        Before anything was measured: a few when others decode, no bound when `alone`.
        """
        if self.token_s is None:
            return NO_BOUND if alone else max(FIRST_CHUNK_TOKENS, self.least_chunk_tokens)
        if self.token_s <= 0.0:
            return NO_BOUND
        return max(self.least_chunk_tokens, int(budget_s / self.token_s))

    @property
    def prefill_tokens_per_s(self) -> float | None:
        return 1.0 / self.token_s if self.token_s else None


def share_budget(missing_tokens: list[int], budget_tokens: int) -> list[int]:
    """How many tokens each prompt gets of the budget; prompts come oldest first.

    The oldest gets at least half, so that it cannot starve. The rest goes to those who need least, so that
    a short question does not wait for a long document; what they leave goes back to the oldest.
    """
    if not missing_tokens:
        return []
    shares = [0] * len(missing_tokens)
    others = sorted(range(1, len(missing_tokens)), key=missing_tokens.__getitem__)
    shares[0] = min(missing_tokens[0], budget_tokens - budget_tokens // 2)
    left = budget_tokens - shares[0]
    for index in [*others, 0]:
        more = min(missing_tokens[index] - shares[index], left)
        shares[index] += more
        left -= more
    return shares


def _blend(old: float | None, new: float) -> float:
    if old is None:
        return new
    return old + (WEIGHT_OF_SLOWER if new > old else WEIGHT_OF_FASTER) * (new - old)

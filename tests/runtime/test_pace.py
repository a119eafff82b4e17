"""Chunk sizes: bounded in time, never zero, shared without starving anyone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from worker.runtime.pace import FIRST_CHUNK_TOKENS, LEAST_CHUNK_TOKENS, Pace, share_budget


def test_before_any_measurement() -> None:
    pace = Pace()
    assert pace.chunk_tokens(0.1) == FIRST_CHUNK_TOKENS
    assert pace.chunk_tokens(0.1, alone=True) >= 1_000_000
    assert pace.prefill_tokens_per_s is None


def test_chunk_follows_the_measured_rate() -> None:
    pace = Pace()
    for _ in range(30):
        pace.note(0.02, 0)
        pace.note(0.02 + 100 * 0.001, 100)
    assert 140 <= pace.chunk_tokens(0.15) <= 160


def test_a_slow_model_still_advances() -> None:
    pace = Pace()
    pace.note(100.0, 10)
    assert pace.chunk_tokens(0.15) == LEAST_CHUNK_TOKENS


def test_chunks_do_not_stay_below_what_large_ones_begin_with() -> None:
    """A first chunk of 64 tokens costs what 500 do, so the next ones grow until the budget is used."""
    pace = Pace(64)
    sizes = [pace.chunk_tokens(0.15)]
    for _ in range(40):
        pace.note(0.02, 0)
        pace.note(0.02 + 0.07 + sizes[-1] * 0.0001, sizes[-1])
        sizes.append(pace.chunk_tokens(0.15))
    assert sizes[0] == 64 and min(sizes) >= 64 and sizes[-1] > 500
    pace.note(100.0, 64)
    assert pace.chunk_tokens(0.15) == 64


def test_an_instant_model_has_no_bound() -> None:
    pace = Pace()
    pace.note(0.0, 100)
    assert pace.chunk_tokens(0.15) >= 1_000_000


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=10), st.integers(1, 4096))
def test_shares_use_the_budget_and_feed_the_oldest(missing: list[int], budget: int) -> None:
    shares = share_budget(missing, budget)
    assert sum(shares) == min(budget, sum(missing))
    assert all(0 <= share <= need for share, need in zip(shares, missing, strict=True))
    assert shares[0] >= min(missing[0], budget - budget // 2)


def test_a_short_prompt_passes_a_long_one() -> None:
    assert share_budget([4000, 20, 300], 512) == [256, 20, 236]
    assert share_budget([4000, 20], 512) == [492, 20]
    assert share_budget([], 512) == []

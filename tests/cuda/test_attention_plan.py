"""How decode attention is cut, and the order of rows in the cache: arithmetic that needs no card."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import pytest

from worker.cuda import attention
from worker.cuda.attention_values import HEAD_DIMS, Heads
from worker.cuda.driver import Launcher
from worker.cuda.kv_cache import unit_order

KIB = 1024


@dataclass
class Card:
    """What a plan asks of a launcher."""

    capability: int
    sm_count: int
    shared_bytes: int


CARDS = [Card(75, 40, 64 * KIB), Card(86, 82, 99 * KIB), Card(90, 132, 227 * KIB), Card(120, 170, 99 * KIB)]
SHAPES = [Heads(32, 4, 128), Heads(32, 8, 128), Heads(32, 32, 64), Heads(20, 1, 256), Heads(14, 2, 64)]


@pytest.mark.parametrize("card", CARDS, ids=lambda card: str(card.capability))
@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_plans_fit_the_card_and_the_workspace(card: Card, heads: Heads) -> None:
    launcher = cast(Launcher, card)
    workspace_bytes = attention.decode_workspace_bytes(launcher, heads, 32)
    for n_rows in (1, 2, 3, 8, 17, 32):
        for context in (1, 64, 1024, 5000, 40_000, 1_000_000):
            plan = attention.plan_decode(launcher, heads, n_rows, context)
            assert plan.n_splits % plan.cluster == 0
            assert plan.cluster == 1 or (card.capability >= 90 and plan.cluster in (2, 4, 8))
            assert plan.heads_per_block <= 16
            assert all(attention.decode_fits(launcher, heads, plan, is_q8=q8) for q8 in (False, True))
            needed = attention.COUNTER_BYTES + attention.partial_bytes(heads, plan, n_rows)
            assert needed <= workspace_bytes


def test_long_contexts_use_the_whole_card() -> None:
    """At least three blocks of four multiprocessors' worth, wherever there are so many positions to share."""
    card = Card(90, 132, 227 * KIB)
    for n_rows in (1, 2, 4, 8, 16):
        plan = attention.plan_decode(cast(Launcher, card), Heads(32, 4, 128), n_rows, 32_768)
        assert plan.n_splits * 4 * n_rows >= 96


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_eight_tokens_reach_different_banks(head_dim: int) -> None:
    """The 16-byte units that a tensor core's load takes of eight neighbouring tokens cover all 128 bytes of banks."""
    order = unit_order(head_dim)
    rows = np.arange(32)[:, None] * 2 * head_dim
    banks = (rows + 16 * order) % 128 // 16
    for first in range(0, 32, 8):
        assert (np.sort(banks[first : first + 8], axis=0) == np.arange(8)[:, None]).all()
    units = np.arange(head_dim // 8)
    assert (np.sort(order, axis=1) == units).all()
    assert (np.take_along_axis(order, order, axis=1) == units).all()

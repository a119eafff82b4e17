"""The page pool: pages are never lost, never shared while writable, never more than there are; reuse is exact."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plans.placement import PAGE_TOKENS
from worker.runtime.kv_pages import PagePool, SequencePages, pages_for


class Memory:
    """What the pages would hold: each slot remembers the whole prefix that it was computed for."""

    def __init__(self, n_pages: int) -> None:
        self.slots: list[list[tuple[int, ...] | None]] = [[None] * PAGE_TOKENS for _ in range(n_pages)]

    def copy_page(self, source: int, destination: int) -> None:
        self.slots[destination] = list(self.slots[source])

    def write(self, pages: SequencePages, tokens: list[int], first: int, end: int) -> None:
        for position in range(first, end):
            page = pages.page_ids[position // PAGE_TOKENS]
            self.slots[page][position % PAGE_TOKENS] = tuple(tokens[: position + 1])

    def holds(self, pages: SequencePages, tokens: list[int], n_tokens: int) -> bool:
        return all(
            self.slots[pages.page_ids[p // PAGE_TOKENS]][p % PAGE_TOKENS] == tuple(tokens[: p + 1])
            for p in range(n_tokens)
        )


def tree_pages(pool: PagePool) -> list[int]:
    found: list[int] = []
    waiting = list(pool._root.children.values())
    while waiting:
        node = waiting.pop()
        found.append(node.page_id)
        waiting.extend(node.children.values())
    return found


def check_pool(pool: PagePool, running: list[SequencePages]) -> None:
    """Each page is exactly one of: free, in the tree, owned by one sequence."""
    own = [page for pages in running for page in pages.page_ids[len(pages._path) :]]
    everything = sorted(pool._free + tree_pages(pool) + own)
    assert everything == list(range(pool.n_pages))
    for pages in running:
        for index, node in enumerate(pages._path):
            assert pages.page_ids[index] == node.page_id and node.holders > 0
    assert pool.available_pages + pool.held_pages == pool.n_pages


def prompt(seed: int, n_tokens: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(50) for _ in range(n_tokens)]


def run_to_end(pool: PagePool, memory: Memory, tokens: list[int], reuse: bool = True) -> int:
    """Open, compute everything, close; returns how many tokens were reused."""
    pages = pool.open(tokens, len(tokens), reuse=reuse)
    assert pages is not None
    reused = pages.reused_tokens
    assert memory.holds(pages, tokens, reused)
    memory.write(pages, tokens, reused, len(tokens))
    pool.close(pages, tokens, len(tokens), keep=reuse)
    return reused


@pytest.fixture
def memory() -> Memory:
    return Memory(16)


@pytest.fixture
def pool(memory: Memory) -> PagePool:
    return PagePool(16, memory.copy_page)


def test_second_turn_reuses_the_whole_first(pool: PagePool, memory: Memory) -> None:
    first = prompt(1, 75)
    assert run_to_end(pool, memory, first) == 0
    assert run_to_end(pool, memory, first + prompt(2, 40)) == 75


def test_same_prompt_leaves_one_token_to_compute(pool: PagePool, memory: Memory) -> None:
    for n_tokens in (1, 2, 31, 32, 33, 64, 65):
        tokens = prompt(n_tokens, n_tokens)
        run_to_end(pool, memory, tokens)
        assert run_to_end(pool, memory, tokens) == n_tokens - 1


def test_branch_inside_a_page_is_copied(pool: PagePool, memory: Memory) -> None:
    tokens = prompt(3, 64)
    run_to_end(pool, memory, tokens)
    branch = [*tokens[:40], 99, 98, 97]
    assert run_to_end(pool, memory, branch) == 40
    assert run_to_end(pool, memory, [*tokens, 1]) == 64  # the original was not harmed


def test_no_reuse_leaves_no_trace(pool: PagePool, memory: Memory) -> None:
    tokens = prompt(4, 70)
    run_to_end(pool, memory, tokens, reuse=False)
    assert pool.cached_pages == 0
    assert run_to_end(pool, memory, tokens) == 0


def test_running_sequences_share_full_pages(pool: PagePool, memory: Memory) -> None:
    tokens = prompt(5, 70)
    left = pool.open(tokens, 70)
    right = pool.open(tokens, 70)
    assert left is not None and right is not None
    memory.write(left, tokens, 0, 70)
    memory.write(right, tokens, 0, 70)
    pool.share(left, tokens, 70)
    pool.share(right, tokens, 70)
    assert left.page_ids[:2] == right.page_ids[:2] and left.page_ids[2] != right.page_ids[2]
    assert pool.held_pages == 4
    check_pool(pool, [left, right])


def test_too_large_is_refused_and_changes_nothing(pool: PagePool, memory: Memory) -> None:
    tokens = prompt(6, 200)
    run_to_end(pool, memory, tokens)
    before = (pool.available_pages, pool.cached_pages)
    assert pool.open(tokens, 17 * PAGE_TOKENS) is None
    assert pool.open(tokens, 15 * PAGE_TOKENS, spare_pages=2) is None
    assert (pool.available_pages, pool.cached_pages) == before
    pages = pool.open(tokens, 16 * PAGE_TOKENS)
    assert pages is not None and not pool.reserve(pages, 17 * PAGE_TOKENS)
    check_pool(pool, [pages])


def test_oldest_conversation_is_evicted_first(pool: PagePool, memory: Memory) -> None:
    conversations = [prompt(seed, 4 * PAGE_TOKENS) for seed in (10, 11, 12)]
    for tokens in conversations:
        run_to_end(pool, memory, tokens)
    run_to_end(pool, memory, [*conversations[0], 1])  # used again: now the second is oldest
    run_to_end(pool, memory, prompt(13, 6 * PAGE_TOKENS))
    assert run_to_end(pool, memory, [*conversations[0], 2]) >= 4 * PAGE_TOKENS
    assert run_to_end(pool, memory, [*conversations[1], 2]) < 4 * PAGE_TOKENS


def test_clear_forgets_idle_prefixes_only(pool: PagePool, memory: Memory) -> None:
    run_to_end(pool, memory, prompt(20, 100))
    tokens = prompt(21, 64)
    pages = pool.open(tokens, 64)
    assert pages is not None
    memory.write(pages, tokens, 0, 64)
    pool.share(pages, tokens, 64)
    pool.clear()
    assert pool.cached_pages == 0 and pool.held_pages == 2
    check_pool(pool, [pages])


def test_outdated_heap_entries_do_not_pile_up(pool: PagePool, memory: Memory) -> None:
    tokens = prompt(30, 40)
    for _ in range(1000):
        run_to_end(pool, memory, tokens)
    assert len(pool._idle_leaves) <= 4 * pool.n_pages + 1


action = st.tuples(st.sampled_from(["open", "grow", "share", "close"]), st.integers(0, 7), st.integers(1, 90))


@settings(max_examples=150, deadline=None)
@given(n_pages=st.integers(1, 12), actions=st.lists(action, max_size=60))
def test_random_lives(n_pages: int, actions: list[tuple[str, int, int]]) -> None:
    memory = Memory(n_pages)
    pool = PagePool(n_pages, memory.copy_page)
    running: list[tuple[SequencePages, list[int], int]] = []
    for name, pick, size in actions:
        if name == "open":
            tokens = [*prompt(pick % 3, size), *prompt(pick, 5)]  # few seeds: many shared prefixes
            pages = pool.open(tokens, len(tokens))
            if pages is None:
                assert pages_for(len(tokens)) > 0
                continue
            assert memory.holds(pages, tokens, pages.reused_tokens)
            memory.write(pages, tokens, pages.reused_tokens, len(tokens))
            running.append((pages, tokens, len(tokens)))
        elif running:
            index = pick % len(running)
            pages, tokens, computed = running[index]
            if name == "grow" and pool.reserve(pages, computed + size):
                tokens += prompt(pick + 100, size)
                memory.write(pages, tokens, computed, computed + size)
                running[index] = (pages, tokens, computed + size)
            elif name == "share":
                pool.share(pages, tokens, computed)
            elif name == "close":
                pool.close(pages, tokens, computed, keep=size % 4 != 0)
                running.pop(index)
        for pages, tokens, computed in running:
            assert memory.holds(pages, tokens, computed)
        check_pool(pool, [pages for pages, _, _ in running])

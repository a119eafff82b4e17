"""The key/value cache as pages of 32 tokens: who holds which page, and which prefixes are already computed.

Full pages form a tree: an edge is the exact tuple of a page's tokens, so a path from the root spells a
prefix and reuse is exact by construction. Pages of ended sequences stay in the tree until room is needed;
then the leaf unused for longest goes first. The last, partly filled page of a sequence is kept too and
reused by copying it.

The pool holds page ids only; the executor holds their memory. Used from one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from plans.placement import PAGE_TOKENS


class _Node:
    """A page in the tree. Immutable content: `tokens` are at most PAGE_TOKENS ids, fewer only in a leaf."""

    __slots__ = ("tokens", "page_id", "parent", "children", "holders", "last_used")

    def __init__(self, tokens: tuple[int, ...], page_id: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.page_id = page_id
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.holders = 0  # sequences whose path goes through here
        self.last_used = 0


@dataclass(slots=True, eq=False)
class SequencePages:
    """The pages of one running sequence: first the shared ones of its path, then its own.

    `page_ids[p // PAGE_TOKENS]` holds position p. `reused_tokens`: computed before this sequence began.
    """

    page_ids: list[int] = field(default_factory=list)
    reused_tokens: int = 0
    _path: list[_Node] = field(default_factory=list)

    @property
    def capacity_tokens(self) -> int:
        return len(self.page_ids) * PAGE_TOKENS


def pages_for(n_tokens: int) -> int:
    """Pages that hold n_tokens."""
    return -(-n_tokens // PAGE_TOKENS)


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length


class PagePool:
    """Hands out pages of a cache of `n_pages`; never more than there are."""

    def __init__(self, n_pages: int, copy_page: Callable[[int, int], None]) -> None:
        self.n_pages = n_pages
        self._copy_page = copy_page
        self._free = list(range(n_pages - 1, -1, -1))
        self._root = _Node((), -1, None)
        self._n_idle = 0  # nodes that no sequence holds
        self._idle_leaves: list[tuple[int, int, _Node]] = []  # heap by last use; may hold outdated entries
        self._clock = 0

    # ---- what is there --------------------------------------------------------------------------

    @property
    def available_pages(self) -> int:
        """Pages that can be handed out now: free ones and those of prefixes that nobody holds."""
        return len(self._free) + self._n_idle

    @property
    def cached_pages(self) -> int:
        """Pages of prefixes that nobody holds."""
        return self._n_idle

    @property
    def held_pages(self) -> int:
        """Pages in use by running sequences."""
        return self.n_pages - self.available_pages

    # ---- life of a sequence ---------------------------------------------------------------------

    def open(
        self, token_ids: Sequence[int], reserve_tokens: int, spare_pages: int = 0, reuse: bool = True
    ) -> SequencePages | None:
        """Pages for `reserve_tokens` positions, with as much of `token_ids` already computed as is cached.

        At least one token is always left to compute, since its logits are wanted. None, and nothing
        changed, when that would leave less than `spare_pages` available.
        """
        path = self._match(token_ids, len(token_ids) - 1) if reuse else []
        idle_on_path = sum(1 for node in path if node.holders == 0)
        wanted_pages = max(0, pages_for(reserve_tokens) - len(path))
        if wanted_pages + idle_on_path + spare_pages > self.available_pages:
            return None
        pages = SequencePages([node.page_id for node in path], len(path) * PAGE_TOKENS, path)
        for node in path:
            self._hold(node)
        if reuse and wanted_pages:
            self._copy_partial_page(pages, token_ids)
        self.reserve(pages, reserve_tokens)
        return pages

    def reserve(self, pages: SequencePages, n_tokens: int) -> bool:
        """Let `pages` cover n_tokens positions. False, and nothing changed, when there are too few pages."""
        missing = pages_for(n_tokens) - len(pages.page_ids)
        if missing > self.available_pages:
            return False
        for _ in range(missing):
            pages.page_ids.append(self._take())
        return True

    def share(self, pages: SequencePages, token_ids: Sequence[int], n_computed: int) -> None:
        """Put full pages among the first n_computed tokens into the tree, for others to reuse.

        Where the tree has the page already, the sequence goes on with that one: its content is the same,
        since the result for a token depends on the tokens before it alone.
        """
        while (len(pages._path) + 1) * PAGE_TOKENS <= n_computed:
            index = len(pages._path)
            key = tuple(token_ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS])
            parent = pages._path[-1] if pages._path else self._root
            node = parent.children.get(key)
            if node is None:
                node = self._insert(parent, key, pages.page_ids[index])
            else:
                self._free.append(pages.page_ids[index])
                pages.page_ids = list(pages.page_ids)  # a list that an executor has seen only grows
                pages.page_ids[index] = node.page_id
            self._hold(node)
            pages._path.append(node)

    def close(
        self, pages: SequencePages, token_ids: Sequence[int], n_computed: int, keep: bool = True
    ) -> None:
        """End the sequence. With `keep`, what it computed stays cached as long as there is room."""
        if keep:
            self.share(pages, token_ids, n_computed)
        own = pages.page_ids[len(pages._path) :]
        first = len(pages._path) * PAGE_TOKENS
        if keep and own and n_computed > first:
            self._keep_partial_page(pages, tuple(token_ids[first:n_computed]), own.pop(0))
        self._free.extend(own)
        for node in reversed(pages._path):
            self._release(node)
        pages.page_ids, pages._path, pages.reused_tokens = [], [], 0

    def clear(self) -> None:
        """Forget all prefixes that nobody holds."""
        while self._n_idle:
            self._free.append(self._evict())

    # ---- the tree -------------------------------------------------------------------------------

    def _match(self, token_ids: Sequence[int], limit: int) -> list[_Node]:
        """Nodes of the full cached pages at the start of token_ids, within the first `limit` tokens."""
        path: list[_Node] = []
        node = self._root
        for end in range(PAGE_TOKENS, limit + 1, PAGE_TOKENS):
            child = node.children.get(tuple(token_ids[end - PAGE_TOKENS : end]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def _copy_partial_page(self, pages: SequencePages, token_ids: Sequence[int]) -> None:
        """Begin the first own page with a copy of the cached page that shares most tokens with it."""
        parent = pages._path[-1] if pages._path else self._root
        first = len(pages._path) * PAGE_TOKENS
        wanted = token_ids[first : min(first + PAGE_TOKENS, len(token_ids) - 1)]
        best, best_tokens = None, 0
        for child in parent.children.values():
            n_tokens = _common_prefix(child.tokens, wanted)
            if n_tokens > best_tokens:
                best, best_tokens = child, n_tokens
        if best is None:
            return
        self._hold(best)  # or it might be evicted to make room for its copy
        if self.available_pages:
            pages.page_ids.append(self._take())
            pages.reused_tokens += best_tokens
            self._copy_page(best.page_id, pages.page_ids[-1])
        self._release(best)

    def _keep_partial_page(self, pages: SequencePages, tokens: tuple[int, ...], page_id: int) -> None:
        parent = pages._path[-1] if pages._path else self._root
        if tokens in parent.children:
            self._free.append(page_id)
            return
        node = self._insert(parent, tokens, page_id)
        self._hold(node)
        self._release(node)

    def _insert(self, parent: _Node, tokens: tuple[int, ...], page_id: int) -> _Node:
        node = _Node(tokens, page_id, parent)
        parent.children[tokens] = node
        self._n_idle += 1
        return node

    def _hold(self, node: _Node) -> None:
        if node.holders == 0:
            self._n_idle -= 1
        node.holders += 1

    def _release(self, node: _Node) -> None:
        """Callers release a path from its end, so a parent is never older than its children."""
        node.holders -= 1
        self._clock += 1
        node.last_used = self._clock
        if node.holders == 0:
            self._n_idle += 1
            if not node.children:
                self._offer(node)

    # ---- pages ----------------------------------------------------------------------------------

    def _take(self) -> int:
        return self._free.pop() if self._free else self._evict()

    def _offer(self, node: _Node) -> None:
        heapq.heappush(self._idle_leaves, (node.last_used, node.page_id, node))
        if len(self._idle_leaves) > 4 * self.n_pages:
            self._idle_leaves = [entry for entry in self._idle_leaves if self._is_current(entry)]
            heapq.heapify(self._idle_leaves)

    @staticmethod
    def _is_current(entry: tuple[int, int, _Node]) -> bool:
        last_used, _, node = entry
        return (
            node.parent is not None
            and node.holders == 0
            and not node.children
            and node.last_used == last_used
        )

    def _evict(self) -> int:
        """Take the page of the idle leaf unused for longest; there is one whenever `_n_idle` > 0."""
        while True:
            entry = heapq.heappop(self._idle_leaves)
            if self._is_current(entry):
                break
        node = entry[2]
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        node.parent = None
        self._n_idle -= 1
        if parent is not self._root and parent.holders == 0 and not parent.children:
            self._offer(parent)
        return node.page_id

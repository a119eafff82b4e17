"""One forward pass's input as arrays: the tokens of several sequences, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from plans.placement import (
    PAGE_TOKENS as PAGE_TOKENS,  # part of this page's vocabulary: others take it from here
)

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Batch:
    """`token_ids`, `positions`: i32 [n_tokens]; `sequence_first`: i32 [n_sequences + 1], the tokens of sequence s are
    rows first[s]..first[s+1] with ascending positions; `page_tables`: i32 [n_sequences, max_pages] ids of KV pages of
    PAGE_TOKENS tokens; `output_rows`: i32 [n_outputs] rows whose logits are wanted.
    """

    token_ids: Int32Array
    positions: Int32Array
    sequence_first: Int32Array
    page_tables: Int32Array
    output_rows: Int32Array

    @staticmethod
    def of_sequence(
        token_ids: list[int], first_position: int, pages: list[int], *, all_outputs: bool
    ) -> Batch:
        """A batch of one sequence; outputs for every token, or for the last one only."""
        count = len(token_ids)
        rows = range(count) if all_outputs else [count - 1]
        return Batch(
            np.asarray(token_ids, np.int32),
            np.arange(first_position, first_position + count, dtype=np.int32),
            np.asarray([0, count], np.int32),
            np.asarray([pages], np.int32),
            np.asarray(list(rows), np.int32),
        )


class PageTables:
    """Writes `table`, i32 [n_sequences, max_pages], step by step. A list of pages only grows from step to step, so of
    the list that a row was given last only what came since is written.
    """

    def __init__(self, table: Int32Array) -> None:
        self._table = table
        self._written: list[tuple[Sequence[int], int]] = [((), 0)] * len(table)

    def set(self, row: int, page_ids: Sequence[int], n_tokens: int) -> None:
        """The pages that hold positions up to `n_tokens`; what the row holds beyond them has no meaning."""
        used = (n_tokens - 1) // PAGE_TOKENS + 1
        known_ids, known = self._written[row]
        if known_ids is not page_ids:
            known = 0
        if known < used:
            self._table[row, known:used] = page_ids[known:used]
            self._written[row] = (page_ids, used)

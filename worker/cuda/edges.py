"""Tuned edges, kept on disk: which kernels of a decode graph start early was measured once for a model and a card.

The key covers the card, its driver, the machine code of the kernels and the shapes of the model, so that a change of
any of them tunes anew. A cache that can not be read or written only costs the time of tuning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from configs.paths import cache_folder
from plans.files import write_atomically
from worker.cuda.driver import Function
from worker.ops.oplist import OpList

Edges = dict[str, bool | None]  # Function.may_start_early by Function.identity


def edges_file(card: str, oplist: OpList, functions: Iterable[Function]) -> Path:
    """Where the edges of these kernels belong. `card` names the device and its driver."""
    tensors = [(w.tensor.type, w.tensor.shape) if w.tensor else len(w.constant) for w in oplist.weights]
    words = [card, repr(tensors), repr([op.kind for op in oplist.ops]), *(f.identity for f in functions)]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()
    return cache_folder() / "edges" / f"{key[:32]}.json"


def load_edges(file: Path) -> Edges | None:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
        return known if isinstance(known, dict) else None
    return None


def store_edges(file: Path, functions: Iterable[Function]) -> None:
    edges: Edges = {function.identity: function.may_start_early for function in functions}
    with contextlib.suppress(OSError):
        write_atomically(file, json.dumps(edges).encode())


def set_edges(functions: Iterable[Function], edges: Edges) -> bool:
    """Set what is known; False where a kernel is not among it."""
    listed = list(functions)
    if any(function.identity not in edges for function in listed):
        return False
    for function in listed:
        function.may_start_early = edges[function.identity]  # type: ignore[assignment]
    return True

"""What tuning found, kept on disk: how the kernels of a decode graph run best was measured once for a model and a card.

The key covers the card, its driver, the machine code of the kernels and the shapes of the model, so that a change of
any of them tunes anew; so does a graph that is not as fast as it was then, because one of the two times was disturbed.
A cache that can not be read or written only costs the time of tuning.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from configs.paths import cache_folder
from plans.files import write_atomically
from worker.cuda.driver import Function
from worker.ops.oplist import OpList

_NOISE_RATIO = 1.1  # between two times of the same graph


class Settings(msgspec.Struct, frozen=True):
    """`attributes`: those of Function.TUNED, by Function.identity. `graph_s`: seconds of the graph with them."""

    graph_s: float
    attributes: dict[str, dict[str, bool | None]]

    def is_confirmed_by(self, graph_s: float) -> bool:
        return self.graph_s / _NOISE_RATIO < graph_s < self.graph_s * _NOISE_RATIO


def tuned_file(card: str, oplist: OpList, functions: Iterable[Function]) -> Path:
    """Where the settings of these kernels belong. `card` names the device and its driver."""
    tensors = [(w.tensor.type, w.tensor.shape) if w.tensor else len(w.constant) for w in oplist.weights]
    words = [card, repr(tensors), repr([op.kind for op in oplist.ops]), *(f.identity for f in functions)]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()
    return cache_folder() / "tuned" / f"{key[:32]}.json"


def load_settings(file: Path) -> Settings | None:
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode(file.read_bytes(), type=Settings)
    return None


def store_settings(file: Path, functions: Iterable[Function], graph_s: float) -> None:
    attributes = {f.identity: {name: getattr(f, name) for name in f.TUNED} for f in functions}
    with contextlib.suppress(OSError):
        write_atomically(file, msgspec.json.encode(Settings(graph_s, attributes)))


def apply_settings(functions: Iterable[Function], settings: Settings) -> bool:
    """Set what is known; False, and nothing changed, where a kernel or an attribute is not among it."""
    listed, known = list(functions), settings.attributes
    if any(set(known.get(function.identity, ())) != set(function.TUNED) for function in listed):
        return False
    for function in listed:
        for name in function.TUNED:
            setattr(function, name, known[function.identity][name])
    return True

"""What tuning found, kept on disk: how the kernels of a decode graph run best was measured once for a model and a card.

The key covers the card, its driver, the machine code of the kernels and the shapes of the model, so that a change of
any of them tunes anew. A cache that can not be read or written only costs the time of tuning.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from configs.paths import cache_folder
from plans.files import write_atomically
from worker.cuda.driver import Function
from worker.ops.oplist import OpList

Settings = dict[str, dict[str, Any]]  # the attributes Function.TUNED, by Function.identity


def tuned_file(card: str, oplist: OpList, functions: Iterable[Function]) -> Path:
    """Where the settings of these kernels belong. `card` names the device and its driver."""
    tensors = [(w.tensor.type, w.tensor.shape) if w.tensor else len(w.constant) for w in oplist.weights]
    words = [card, repr(tensors), repr([op.kind for op in oplist.ops]), *(f.identity for f in functions)]
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()
    return cache_folder() / "tuned" / f"{key[:32]}.json"


def load_settings(file: Path) -> Settings | None:
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(file.read_text())
        return known if isinstance(known, dict) else None
    return None


def store_settings(file: Path, functions: Iterable[Function]) -> None:
    settings = {f.identity: {name: getattr(f, name) for name in f.TUNED} for f in functions}
    with contextlib.suppress(OSError):
        write_atomically(file, json.dumps(settings).encode())


def apply_settings(functions: Iterable[Function], settings: Settings) -> bool:
    """Set what is known; False, and nothing changed, where a kernel or an attribute is not among it."""
    listed = list(functions)
    if any(set(settings.get(function.identity, ())) != set(function.TUNED) for function in listed):
        return False
    for function in listed:
        for name in function.TUNED:
            setattr(function, name, settings[function.identity][name])
    return True

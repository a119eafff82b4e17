"""The architectures that are declared as units: one module each, named as `general.architecture` spells it.

A module has one public function, `units(file) -> tuple[Unit, ...]`; docs/add-an-architecture.md tells how to
add one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from configs.errors import ModelFileError
from plans.units import Unit
from worker.model.gguf import ModelFile

SUPPORTED = tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def units(file: ModelFile) -> tuple[Unit, ...]:
    """The units of `file` in order of execution.

    Raises ModelFileError for an unknown architecture, and for a context that has more positions than kernels count.
    """
    name = file.architecture
    if name not in SUPPORTED:
        raise ModelFileError(
            f"{file.path}: general.architecture = {name!r} is not supported by the native engine; it knows "
            f"{', '.join(SUPPORTED)}. Other engines may run it (placewright engines)"
        )
    file.metadata.integer(f"{name}.context_length", 1, minimum=1)
    declare: Callable[[ModelFile], tuple[Unit, ...]] = importlib.import_module(f"{__name__}.{name}").units
    return declare(file)

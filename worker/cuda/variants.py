"""Every kernel variant that is compiled without a GPU in the tests: (source, definitions).

Shapes are compile-time constants of many kernels; here each type and each branch stands once, with small shapes.
A family of kernels adds its variants with a function of its own module listed in `_FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

Variant = tuple[str, dict[str, int | float | str]]

ARCHITECTURES = (75, 80, 86, 89, 90, 120)


def _matmul_variants() -> Iterator[Variant]:
    yield from ()


_FAMILIES: tuple[Callable[[], Iterator[Variant]], ...] = (_matmul_variants,)


def all_variants() -> list[Variant]:
    return [variant for family in _FAMILIES for variant in family()]

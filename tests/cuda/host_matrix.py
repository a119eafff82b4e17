"""A matrix in a HostDevice's memory, as the kernels in numpy multiply it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tests.cuda.host_device import view


@dataclass(frozen=True)
class HostMatrix:
    """Laid out = dequantised to f32 [experts * rows, columns]."""

    rows: int
    columns: int
    experts: int
    address: int

    def values(self) -> NDArray[np.float32]:
        shape = (self.experts, self.rows, self.columns) if self.experts > 1 else (self.rows, self.columns)
        return view(self.address, shape)

"""cuBLAS through CuPy: one product of halves with f32 sums. One handle per executor, bound to its stream."""

from __future__ import annotations

import numpy as np

_R_16F, _R_32F = 2, 0  # cudaDataType_t
_COMPUTE_32F = 68
_OP_N, _OP_T = 0, 1
_DEFAULT_ALGORITHM = -1


class _Stream:
    """An address as CUDA's Python packages exchange streams."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


class CuBlas:
    """Create and use with the device current; the handle lives as long as the object."""

    def __init__(self, stream: int) -> None:
        import cupy
        from cupy_backends.cuda.libs import cublas

        # CuPy moves a handle to its current stream at every call; without this, products would run on the null stream.
        streams = cupy.cuda.Stream
        known = hasattr(streams, "from_external")  # CuPy 14 deprecates the other way
        self._stream = streams.from_external(_Stream(stream)) if known else cupy.cuda.ExternalStream(stream)
        self._cublas = cublas
        self._handle = cublas.create()
        cublas.setStream(self._handle, stream)
        cublas.setPointerMode(self._handle, cublas.CUBLAS_POINTER_MODE_HOST)

    def matrix_product(
        self,
        weights: int,
        weights_stride: int,
        inputs: int,
        output: int,
        output_stride: int,
        shape: tuple[int, int, int],
        scale: float,
        accumulate: bool,
    ) -> None:
        """output f32 [n, output_stride] (+)= scale * inputs f16 [n, k] weights f16 [m, weights_stride]^T;
        shape = (n, m, k). cuBLAS counts columns first, so that the product is written transposed."""
        n, m, k = shape
        alpha, beta = np.array([scale], np.float32), np.array([float(accumulate)], np.float32)
        with self._stream:
            self._cublas.gemmEx(
                self._handle,
                _OP_T,
                _OP_N,
                m,
                n,
                k,
                alpha.ctypes.data,
                weights,
                _R_16F,
                weights_stride,
                inputs,
                _R_16F,
                k,
                beta.ctypes.data,
                output,
                _R_32F,
                output_stride,
                _COMPUTE_32F,
                _DEFAULT_ALGORITHM,
            )

    def close(self) -> None:
        self._cublas.destroy(self._handle)

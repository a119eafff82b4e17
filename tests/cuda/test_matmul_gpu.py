"""The matrix kernels on a GPU: every type, one to eight tokens, odd shapes, outliers."""

from __future__ import annotations

import pytest

from tests.cuda import matmul_checks as checks
from tests.cuda import prefill_checks
from tests.cuda.devices import GpuDevice, why_no_gpu
from tests.cuda.float_experts import check_float_experts
from worker.cuda.blas import CuBlas

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_no_gpu()), reason=why_no_gpu() or "-")]


@pytest.fixture(scope="module")
def device() -> GpuDevice:
    return GpuDevice()


@pytest.fixture(scope="module")
def blas(device: GpuDevice) -> CuBlas:
    return CuBlas(device.stream.ptr)


def _cols(name: str, n: int) -> int:
    """About n columns, as the type allows; odd for float types."""
    if name in checks.FLOAT_TYPES:
        return n | 1
    step = 256 if name in checks.SUPER_BLOCK_TYPES else 32
    return max(1, n // step) * step


@pytest.mark.parametrize("name", checks.FLOAT_TYPES + checks.QUANT_TYPES)
@pytest.mark.parametrize(("rows", "n_cols"), [(1, 32), (37, 544), (640, 2048)])
def test_matrix_vector(device: GpuDevice, name: str, rows: int, n_cols: int) -> None:
    for n_tokens in (1, 2, 3, 5, 8) if rows == 37 else (1, 4):
        checks.check_gemv(device, name, n_tokens, rows, _cols(name, n_cols))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize(("rows", "cols"), [(4096, 14336), (32000, 2048)])
def test_large_matrices(device: GpuDevice, name: str, rows: int, cols: int) -> None:
    checks.check_gemv(device, name, 1, rows, cols)
    checks.check_gemv(device, name, 8, rows, cols)


@pytest.mark.parametrize("n_tokens", [1, 2, 8])
@pytest.mark.parametrize("names", [("Q4_K", "Q4_K", "Q6_K"), ("Q5_0", "Q5_0", "Q8_0"), ("F16", "Q2_K")])
def test_parts_of_different_types(device: GpuDevice, names: tuple[str, ...], n_tokens: int) -> None:
    checks.check_parts(device, names, n_tokens, 512)


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("with_norm", [False, True])
def test_norm_in_the_kernel(device: GpuDevice, name: str, with_norm: bool) -> None:
    for n_tokens in (1, 3):
        checks.check_prologue(device, name, n_tokens, 2048, with_norm)


@pytest.mark.parametrize("down", ["Q4_K", "Q6_K", "Q8_0", "Q5_0"])
@pytest.mark.parametrize(("n_tokens", "in_kernel"), [(1, True), (1, False), (4, False), (8, False)])
def test_mixture(device: GpuDevice, down: str, n_tokens: int, in_kernel: bool) -> None:
    shape = (512, 256, 128, 8)
    checks.check_moe(device, ("Q4_K", "Q4_K", down), n_tokens, shape, in_kernel=in_kernel)
    checks.check_moe(
        device, ("Q4_0", "Q5_0", down), n_tokens, shape, in_kernel=in_kernel, activation=1, sigmoid=in_kernel
    )


@pytest.mark.parametrize("sigmoid", [False, True])
def test_mixture_behind_a_folded_router(device: GpuDevice, sigmoid: bool) -> None:
    names, shape = ("Q4_K", "Q4_K", "Q6_K"), (2048, 768, 128, 8)
    checks.check_moe(device, names, 1, shape, in_kernel=True, sigmoid=sigmoid, folded=True)


@pytest.mark.parametrize("shape", [(4096, 2048, 128), (512, 256, 300), (8192, 3072, 64)])
@pytest.mark.parametrize(("name", "router"), [("Q4_K", "F32"), ("Q6_K", "F16"), ("Q5_K", "BF16")])
def test_folded_router(device: GpuDevice, name: str, router: str, shape: tuple[int, int, int]) -> None:
    checks.check_folded_router(device, name, router, shape)


@pytest.mark.parametrize("n_tokens", [1, 2, 5, 8])
def test_dense_network(device: GpuDevice, n_tokens: int) -> None:
    checks.check_moe(device, ("Q4_K", "Q4_K", "Q6_K"), n_tokens, (512, 3584, 1, 1), in_kernel=False)
    checks.check_moe(device, ("Q4_K", "Q4_K", "Q6_K"), n_tokens, (256, 14336, 1, 1), in_kernel=False)
    prefill_checks.check_network(device, ("Q4_K", "Q4_K", "Q6_K"), 3 * max(n_tokens, 2), 512, 14336)


@pytest.mark.parametrize("name", checks.FLOAT_TYPES + checks.QUANT_TYPES)
@pytest.mark.parametrize(("n_tokens", "rows", "cols"), [(5, 37, 256), (12, 520, 2304), (29, 200, 512)])
def test_few_tokens(device: GpuDevice, name: str, n_tokens: int, rows: int, cols: int) -> None:
    prefill_checks.check_few(device, name, n_tokens, rows, cols)


@pytest.mark.parametrize("name", ["F16", "Q4_0", "Q5_0", "Q5_1", "Q8_0"])
def test_few_tokens_on_odd_widths(device: GpuDevice, name: str) -> None:
    prefill_checks.check_few(device, name, 7, 130, 352)


@pytest.mark.parametrize("n_tokens", [2, 8, 9, 16, 17, 32])
def test_few_tokens_beyond_the_range_of_halves(device: GpuDevice, n_tokens: int) -> None:
    prefill_checks.check_few(device, "Q4_K", n_tokens, 4100, 4096, size=1e6)
    prefill_checks.check_few(device, "Q6_K", n_tokens, 300, 4096, size=1e-6)


@pytest.mark.parametrize("name", checks.FLOAT_TYPES + checks.QUANT_TYPES)
@pytest.mark.parametrize(("rows", "cols"), [(37, 256), (520, 2048)])
def test_tensor_cores(device: GpuDevice, name: str, rows: int, cols: int) -> None:
    for n_tokens in (8, 33, 200):
        prefill_checks.check_tensor_cores(device, name, n_tokens, rows, cols)


@pytest.mark.parametrize("name", ["F32", "F16", "Q4_0", "Q5_1", "Q8_0"])
def test_tensor_cores_on_odd_widths(device: GpuDevice, name: str) -> None:
    prefill_checks.check_tensor_cores(device, name, 50, 130, 288)


@pytest.mark.parametrize("n_tokens", [2, 3, 16, 17, 63, 64, 300])
def test_dispatch(device: GpuDevice, blas: CuBlas, n_tokens: int) -> None:
    for names in (("Q4_K", "Q4_K", "Q6_K"), ("F16", "Q8_0", "F32"), ("Q5_K",)):
        prefill_checks.check_linear(device, blas, names, n_tokens, 512)


@pytest.mark.parametrize("name", checks.QUANT_TYPES + checks.FLOAT_TYPES)
def test_blas(device: GpuDevice, blas: CuBlas, name: str) -> None:
    prefill_checks.check_linear(device, blas, (name,), 130, 256)


@pytest.mark.parametrize("down", ["Q4_K", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("n_tokens", [2, 5, 16, 32, 100, 700])
def test_grouped_experts(device: GpuDevice, down: str, n_tokens: int) -> None:
    prefill_checks.check_grouped(device, ("Q4_K", "Q4_K", down), n_tokens, (512, 256, 32, 4))
    prefill_checks.check_grouped(device, ("Q4_0", "Q5_0", down), n_tokens, (256, 256, 16, 2), activation=1)


@pytest.mark.parametrize("names", [("F32", "F32", "F32"), ("F16", "F16", "F16"), ("Q8_0", "Q8_0", "BF16")])
def test_experts_of_floats(device: GpuDevice, names: tuple[str, str, str]) -> None:
    for n_tokens in (1, 2, 5, 100):
        check_float_experts(device, names, n_tokens, (512, 256, 32, 4))


@pytest.mark.parametrize(("name", "cols"), [("F32", 132), ("F16", 2048), ("BF16", 1056)])
def test_router_of_one_token(device: GpuDevice, name: str, cols: int) -> None:
    checks.check_router(device, name, 9, cols)

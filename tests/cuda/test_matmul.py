"""The matrix kernels in the emulator: their indices and arithmetic, on a machine without a GPU.

One small case per type and path; `test_matmul_gpu.py` has the sizes and numbers of tokens.
"""

from __future__ import annotations

import pytest

from tests.cuda import matmul_checks as checks
from tests.cuda import prefill_checks
from tests.cuda.devices import EmulatedDevice, why_no_emulator
from tests.cuda.float_experts import check_float_experts

pytestmark = pytest.mark.skipif(bool(why_no_emulator()), reason=why_no_emulator() or "-")


@pytest.fixture(scope="module")
def device() -> EmulatedDevice:
    return EmulatedDevice()


@pytest.mark.parametrize("name", checks.FLOAT_TYPES + checks.QUANT_TYPES)
def test_matrix_vector(device: EmulatedDevice, name: str) -> None:
    cols = 256 if name in checks.SUPER_BLOCK_TYPES else 288 if name in checks.QUANT_TYPES else 77
    checks.check_gemv(device, name, 3, 19, cols)


def test_parts_of_different_types(device: EmulatedDevice) -> None:
    checks.check_parts(device, ("Q4_K", "Q6_K", "F16"), 2, 256)


@pytest.mark.parametrize(("name", "cols"), [("Q4_0", 96), ("F32", 96)])
def test_norm_in_the_kernel(device: EmulatedDevice, name: str, cols: int) -> None:
    checks.check_prologue(device, name, 2, cols, with_norm=True)


@pytest.mark.parametrize(("n_tokens", "in_kernel"), [(1, True), (3, False)])
def test_mixture(device: EmulatedDevice, n_tokens: int, in_kernel: bool) -> None:
    checks.check_moe(
        device, ("Q4_0", "Q4_0", "Q8_0"), n_tokens, (96, 64, 8, 3), in_kernel=in_kernel, sigmoid=in_kernel
    )


@pytest.mark.parametrize(("n_experts", "n_used"), [(72, 3), (128, 8), (130, 32)])
def test_choice_among_many_experts(device: EmulatedDevice, n_experts: int, n_used: int) -> None:
    """Lanes that look at three, four (in one load) and five experts."""
    shape = (32, 32, n_experts, n_used)
    checks.check_moe(device, ("Q4_0", "Q4_0", "Q8_0"), 1, shape, in_kernel=True, folded=True)


@pytest.mark.parametrize("sigmoid", [False, True])
def test_mixture_behind_a_folded_router(device: EmulatedDevice, sigmoid: bool) -> None:
    names, shape = ("Q4_0", "Q4_0", "Q8_0"), (96, 64, 8, 3)
    checks.check_moe(device, names, 1, shape, in_kernel=True, sigmoid=sigmoid, folded=True)


@pytest.mark.parametrize(("name", "router"), [("Q4_K", "F32"), ("Q6_K", "F16"), ("Q8_0", "BF16")])
def test_folded_router(device: EmulatedDevice, name: str, router: str) -> None:
    checks.check_folded_router(device, name, router, (256, 72, 11))


def test_dense_network(device: EmulatedDevice) -> None:
    checks.check_moe(device, ("Q8_0", "Q4_0", "Q5_0"), 2, (96, 64, 1, 1), in_kernel=False)
    prefill_checks.check_network(device, ("Q8_0", "Q4_0", "Q5_0"), 5, 96, 64)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_tensor_cores(device: EmulatedDevice, name: str) -> None:
    """5 tokens on few.cu, 33 on mma.cu."""
    prefill_checks.check_few(device, name, 5, 44, 160 if name in checks.FLOAT_TYPES else 352)
    prefill_checks.check_tensor_cores(device, name, 33, 140, 96)


@pytest.mark.parametrize("name", checks.SUPER_BLOCK_TYPES)
def test_tensor_cores_on_k_quants(device: EmulatedDevice, name: str) -> None:
    prefill_checks.check_few(device, name, 11, 44, 768)
    prefill_checks.check_tensor_cores(device, name, 33, 130, 256)


def test_few_tokens_of_many_columns(device: EmulatedDevice) -> None:
    """Warps with a block of columns each that keep their inputs, warps with two, two tiles of tokens."""
    prefill_checks.check_few(device, "Q4_K", 12, 70, 2560)
    prefill_checks.check_few(device, "Q6_K", 20, 37, 4608)


@pytest.mark.parametrize("n_tokens", [2, 11])
def test_dispatch(device: EmulatedDevice, n_tokens: int) -> None:
    prefill_checks.check_linear(device, None, ("Q4_0", "Q8_0", "F16"), n_tokens, 64, rows=24)


@pytest.mark.parametrize("n_tokens", [7, 60])
def test_grouped_experts(device: EmulatedDevice, n_tokens: int) -> None:
    prefill_checks.check_grouped(device, ("Q4_0", "Q4_0", "Q8_0"), n_tokens, (96, 96, 4, 2))


@pytest.mark.parametrize("names", [("F16", "F16", "F16"), ("Q8_0", "Q8_0", "BF16")])
def test_experts_of_floats_have_no_kernels_of_their_own_for_few_tokens(
    device: EmulatedDevice, names: tuple[str, str, str]
) -> None:
    for n_tokens in (1, 2):
        check_float_experts(device, names, n_tokens, (96, 96, 4, 2))


def test_an_expert_with_several_tiles(device: EmulatedDevice) -> None:
    prefill_checks.check_grouped(device, ("Q4_0", "Q4_0", "Q8_0"), 20, (96, 96, 16, 2))


@pytest.mark.parametrize(("name", "cols"), [("F32", 132), ("F16", 2048), ("BF16", 1056)])
def test_router_of_one_token(device: EmulatedDevice, name: str, cols: int) -> None:
    checks.check_router(device, name, 9, cols)

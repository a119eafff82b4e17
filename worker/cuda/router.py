"""The expert router on the GPU: logits, gating, the choice of the best and their weights."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from configs.errors import EngineError
from worker.cuda.driver import Launcher
from worker.cuda.matmul_moe import RouterRule

MAX_EXPERTS = 1024
MAX_USED = 64
_SOURCE = "router.cu"
_FUSED_TOKENS = 32  # up to here one launch does everything
_CHOOSE_WARPS = 4

c_int, c_float = ctypes.c_int32, ctypes.c_float


@dataclass(frozen=True, slots=True)
class Router:
    """`matrix`: [n_experts, width] row-major, f32 or f16; `bias`: f32 [n_experts] that steers the choice, or 0.

    `gating` 0 softmax, 1 sigmoid; `normalize`: the chosen weights sum to 1 before `scale`.
    """

    matrix: int
    is_f16: bool
    bias: int
    n_experts: int
    n_used: int
    width: int
    gating: int
    normalize: bool
    scale: float

    def check(self) -> None:
        if not 0 < self.n_used <= min(self.n_experts, MAX_USED) or self.n_experts > MAX_EXPERTS:
            raise EngineError(
                f"a router of {self.n_used} out of {self.n_experts} experts: "
                f"the GPU kernels go up to {MAX_USED} out of {MAX_EXPERTS}"
            )
        if self.width % 4:
            raise EngineError(f"a router over {self.width} columns: use a multiple of 4")


def workspace_bytes(max_tokens: int, n_experts: int) -> int:
    """Scratch of `route`; it has to be zeroed once, before the first call."""
    return 4 * max_tokens * n_experts + 4 * _FUSED_TOKENS


def route(
    launcher: Launcher,
    router: Router,
    source: int,
    n_tokens: int,
    ids: int,
    weights: int,
    workspace: int,
    *,
    pdl: bool = False,
) -> None:
    """source f32 [n_tokens, width] -> ids i32 and weights f32 [n_tokens, n_used], best first, ties to the lower id."""
    router.check()
    counters = workspace
    logits = workspace + 4 * _FUSED_TOKENS
    defines = {"MATRIX_F16": int(router.is_f16)}
    gate = (
        router.bias,
        c_int(router.n_experts),
        c_int(router.n_used),
        c_int(router.gating),
        c_int(router.normalize),
        c_float(router.scale),
        ids,
        weights,
    )
    shape = (source, router.matrix, c_int(router.width))
    if n_tokens <= _FUSED_TOKENS:
        function = launcher.function(_SOURCE, "route", defines)
        grid = (-(-router.n_experts // 8), n_tokens)
        launcher.launch(function, grid, 256, 0, (*shape, logits, counters, *gate), pdl)
        return
    function = launcher.function(_SOURCE, "router_logits", defines)
    grid = (-(-router.n_experts // 32), -(-n_tokens // 32))
    args = (*shape, c_int(n_tokens), c_int(router.n_experts), logits)
    launcher.launch(function, grid, 256, 0, args, pdl)
    function = launcher.function(_SOURCE, "choose_experts", defines)
    launcher.launch(function, n_tokens, 32 * _CHOOSE_WARPS, 0, (logits, *gate), pdl)


def choose_experts(
    launcher: Launcher,
    rule: RouterRule,
    n_experts: int,
    n_used: int,
    n_tokens: int,
    ids: int,
    weights: int,
    pdl: bool = False,
) -> None:
    """The same from logits f32 [n_tokens, n_experts] that are there."""
    function = launcher.function(_SOURCE, "choose_experts", {"MATRIX_F16": 0})
    gate = (
        rule.bias,
        c_int(n_experts),
        c_int(n_used),
        c_int(rule.is_sigmoid),
        c_int(rule.normalize),
        c_float(rule.weights_scale),
        ids,
        weights,
    )
    launcher.launch(function, n_tokens, 32 * _CHOOSE_WARPS, 0, (rule.logits, *gate), pdl)

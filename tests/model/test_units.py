"""Architectures as units: shapes, roles and refusals, one tiny model each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import ModelFileError
from plans.units import AttentionShape, EmbeddingShape, HeadShape, MoeShape, Unit
from tests import tiny
from worker.model import archs
from worker.model.gguf import open_model

ATTENTION = {"norm", "q", "k", "v", "output"}
QK_NORM = {"q_norm", "k_norm"}


def units_of(path: Path) -> tuple[Unit, ...]:
    return archs.units(open_model(path))


def attention_of(units: tuple[Unit, ...], layer: int) -> tuple[Unit, AttentionShape]:
    unit = next(unit for unit in units if unit.name == f"layer.{layer}.attention")
    assert isinstance(unit.shape, AttentionShape)
    return unit, unit.shape


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_units_come_in_order_and_hold_every_tensor(tmp_path: Path, arch: str) -> None:
    path = tiny.write_model(tmp_path, arch=arch, tied=False)
    units = units_of(path)
    layers = [name for layer in range(2) for name in (f"layer.{layer}.attention", f"layer.{layer}.ffn")]
    assert [unit.name for unit in units] == ["embedding", *layers, "head"]
    held = [tensor.name for unit in units for tensor in unit.tensors.values()]
    assert sorted(held) == sorted(open_model(path).tensors)
    assert units[0].shape == EmbeddingShape(305, 256, 16.0 if arch == "gemma3" else 1.0)


@pytest.mark.parametrize(
    ("arch", "roles", "style"),
    [
        ("llama", ATTENTION, "interleaved"),
        ("qwen2", ATTENTION | {"q_bias", "k_bias", "v_bias"}, "half"),
        ("qwen3", ATTENTION | QK_NORM, "half"),
        ("qwen3moe", ATTENTION | QK_NORM, "half"),
        ("gemma3", ATTENTION | QK_NORM | {"post_norm"}, "half"),
    ],
)
def test_attention_has_its_roles_and_shape(tmp_path: Path, arch: str, roles: set[str], style: str) -> None:
    unit, shape = attention_of(units_of(tiny.write_model(tmp_path, arch=arch)), 1)
    assert set(unit.tensors) == roles
    assert (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.rope_dim) == (4, 2, 64, 64)
    assert shape.rope_style == style and shape.score_scale == 1 / 8 and shape.rope_magnitude == 1.0
    assert shape.inverse_frequencies == pytest.approx([10000 ** (-2 * i / 64) for i in range(32)])


def test_tied_head_names_the_embedding(tmp_path: Path) -> None:
    units = units_of(tiny.write_model(tmp_path))
    assert units[-1].tensors["output"] is units[0].tensors["token_embd"]
    assert isinstance(units[-1].shape, HeadShape)


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_experts_are_stacked_behind_a_router(tmp_path: Path, arch: str) -> None:
    units = units_of(tiny.write_model(tmp_path, arch=arch, n_experts=6, n_experts_used=3))
    unit = units[2]
    assert unit.kind == "moe_ffn" and set(unit.tensors) == {
        *("norm", "router", "gate_experts", "up_experts", "down_experts")
    }
    norm_eps = float(np.float32(1e-6))
    assert unit.shape == MoeShape(6, 3, 512, "silu", norm_eps, "softmax", True, 1.0)
    assert unit.tensors["gate_experts"].experts == 6


def test_gemma3_windows_scales_and_bases(tmp_path: Path) -> None:
    extra = (("rope.scaling.type", "linear"), ("rope.scaling.factor", 8.0), ("final_logit_softcapping", 30.0))
    units = units_of(tiny.write_model(tmp_path, arch="gemma3", n_layers=8, metadata=extra))
    shapes = [attention_of(units, layer)[1] for layer in range(8)]
    assert [shape.window_tokens for shape in shapes] == [16, 16, 16, 16, 16, 0, 16, 16]
    assert shapes[0].inverse_frequencies[0] == 1.0 and shapes[5].inverse_frequencies[0] == 1 / 8
    assert units[0].shape == EmbeddingShape(305, 256, 16.0)
    head = units[-1].shape
    assert isinstance(head, HeadShape) and head.logit_softcap == 30.0


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"window_period": 2}, [16, 0, 16]),
        ({"window_period": 0}, [16, 16, 16]),
        ({"window_tokens": 0}, [0, 0, 0]),
        ({"metadata": (("attention.sliding_window_pattern", [True, False, False]),)}, [16, 0, 0]),
    ],
)
def test_gemma3_window_patterns(tmp_path: Path, options: dict[str, Any], windows: list[int]) -> None:
    units = units_of(tiny.write_model(tmp_path, arch="gemma3", n_layers=3, **options))
    assert [attention_of(units, layer)[1].window_tokens for layer in range(3)] == windows


def test_gemma3_of_27b_scales_scores_by_the_embedding(tmp_path: Path) -> None:
    units = units_of(
        tiny.write_model(tmp_path, arch="gemma3", n_layers=62, n_embd=512, quant="Q2_K", n_ff=256)
    )
    assert attention_of(units, 0)[1].score_scale == 1 / math.sqrt(512 / 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"metadata": (("rope.scaling.type", "longrope"),)},
            "rope.scaling.type = 'longrope', expected one of none",
        ),
        ({"metadata": (("attention.causal", False),)}, "attention.causal = False, expected true"),
        ({"n_heads": 3, "quant": "F32"}, r"head_count_kv = 2, expected a divisor of the 3 attention heads"),
        ({"n_experts": 2, "n_experts_used": 3}, "expert_used_count = 3, expected a whole number from 1 to 2"),
    ],
)
def test_metadata_refusals(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    path = tiny.write_model(tmp_path, **options)
    with pytest.raises(ModelFileError, match=words):
        units_of(path)


def edited(path: Path, old: bytes, new: bytes) -> Path:
    """The file with one name changed for another of the same length."""
    content = path.read_bytes()
    assert old in content and len(old) == len(new)
    path.write_bytes(content.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            b"blk.1.attn_q.weight",
            b"blk.1.attn_x.weight",
            "needs 20 tensors, 1 of them are missing .* blk.1.attn_q.weight",
        ),
        (b"output_norm.weight", b"output_form.weight", "the first is output_norm.weight"),
        (b"llama.block_count", b"llama.bloke_count", "llama.block_count is missing, expected a whole number"),
    ],
)
def test_missing_pieces(tmp_path: Path, old: bytes, new: bytes, words: str) -> None:
    with pytest.raises(ModelFileError, match=words):
        units_of(edited(tiny.write_model(tmp_path), old, new))


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, metadata=(("block_count", 1),))
    with pytest.raises(
        ModelFileError, match="9 of 20 tensors have no place in .* llama .*; the first is blk.1."
    ):
        units_of(path)


def test_wrong_shapes_and_types_are_refused(tmp_path: Path) -> None:
    path = tiny.write_model(tmp_path, metadata=(("feed_forward_length", 768),))
    words = r"blk.0.ffn_gate.weight has shape \[256, 512\], the metadata ask for \[256, 768\]"
    with pytest.raises(ModelFileError, match=words):
        units_of(path)


def test_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    path = edited(tiny.write_model(tmp_path, arch="qwen3"), b"qwen3", b"mamba")
    with pytest.raises(
        ModelFileError, match="'mamba' is not supported .* gemma3, llama, qwen2, qwen3, qwen3moe"
    ):
        units_of(path)
    assert tuple(sorted(tiny.ARCHITECTURES)) == archs.SUPPORTED

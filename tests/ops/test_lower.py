"""Lowering: the op list of each architecture is closed (every id exists) and says what its units say."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests import tiny
from worker.model import archs
from worker.model.gguf import open_model
from worker.ops.lower import lower
from worker.ops.oplist import AttentionInts, OpKind, OpList


def _lowered(folder: Path, arch: str, **options: object) -> OpList:
    return lower(archs.units(open_model(tiny.write_model(folder, arch, **options))))


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_every_id_exists(tmp_path: Path, arch: str) -> None:
    oplist = _lowered(tmp_path, arch)
    for op in oplist.ops:
        assert all(0 <= index < len(oplist.buffers) for index in (*op.inputs, *op.outputs)), op
        assert all(-1 <= index < len(oplist.weights) for index in (*op.weights, *op.biases)), op


@pytest.mark.parametrize("arch", tiny.ARCHITECTURES)
def test_one_attention_and_one_cache_a_layer(tmp_path: Path, arch: str) -> None:
    oplist = _lowered(tmp_path, arch, n_layers=3)
    kinds = Counter(op.kind for op in oplist.ops)
    assert kinds[OpKind.ATTENTION] == kinds[OpKind.ROPE_STORE] == len(oplist.kv_layers) == 3
    assert kinds[OpKind.MOE] == kinds[OpKind.ROUTER] == (3 if arch == "qwen3moe" else 0)
    layers = [AttentionInts(*op.ints).kv_layer for op in oplist.ops if op.kind == OpKind.ATTENTION]
    assert layers == [0, 1, 2]


def test_outputs_are_selected_before_the_head(tmp_path: Path) -> None:
    oplist = _lowered(tmp_path, "llama")
    names = [op.kind for op in oplist.ops[-4:]]
    assert names == [OpKind.SELECT, OpKind.RMS_NORM, OpKind.LINEAR, OpKind.SAMPLE]
    assert oplist.buffers[oplist.buffer_index("logits")].is_output
    assert oplist.buffers[oplist.buffer_index("logits")].width == oplist.n_vocab


def test_a_tied_head_is_one_weight_that_is_packed(tmp_path: Path) -> None:
    oplist = _lowered(tmp_path, "llama", tied=True)
    (embedding,) = [w for w in oplist.weights if w.name == "token_embd.weight"]
    assert embedding.packed
    assert not [w for w in oplist.weights if w.name == "output.weight"]


def test_post_norms_come_between_projection_and_residual(tmp_path: Path) -> None:
    """gemma3: residual += norm(W x), never residual += W x."""
    oplist = _lowered(tmp_path, "gemma3")
    residual = oplist.buffer_index("residual")
    linears = [op for op in oplist.ops if op.kind == OpKind.LINEAR]
    assert all(residual not in op.outputs for op in linears)
    added = [op for op in oplist.ops if op.kind == OpKind.RMS_NORM and op.outputs == (residual,)]
    assert len(added) == 4 and all(op.ints == (1,) for op in added)


def test_layers_with_equal_frequencies_share_a_constant(tmp_path: Path) -> None:
    one = _lowered(tmp_path, "llama", n_layers=4)
    assert len([w for w in one.weights if w.constant]) == 1
    faster = (("rope.freq_base", 1e6),)
    two = _lowered(tmp_path, "gemma3", n_layers=4, window_period=2, metadata=faster)
    assert len([w for w in two.weights if w.constant]) == 2, "local and global layers turn at other speeds"

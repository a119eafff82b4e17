"""Lowering: the units of a model to the flat list of operations of one forward pass.

The same list serves prefill and decode; how many tokens a pass has is the batch's affair. Each unit kind has one
function here, in the order in which a token meets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from plans.units import (
    AttentionShape,
    EmbeddingShape,
    FfnShape,
    HeadShape,
    MoeShape,
    Unit,
)
from worker.ops.oplist import (
    ACTIVATION_CODES,
    GATING_CODES,
    ROPE_STYLE_CODES,
    AttentionInts,
    Buffer,
    KvLayer,
    LinearInts,
    MoeInts,
    Op,
    OpKind,
    OpList,
    RopeStoreInts,
    RouterInts,
    Weight,
)


def lower(units: tuple[Unit, ...]) -> OpList:
    """Lower a whole model. Raises KeyError for a unit kind that has no lowering: our own fault, not the user's."""
    builder = _Builder()
    for unit in units:
        _LOWERINGS[unit.kind](builder, unit)
    return builder.finish()


class _Builder:
    """Collects ops; hands out buffer and weight ids, one per (name, width) and per tensor."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.buffers: dict[tuple[str, int], int] = {}
        self.buffer_values: list[Buffer] = []
        self.weights: dict[str, int] = {}
        self.weight_values: list[Weight] = []
        self.constants: dict[tuple[float, ...], int] = {}
        self.kv_layers: list[KvLayer] = []
        self.n_embd = 0
        self.n_vocab = 0

    def buffer(self, name: str, width: int, *, is_output: bool = False) -> int:
        key = (name, width)
        if key not in self.buffers:
            self.buffers[key] = len(self.buffer_values)
            self.buffer_values.append(Buffer(name, width, is_output))
        return self.buffers[key]

    def _weight(self, value: Weight) -> int:
        index = self.weights.setdefault(value.name, len(self.weight_values))
        if index == len(self.weight_values):
            self.weight_values.append(value)
        elif value.packed and not self.weight_values[index].packed:
            self.weight_values[index] = value  # a tied head: looked up as rows, multiplied as a matrix
        return index

    def vector(self, unit: Unit, role: str) -> int:
        """A norm, a bias or embedding rows; -1 when the unit has no such tensor."""
        tensor = unit.tensors.get(role)
        return -1 if tensor is None else self._weight(Weight(tensor.name, tensor))

    def matrix(self, unit: Unit, role: str) -> int:
        tensor = unit.tensors[role]
        return self._weight(Weight(tensor.name, tensor, packed=True))

    def constant(self, name: str, values: tuple[float, ...]) -> int:
        """A vector of the metadata; layers with equal values share one."""
        number = self.constants.setdefault(values, len(self.constants))
        return self._weight(Weight(f"{name}.{number}", constant=values))

    def add(self, kind: OpKind, unit: Unit, **operands: Any) -> None:
        self.ops.append(Op(kind, unit.layer, **operands))

    def residual(self) -> int:
        return self.buffer("residual", self.n_embd)

    def finish(self) -> OpList:
        return OpList(
            tuple(self.ops),
            tuple(self.buffer_values),
            tuple(self.weight_values),
            tuple(self.kv_layers),
            self.n_vocab,
        )


def _norm(builder: _Builder, unit: Unit, role: str, source: int, target: int, *, add: bool = False) -> None:
    builder.add(
        OpKind.RMS_NORM,
        unit,
        inputs=(source,),
        outputs=(target,),
        weights=(builder.vector(unit, role),),
        ints=(int(add),),
        floats=(unit.shape.norm_eps,),  # type: ignore[union-attr]
    )


def _linear(
    builder: _Builder,
    unit: Unit,
    source: int,
    roles: tuple[str, ...],
    targets: tuple[int, ...],
    *,
    accumulate: bool = False,
    scale: float = 0.0,
    softcap: float = 0.0,
) -> None:
    builder.add(
        OpKind.LINEAR,
        unit,
        inputs=(source,),
        outputs=targets,
        weights=tuple(builder.matrix(unit, role) for role in roles),
        biases=tuple(builder.vector(unit, f"{role}_bias") for role in roles),
        ints=LinearInts(len(roles), int(accumulate)),
        floats=(scale, softcap),
    )


def _project_back(builder: _Builder, unit: Unit, source: int, role: str) -> None:
    """residual += W source, through the post norm where the unit has one."""
    if "post_norm" not in unit.tensors:
        _linear(builder, unit, source, (role,), (builder.residual(),), accumulate=True)
        return
    projected = builder.buffer("projected", builder.n_embd)
    _linear(builder, unit, source, (role,), (projected,))
    _norm(builder, unit, "post_norm", projected, builder.residual(), add=True)


def _embedding(builder: _Builder, unit: Unit) -> None:
    assert isinstance(unit.shape, EmbeddingShape)
    builder.n_embd = unit.shape.n_embd
    builder.add(
        OpKind.EMBED,
        unit,
        outputs=(builder.residual(),),
        weights=(builder.vector(unit, "token_embd"),),
        floats=(unit.shape.scale,),
    )


def _attention(builder: _Builder, unit: Unit) -> None:
    shape = unit.shape
    assert isinstance(shape, AttentionShape)
    query_width = shape.n_heads * shape.head_dim
    kv_width = shape.n_kv_heads * shape.head_dim
    normed = builder.buffer("normed", builder.n_embd)
    query = builder.buffer("query", query_width)
    key, value = builder.buffer("key", kv_width), builder.buffer("value", kv_width)
    attended = builder.buffer("attended", query_width)
    kv_layer = len(builder.kv_layers)
    builder.kv_layers.append(KvLayer(shape.n_kv_heads, shape.head_dim))

    _norm(builder, unit, "norm", builder.residual(), normed)
    _linear(builder, unit, normed, ("q", "k", "v"), (query, key, value))
    frequencies = builder.constant("inverse_frequencies", shape.inverse_frequencies)
    heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim)
    builder.add(
        OpKind.ROPE_STORE,
        unit,
        inputs=(query, key, value),
        weights=(builder.vector(unit, "q_norm"), builder.vector(unit, "k_norm"), frequencies),
        ints=RopeStoreInts(*heads, shape.rope_dim, ROPE_STYLE_CODES[shape.rope_style], kv_layer),
        floats=(shape.norm_eps, shape.rope_magnitude),
    )
    builder.add(
        OpKind.ATTENTION,
        unit,
        inputs=(query,),
        outputs=(attended,),
        ints=AttentionInts(*heads, 0, 0, kv_layer, shape.window_tokens),
        floats=(shape.score_scale, shape.score_softcap),
    )
    _project_back(builder, unit, attended, "output")


def _dense_ffn(builder: _Builder, unit: Unit) -> None:
    shape = unit.shape
    assert isinstance(shape, FfnShape)
    normed = builder.buffer("normed", builder.n_embd)
    gate, up = builder.buffer("gate", shape.n_ff), builder.buffer("up", shape.n_ff)
    _norm(builder, unit, "norm", builder.residual(), normed)
    _linear(builder, unit, normed, ("gate", "up"), (gate, up))
    builder.add(
        OpKind.GLU, unit, inputs=(gate, up), outputs=(gate,), ints=(ACTIVATION_CODES[shape.activation],)
    )
    _project_back(builder, unit, gate, "down")


def _moe_ffn(builder: _Builder, unit: Unit) -> None:
    shape = unit.shape
    assert isinstance(shape, MoeShape)
    normed = builder.buffer("normed", builder.n_embd)
    ids = builder.buffer("expert_ids", shape.n_experts_used)
    weights = builder.buffer("expert_weights", shape.n_experts_used)
    _norm(builder, unit, "norm", builder.residual(), normed)
    builder.add(
        OpKind.ROUTER,
        unit,
        inputs=(normed,),
        outputs=(ids, weights),
        weights=(builder.matrix(unit, "router"),),
        biases=(builder.vector(unit, "router_bias"),),
        ints=RouterInts(
            shape.n_experts, shape.n_experts_used, GATING_CODES[shape.gating], int(shape.normalize)
        ),
        floats=(shape.weights_scale,),
    )
    has_post_norm = "post_norm" in unit.tensors
    target = builder.buffer("projected", builder.n_embd) if has_post_norm else builder.residual()
    builder.add(
        OpKind.MOE,
        unit,
        inputs=(normed, ids, weights),
        outputs=(target,),
        weights=tuple(builder.matrix(unit, role) for role in ("gate_experts", "up_experts", "down_experts")),
        ints=MoeInts(ACTIVATION_CODES[shape.activation], shape.n_experts_used, int(not has_post_norm)),
    )
    if has_post_norm:
        _norm(builder, unit, "post_norm", target, builder.residual(), add=True)


def _head(builder: _Builder, unit: Unit) -> None:
    shape = unit.shape
    assert isinstance(shape, HeadShape)
    builder.n_vocab = shape.n_vocab
    chosen = builder.buffer("chosen", shape.n_embd, is_output=True)
    normed = builder.buffer("output_normed", shape.n_embd, is_output=True)
    logits = builder.buffer("logits", shape.n_vocab, is_output=True)
    builder.add(OpKind.SELECT, unit, inputs=(builder.residual(),), outputs=(chosen,))
    _norm(builder, unit, "norm", chosen, normed)
    scale = 0.0 if shape.logit_scale == 1.0 else shape.logit_scale
    _linear(builder, unit, normed, ("output",), (logits,), scale=scale, softcap=shape.logit_softcap)
    builder.add(OpKind.SAMPLE, unit, inputs=(logits,), ints=(shape.n_vocab,))


_LOWERINGS: dict[str, Callable[[_Builder, Unit], None]] = {
    "embedding": _embedding,
    "attention": _attention,
    "dense_ffn": _dense_ffn,
    "moe_ffn": _moe_ffn,
    "head": _head,
}

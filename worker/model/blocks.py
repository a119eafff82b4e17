"""Building blocks of architectures: checked tensors, and units in the forms that several architectures share.

`Parts` hands out tensors by name, type and shape and knows at the end which were missing and which nobody
asked for. The functions below it make units from `Sizes` and `Parts`. No block asks which architecture it
works for: what differs comes in as an argument.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from configs.errors import ModelFileError
from plans.units import (
    Activation,
    AttentionShape,
    EmbeddingShape,
    FfnShape,
    HeadShape,
    MoeShape,
    RopeStyle,
    TensorRef,
    Unit,
)
from worker.model.gguf import ModelFile
from worker.model.rope import Rope
from worker.model.types import WEIGHT_TYPES


class Parts:
    """The tensors of one model, taken one by one; `finish` refuses when some are missing or left over."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._taken: set[str] = set()
        self._missing: list[str] = []

    def has(self, name: str) -> bool:
        return name in self._file.tensors

    def matrix(self, name: str, *shape: int) -> TensorRef:
        """A matrix [columns, rows] or a stack of them [columns, rows, experts], of any type for weights."""
        return self._take(name, shape, WEIGHT_TYPES, "a type for weights")

    def vector(self, name: str, length: int) -> TensorRef:
        """A norm or a bias: F32[length]."""
        return self._take(name, (length,), frozenset({"F32"}), "F32")

    def vectors(self, prefix: str, lengths: dict[str, tuple[str, int]]) -> dict[str, TensorRef]:
        """Those that exist of `role -> (name after the prefix, length)`."""
        return {
            role: self.vector(prefix + name, length)
            for role, (name, length) in lengths.items()
            if self.has(prefix + name)
        }

    def read_vector(self, name: str, length: int) -> np.ndarray | None:
        """The values (f32[length]) of an optional vector."""
        if not self.has(name):
            return None
        self.vector(name, length)
        return self._file.tensor_bytes(name).view("<f4")

    def finish(self, units: list[Unit]) -> tuple[Unit, ...]:
        """`units` as a tuple, once every tensor of the file is accounted for."""
        present = self._file.tensors.keys()
        if self._missing:
            raise ModelFileError(
                f"{self._file.path}: {self._file.architecture} needs {len(self._taken)} tensors, "
                f"{len(self._missing)} of them are missing (the file has {len(present)} tensors); the "
                f"first is {self._missing[0]}"
            )
        left = [name for name in present if name not in self._taken]
        if left:
            raise ModelFileError(
                f"{self._file.path}: {len(left)} of {len(present)} tensors have no place in the architecture "
                f"{self._file.architecture} as it is supported here; the first is {left[0]}"
            )
        return tuple(units)

    def _take(self, name: str, shape: tuple[int, ...], types: frozenset[str], expected: str) -> TensorRef:
        self._taken.add(name)
        tensor = self._file.tensors.get(name)
        if tensor is None:
            self._missing.append(name)
            return TensorRef(name, "F32", shape, 0, 0, 0)
        if tensor.shape != shape and _without_ones(tensor.shape) != _without_ones(shape):
            raise ModelFileError(
                f"{self._file.path}: tensor {name} has shape {list(tensor.shape)}, the metadata ask for "
                f"{list(shape)}"
            )
        if tensor.type not in types:
            raise ModelFileError(f"{self._file.path}: tensor {name} is {tensor.type}, expected {expected}")
        return tensor


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Trailing dimensions of 1 carry no meaning; some writers pad shapes with them."""
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    return shape


class Sizes(NamedTuple):
    """The numbers that every supported architecture has, read by `read_sizes`."""

    n_layers: int
    n_embd: int
    n_vocab: int
    n_ff: tuple[int, ...]  # one a layer, as the following two
    n_heads: tuple[int, ...]
    n_kv_heads: tuple[int, ...]
    head_dim: int
    rope_dim: int
    norm_eps: float


def read_sizes(file: ModelFile) -> Sizes:
    """Sizes from the metadata under the architecture's own prefix. Raises ModelFileError by key and value."""
    metadata, prefix = file.metadata, file.architecture
    n_layers = metadata.integer(f"{prefix}.block_count", minimum=1, maximum=4096)
    n_embd = metadata.integer(f"{prefix}.embedding_length", minimum=1)
    n_heads = metadata.per_layer(f"{prefix}.attention.head_count", n_layers, minimum=1)
    n_kv_heads = metadata.per_layer(f"{prefix}.attention.head_count_kv", n_layers, n_heads[0], minimum=1)
    _check_heads(file, n_heads, n_kv_heads)
    head_dim = metadata.integer(f"{prefix}.attention.key_length", n_embd // n_heads[0], minimum=1)
    if metadata.integer(f"{prefix}.attention.value_length", head_dim) != head_dim:
        raise metadata.refuse(f"{prefix}.attention.value_length", f"{head_dim}, the length of keys")
    rope_dim = metadata.integer(f"{prefix}.rope.dimension_count", head_dim, minimum=2, maximum=head_dim)
    if rope_dim % 2:
        raise metadata.refuse(f"{prefix}.rope.dimension_count", "an even number")
    if not metadata.flag(f"{prefix}.attention.causal", True):
        raise metadata.refuse(f"{prefix}.attention.causal", "true (embedding models are not supported)")
    return Sizes(
        n_layers=n_layers,
        n_embd=n_embd,
        n_vocab=_n_vocab(file),
        n_ff=metadata.per_layer(f"{prefix}.feed_forward_length", n_layers, 0),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        norm_eps=metadata.number(f"{prefix}.attention.layer_norm_rms_epsilon"),
    )


def _check_heads(file: ModelFile, n_heads: tuple[int, ...], n_kv_heads: tuple[int, ...]) -> None:
    for heads, kv_heads in zip(n_heads, n_kv_heads, strict=True):
        if heads % kv_heads:
            key = f"{file.architecture}.attention.head_count_kv"
            raise file.metadata.refuse(key, f"a divisor of the {heads} attention heads")


def _n_vocab(file: ModelFile) -> int:
    """Rows of the embedding, which must be the length of the vocabulary where there is one."""
    embedding = file.tensors.get("token_embd.weight")
    n_rows = embedding.rows if embedding else file.metadata.integer(f"{file.architecture}.vocab_size", 0)
    if "tokenizer.ggml.tokens" in file.metadata:
        n_tokens = len(file.metadata.strings("tokenizer.ggml.tokens"))
        if embedding and n_tokens != n_rows:
            raise ModelFileError(
                f"{file.path}: token_embd.weight has {n_rows} rows, tokenizer.ggml.tokens {n_tokens} "
                "entries; they must be as many"
            )
        return n_tokens
    return n_rows


def expert_counts(file: ModelFile, required: bool) -> tuple[int, int]:
    """(experts, experts that a token uses); both 0 for a model without, which is refused where `required`."""
    prefix = file.architecture
    n_experts = file.metadata.integer(f"{prefix}.expert_count", 0, minimum=int(required), maximum=65536)
    if n_experts == 0:
        return 0, 0
    return n_experts, file.metadata.integer(f"{prefix}.expert_used_count", minimum=1, maximum=n_experts)


def embedding(parts: Parts, sizes: Sizes, scale: float = 1.0) -> Unit:
    """Token embedding, its rows multiplied by `scale`."""
    tensors = {"token_embd": parts.matrix("token_embd.weight", sizes.n_embd, sizes.n_vocab)}
    return Unit("embedding", "embedding", -1, tensors, EmbeddingShape(sizes.n_vocab, sizes.n_embd, scale))


def attention(
    parts: Parts,
    sizes: Sizes,
    layer: int,
    *,
    rope: Rope,
    rope_style: RopeStyle,
    qk_norm: bool = False,
    post_norm: bool = False,
    window_tokens: int = 0,
    score_scale: float | None = None,
) -> Unit:
    """Grouped-query attention of one layer; biases are taken where the file has them."""
    prefix, head_dim, n_embd = f"blk.{layer}.", sizes.head_dim, sizes.n_embd
    q_width, kv_width = sizes.n_heads[layer] * head_dim, sizes.n_kv_heads[layer] * head_dim
    tensors = {
        "norm": parts.vector(prefix + "attn_norm.weight", n_embd),
        "q": parts.matrix(prefix + "attn_q.weight", n_embd, q_width),
        "k": parts.matrix(prefix + "attn_k.weight", n_embd, kv_width),
        "v": parts.matrix(prefix + "attn_v.weight", n_embd, kv_width),
        "output": parts.matrix(prefix + "attn_output.weight", q_width, n_embd),
    }
    biases = {"q": q_width, "k": kv_width, "v": kv_width, "output": n_embd}
    tensors |= parts.vectors(
        prefix, {f"{at}_bias": (f"attn_{at}.bias", width) for at, width in biases.items()}
    )
    if qk_norm:
        tensors["q_norm"] = parts.vector(prefix + "attn_q_norm.weight", head_dim)
        tensors["k_norm"] = parts.vector(prefix + "attn_k_norm.weight", head_dim)
    if post_norm:
        tensors["post_norm"] = parts.vector(prefix + "post_attention_norm.weight", n_embd)
    shape = AttentionShape(
        n_heads=sizes.n_heads[layer],
        n_kv_heads=sizes.n_kv_heads[layer],
        head_dim=head_dim,
        rope_dim=sizes.rope_dim,
        rope_style=rope_style,
        inverse_frequencies=rope.inverse_frequencies,
        score_scale=score_scale or 1.0 / math.sqrt(head_dim),
        norm_eps=sizes.norm_eps,
        window_tokens=window_tokens,
        rope_magnitude=rope.magnitude,
    )
    return Unit(f"layer.{layer}.attention", "attention", layer, tensors, shape)


def dense_ffn(
    parts: Parts, sizes: Sizes, layer: int, activation: Activation = "silu", post_norm: bool = False
) -> Unit:
    """down(act(gate x) * up x)."""
    prefix, n_embd, n_ff = f"blk.{layer}.", sizes.n_embd, sizes.n_ff[layer]
    tensors = {
        "norm": parts.vector(prefix + "ffn_norm.weight", n_embd),
        "gate": parts.matrix(prefix + "ffn_gate.weight", n_embd, n_ff),
        "up": parts.matrix(prefix + "ffn_up.weight", n_embd, n_ff),
        "down": parts.matrix(prefix + "ffn_down.weight", n_ff, n_embd),
    }
    if post_norm:
        tensors["post_norm"] = parts.vector(prefix + "post_ffw_norm.weight", n_embd)
    return Unit(f"layer.{layer}.ffn", "dense_ffn", layer, tensors, FfnShape(n_ff, activation, sizes.norm_eps))


def moe_ffn(
    parts: Parts, sizes: Sizes, layer: int, n_experts: int, n_experts_used: int, n_ff_expert: int
) -> Unit:
    """Routed experts: softmax over all, the best `n_experts_used`, their weights divided by their sum."""
    prefix, n_embd = f"blk.{layer}.", sizes.n_embd
    tensors = {
        "norm": parts.vector(prefix + "ffn_norm.weight", n_embd),
        "router": parts.matrix(prefix + "ffn_gate_inp.weight", n_embd, n_experts),
        "gate_experts": parts.matrix(prefix + "ffn_gate_exps.weight", n_embd, n_ff_expert, n_experts),
        "up_experts": parts.matrix(prefix + "ffn_up_exps.weight", n_embd, n_ff_expert, n_experts),
        "down_experts": parts.matrix(prefix + "ffn_down_exps.weight", n_ff_expert, n_embd, n_experts),
    }
    shape = MoeShape(n_experts, n_experts_used, n_ff_expert, "silu", sizes.norm_eps)
    return Unit(f"layer.{layer}.ffn", "moe_ffn", layer, tensors, shape)


def head(parts: Parts, sizes: Sizes, logit_softcap: float = 0.0) -> Unit:
    """Final norm and projection; without `output.weight` the embedding serves as the projection."""
    name = "output.weight" if parts.has("output.weight") else "token_embd.weight"
    tensors = {
        "norm": parts.vector("output_norm.weight", sizes.n_embd),
        "output": parts.matrix(name, sizes.n_embd, sizes.n_vocab),
    }
    return Unit(
        "head", "head", -1, tensors, HeadShape(sizes.n_vocab, sizes.n_embd, sizes.norm_eps, logit_softcap)
    )

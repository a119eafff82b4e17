"""Tiny but legal GGUF models for tests: every architecture, every tensor type, random weights of sane size.

`write_model(folder, arch="llama", quant="Q8_0")` returns the path of a model that loads, tokenizes
(byte-level BPE or SentencePiece) and computes finite numbers. The same arguments give the same file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import dequantize, quantize

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3")

# Where the half-precision scale of a block is, and that of its minimums with the ratio that centres values.
_SCALE_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
_MINIMUM_AT = {"Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}
# A small embedding and strong layers: what the model says next depends on more than the token before.
_EMBEDDING_STD, _GAIN = 0.1, 3.0
Maker = Callable[..., tuple[str, np.ndarray, str]]
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"


@dataclass(frozen=True)
class TinyModel:
    """Numbers of a tiny model; widths are multiples of 256 so that every tensor type fits."""

    arch: str = "llama"
    quant: str = "Q8_0"
    embedding_quant: str | None = None  # None: as `quant`
    n_layers: int = 2
    n_embd: int = 256
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 64
    n_ff: int = 512
    n_experts: int = 0  # 0: dense, but qwen3moe has 8
    n_experts_used: int = 2
    window_tokens: int = 16  # gemma3 only
    window_period: int | None = None  # gemma3 only; None: the usual 6
    context_length_tokens: int = 512
    tied: bool = True
    rope_factors: bool = False
    tokenizer: str = "bpe"  # or "spm"
    split_max_tensors: int = 0  # more than 0: a split set, and the path returned is its first part
    seed: int = 1
    metadata: tuple[tuple[str, object], ...] = ()  # further keys under the architecture's prefix


def write_model(folder: Path, arch: str = "llama", quant: str = "Q8_0", **options: object) -> Path:
    """Write a model into `folder` and return its path. `options` are the fields of TinyModel."""
    model = TinyModel(arch=arch, quant=quant, **options)  # type: ignore[arg-type]
    if arch == "qwen3moe" and model.n_experts == 0:
        model = replace(model, n_experts=8)
    writer = gguf.GGUFWriter(None, arch, split_max_tensors=model.split_max_tensors)
    _write_sizes(writer, model)
    n_vocab = _write_spm(writer) if model.tokenizer == "spm" else _write_bpe(writer)
    for name, values, kind in _tensors(model, n_vocab):
        _add_tensor(writer, name, values, kind)
    path = Path(folder) / f"tiny-{arch}-{quant}.gguf"
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (
        path if not model.split_max_tensors else sorted(Path(folder).glob(f"{path.stem}-00001-of-*.gguf"))[0]
    )


def random_blocks(kind: str, rows: int, columns: int, std: float, rng: np.random.Generator) -> np.ndarray:
    """Random valid rows (uint8[rows, row bytes]) of a tensor type, their values spread by about `std`."""
    qtype = gguf.GGMLQuantizationType[kind]
    try:
        return quantize((rng.standard_normal((rows, columns)) * std).astype(np.float32), qtype).view(np.uint8)
    except NotImplementedError:
        pass
    block_elements, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    blocks = rng.integers(0, 256, (rows * columns // block_elements, block_bytes), dtype=np.uint8)
    _set_scale(kind, blocks, 1.0)
    spread = float(dequantize(blocks[:64], qtype).std())
    _set_scale(kind, blocks, std / spread)
    return blocks.reshape(rows, -1)


def _set_scale(kind: str, blocks: np.ndarray, scale: float) -> None:
    if kind == "IQ1_M":  # its scale is spread over the top nibbles of four 16-bit words
        bits = int(np.float16(scale).view(np.uint16))
        words = blocks[:, 48:56].view(np.uint16)
        for index in range(4):
            words[:, index] = (words[:, index] & 0x0FFF) | ((bits >> 4 * index & 0xF) << 12)
        return
    places = {_SCALE_AT.get(kind, 0): scale}
    if kind in _MINIMUM_AT:
        at, ratio = _MINIMUM_AT[kind]
        places[at] = scale * ratio
    for at, value in places.items():
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)


def _write_sizes(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_name(f"tiny {model.arch} {model.quant}")
    writer.add_block_count(model.n_layers)
    writer.add_context_length(model.context_length_tokens)
    writer.add_embedding_length(model.n_embd)
    writer.add_feed_forward_length(model.n_ff)
    writer.add_head_count(model.n_heads)
    writer.add_head_count_kv(model.n_kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if model.arch == "llama":
        writer.add_rope_dimension_count(model.head_dim)
    if model.n_experts:
        writer.add_expert_count(model.n_experts)
        writer.add_expert_used_count(model.n_experts_used)
        writer.add_expert_feed_forward_length(model.n_ff)
    if model.arch == "gemma3":
        writer.add_sliding_window(model.window_tokens)
        if model.window_period is not None:
            writer.add_uint32("gemma3.attention.sliding_window_pattern", model.window_period)
    for key, value in model.metadata:
        _add_value(writer, f"{model.arch}.{key}", value)


def _add_value(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)  # type: ignore[operator]


def _write_bpe(writer: gguf.GGUFWriter) -> int:
    """A byte-level vocabulary that can encode anything, with a few merges; returns its size."""
    alphabet = _byte_alphabet()
    merges = [("Ġ", letter) for letter in _LETTERS[:12]]
    merges += [(a, b) for a in _LETTERS[:6] for b in _LETTERS[:6] if a != b]
    merges += [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("in", "g"),
    ]  # 305 tokens: not a multiple of 16, on purpose
    made = list(dict.fromkeys(a + b for a, b in merges))
    merges = [next(pair for pair in merges if pair[0] + pair[1] == token) for token in made]
    tokens = [*alphabet, *made, *SPECIAL_TOKENS]
    first_special = len(tokens) - len(SPECIAL_TOKENS)
    types = [gguf.TokenType.NORMAL] * first_special + [gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_bos_token_id(first_special)
    writer.add_eos_token_id(first_special + 2)
    writer.add_pad_token_id(first_special)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(tokens)


def _write_spm(writer: gguf.GGUFWriter) -> int:
    """A SentencePiece vocabulary with byte fallback; returns its size."""
    kind = gguf.TokenType
    entries = [("<unk>", 0.0, kind.UNKNOWN), ("<s>", 0.0, kind.CONTROL), ("</s>", 0.0, kind.CONTROL)]
    entries += [(f"<0x{byte:02X}>", 0.0, kind.BYTE) for byte in range(256)]
    pieces = ["▁", *_LETTERS, "th", "he", "▁the", "▁t", "▁a", "in", "er", "an", "\n"]
    entries += [(piece, -float(rank), kind.NORMAL) for rank, piece in enumerate(pieces)]
    entries += [(token, 0.0, kind.CONTROL) for token in SPECIAL_TOKENS]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in entries])
    writer.add_token_scores([score for _, score, _ in entries])
    writer.add_token_types([token_type for _, _, token_type in entries])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT_TEMPLATE)
    return len(entries)


def _byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(stand_ins)) for byte in range(256)]


def _tensors(model: TinyModel, n_vocab: int) -> Iterator[tuple[str, np.ndarray, str]]:
    """(name, stored rows or float32 values, type) in the order of the file."""
    rng = np.random.default_rng(model.seed)

    def matrix(
        name: str, rows: int, columns: int, kind: str, std: float, stack: int = 1
    ) -> tuple[str, np.ndarray, str]:
        blocks = random_blocks(kind, rows * stack, columns, std, rng)
        return name, blocks.reshape(stack, rows, -1) if stack > 1 else blocks, kind

    def vector(
        name: str, length: int, centre: float = 1.0, spread: float = 0.1
    ) -> tuple[str, np.ndarray, str]:
        return name, (centre + spread * rng.standard_normal(length)).astype(np.float32), "F32"

    width = model.n_embd
    embedding_kind = model.embedding_quant or model.quant
    shrink = width**0.5 if model.arch == "gemma3" else 1.0  # which multiplies the embedding by this
    yield matrix("token_embd.weight", n_vocab, width, embedding_kind, _EMBEDDING_STD / shrink)
    if model.rope_factors:
        yield "rope_freqs.weight", np.linspace(1.0, 8.0, model.head_dim // 2, dtype=np.float32), "F32"
    for layer in range(model.n_layers):
        yield from _layer(model, f"blk.{layer}.", matrix, vector)
    yield vector("output_norm.weight", width, centre=4.0 * shrink)
    if not model.tied:
        yield matrix("output.weight", n_vocab, width, embedding_kind, _EMBEDDING_STD / shrink)


def _layer(
    model: TinyModel, prefix: str, matrix: Maker, vector: Maker
) -> Iterator[tuple[str, np.ndarray, str]]:
    width, kind, head_dim = model.n_embd, model.quant, model.head_dim
    q_width, kv_width = model.n_heads * head_dim, model.n_kv_heads * head_dim
    std = width**-0.5
    yield vector(prefix + "attn_norm.weight", width)
    for name, rows in (("attn_q", q_width), ("attn_k", kv_width), ("attn_v", kv_width)):
        yield matrix(f"{prefix}{name}.weight", rows, width, kind, std)
        if model.arch == "qwen2":
            yield vector(f"{prefix}{name}.bias", rows, centre=0.0)
    yield matrix(prefix + "attn_output.weight", width, q_width, kind, _GAIN * q_width**-0.5)
    if model.arch in ("qwen3", "qwen3moe", "gemma3"):
        yield vector(prefix + "attn_q_norm.weight", head_dim)
        yield vector(prefix + "attn_k_norm.weight", head_dim)
    if model.arch == "gemma3":
        yield vector(prefix + "post_attention_norm.weight", width)
        yield vector(prefix + "post_ffw_norm.weight", width)
    yield vector(prefix + "ffn_norm.weight", width)
    suffix, stack = ("_exps", model.n_experts) if model.n_experts else ("", 1)
    if model.n_experts:
        yield matrix(prefix + "ffn_gate_inp.weight", model.n_experts, width, "F32", 4 * std)
    yield matrix(f"{prefix}ffn_gate{suffix}.weight", model.n_ff, width, kind, std, stack)
    yield matrix(f"{prefix}ffn_up{suffix}.weight", model.n_ff, width, kind, std, stack)
    yield matrix(f"{prefix}ffn_down{suffix}.weight", width, model.n_ff, kind, _GAIN * model.n_ff**-0.5, stack)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    if kind in ("F32", "F16"):
        writer.add_tensor(name, values.view(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType[kind])

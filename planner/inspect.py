"""A model file becomes a ModelCard: what it is, where its bytes are, and whether the native engine runs it.

Works for every readable GGUF file. Only headers are read; a broken file is refused by the reader with
ModelFileError.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from configs.errors import ModelFileError, printable
from plans.card import CARD_VERSION, KindBytes, KvLayer, ModelCard, TypeBytes, kv_layers_of
from plans.units import TensorRef, Unit
from worker.model import archs
from worker.model.gguf import ModelFile, open_model
from worker.model.metadata import Metadata, StringArray
from worker.model.tokenizer import check_tokenizer_kind

# Weight types that the native engine has matrix kernels for (worker/cpu); the probe reports the rate of each.
NATIVE_TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0") + tuple(
    f"Q{bits}_K" for bits in range(2, 7)
)
_GROUPS = (  # first match names the group of a tensor where there are no units to ask
    (re.compile(r"^token_embd"), "embedding"),
    (re.compile(r"^output"), "head"),
    (re.compile(r"ffn_.*_exps\b|ffn_gate_inp"), "moe_ffn"),
    (re.compile(r"ffn_"), "dense_ffn"),
    (re.compile(r"attn|ssm|shortconv|time_mix"), "attention"),
)


def _native_reason(file: ModelFile) -> tuple[tuple[Unit, ...], str | None]:
    """The units, or why the native engine cannot run this file."""
    try:
        units = archs.units(file)
    except ModelFileError as error:
        return (), str(error).removeprefix(f"{file.path}: ")
    weights = [tensor for unit in units for tensor in unit.tensors.values() if len(tensor.shape) > 1]
    unknown = Counter(tensor.type for tensor in weights if tensor.type not in NATIVE_TYPES)
    if not unknown:
        return units, None
    found = ", ".join(f"{name} ({count} tensors)" for name, count in unknown.most_common())
    return units, f"no native kernels for {found}; there are kernels for {', '.join(NATIVE_TYPES)}"


def _tokenizer_reason(file: ModelFile) -> str | None:
    """Why its text cannot be turned into tokens; the vocabulary itself is not read for it."""
    try:
        check_tokenizer_kind(file.metadata)
    except ModelFileError as error:
        return str(error)
    return None


def _group_of(name: str) -> str:
    return next((group for pattern, group in _GROUPS if pattern.search(name)), "other")


def _sum_kinds(pairs: Iterable[tuple[str, TensorRef]]) -> tuple[KindBytes, ...]:
    """Every tensor once, even where a tied head names the embedding's."""
    totals: dict[str, list[int]] = {}
    seen: set[str] = set()
    for kind, tensor in pairs:
        if tensor.name in seen:
            continue
        seen.add(tensor.name)
        total = totals.setdefault(kind, [0, 0])
        total[0] += tensor.bytes
        total[1] += 1
    return tuple(KindBytes(kind, *total) for kind, total in totals.items())


def _kinds(file: ModelFile, units: tuple[Unit, ...]) -> tuple[KindBytes, ...]:
    if not units:
        return _sum_kinds((_group_of(tensor.name), tensor) for tensor in file.tensors.values())
    placed = [(unit.kind, tensor) for unit in units for tensor in unit.tensors.values()]
    names = {tensor.name for _, tensor in placed}
    others = [("other", tensor) for tensor in file.tensors.values() if tensor.name not in names]
    return _sum_kinds([*placed, *others])


def _types(tensors: Iterable[TensorRef]) -> tuple[TypeBytes, ...]:
    totals: dict[str, list[int]] = {}
    for tensor in tensors:
        total = totals.setdefault(tensor.type, [0, 0, 0])
        total[0] += tensor.bytes
        total[1] += 1
        total[2] += math.prod(tensor.shape)
    ordered = sorted(totals.items(), key=lambda item: -item[1][0])
    return tuple(TypeBytes(name, *total) for name, total in ordered)


def _whole(metadata: Metadata, key: str) -> int | None:
    """A whole number of the metadata; None where it is missing or something else."""
    with contextlib.suppress(ModelFileError):
        return metadata.integer(key)
    return None


def _text(metadata: Metadata, key: str) -> str | None:
    value = metadata.get(key)
    return printable(value) if isinstance(value, str) and value else None


def _kv_layers(file: ModelFile) -> tuple[KvLayer, ...]:
    """Of any architecture that follows the usual keys; () where these are missing, so nothing is guessed."""
    metadata, prefix = file.metadata, file.architecture
    n_layers = _whole(metadata, f"{prefix}.block_count")
    n_embd = _whole(metadata, f"{prefix}.embedding_length")
    n_heads = _whole(metadata, f"{prefix}.attention.head_count")
    if not n_layers or not n_embd or not n_heads:
        return ()
    try:
        kv_heads = metadata.per_layer(f"{prefix}.attention.head_count_kv", n_layers, n_heads)
    except ModelFileError:
        return ()
    key_dim = _whole(metadata, f"{prefix}.attention.key_length") or n_embd // n_heads
    value_dim = _whole(metadata, f"{prefix}.attention.value_length") or n_embd // n_heads
    return tuple(KvLayer(count, key_dim, value_dim) for count in kv_heads)


def _n_vocab(file: ModelFile) -> int | None:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, StringArray):
        return len(tokens)
    return _whole(file.metadata, f"{file.architecture}.vocab_size")


def card_of(file: ModelFile) -> ModelCard:
    """The card of an open model."""
    metadata, prefix = file.metadata, file.architecture
    units, reason = _native_reason(file)
    return ModelCard(
        card_version=CARD_VERSION,
        name=_text(metadata, "general.name") or file.path.stem,
        architecture=printable(prefix),
        paths=tuple(str(path) for path in file.paths),
        file_bytes=file.file_bytes,
        parameters=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        n_layers=_whole(metadata, f"{prefix}.block_count"),
        n_embd=_whole(metadata, f"{prefix}.embedding_length"),
        n_vocab=_n_vocab(file),
        context_length_tokens=_whole(metadata, f"{prefix}.context_length"),
        n_experts=_whole(metadata, f"{prefix}.expert_count") or None,
        n_experts_used=_whole(metadata, f"{prefix}.expert_used_count") or None,
        tokenizer=_text(metadata, "tokenizer.ggml.model"),
        pre_tokenizer=_text(metadata, "tokenizer.ggml.pre"),
        has_chat_template=_text(metadata, "tokenizer.chat_template") is not None,
        types=_types(file.tensors.values()),
        kinds=_kinds(file, units),
        kv_layers=kv_layers_of(units) or _kv_layers(file),
        native_reason=reason,
        units=units,
        tokenizer_reason=_tokenizer_reason(file),
    )


def read_card(path: Path) -> ModelCard:
    """Opens the model at `path` (any part of a split set).

    Raises ModelFileError for a file that is none, and for a path that no card and no plan can hold.
    """
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        raise ModelFileError(f"{path}: the path is not valid UTF-8; rename what is not") from None
    return card_of(open_model(path.absolute()))

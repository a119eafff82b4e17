"""Cards of model files, supported or not."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

import placewright
from configs.errors import ModelFileError, PlanError
from planner.inspect import NATIVE_TYPES, read_card
from planner.workload import check_context
from plans.show import card_builtins, card_text
from tests.model import raw_gguf
from tests.model.raw_gguf import words
from tests.planner import fakes
from tests.tiny import write_model
from worker.model import archs
from worker.model.gguf import open_model


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe", "gemma3"])
def test_a_supported_model(tmp_path: Path, arch: str) -> None:
    card = read_card(write_model(tmp_path, arch))
    assert card.supported and card.architecture == arch and card.units
    total = sum(entry.bytes for entry in card.types)
    assert sum(entry.bytes for entry in card.kinds) == total < card.file_bytes
    assert sum(entry.parameters for entry in card.types) == card.parameters
    assert card.kv_elements_per_token > 0
    assert (card.n_experts is not None) == (arch == "qwen3moe")


def test_the_json_form_sums_units_up(tmp_path: Path) -> None:
    content = card_builtins(read_card(write_model(tmp_path)))
    assert content["native_supported"] is True
    assert {"name", "kind", "layer", "bytes", "types"} == set(content["units"][0])


def test_the_text_form_names_types_and_parts(tmp_path: Path) -> None:
    text = card_text(read_card(write_model(tmp_path, quant="Q4_0")))
    assert "Q4_0" in text and "attention" in text and "native        runs" in text


def write_strange(folder: Path) -> Path:
    tensors = [
        raw_gguf.tensor("token_embd.weight", (64, 8)),
        raw_gguf.tensor("blk.0.ssm_in.weight", (64, 4), offset=2048),
        raw_gguf.tensor("blk.0.ffn_up_exps.weight", (64, 2, 2), offset=3072),
    ]
    metadata = [
        raw_gguf.words("general.architecture", "strange"),
        raw_gguf.number("strange.block_count", 1),
        raw_gguf.number("strange.context_length", 512),
    ]
    path = folder / "strange.gguf"
    path.write_bytes(raw_gguf.build(metadata, tensors, bytes(4096)))
    return path


def test_an_unknown_architecture_is_told_and_refused_with_the_reason(tmp_path: Path) -> None:
    card = read_card(write_strange(tmp_path))
    assert not card.supported and card.units == ()
    assert card.native_reason is not None and "'strange' is not supported" in card.native_reason
    assert {entry.kind for entry in card.kinds} == {"embedding", "attention", "moe_ffn"}
    assert card.kv_layers == () and card.context_length_tokens == 512
    assert "does not run" in card_text(card)


def test_a_context_of_more_positions_than_kernels_count_is_refused_as_the_worker_does(tmp_path: Path) -> None:
    assert read_card(write_model(tmp_path, context_length_tokens=2**31 - 1)).supported
    path = write_model(tmp_path, context_length_tokens=2**31)
    reason = read_card(path).native_reason
    assert reason is not None and reason.endswith(
        "llama.context_length = 2147483648, expected a whole number from 1 to 2147483647"
    )
    with pytest.raises(ModelFileError, match=re.escape(reason)):
        archs.units(open_model(path))


def test_a_context_that_no_number_of_the_kernels_holds_is_refused() -> None:
    unknown = msgspec.structs.replace(fakes.card(), context_length_tokens=None)
    assert check_context(unknown, 2**31 - 1, 4096) == 2**31 - 1
    with pytest.raises(PlanError, match=r"--ctx 2147483648 is out of range; use \d+ to 2147483647"):
        check_context(unknown, 2**31, 4096)


def test_a_type_without_kernels_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "planner.inspect.NATIVE_TYPES", tuple(name for name in NATIVE_TYPES if name != "Q8_0")
    )
    card = read_card(write_model(tmp_path, quant="Q8_0"))
    assert card.native_reason is not None and "no native kernels for Q8_0" in card.native_reason


def test_an_unknown_tokenizer_is_told(tmp_path: Path) -> None:
    path = write_model(tmp_path)
    content = path.read_bytes()
    assert content.count(b"gpt-2") == 1
    path.write_bytes(content.replace(b"gpt-2", b"gpt-x"))
    card = read_card(path)
    assert card.tokenizer_reason is not None and "tokenizer.ggml.pre is 'gpt-x'" in card.tokenizer_reason
    assert "cannot be used" in card_text(card)


def test_a_name_does_not_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "m.gguf"
    name = "Gr\u00fc\u00dfe \x1b[31m\x1b]0;title\x07\x9b1m"
    path.write_bytes(raw_gguf.build([words("general.architecture", "\x1b[1m"), words("general.name", name)]))
    card = read_card(path)
    assert card.name == "Gr\u00fc\u00dfe \ufffd[31m\ufffd]0;title\ufffd\ufffd1m" and "\x1b" not in card_text(
        card
    )
    assert placewright.run(["plan", str(path)]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """A plan is a text file and could not name it."""
    model = write_model(tmp_path, "llama", "Q8_0").rename(tmp_path / os.fsdecode(b"m\xe9.gguf"))
    with pytest.raises(ModelFileError, match="not valid UTF-8"):
        read_card(model)

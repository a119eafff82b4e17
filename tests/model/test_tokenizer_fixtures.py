"""Ids and prompts against llama.cpp: its vocabulary fixtures and templates, and real models.

PLACEWRIGHT_FIXTURES is a folder filled by scripts/fetch-fixtures, PLACEWRIGHT_TEST_MODELS one with GGUF files
named as in golden/tokenizer_models.json.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from worker.model.chat_template import ChatTemplate, load_chat_template
from worker.model.detokenizer import StreamDecoder
from worker.model.gguf import open_model
from worker.model.tokenizer import load_tokenizer

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parent / "golden"
CHAT_PROMPTS: dict[str, Any] = json.loads((GOLDEN / "chat_prompts.json").read_text())
MODELS: dict[str, Any] = json.loads((GOLDEN / "tokenizer_models.json").read_text())
VOCABULARIES = [
    *("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "phi-3"),
    *("qwen2", "qwen35", "refact", "starcoder"),
]
# What a template needs from the caller.
EXTRA = {
    "fireworks-ai-llama-3-firefunction-v2": {"functions": "[]", "datetime": "Jan 01 2026"},
}


def folder_of(variable: str) -> Path:
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"{variable} is not set")
    return Path(value)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_vocabulary_gives_the_ids_of_llama_cpp(name: str) -> None:
    path = folder_of("PLACEWRIGHT_FIXTURES") / "vocabularies" / f"ggml-vocab-{name}.gguf"
    tokenizer = load_tokenizer(open_model(path).metadata)
    texts = Path(f"{path}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")[:-1]
    expected = Path(f"{path}.out").read_text().splitlines()
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        found = tokenizer.encode(text, add_special=False, parse_special=False)
        assert found == [int(token_id) for token_id in ids.split()], text
        decoder = StreamDecoder(tokenizer)
        assert "".join(map(decoder.push, found)) + decoder.flush() == tokenizer.decode(found)


def test_every_template_renders() -> None:
    paths = sorted((folder_of("PLACEWRIGHT_FIXTURES") / "templates").glob("*.jinja"))
    assert len(paths) == 73
    plain = [{"role": "user", "content": "some needle"}]
    part = {"type": "text", "text": "some needle", "source_lang_code": "de", "target_lang_code": "en"}
    for path in paths:
        template = ChatTemplate(path.read_text(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
        messages = [{"role": "user", "content": [part]}] if "translate" in path.name else plain
        assert "some needle" in template.render(messages, **EXTRA.get(path.stem, {})), path.name
        template.close()


@pytest.mark.parametrize("name", sorted(CHAT_PROMPTS["prompts"]))
def test_prompts_are_those_of_llama_cpp(name: str) -> None:
    path = folder_of("PLACEWRIGHT_FIXTURES") / "templates" / name
    template = ChatTemplate(path.read_text(), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    for conversation, digest in CHAT_PROMPTS["prompts"][name].items():
        given = CHAT_PROMPTS["conversations"][conversation]
        prompt = template.render(given["messages"], tools=given.get("tools"), enable_thinking=True)
        assert hashlib.sha256(prompt.encode()).hexdigest().startswith(digest), prompt
    template.close()


@pytest.mark.parametrize("name", sorted(MODELS["models"]))
def test_real_model(name: str) -> None:
    path = folder_of("PLACEWRIGHT_TEST_MODELS") / name
    if not path.exists():
        pytest.skip(f"{name} is not in PLACEWRIGHT_TEST_MODELS")
    metadata = open_model(path).metadata
    tokenizer = load_tokenizer(metadata)
    golden = MODELS["models"][name]
    for special, key in ((False, "ids_plain"), (True, "ids_special")):
        for text, ids in zip(MODELS["texts"], golden[key], strict=True):
            found = tokenizer.encode(text, add_special=special, parse_special=special)
            assert " ".join(map(str, found)) == ids, text
    assert " ".join(map(str, sorted(tokenizer.end_ids))) == golden["end_ids"]
    template = load_chat_template(metadata)
    for conversation, prompt in golden.get("prompts", {}).items():
        assert template is not None
        given = MODELS["conversations"][conversation]
        assert template.render(given["messages"], tools=given.get("tools")) == prompt
    if template is not None:
        template.close()

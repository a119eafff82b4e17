"""Byte-level BPE on tiny vocabularies: cutting, merging, special tokens, ends, and refusals."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import ModelFileError
from tests.model.tiny_vocabulary import BPE_MERGES, bpe_metadata
from worker.model.pretokenizers import RULES
from worker.model.tokenizer import Tokenizer, load_tokenizer
from worker.model.tokenizer_bpe import BYTE_OF_CHARACTER, CHARACTER_OF_BYTE

TOKENIZERS = {pre: load_tokenizer(bpe_metadata(pre)) for pre in RULES}
SMOLLM = TOKENIZERS["smollm"]
BOS = SMOLLM.token_id("<|im_start|>")
EOS = SMOLLM.token_id("<|im_end|>")


def spell(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=special)
    return [tokenizer.token_text(token_id) for token_id in ids]


def test_byte_alphabet_is_a_bijection() -> None:
    assert len(BYTE_OF_CHARACTER) == len(CHARACTER_OF_BYTE) == 256
    assert CHARACTER_OF_BYTE[ord(" ")] == "Ġ" and CHARACTER_OF_BYTE[ord("\n")] == "Ċ"


def test_merges_in_order_of_rank() -> None:
    assert spell(SMOLLM, "hello world") == ["hello", "Ġworld"]
    assert spell(SMOLLM, "hell") == ["hell"]
    assert spell(SMOLLM, "ü") == ["Ã¼"]


@pytest.mark.parametrize("pre", sorted({rule: name for name, rule in RULES.items()}.values()))
@given(text=st.text())
def test_decode_undoes_encode(pre: str, text: str) -> None:
    tokenizer = TOKENIZERS[pre]
    text = text.encode("utf-8", "ignore").decode()
    for parse_special in (False, True):
        ids = tokenizer.encode(text, add_special=False, parse_special=parse_special)
        assert tokenizer.decode(ids) == text
        assert tokenizer.fewest_tokens(text) <= len(ids)


@given(word=st.text(alphabet="helowrd", max_size=12))
def test_same_as_naive_merging(word: str) -> None:
    parts = list(word)
    for merge in BPE_MERGES:
        left, right = merge.split(" ")
        index = 0
        while index + 1 < len(parts):
            if parts[index] == left and parts[index + 1] == right:
                parts[index : index + 2] = [left + right]
            index += 1
    assert spell(SMOLLM, word) == parts


def test_the_pre_tokenizer_decides_where_words_end() -> None:
    assert spell(TOKENIZERS["gpt-2"], "12") == ["12"]
    assert spell(TOKENIZERS["qwen2"], "12") == ["1", "2"]
    assert spell(TOKENIZERS["smollm"], "a  hello") == ["a", "Ġ", "Ġ", "hello"]


CUTS = {
    "gpt-2": ("I'LL've 1234  x\n\n y", ["I", "'", "LL", "'ve", "Ġ1234", "Ġ", "Ġx", "ĊĊ", "Ġy"]),
    "smollm": ("a12 b", ["a", "1", "2", "Ġb"]),
    "llama-bpe": ("I'LL 12345!\n\nx", ["I", "'LL", "Ġ", "123", "45", "!ĊĊ", "x"]),
    "qwen2": ("ab12 c?\n", ["ab", "1", "2", "Ġc", "?Ċ"]),
    "qwen35": ("e\u0301a x", ["eÌģa", "Ġx"]),
    "falcon": ("a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
    "deepseek-coder": ("x. = 12\n", ["x", ".", "Ġ=Ġ", "1", "2", "Ċ"]),
    "deepseek-llm": ("Hi 123!", ["Hi", "Ġ", "123", "!"]),
    "tekken": ("helloWorld/12", ["hello", "World", "/", "1", "2"]),
}


@pytest.mark.parametrize("pre", sorted(CUTS))
def test_each_rule_cuts_words_its_own_way(pre: str) -> None:
    text, expected = CUTS[pre]
    assert [piece for piece, _ in RULES[pre].build().pre_tokenize_str(text)] == expected


def test_whole_words_win_where_merges_are_ignored() -> None:
    metadata = bpe_metadata("llama-bpe")
    metadata["tokenizer.ggml.tokens"][0:0] = ["held"]
    metadata["tokenizer.ggml.token_type"][0:0] = [1]
    assert spell(load_tokenizer(metadata), "held") == ["held"]
    metadata["tokenizer.ggml.pre"] = "smollm"
    assert spell(load_tokenizer(metadata), "held") == ["he", "l", "d"]


def test_merges_through_a_missing_token() -> None:
    metadata = bpe_metadata()
    tokens = metadata["tokenizer.ggml.tokens"]
    tokens[tokens.index("hell")] = "unrelated"
    tokenizer = load_tokenizer(metadata)
    assert spell(tokenizer, "hello") == ["hello"]
    assert spell(tokenizer, "hell") == ["h", "e", "l", "l"]


def test_an_unknown_byte_is_dropped_but_keeps_its_neighbours_apart() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"][ord("x")] = "unrelated"
    assert spell(load_tokenizer(metadata), "hexllo") == ["he", "ll", "o"]
    assert spell(load_tokenizer(metadata), "helxlo") == ["he", "l", "l", "o"]


def test_control_tokens_only_on_request() -> None:
    assert spell(SMOLLM, "<|im_end|>hello", special=True) == ["<|im_end|>", "hello"]
    assert "<|im_end|>" not in spell(SMOLLM, "<|im_end|>hello")
    assert spell(SMOLLM, "hello<tool>") == ["hello", "<tool>"]


def test_exactly_one_begin_and_end() -> None:
    tokenizer = load_tokenizer(
        bpe_metadata(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True})
    )
    hello = tokenizer.token_id("hello")
    for text in ("hello", "<|im_start|>hello", "<|im_start|>hello<|im_end|>"):
        assert tokenizer.encode(text, add_special=True, parse_special=True) == [BOS, hello, EOS]
    assert tokenizer.encode("", add_special=True, parse_special=True) == [BOS, EOS]
    assert tokenizer.encode("hello", add_special=False, parse_special=True) == [hello]
    assert SMOLLM.encode("hello", add_special=True, parse_special=True) == [hello]
    assert TOKENIZERS["llama-bpe"].add_bos


def test_ids_and_kinds() -> None:
    assert (SMOLLM.bos_id, SMOLLM.eos_id, SMOLLM.n_vocab) == (BOS, EOS, 256 + len(BPE_MERGES) + 3)
    assert SMOLLM.end_ids == {EOS}
    assert SMOLLM.is_control(EOS) and not SMOLLM.is_control(0)
    assert SMOLLM.piece_bytes(EOS) == b"<|im_end|>"
    assert SMOLLM.piece_bytes(0xC3) == b"\xc3"
    assert SMOLLM.decode([BOS, SMOLLM.token_id("hello"), EOS], skip_control=True) == "hello"
    for beyond in (-1, SMOLLM.n_vocab):
        with pytest.raises(IndexError):
            SMOLLM.piece_bytes(beyond)


def test_ends_are_found_by_their_text() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|endoftext|>", "<|file_sep|>", "<unused>"]
    metadata["tokenizer.ggml.token_type"] += [1, 1, 5]
    tokenizer = load_tokenizer(metadata)
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.end_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>", "<|file_sep|>"}
    assert all(tokenizer.is_control(token_id) for token_id in tokenizer.end_ids)
    assert tokenizer.piece_bytes(tokenizer.n_vocab - 1) == b""


def test_harmony_keeps_end_of_message_out_of_the_ends() -> None:
    metadata = bpe_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3, 3]
    tokenizer = load_tokenizer(metadata)
    ends = {tokenizer.token_text(token_id) for token_id in tokenizer.end_ids}
    assert ends == {"<|im_end|>", "<|return|>", "<|call|>"}
    assert not tokenizer.is_control(tokenizer.token_id("<|channel|>"))


def test_halves_of_surrogate_pairs_are_replaced() -> None:
    ids = SMOLLM.encode("a\ud800b\ud83d\ude00", add_special=False, parse_special=True)
    assert SMOLLM.decode(ids) == "a\ufffdb😀"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "bert"}, ["bert", "gpt2", "llama"]),
        ({"tokenizer.ggml.pre": "nonsense"}, ["nonsense", "smollm", "qwen35"]),
        ({"tokenizer.ggml.merges": None}, ["tokenizer.ggml.merges"]),
        ({"tokenizer.ggml.merges": ["ab"]}, ["merges[0]", "'ab'"]),
        ({"tokenizer.ggml.merges": ["a b", "a "]}, ["merges[1]", "'a '"]),
        ({"tokenizer.ggml.merges": [" b"]}, ["merges[0]", "' b'"]),
        ({"tokenizer.ggml.tokens": []}, ["tokenizer.ggml.tokens"]),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, ["'a'", "more than once"]),
        ({"tokenizer.ggml.tokens": "abc"}, ["tokenizer.ggml.tokens", "array"]),
        ({"tokenizer.ggml.tokens": ["a", 5]}, ["tokenizer.ggml.tokens", "int"]),
        ({"tokenizer.ggml.tokens": ["a", "\udc80"]}, ["tokenizer.ggml.tokens", "UTF-8"]),
        ({"tokenizer.ggml.merges": ["a \udc80"]}, ["tokenizer.ggml.merges", "UTF-8"]),
        ({"tokenizer.ggml.token_type": [1]}, ["token_type", "1 entries"]),
        ({"tokenizer.ggml.token_type": [6] * 300}, ["token 0", "byte", "<0x0A>"]),
        ({"tokenizer.ggml.eos_token_id": "5"}, ["eos_token_id", "str"]),
    ],
)
def test_refusals_name_what_is_wrong(change: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ModelFileError) as failure:
        load_tokenizer(bpe_metadata() | change)
    assert all(word in str(failure.value) for word in words)


def test_other_threads_run_while_a_long_text_is_cut() -> None:
    """The server's event loop lives in another thread than the tokenizer."""
    stopped, n_ticks = threading.Event(), 0

    def tick() -> None:
        nonlocal n_ticks
        while not stopped.wait(0.001):
            n_ticks += 1

    ticking = threading.Thread(target=tick)
    ticking.start()
    began_s = time.monotonic()
    SMOLLM.encode("hello world, 12 times over\n" * 40_000, add_special=False, parse_special=False)
    took_s, n_meanwhile = time.monotonic() - began_s, n_ticks
    stopped.set()
    ticking.join()
    assert n_meanwhile > 20 * took_s, f"{n_meanwhile} ticks in {took_s:.2f} s"

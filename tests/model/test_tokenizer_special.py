"""Cutting at special tokens, and the stream decoder and stop matcher that work at the other end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.model.tiny_vocabulary import bpe_metadata, spm_metadata
from worker.model.detokenizer import StopMatcher, StreamDecoder
from worker.model.tokenizer import load_tokenizer
from worker.model.tokenizer_special import SpecialSplitter

BPE = load_tokenizer(bpe_metadata())
SPM = load_tokenizer(spm_metadata())


def test_longer_tokens_are_cut_out_first() -> None:
    splitter = SpecialSplitter([("\n", 1), ("\n\n", 2), ("\n\n\n", 3)])
    assert splitter.split("a\n\n\n\n\nb") == ["a", 3, 2, "b"]
    assert SpecialSplitter([("ab", 1), ("bcd", 2)]).split("abcd") == ["a", 2]


def test_nothing_to_cut() -> None:
    assert SpecialSplitter([]).split("text") == ["text"]
    assert SpecialSplitter([("<x>", 1)]).split("") == []
    assert SpecialSplitter([("<x>", 1), ("]", 2)]).split("<x>]") == [1, 2]


@given(ids=st.lists(st.integers(0, BPE.n_vocab - 1)))
def test_stream_equals_decode(ids: list[int]) -> None:
    for tokenizer in (BPE, SPM):
        known = [token_id % tokenizer.n_vocab for token_id in ids]
        for skip_control in (False, True):
            decoder = StreamDecoder(tokenizer, skip_control=skip_control)
            text = "".join(decoder.push(token_id) for token_id in known) + decoder.flush()
            assert text == tokenizer.decode(known, skip_control=skip_control)


def test_incomplete_characters_are_held_back() -> None:
    decoder = StreamDecoder(BPE)
    assert [decoder.push(byte) for byte in "😀".encode()] == ["", "", "", "😀"]
    assert decoder.push(0xE2) == ""
    assert decoder.flush() == "\ufffd"


def run_matcher(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for chunk in chunks:
        text, hit = matcher.push(chunk)
        shown += text
        if hit is not None:
            return shown, hit
    return shown + matcher.flush(), None


def first_stop(stops: list[str], text: str) -> tuple[str, str | None]:
    """The shortest prefix that ends with a stop string, by trying all."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    chunks=st.lists(st.text(alphabet="abc", max_size=4), max_size=8),
)
def test_stop_matcher_does_not_depend_on_chunks(stops: list[str], chunks: list[str]) -> None:
    assert run_matcher(stops, chunks) == first_stop(stops, "".join(chunks))


def test_every_prefix_of_a_stop_string() -> None:
    stop = "<|end|>"
    for length in range(len(stop)):
        matcher = StopMatcher([stop])
        assert matcher.push("text" + stop[:length]) == ("text", None)
        assert matcher.push("!") == (stop[:length] + "!", None)
        matcher = StopMatcher([stop])
        matcher.push("text" + stop[:length])
        assert matcher.push(stop[length:] + "more") == ("", stop)
        assert matcher.push("again") == ("", stop) and matcher.flush() == ""


def test_text_is_not_held_without_need() -> None:
    matcher = StopMatcher(["\n\n", ""])
    assert matcher.push("a\nb") == ("a\nb", None)
    assert matcher.push("c\n") == ("c", None)
    assert StopMatcher([]).push("a") == ("a", None)

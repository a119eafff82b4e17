"""SentencePiece on tiny vocabularies, against a naive reading of the algorithm."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.model.tiny_vocabulary import SPM_PIECES, spm_metadata
from worker.model.tokenizer import Tokenizer, load_tokenizer

TOKENIZER = load_tokenizer(spm_metadata())
PLAIN = load_tokenizer(spm_metadata(**{"tokenizer.ggml.add_space_prefix": False}))


def spell(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[str]:
    ids = tokenizer.encode(text, add_special=False, parse_special=special)
    return [tokenizer.token_text(token_id) for token_id in ids]


def naive(pieces: dict[str, float], text: str) -> list[str]:
    """Merge the best pair anywhere in the whole text, the leftmost of equals, until there is none."""
    parts = list(text.replace(" ", "▁"))
    while True:
        scores = [pieces.get(left + right) for left, right in zip(parts, parts[1:], strict=False)]
        known = [score for score in scores if score is not None]
        if not known:
            break
        best = scores.index(max(known))
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    spelt: list[str] = []
    for part in parts:
        spelt += [part] if part in pieces else [f"<0x{byte:02X}>" for byte in part.encode()]
    return spelt


def test_words_and_spaces() -> None:
    assert spell(TOKENIZER, "hello") == ["▁hello"]
    assert spell(PLAIN, "hello") == ["hello"]
    assert spell(PLAIN, "hello  worldö") == naive(SPM_PIECES, "hello  worldö")


def test_bytes_where_no_token_fits() -> None:
    assert spell(PLAIN, "€") == ["<0xE2>", "<0x82>", "<0xAC>"]
    assert PLAIN.decode(PLAIN.encode("€\n", add_special=False, parse_special=False)) == "€\n"


def test_a_space_goes_before_text_that_follows_a_special_token() -> None:
    assert spell(TOKENIZER, "<s>hello</s>hello", special=True) == ["<s>", "▁hello", "</s>", "▁hello"]


def test_begin_of_sequence_is_the_default_and_single() -> None:
    hello = TOKENIZER.token_id("▁hello")
    assert TOKENIZER.encode("hello", add_special=True, parse_special=True) == [1, hello]
    assert TOKENIZER.encode("<s>hello", add_special=True, parse_special=True) == [1, hello]
    assert (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.end_ids) == (1, 2, {2})


def test_white_space_after_special_tokens_of_phi3_is_dropped() -> None:
    metadata = spm_metadata(**{"general.name": "Phi-3 mini", "tokenizer.ggml.add_space_prefix": False})
    assert spell(load_tokenizer(metadata), "</s> \n hello", special=True) == ["</s>", "hello"]
    assert spell(load_tokenizer(metadata), "<s> hello", special=True) == ["<s>", "▁hello"]


PIECES = st.dictionaries(
    st.text(alphabet="ab▁c", min_size=1, max_size=4), st.sampled_from([-1.0, -2.0, -3.0, -4.5]), max_size=25
)


@given(pieces=PIECES, text=st.text(alphabet="ab cé", max_size=25))
def test_same_as_naive_merging(pieces: dict[str, float], text: str) -> None:
    metadata = spm_metadata(pieces, **{"tokenizer.ggml.add_space_prefix": False})
    tokenizer = load_tokenizer(metadata)
    assert spell(tokenizer, text) == naive(pieces, text)
    assert spell(tokenizer, text) == naive(pieces, text)  # from the cache


@given(text=st.text())
def test_decode_undoes_encode(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode().replace("▁", "_")
    ids = PLAIN.encode(text, add_special=False, parse_special=False)
    assert PLAIN.decode(ids) == text

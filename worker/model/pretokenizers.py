"""How byte-level BPE models cut text into words before merging: one rule per name of `tokenizer.ggml.pre`.

A rule is a list of regular expressions. Each in turn cuts every piece that the one before it left: a match
becomes a piece of its own and so does the text between two matches. The expressions are part of the file
format (a model is trained on words cut by exactly these), written in the dialect of Oniguruma, which
`tokenizers` uses.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex, pre_tokenizers


class PreTokenizer(NamedTuple):
    """One rule. `ignore_merges`: a whole word found in the vocabulary is taken as it is, without merging.

    `add_bos`: what holds when the file does not say `tokenizer.ggml.add_bos_token`.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The rule as a step of `tokenizers`, bytes spelt as GPT-2's printable characters at the end."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns
        ]
        return pre_tokenizers.Sequence(
            [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )


# Pieces that several rules share. Contractions spell out both cases: a case-insensitive group would also take
# characters that merely fold to ASCII, such as the long s.
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_PUNCTUATION = rf"{_SYMBOLS}[\r\n]*"
_PUNCTUATION_OR_SLASH = rf"{_SYMBOLS}[\r\n/]*"
_BLANKS = r"\s+(?!\S)|\s+"
_SPACES = rf"\s*[\r\n]+|{_BLANKS}"
_THREE_DIGITS = r"\p{N}{1,3}"

_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_SYMBOLS}|{_BLANKS}"
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|{_THREE_DIGITS}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# Words that change case once, as o200k and Tekken cut them: letters that are not lower-case ASCII, then
# letters that are not upper-case ASCII, at least one of either kind.
_UPPER = r"(?:(?=\p{L})[^a-z])"
_LOWER = r"(?:(?=\p{L})[^A-Z])"
_CASED_WORDS = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_TEKKEN = rf"{_CASED_WORDS % ('', '')}|\p{{N}}|{_PUNCTUATION_OR_SLASH}|{_SPACES}"
_O200K = (
    rf"{_CASED_WORDS % (_CONTRACTIONS + '?', _CONTRACTIONS + '?')}"
    rf"|{_THREE_DIGITS}|{_PUNCTUATION_OR_SLASH}|{_SPACES}"
)
_WORDS_BY_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_SYMBOL_WORD = r"[!\"#$%\x26'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_WORD_BY_CATEGORIES = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_ASCII_SYMBOL_WORD}|{_WORD_BY_CATEGORIES}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_JAIS2_BLANKS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
# Its middle range holds the ideographic space, as the models' own tokenizers have it; llama.cpp replaces wide
# spaces before it matches, so the two may cut differently next to one.
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters as DeepSeek's first tokenizer lists them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)

_DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))

# Each rule with the names that files give it.
_NAMED_RULES: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", _DEFAULT),
    (
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling gigachat a.x-4.0 mellum exaone4 modern-bert "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe",
        PreTokenizer((_GPT2,)),
    ),
    (
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    (
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True),
    ),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        "qwen2 deepseek-r1-qwen stablelm2 megrez hunyuan solar-open kormo f2llmv2 grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                r"\s+\z",
                _CJK,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"))),
    (
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
        PreTokenizer((_THREE_DIGITS, _KANA_AND_HAN, _DEEPSEEK3)),
    ),
    ("tekken", PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_O200K,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_WORDS_BY_PUNCTUATION,))),
    ("viking", PreTokenizer((_WORDS_BY_PUNCTUATION, r"\p{N}"))),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])"
                rf"|{_WORD}|\p{{N}}|{_PUNCTUATION}|\s*[\r\n]|{_BLANKS}",
            )
        ),
    ),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}",))),
    ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _QWEN2))),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"|{_SYMBOLS}[\r\n/]?|\s*[\r\n]|{_BLANKS}",
            )
        ),
    ),
    (
        "minicpm5",
        PreTokenizer(
            (_THREE_DIGITS, rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}"), ignore_merges=True
        ),
    ),
    (
        "k2-horizon",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}|\p{{M}}|\u200c|\u200d)+"
                rf"|{_THREE_DIGITS}|{_PUNCTUATION}|{_SPACES}",
            )
        ),
    ),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_CONTRACTIONS}|{_WORD}|{_THREE_DIGITS}|{_PUNCTUATION}|\s*[\r\n]+{_JAIS2_BLANKS}"
                r"|\s{1,2}(?!\S)|\s",
            )
        ),
    ),
)

RULES: dict[str, PreTokenizer] = {name: rule for names, rule in _NAMED_RULES for name in names.split()}

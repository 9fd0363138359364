"""Rules by which byte-level tokenizers split text before merges, by llama.cpp's names (``tokenizer.ggml.pre``).

They are those of the models' own tokenizers, which llama.cpp approximates in places (llama-vocab.cpp).
"""

from __future__ import annotations

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from transformers.integrations.gguf import gguf_tokenizer_mapping as transformers_gguf

_KNOWN = {rule: (split,) for rule, split in transformers_gguf.GGUF_PRE_TOKENIZER_SPLITS.items()}  # to transformers

# Parts of expressions
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED_WORD = (  # capitals before small letters
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{_ENDINGS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{_ENDINGS}?"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    rf"|{_BLANKS}"
)
_OLD_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # of DeepSeek's first models
_LETTERS = (  # those of alphabets with capitals
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_POWERS = "|".join(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1))  # of 2: lengths of runs of blanks

# Expressions in turn, each for what the others left.
SPLITS: dict[str, tuple[str, ...]] = {
    **_KNOWN,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), (r"\p{N}{1,3}", _CJK, _DEEPSEEK)),
    **dict.fromkeys(("glm4", "glm5"), _KNOWN["llama3"]),
    **dict.fromkeys(("hunyuan", "stablelm2", "solar-open"), _KNOWN["qwen2"]),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_LETTERS}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        _OLD_CJK,
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CJK, r"\p{N}"),
    "seed-coder": (rf"{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
    "jais-2": (rf"{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|{_POWERS}|\s{{1,2}}(?!\S)|\s",),
    "exaone-moe": (
        rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "minicpm5": (r"\p{N}{1,3}", rf"{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"),
    "youtu": (
        "[\uac00-\ud7a3\u3131-\u318e]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+"
        "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+",
        rf"{_CASED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_BLANKS}",
    ),
    "afmoe": (
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",  # groups of three from the last digit
        "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0eff\u1780-\u17ff\u1000-\u109f"
        "\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
        _DEEPSEEK,
    ),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "viking": (" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+", r"\p{N}"),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", *_KNOWN["gpt-4o"]),
}
GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "exaone4", "mellum", "gigachat", "a.x-4.0", "granite-docling", "trillion", "jais")
GPT2_AND_DIGITS = (  # one by one
    *("command-r", "starcoder", "refact", "smollm", "exaone", "codeshell", "minerva-7b", "mellum2"),
)
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano")
# As in llama.cpp: a piece of text that is a token stays one, and BOS is added if the file does not say.
IGNORING_MERGES = (*LLAMA3, "tekken", "minicpm5", "youtu", "glm4", "glm5")
ADDING_BOS = (*LLAMA3, "tekken", "chameleon")
NORMALISED = ("qwen2", "qwen35", "deepseek-r1-qwen", "command-r", "tiny_aya")  # by the original tokenizers, not by llama.cpp


def is_known(rule: str | None) -> bool:
    return any(rule in rules for rules in (SPLITS, GPT2, GPT2_AND_DIGITS))


def pre_tokenizer_of(rule: str | None) -> PreTokenizer:
    """Return what splits text and spells its bytes; GPT-2's for an unknown rule."""
    splits = (r"\p{N}",) if rule in GPT2_AND_DIGITS else SPLITS.get(rule or "", ())
    pieces = ByteLevel(add_prefix_space=False, use_regex=rule not in SPLITS)
    return Sequence([*(Split(Regex(each), "isolated") for each in splits), pieces]) if splits else pieces

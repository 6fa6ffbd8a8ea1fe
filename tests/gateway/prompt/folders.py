"""Model folders of the shapes in which real ones come, small: what `test_reading` holds against transformers.

Vocabularies are learned here, by the plainest form of BPE, so that they are the same wherever this runs.
"""

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

TEXTS = [
    "Hello, world! The quick brown fox's den: don't.", " leading blank", "   three blanks  and two ", "\n\nlines\n\tand tabs\r\n",
    "12345 3.14 2\u00bd", "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u65e5\u672c\u8a9e\u306e\u30c6\u30b9\u30c8", "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0438\u0440",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "na\u00efve e\u0301tude \ufb01", "\U0001f600\U0001f1e9\U0001f1ea",
    "", " ", "x", "\u2581already\u2581marked", "<unk>", "<s>", "<s>x", "<s> x", "a<s>b</s>c", "a <s> b </s> c", "</s>\nnext", "<|one|>two<|three|>",
    " <|one|> two  <|three|> ", "<|extra|>text", "x<extra>y <image> z", "wordone two", "<|endoftext|>tail", "<pad>a<mask>b", "\n<s>\n",
]  # fmt: skip
_CORPUS = """the quick brown fox jumps over the lazy dog and the other dogs then the fox says hello world to them all
hello there this is the text that the tokens are learned of and there are words in it that are there again and again
\u041f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u043f\u0440\u0438\u0432\u0435\u0442 \u4f60\u597d \u4e16\u754c \u4f60\u597d na\u00efve den lines tabs leading blanks text next tail word words"""


def _learn(words: Counter[tuple[str, ...]], count: int) -> list[tuple[str, str]]:
    merges = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        words = Counter({_merged(word, best): times for word, times in words.items()})
    return merges


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


@cache
def _sentencepiece() -> dict[str, Any]:
    """The model of a converted Llama 2: bytes for what is not in the vocabulary, blanks as U+2581."""
    merges = _learn(Counter(tuple("\u2581" + word) for word in _CORPUS.split()), 120)
    symbols = sorted({symbol for word in _CORPUS.split() for symbol in "\u2581" + word} | {"<", ">", "|", "/", "\n"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *symbols]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces + [a + b for a, b in merges]))}
    return {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
            "fuse_unk": True, "byte_fallback": True, "vocab": vocab, "merges": [f"{a} {b}" for a, b in merges]}  # fmt: skip


@cache
def _bytes(ignore_merges: bool = False) -> dict[str, Any]:
    """The model of a GPT or Llama 3: all text is bytes."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = Counter(tuple(level.pre_tokenize_str(" " + word)[0][0]) for word in _CORPUS.split())
    merges = _learn(words, 150)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges), "hello", "\u0120blanks"]
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys(pieces))}
    return {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
            "fuse_unk": False, "byte_fallback": False, "ignore_merges": ignore_merges, "vocab": vocab,
            "merges": [[a, b] for a, b in merges]}  # fmt: skip


def token(text: str, **more: bool) -> dict[str, Any]:
    return {
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
        **more,
    }


_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"},
                                                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]}  # fmt: skip
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
_BEGIN = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
          "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
          "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}  # fmt: skip
_GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LLAMA3_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(words: str) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False},
                                                  {**_GPT2, "trim_offsets": False, "use_regex": False}]}  # fmt: skip


def sentencepiece(
    normalizer: Any = _PREPEND, pre: Any = None, added: tuple[dict[str, Any], ...] | None = None, **more: Any
) -> dict[str, Any]:
    """The tokenizer.json of a converted sentencepiece model."""
    own = [token("<unk>"), token("<s>"), token("</s>")]
    decoder = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ],
    }
    parts = {"normalizer": normalizer, "pre_tokenizer": pre, "post_processor": _BEGIN, "decoder": decoder}
    return _file(_sentencepiece(), own if added is None else list(added), **parts, **more)


def byte_level(
    *added: str | dict[str, Any], words: str = LLAMA3_WORDS, ignore_merges: bool = False, **more: Any
) -> dict[str, Any]:
    """The tokenizer.json of a byte-level model."""
    own = [token(one) if isinstance(one, str) else one for one in added]
    parts = {"normalizer": None, "pre_tokenizer": _split(words), "post_processor": _GPT2, "decoder": _GPT2}
    return _file(_bytes(ignore_merges), own, **{**parts, **more})


def _file(model: dict[str, Any], added: list[dict[str, Any]], **parts: Any) -> dict[str, Any]:
    size = len(model["vocab"])
    listed = []
    for one in added:
        id = model["vocab"].get(one["content"], size)
        size += one["content"] not in model["vocab"]
        listed.append({"id": id, **one})
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": sorted(listed, key=lambda one: one["id"]),
        "model": model,
        **parts,
    }


def decoder_of(file: dict[str, Any], *more: tuple[int, dict[str, Any]]) -> dict[str, Any]:
    """`added_tokens_decoder` as tokenizer_config.json has it, of a tokenizer.json, with more tokens."""
    own = {str(one["id"]): {key: value for key, value in one.items() if key != "id"} for one in file["added_tokens"]}
    return own | {str(id): one for id, one in more}


def size_of(file: dict[str, Any]) -> int:
    return len(file["model"]["vocab"]) + sum(
        one["content"] not in file["model"]["vocab"] for one in file["added_tokens"]
    )


# model_type, tokenizer.json, tokenizer_config.json, more files
Shape = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
SHAPES: dict[str, Callable[[], Shape]] = {}


def shape(make: Callable[[], Shape]) -> Callable[[], Shape]:
    SHAPES[make.__name__] = make
    return make


_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@shape
def llama_2() -> Shape:
    file = sentencepiece()
    return (
        "llama",
        file,
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA, "added_tokens_decoder": decoder_of(file)},
        {},
    )


@shape
def llama_2_legacy() -> Shape:
    return "llama", sentencepiece(), {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, **_LLAMA}, {}


@shape
def llama_2_legacy_unsaid() -> Shape:
    return "llama", sentencepiece(), {"tokenizer_class": "LlamaTokenizer", "legacy": None, **_LLAMA}, {}


@shape
def llama_2_without_a_class() -> Shape:
    return "llama", sentencepiece(), dict(_LLAMA), {}


@shape
def llama_2_without_names() -> Shape:
    return "llama", sentencepiece(), {"tokenizer_class": "LlamaTokenizer"}, {}


@shape
def llama_2_without_bos() -> Shape:
    return "llama", sentencepiece(), {"tokenizer_class": "LlamaTokenizer", "bos_token": None}, {}


@shape
def llama_2_without_config() -> Shape:
    return "llama", sentencepiece(), {}, {"special_tokens_map.json": {"bos_token": token("<s>"), "eos_token": "</s>"}}


@shape
def class_in_config_json() -> Shape:
    return "llama", sentencepiece(), {}, {"config.json": {"tokenizer_class": "LlamaTokenizer"}}


@shape
def metaspace_first() -> Shape:
    pre = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
    return "llama", sentencepiece(None, pre), {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA}, {}


@shape
def metaspace_always() -> Shape:
    pre = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
    return "llama", sentencepiece(None, pre), {"tokenizer_class": "LlamaTokenizer", "legacy": True, **_LLAMA}, {}


@shape
def yi() -> Shape:
    file = sentencepiece(_REPLACE, added=(token("<unk>"), token("<|one|>"), token("<|three|>", special=False)))
    return "llama", file, {"tokenizer_class": "LlamaTokenizer", "legacy": True, "bos_token": "<s>", "add_bos_token": False,
                           "added_tokens_decoder": decoder_of(file)}, {}  # fmt: skip


@shape
def yi_without_prefix_space() -> Shape:
    file = sentencepiece(_REPLACE)
    return "llama", file, {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_prefix_space": False, **_LLAMA}, {}


@shape
def r1_distill_llama() -> Shape:
    file = byte_level("<s>", "<|one|>", "<|three|>", ignore_merges=True)
    return "llama", file, {"tokenizer_class": "LlamaTokenizerFast", "legacy": True, "bos_token": {"__type": "AddedToken", **token("<s>")},
                           "eos_token": "<|one|>", "add_bos_token": True}, {}  # fmt: skip


@shape
def llama_3() -> Shape:
    file = byte_level("<s>", "<|one|>", "<|three|>", ignore_merges=True)
    return "llama", file, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|one|>",
                           "added_tokens_decoder": decoder_of(file)}, {}  # fmt: skip


@shape
def deepseek_v3() -> Shape:
    return (
        "deepseek_v3",
        byte_level("<s>", "<|one|>"),
        {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>", "eos_token": "<|one|>"},
        {},
    )


@shape
def phi_3() -> Shape:
    return "phi3", sentencepiece(), {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA}, {}


@shape
def mistral_7b() -> Shape:
    return "mistral", sentencepiece(), {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA}, {}


@shape
def tokens_in_config_only() -> Shape:
    file = byte_level("<s>")
    more = ((size_of(file), token("<|one|>")), (size_of(file) + 1, token("<|three|>", special=False, normalized=True)))
    return (
        "llama",
        file,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "added_tokens_decoder": decoder_of(file, *more),
        },
        {},
    )


@shape
def tokens_in_config_only_with_a_gap() -> Shape:
    file = byte_level("<s>")
    more = ((size_of(file) + 7, token("<|one|>")), (size_of(file) + 20, token("<|three|>")))
    return "granite", file, {"bos_token": "<s>", "added_tokens_decoder": decoder_of(file, *more)}, {}


@shape
def tokens_with_other_properties() -> Shape:
    file = byte_level("<s>", token("<|one|>", special=False, normalized=True))
    decoder = decoder_of(byte_level("<s>", token("<|one|>", rstrip=True)))
    return "llama", file, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|one|>",
                           "added_tokens_decoder": decoder}, {}  # fmt: skip


@shape
def tokens_that_config_forgets() -> Shape:
    file = sentencepiece(added=(token("<unk>"), token("<s>"), token("</s>"), token("<|one|>"), token("<|three|>")))
    decoder = decoder_of(sentencepiece())
    return (
        "llama",
        file,
        {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA, "added_tokens_decoder": decoder},
        {},
    )


@shape
def tokens_in_added_tokens_json() -> Shape:
    file = byte_level("<s>")
    size = size_of(file)
    return "llama", file, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}, {
        "added_tokens.json": {"<|one|>": size, "<|three|>": size + 1, "word": size + 2},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": token("<|one|>")},
    }  # fmt: skip


@shape
def tokens_in_added_tokens_json_of_llama() -> Shape:
    file = sentencepiece()
    size = size_of(file)
    return "llama", file, {"tokenizer_class": "LlamaTokenizer", "legacy": False, **_LLAMA}, {
        "added_tokens.json": {"<|one|>": size, "<|three|>": size + 1}, "special_tokens_map.json": {"eos_token": "<|one|>"}}  # fmt: skip


@shape
def extra_special_tokens_listed() -> Shape:
    return (
        "llama",
        byte_level("<s>"),
        {
            "tokenizer_class": "TokenizersBackend",
            "bos_token": "<s>",
            "extra_special_tokens": ["<|extra|>", "<s>", "<|one|>"],
        },
        {},
    )


@shape
def extra_special_tokens_named() -> Shape:
    return "llama", byte_level("<s>"), {"tokenizer_class": "TokenizersBackend", "bos_token": "<s>",
                                        "extra_special_tokens": {"image_token": "<image>", "boi_token": "<|extra|>"}}, {}  # fmt: skip


@shape
def additional_special_tokens() -> Shape:
    return (
        "llama",
        byte_level("<s>"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "additional_special_tokens": ["<|extra|>", "<|one|>"],
        },
        {},
    )


@shape
def additional_special_tokens_beside_named_ones() -> Shape:
    """The dictionary is taken away, and then the list takes its name."""
    file = byte_level("<s>", "<image>")
    return "llama", file, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "additional_special_tokens": ["<|extra|>", "<extra>"],
                           "extra_special_tokens": {"image_token": "<image>"}, "added_tokens_decoder": decoder_of(file)}, {}  # fmt: skip


@shape
def tokens_of_a_models_own_as_untyped_objects() -> Shape:
    """Not named, for transformers: an object is a token only if it says so."""
    return "llama", byte_level("<s>", "<image>"), {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "image_token": token("<image>", special=True), "boi_token": {"__type": "AddedToken", **token("<|extra|>", special=True)}}, {}  # fmt: skip


@shape
def tokens_named_by_key() -> Shape:
    return (
        "llama",
        byte_level("<s>"),
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "image_token": "<image>",
            "pad_token": "<pad>",
        },
        {},
    )


@shape
def map_against_config() -> Shape:
    return "llama", byte_level("<s>", "<|one|>", "<|three|>"), {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|one|>"}, {
        "special_tokens_map.json": {"eos_token": "<|three|>", "pad_token": token("<pad>"), "additional_special_tokens": ["<|extra|>"]}}  # fmt: skip


@shape
def map_beside_a_decoder() -> Shape:
    file = byte_level("<s>", "<|one|>", "<|three|>")
    return "llama", file, {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<|one|>", "added_tokens_decoder": decoder_of(file)}, {
        "special_tokens_map.json": {"eos_token": "<|three|>", "pad_token": "<pad>"}, "added_tokens.json": {"<|extra|>": 999}}  # fmt: skip


@shape
def split_special_tokens() -> Shape:
    return "llama", byte_level("<s>", "<|one|>", token("<|three|>", special=False)), {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "split_special_tokens": True}, {}  # fmt: skip


@shape
def prefix_space_where_it_does_nothing() -> Shape:
    return (
        "llama",
        byte_level("<s>"),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_prefix_space": True},
        {},
    )


@shape
def gpt_2() -> Shape:
    return "gpt2", byte_level("<|endoftext|>", pre_tokenizer=_GPT2), {"tokenizer_class": "GPT2Tokenizer"}, {}


@shape
def gpt_2_with_prefix_space() -> Shape:
    return (
        "gpt2",
        byte_level("<|endoftext|>", pre_tokenizer=_GPT2),
        {"tokenizer_class": "GPT2TokenizerFast", "add_prefix_space": True},
        {},
    )


@shape
def gpt_2_with_other_words() -> Shape:
    return "gpt2", byte_level("<|endoftext|>"), {}, {}


@shape
def gpt_neox() -> Shape:
    return (
        "gpt_neox",
        byte_level("<|endoftext|>", "<|padding|>", pre_tokenizer=_GPT2, normalizer={"type": "NFC"}),
        {"tokenizer_class": "GPTNeoXTokenizer"},
        {},
    )


@shape
def olmo_with_begin() -> Shape:
    begin = json.loads(json.dumps(_BEGIN).replace("<s>", "<|endoftext|>").replace("[1]", str([len(_bytes()["vocab"])])))
    file = byte_level("<|endoftext|>", pre_tokenizer=_GPT2, normalizer={"type": "NFC"}, post_processor=begin)
    return "olmo", file, {"tokenizer_class": "GPTNeoXTokenizer", "add_bos_token": True}, {}


@shape
def qwen_3() -> Shape:
    file = byte_level(
        "<|endoftext|>", "<|one|>", token("<|three|>", special=False), words=QWEN2_WORDS, normalizer={"type": "NFC"}
    )
    return "qwen3", file, {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|one|>", "pad_token": "<|endoftext|>", "bos_token": None, "unk_token": None,
                           "added_tokens_decoder": decoder_of(file), "additional_special_tokens": ["<|one|>"]}, {}  # fmt: skip


@shape
def qwen_2_without_names() -> Shape:
    return (
        "qwen2",
        byte_level("<|endoftext|>", "<|one|>", words=QWEN2_WORDS, normalizer={"type": "NFC"}),
        {"tokenizer_class": "Qwen2Tokenizer"},
        {},
    )


@shape
def qwen_2_type_with_llama_3_words() -> Shape:
    return "qwen2", byte_level("<s>", "<|one|>"), {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<s>"}, {}


@shape
def qwen_3_type_with_llama_3_words() -> Shape:
    return "qwen3", byte_level("<s>", "<|one|>"), {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}, {}


@shape
def qwen_3_5() -> Shape:
    return (
        "qwen3_5_text",
        byte_level("<|endoftext|>", "<|one|>", words=QWEN2_WORDS, normalizer={"type": "NFC"}),
        {"tokenizer_class": "Qwen2Tokenizer"},
        {},
    )


@shape
def qwen_3_5_moe() -> Shape:
    return (
        "qwen3_5_moe_text",
        byte_level("<|endoftext|>", words=QWEN2_WORDS, normalizer={"type": "NFC"}),
        {"tokenizer_class": "Qwen2Tokenizer"},
        {},
    )


@shape
def gemma() -> Shape:
    pre = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    return (
        "gemma2",
        sentencepiece(_REPLACE, pre),
        {"tokenizer_class": "GemmaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
        {},
    )


@shape
def gemma_without_names() -> Shape:
    return "gemma3_text", sentencepiece(_REPLACE), {}, {}


@shape
def padding_in_tokenizer_json() -> Shape:
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    return (
        "llama",
        byte_level("<s>", padding=padding),
        {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"},
        {},
    )


def digest(ids: list[int]) -> str:
    """Token ids, in short: their number and a hash."""
    return f"{len(ids)}:{hashlib.md5(repr(list(ids)).encode()).hexdigest()[:8]}"


def write(name: str, folder: Path) -> Path:
    """The files of one shape."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, tokenizer, config, more = SHAPES[name]()
    files = {
        "tokenizer.json": tokenizer,
        "config.json": {"model_type": kind},
        **({"tokenizer_config.json": config} if config else {}),
    }
    for file, content in more.items():
        files[file] = {**files.get(file, {}), **content}
    for file, content in files.items():
        (folder / file).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return folder

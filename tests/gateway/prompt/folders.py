"""Model folders of the shapes in which real ones come, small: what `test_reading` holds against transformers.

Vocabularies are learned here, by the plainest form of BPE, so that they are the same wherever this runs.
"""

import hashlib
import itertools
import json
from collections import Counter
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
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": text, **plain, **more}


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
    blanks = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    decoder = {"type": "Sequence", "decoders": [blanks, {"type": "ByteFallback"}, {"type": "Fuse"}]}
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
    added_tokens = sorted(listed, key=lambda one: one["id"])
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens,
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


def shape(
    kind: str, file: dict[str, Any], name: str = "", decoder: Any = None, files: Any = None, **config: Any
) -> Shape:
    """`name`: the tokenizer class; `decoder`: `added_tokens_decoder`, True: of the file's tokens."""
    given = {"tokenizer_class": name} if name else {}
    added = {} if decoder is None else {"added_tokens_decoder": decoder_of(file) if decoder is True else decoder}
    return kind, file, {**given, **config, **added}, files or {}


_L, _F = "LlamaTokenizer", "PreTrainedTokenizerFast"
_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_NFC = {"type": "NFC"}
_PADDING = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
            "pad_token": "<pad>"}  # fmt: skip
_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}


def _metaspace(scheme: str, split: bool) -> dict[str, Any]:
    pre = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}
    return sentencepiece(None, pre)


def _llamas() -> dict[str, Shape]:
    llama, s, one_three = sentencepiece(), byte_level("<s>"), ("<s>", "<|one|>", "<|three|>")
    merged, two = byte_level(*one_three, ignore_merges=True), byte_level("<s>", "<|one|>")
    yi = sentencepiece(_REPLACE, added=(token("<unk>"), token("<|one|>"), token("<|three|>", special=False)))
    forgotten = sentencepiece(added=tuple(map(token, ("<unk>", "<s>", "</s>", "<|one|>", "<|three|>"))))
    return {
        "llama_2": shape("llama", llama, _L, True, legacy=False, **_LLAMA),
        "llama_2_legacy": shape("llama", llama, _L + "Fast", legacy=True, **_LLAMA),
        "llama_2_legacy_unsaid": shape("llama", llama, _L, legacy=None, **_LLAMA),
        "llama_2_without_a_class": shape("llama", llama, **_LLAMA),
        "llama_2_without_names": shape("llama", llama, _L),
        "llama_2_without_bos": shape("llama", llama, _L, bos_token=None),
        "llama_2_without_config": shape(
            "llama", llama, files={"special_tokens_map.json": {"bos_token": token("<s>"), "eos_token": "</s>"}}
        ),
        "class_in_config_json": shape("llama", llama, files={"config.json": {"tokenizer_class": _L}}),
        "metaspace_first": shape("llama", _metaspace("first", False), _L, legacy=False, **_LLAMA),
        "metaspace_always": shape("llama", _metaspace("always", True), _L, legacy=True, **_LLAMA),
        "yi": shape("llama", yi, _L, True, legacy=True, bos_token="<s>", add_bos_token=False),
        "yi_without_prefix_space": shape(
            "llama", sentencepiece(_REPLACE), _L, legacy=True, add_prefix_space=False, **_LLAMA
        ),
        "r1_distill_llama": shape(
            "llama", merged, _L + "Fast", legacy=True, bos_token={"__type": "AddedToken", **token("<s>")},
            eos_token="<|one|>", add_bos_token=True,
        ),
        "llama_3": shape("llama", merged, _F, True, bos_token="<s>", eos_token="<|one|>"),
        "deepseek_v3": shape("deepseek_v3", two, _L + "Fast", bos_token="<s>", eos_token="<|one|>"),
        "phi_3": shape("phi3", llama, _L, legacy=False, **_LLAMA),
        "mistral_7b": shape("mistral", llama, _L, legacy=False, **_LLAMA),
        "tokens_that_config_forgets": shape("llama", forgotten, _L, decoder_of(llama), legacy=False, **_LLAMA),
        "prefix_space_where_it_does_nothing": shape("llama", s, _F, bos_token="<s>", add_prefix_space=True),
        "padding_in_tokenizer_json": shape("llama", byte_level("<s>", padding=_PADDING), _F, bos_token="<s>"),
        "split_special_tokens": shape(
            "llama", byte_level("<s>", "<|one|>", token("<|three|>", special=False)), _F, bos_token="<s>",
            split_special_tokens=True,
        ),
    }  # fmt: skip


def _outside_tokenizer_json() -> dict[str, Shape]:
    """Tokens that other files name."""
    s, image, three = byte_level("<s>"), byte_level("<s>", "<image>"), byte_level("<s>", "<|one|>", "<|three|>")
    size, llama, llama_size = size_of(s), sentencepiece(), size_of(sentencepiece())
    plain_three = token("<|three|>", special=False, normalized=True)
    listed = {"<|one|>": size, "<|three|>": size + 1, "word": size + 2}
    other = byte_level("<s>", token("<|one|>", special=False, normalized=True))
    named = {"bos_token": "<s>", "eos_token": "<|one|>"}
    return {
        "tokens_in_config_only": shape(
            "llama", s, _F, decoder_of(s, (size, token("<|one|>")), (size + 1, plain_three)), bos_token="<s>"
        ),
        "tokens_in_config_only_with_a_gap": shape(
            "granite", s, "", decoder_of(s, (size + 7, token("<|one|>")), (size + 20, token("<|three|>"))), bos_token="<s>"
        ),
        "tokens_with_other_properties": shape(
            "llama", other, _F, decoder_of(byte_level("<s>", token("<|one|>", rstrip=True))), **named
        ),
        "tokens_in_added_tokens_json": shape("llama", s, _F, bos_token="<s>", files={
            "added_tokens.json": listed,
            "special_tokens_map.json": {"bos_token": "<s>", "eos_token": token("<|one|>")},
        }),
        "tokens_in_added_tokens_json_of_llama": shape("llama", llama, _L, legacy=False, **_LLAMA, files={
            "added_tokens.json": {"<|one|>": llama_size, "<|three|>": llama_size + 1},
            "special_tokens_map.json": {"eos_token": "<|one|>"},
        }),
        "extra_special_tokens_listed": shape(
            "llama", s, "TokenizersBackend", bos_token="<s>", extra_special_tokens=["<|extra|>", "<s>", "<|one|>"]
        ),
        "extra_special_tokens_named": shape(
            "llama", s, "TokenizersBackend", bos_token="<s>",
            extra_special_tokens={"image_token": "<image>", "boi_token": "<|extra|>"},
        ),
        "additional_special_tokens": shape(
            "llama", s, _F, bos_token="<s>", additional_special_tokens=["<|extra|>", "<|one|>"]
        ),
        # The dictionary is taken away, and then the list takes its name.
        "additional_special_tokens_beside_named_ones": shape(
            "llama", image, _F, True, bos_token="<s>", additional_special_tokens=["<|extra|>", "<extra>"],
            extra_special_tokens={"image_token": "<image>"},
        ),
        # Not named, for transformers: an object is a token only if it says so.
        "tokens_of_a_models_own_as_untyped_objects": shape(
            "llama", image, _F, bos_token="<s>", image_token=token("<image>"),
            boi_token={"__type": "AddedToken", **token("<|extra|>")},
        ),
        "tokens_named_by_key": shape("llama", s, _F, bos_token="<s>", image_token="<image>", pad_token="<pad>"),
        "map_against_config": shape("llama", three, _F, **named, files={"special_tokens_map.json": {
            "eos_token": "<|three|>", "pad_token": token("<pad>"), "additional_special_tokens": ["<|extra|>"],
        }}),
        "map_beside_a_decoder": shape("llama", three, _F, True, **named, files={
            "special_tokens_map.json": {"eos_token": "<|three|>", "pad_token": "<pad>"},
            "added_tokens.json": {"<|extra|>": 999},
        }),
    }  # fmt: skip


def _other_classes() -> dict[str, Shape]:
    end, neox, qwen = "<|endoftext|>", "GPTNeoXTokenizer", "Qwen2Tokenizer"
    gpt2, words = byte_level(end, pre_tokenizer=_GPT2), {"words": QWEN2_WORDS, "normalizer": _NFC}
    begin = json.loads(json.dumps(_BEGIN).replace("<s>", end).replace("[1]", str([len(_bytes()["vocab"])])))
    two, three = byte_level("<s>", "<|one|>"), byte_level(end, "<|one|>", token("<|three|>", special=False), **words)
    qwen_two = byte_level(end, "<|one|>", **words)
    return {
        "gpt_2": shape("gpt2", gpt2, "GPT2Tokenizer"),
        "gpt_2_with_prefix_space": shape("gpt2", gpt2, "GPT2TokenizerFast", add_prefix_space=True),
        "gpt_2_with_other_words": shape("gpt2", byte_level(end)),
        "gpt_neox": shape("gpt_neox", byte_level(end, "<|padding|>", pre_tokenizer=_GPT2, normalizer=_NFC), neox),
        "olmo_with_begin": shape(
            "olmo", byte_level(end, pre_tokenizer=_GPT2, normalizer=_NFC, post_processor=begin), neox, add_bos_token=True
        ),
        "qwen_3": shape(
            "qwen3", three, qwen, True, eos_token="<|one|>", pad_token=end, bos_token=None, unk_token=None,
            additional_special_tokens=["<|one|>"],
        ),
        "qwen_2_without_names": shape("qwen2", qwen_two, qwen),
        "qwen_2_type_with_llama_3_words": shape("qwen2", two, _L + "Fast", bos_token="<s>"),
        "qwen_3_type_with_llama_3_words": shape("qwen3", two, _F, bos_token="<s>"),
        "qwen_3_5": shape("qwen3_5_text", qwen_two, qwen),
        "qwen_3_5_moe": shape("qwen3_5_moe_text", byte_level(end, **words), qwen),
        "gemma": shape("gemma2", sentencepiece(_REPLACE, _SPACES), "GemmaTokenizer", **_LLAMA),
        "gemma_without_names": shape("gemma3_text", sentencepiece(_REPLACE)),
    }  # fmt: skip


SHAPES = {**_llamas(), **_outside_tokenizer_json(), **_other_classes()}


def digest(ids: list[int]) -> str:
    """Token ids, in short: their number and a hash."""
    return f"{len(ids)}:{hashlib.md5(repr(list(ids)).encode()).hexdigest()[:8]}"


def write(name: str, folder: Path) -> Path:
    """The files of one shape."""
    folder.mkdir(parents=True, exist_ok=True)
    kind, tokenizer, config, more = SHAPES[name]
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

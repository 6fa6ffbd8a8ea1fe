"""Interpretation of a model's tokenizer files as the engine interprets them.

vLLM does not use `tokenizer.json` as it is in the folder. transformers 5 loads it through a tokenizer class. Several
classes keep only its vocabulary, its merges and its post-processor, and build everything else themselves; for example,
LlamaTokenizer splits at `▁` whatever the file says. All classes add tokens that only `tokenizer_config.json`,
`special_tokens_map.json` or `added_tokens.json` name. A `Reading` is the outcome: a complete tokenizer, and the special
tokens that a chat template may print.

Which class is used depends on the release of transformers, which an engine does not report. So there may be several
readings, and the files alone do not always decide between them. An engine's answers to `/tokenize` do
(`Pipeline.judge`). The rules were read in the sources of transformers 5.5 to 5.23, and compared with 5.19 and 5.23 on
folders of each sort (tests/gateway/prompt/tokens/test_reading.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from tokenizers import AddedToken, Tokenizer

from ..quirks import Transformers
from .folder import ModelError, json_object, read_text, using

# The names of the special tokens that every tokenizer class has, in transformers' order.
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
AS_IT_IS = "tokenizer.json as it is"
# Since this release transformers does not use LlamaTokenizer for a tokenizer.json that contains "ByteLevel".
_BYTE_LEVEL_LLAMA = (5, 22)


@dataclass(frozen=True)
class Reading:
    """One interpretation of a model's tokenizer files that an engine may make."""

    how: str  # its name, for messages: AS_IT_IS, or a text that says how the tokenizer is rebuilt
    rebuilt: bytes  # the SHA-256 of the content that replaces tokenizer.json; empty: the file is used as it is
    special_tokens: dict[str, str]  # the special tokens that a template may print, by name
    splits_special_tokens: bool  # special tokens inside a text are treated as ordinary text
    # Returns the content that replaces tokenizer.json.
    make: Callable[[], str | None] = field(compare=False, repr=False)
    # A run of more blanks than this, or of more other characters, has tokens that are not known here; 0: no limit.
    longest_run: int = 0

    @property
    def content(self) -> str | None:
        """The content that replaces that of tokenizer.json, or None if the file is used as it is.

        The content has megabytes, so a Reading does not keep it, and each access may make it again.
        """
        return self.make() if self.rebuilt else None


class Readings:
    """The interpretations (Readings) that engines may make of one model's tokenizer files.

    `before`: the interpretation of transformers before 5.22; `since`: that of transformers 5.22 and later.
    """

    def __init__(self, directory: Path, config: dict[str, Any], settings: dict[str, Any]) -> None:
        """Read the files of the folder, which must have a tokenizer.json. Raises ModelError.

        `config`: the content of tokenizer_config.json; `settings`: the content of config.json.
        """
        self._directory, self._config = directory, config
        # Both keep their results until `let_go` is called: the parsed files, which take some 10 times the size of
        # tokenizer.json, and the contents made of them.
        self._files, self._content = cache(self._read), cache(self._make)
        byte_level = '"ByteLevel"' in read_text(directory / "tokenizer.json")
        with using(directory / "config.json", directory / "tokenizer_config.json"):
            told = config.get("tokenizer_class") or settings.get("tokenizer_class")
            # The name of the tokenizer class in the files, without "Fast" at its end, or "".
            self._told = told.removesuffix("Fast") if isinstance(told, str) else ""
            before, since = (_class_name(settings, self._told, byte_level, newer) for newer in (False, True))
            # Why the engine may interpret the files in a way that is not implemented here, or "".
            self.unknown = _unknown(directory, config, settings, before, since)
        self.before = self.reading(before)
        self.since = self.before if since == before else self.reading(since)
        with using(*_named_in(directory)):
            # All texts that the files call a token, whether or not a Reading has them as tokens.
            self.mentioned = [
                *_mentioned([value for key, value in config.items() if key.endswith(_MENTIONING)]),
                *_mentioned(json_object(directory / "special_tokens_map.json")),
                *json_object(directory / "added_tokens.json"),
            ]

    def likeliest(self, transformers: Transformers) -> tuple[Reading, str]:
        """Return the Reading that an engine most likely makes, and why that is uncertain, or "".

        `transformers`: the releases of transformers that the engine may run with.
        """
        newer = transformers.has(_BYTE_LEVEL_LLAMA)
        if self.before is self.since or newer is not None:
            return self.since if newer else self.before, self.unknown
        return self.since, self.unknown or f"{transformers} has {self.since.how} or {self.before.how}"

    def all(self) -> Iterator[Reading]:
        """Yield every Reading (interpretation of the tokenizer files) that an engine may make, some of them twice.

        The Readings are made one by one, because each takes up to a second, and the memory of tokenizer.json.
        """
        yield self.since
        yield self.before
        for name in dict.fromkeys((self._told, "")):
            yield self.reading(name)

    def let_go(self) -> None:
        """Free the memory of the parsed files; they are read again when they are needed."""
        self._files.cache_clear()
        self._content.cache_clear()

    def reading(self, name: str) -> Reading:
        """Return the Reading that the tokenizer class of this name in transformers makes. Raises ModelError.

        `name`: the class; "": a class that uses tokenizer.json as it is.
        """
        with using(self._directory / "tokenizer.json", *_named_in(self._directory)):
            content = self._content(name)
            named = self._files().names(_defaults(name))
        return Reading(
            f"rebuilt as {name}" if name in _CLASSES else AS_IT_IS,
            sha256(content.encode()).digest() if content is not None else b"",
            {key: str(value) for key, value in named.items() if str(value)},
            bool(self._config.get("split_special_tokens")),
            partial(self._content, name),
        )

    def _read(self) -> _Files:
        path = self._directory / "tokenizer.json"
        with using(path):
            tokenizer = orjson.loads(read_text(path))
            own = {token["id"]: _added(token) for token in tokenizer.get("added_tokens") or []}
        with using(*_named_in(self._directory)):
            return _Files(self._directory, dict(self._config), tokenizer, own)

    def _make(self, name: str) -> str | None:
        files, known = self._files(), _CLASSES.get(name)
        names = files.names(_defaults(name))
        return _rebuilt(files, self._config, known, names) if known else _as_it_is(files, names)


_MENTIONING = ("_token", "_tokens", "_tokens_decoder")


def _defaults(name: str) -> dict[str, str]:
    return _CLASSES[name].defaults if name in _CLASSES else _NAMED_OTHERWISE.get(name, {})


@dataclass(frozen=True)
class _Class:
    """A tokenizer class of transformers 5 that does not use the normalizer and pre-tokenizer in tokenizer.json."""

    defaults: dict[str, str]  # its special tokens by name, used where the files name none
    # Returns the normalizer and the pre-tokenizer, given the content of tokenizer_config.json.
    pipeline: Callable[[dict[str, Any]], dict[str, Any]]
    model: dict[str, Any] = field(default_factory=dict)  # its options of the BPE model
    adds_all_special: bool = False  # it adds its special tokens once more, after all others
    adds_nothing: bool = False  # it replaces the post-processor by one that adds no tokens


def _unknown(directory: Path, config: dict[str, Any], settings: dict[str, Any], *names: str) -> str:
    other = next((name for name in names if name in _REBUILT_OTHERWISE), None)
    if other is not None:
        return f"transformers rebuilds the tokenizer as {other}, which the gateway does not"
    if "AutoTokenizer" in (config.get("auto_map") or {}):
        return "the model brings tokenizer code of its own (auto_map)"
    if settings.get("model_type") in _MISTRAL_TYPES and (directory / "tekken.json").is_file():
        return "transformers may use mistral-common for this model"
    if config.get("fix_mistral_regex"):
        return "fix_mistral_regex may change how the engine splits words"
    return ""


# --- which class


def _class_name(settings: dict[str, Any], told: str, byte_level: bool, newer: bool) -> str:
    """Return the name of the tokenizer class that AutoTokenizer uses, "" for one that uses tokenizer.json as it is.

    `settings`: the content of config.json; `told`: the class that the files name, or ""; `byte_level`: whether
    tokenizer.json contains "ByteLevel"; `newer`: apply the rules of transformers 5.22 and later, which do not use
    LlamaTokenizer for such a tokenizer.json.
    """
    kind = settings.get("model_type")
    if kind in _TAKEN_AS_THEY_ARE or kind in _GENERIC_TYPES or kind in (_GENERIC_SINCE if newer else _GENERIC_BEFORE):
        return ""
    is_wrong = kind in _CLASS_IS_WRONG
    if told == "LlamaTokenizer" and byte_level and newer and not is_wrong:
        return ""
    name = _CLASS_OF_TYPE.get(kind, told) if is_wrong or not told else told
    return name if name in _CLASSES or name in _REBUILT_OTHERWISE else ""


# Model types for which transformers registers a class that uses tokenizer.json as it is: in all releases, only before
# 5.22, and only since 5.22.
_GENERIC_TYPES = frozenset(
    """
    EvollaModel arctic aria bigbird_pegasus camembertv2-base canary chatlm cohere_asr ernie4_5 ernie4_5_moe flex_olmo
    fuyu glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2 gpt_bigcode granite granitemoe
    granitemoehybrid granitemoeshared h2ovl_chat hyperclovax hyperclovax_vlm internlm2 jamba kimi_k25 kimi_linear
    kosmos-2 llava llava_next mimo_v2_flash minicpm3 minicpmv minicpmv4_6 minicpmv4_7 minimax_m2 ministral ministral3
    mistral mistral3 mixtral modernbert modernbert-decoder molmo molmo2 nemotron nvfp4 nystromformer olmo2 olmo3
    olmo_hybrid opencua openvla paddleocr_vl pegasus_x persimmon phi3 phi3_v phimoe pix2struct pixtral smolvlm
    stablelm step3_vl umt5 vipllava voxtral voxtral_realtime xlm-roberta-xl""".split()
)
_GENERIC_BEFORE = frozenset(
    """
    chameleon deepseek_ocr deepseek_ocr2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
    deepseek_vl_hybrid deepseek_vl_v2 janus step3p5""".split()
)
_GENERIC_SINCE = frozenset(
    """
    beam gradium_phonon_tts internlm3 iquestcoder minicpm_ocr mistral_large4 nemo_speechlm pocket_tts""".split()
)
# Model types whose files are known to name a wrong class, so transformers uses the class that it registers for them.
_CLASS_IS_WRONG = frozenset(
    {"hyperclovax_vision_v2", "qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"}
)
# Model types whose tokenizer transformers may read with mistral-common if there is a tekken.json.
_MISTRAL_TYPES = frozenset(
    "ministral ministral3 mistral mistral3 mistral_large4 mixtral pixtral voxtral voxtral_realtime".split()
)
# Model types for which vLLM itself chooses the class that uses tokenizer.json as it is.
_TAKEN_AS_THEY_ARE = frozenset(
    "deepseek_v32 deepseek_v4 internlm2 step3_vl step3p7 step5 step5_vl unlimited-ocr unlimited_ocr".split()
)
_CLASS_OF_TYPE = {
    kind: f"{name}Tokenizer"
    for name, kinds in {
        "Bert": "bert nomic_bert distilbert electra ernie mobilebert",
        "CodeLlama": "code_llama",
        "Cohere": "aya_vision cohere cohere2",
        "GPT2": "blip-2 codegen dbrx emu3 gpt2 gpt_neo gptj hyperclovax_vision_v2 instructblip instructblipvideo jais2 opt "
        "phi starcoder2",
        "GPTNeoX": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "Gemma": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma "
        "zaya",
        "Llama": "idefics idefics2",
        "Qwen2": "audioflamingo3 colqwen2 cosmos3_omni dots3_note fun_asr_nano hunyuan_vl internvl lighton_ocr "
        "moss_transcribe_diarize ovis2 qianfan_ocr qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 "
        "qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe vibevoice",
        "Qwen3_5": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
        "Roberta": "roberta",
        "T5": "t5",
        "XLMRoberta": "xlm-roberta gte jina_embeddings_v3",
    }.items()
    for kind in kinds.split()
}
# Classes that also set their own normalizer and pre-tokenizer but are not implemented here, mostly those of encoders.
_REBUILT_OTHERWISE = frozenset(
    f"{name}Tokenizer"
    for name in """
    Albert Barthez Bert BigBird Blenderbot Camembert CLIP CodeLlama CodeGen Cohere Deberta DebertaV2 Esmc Funnel Herbert
    Lasr LayoutLMv2 LayoutLMv3 LayoutXLM Luke MarkupLM MBart MBart50 MLuke MPNet Nllb Nougat OpenAIGPT Pegasus Reformer
    RemBert Roberta SeamlessM4T Siglip2 Splinter T5 Tipsv2 Udop VideoPrism Whisper XGLM XLMRoberta XLNet""".split()
)


# --- what the classes build


def _metaspace(config: dict[str, Any]) -> dict[str, Any]:
    space = config.get("add_prefix_space")
    scheme = "never" if space is not None and not space else "always" if config.get("legacy", False) else "first"
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": metaspace}


def _byte_level(normalizer: Any, pattern: str = "") -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that gives the normalizer and pre-tokenizer of a tokenizer class with a byte-level vocabulary.

    The function takes the content of tokenizer_config.json, and is meant for `_Class.pipeline`. `normalizer`: the
    class's normalizer, as tokenizer.json writes it; `pattern`: the regular expression that matches one word; "":
    ByteLevel's own.
    """

    def pipeline(config: dict[str, Any]) -> dict[str, Any]:
        space = bool(config.get("add_prefix_space"))
        level = {"type": "ByteLevel", "add_prefix_space": space, "trim_offsets": True, "use_regex": not pattern}
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        steps = {"type": "Sequence", "pretokenizers": [split, level]} if pattern else level
        return {"normalizer": normalizer, "pre_tokenizer": steps}

    return pipeline


def _spaces(config: dict[str, Any]) -> dict[str, Any]:
    space = {"String": " "}
    return {
        "normalizer": {"type": "Replace", "pattern": space, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": space, "behavior": "MergedWithPrevious", "invert": False},
    }


_NFC = {"type": "NFC"}
_QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _QWEN3_5.replace(r"[\p{L}\p{M}]", r"\p{L}").replace(r"\p{M}", "")
_END = dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>")
_QWEN = dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")
_CLASSES = {
    "LlamaTokenizer": _Class({"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, _metaspace,
                             {"fuse_unk": True, "byte_fallback": True}),
    "Qwen2Tokenizer": _Class(_QWEN, _byte_level(_NFC, _QWEN2), adds_all_special=True),
    "Qwen3_5Tokenizer": _Class(_QWEN, _byte_level(_NFC, _QWEN3_5)),
    "GemmaTokenizer": _Class({"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>",
                              "mask_token": "<mask>"}, _spaces, {"fuse_unk": True, "byte_fallback": True, "unk_token": ...}),
    "GPT2Tokenizer": _Class(_END, _byte_level(None)),
    "GPTNeoXTokenizer": _Class({**_END, "pad_token": "<|padding|>"}, _byte_level(_NFC), adds_nothing=True),
}  # fmt: skip
# Default special tokens, by name, of classes that are not in _CLASSES. Models of the remaining classes have no chat
# templates.
_NAMED_OTHERWISE = {
    "CohereTokenizer": {"unk_token": "<UNK>", "bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>",
                        "cls_token": "<CLS>", "sep_token": "<SEP>", "mask_token": "<MASK_TOKEN>"},
    "CodeLlamaTokenizer": _CLASSES["LlamaTokenizer"].defaults,
    "CodeGenTokenizer": _END,
    "BlenderbotTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>", "unk_token": "<unk>",
                            "pad_token": "<pad>", "mask_token": "<mask>"},
}  # fmt: skip


# --- the tokens outside tokenizer.json


_EXTRA, _OLDER_EXTRA = "extra_special_tokens", "additional_special_tokens"


class _Files:
    """The tokenizer files of one folder, with the tokens that they name merged as transformers merges them.

    `extra`: additional special tokens, which have no names; `decoder`: added tokens by id; `named`: the special tokens
    with names that all models use, such as `bos_token`; `specific`: special tokens with names that only this model
    uses.
    """

    def __init__(
        self, directory: Path, told: dict[str, Any], tokenizer: dict[str, Any], own: dict[int, AddedToken]
    ) -> None:
        """Merge the tokens that the files name.

        `told`: a copy of the content of tokenizer_config.json, which is changed; `tokenizer`: the content of
        tokenizer.json; `own`: the added tokens of tokenizer.json by id.
        """
        self.tokenizer, self.own = tokenizer, own
        if _OLDER_EXTRA in told and not told.get(_EXTRA):
            told[_EXTRA] = told.pop(_OLDER_EXTRA)
        of_model = [key for key, value in told.items() if _is_of_model(key) and isinstance(value, str)]
        specific = {key: told.pop(key) for key in of_model}
        if isinstance(told.get(_EXTRA), dict):
            specific |= told.pop(_EXTRA)
        # special_tokens_map.json overrides a tokenizer_config.json without added_tokens_decoder.
        is_older = "added_tokens_decoder" not in told
        for key, value in json_object(directory / "special_tokens_map.json").items() if is_older else ():
            if key == _EXTRA and isinstance(value, list):
                before = list(told.get(key) or [])
                value = before + [one for one in map(_special, value) if one not in before]
            told[key] = value if key == _EXTRA else _special(value)
        if isinstance(told.get(_EXTRA), dict):
            specific |= told.pop(_EXTRA)
        if _OLDER_EXTRA in told and _EXTRA not in told:
            told[_EXTRA] = told.pop(_OLDER_EXTRA)
        self.extra = [_token(one) for one in told.get(_EXTRA) or []]
        self.decoder = (
            self._older_tokens(directory, told)
            if is_older
            else {int(id): _added(token) for id, token in told["added_tokens_decoder"].items()}
        )
        known = {token.content: token for token in self.decoder.values()}
        named = {key: _token(told[key]) for key in NAMED if key in told}
        # A value of None means that the files say that there is no such token.
        self.named = {key: known.get(str(one), one) if one is not None else None for key, one in named.items()}
        others = {key: _typed(value) for key, value in (*told.items(), *specific.items())}
        self.specific = {
            key: value
            for key, value in others.items()
            if isinstance(value, (str, AddedToken)) and (key in specific or _is_of_model(key))
        }

    def _older_tokens(self, directory: Path, told: dict[str, Any]) -> dict[int, AddedToken]:
        """Return the added tokens of added_tokens.json and tokenizer.json by id.

        Used where tokenizer_config.json has no added_tokens_decoder. `told`: the content of tokenizer_config.json.
        """
        special = {str(_token(told[key])) for key in NAMED if told.get(key)} | set(map(str, self.extra))
        found = {}
        for text, id in json_object(directory / "added_tokens.json").items():
            if type(id) is not int:
                raise ModelError(f"can't use {directory / 'added_tokens.json'}: the id of {text!r} is no integer")
            found[id] = AddedToken(text, normalized=text not in special, special=text in special)
        return found | self.own

    def names(self, defaults: dict[str, str]) -> dict[str, Any]:
        """Return the special tokens by name (`bos_token` and others).

        `defaults`: by name, the tokens to use where the files give none.
        """
        padding = self.tokenizer.get("padding") or {}
        found = {"pad_token": padding.get("pad_token")} | defaults | self.named
        return {
            key: value
            for key, value in ({key: found.get(key) for key in NAMED} | self.specific).items()
            if value is not None
        }


def _is_of_model(key: str) -> bool:
    """Return whether a field of tokenizer_config.json gives a special token that only this model has."""
    return key.endswith("_token") and key not in NAMED


def _as_it_is(files: _Files, names: dict[str, Any]) -> str | None:
    if not _missing(files, names, files.own):
        return None
    real = Tokenizer.from_str(json.dumps(files.tokenizer))
    more = _missing(files, names, real.get_added_tokens_decoder())
    real.add_tokens(more)
    return real.to_str() if more else None


def _rebuilt(files: _Files, config: dict[str, Any], kind: _Class, names: dict[str, Any]) -> str | None:
    """Return the content of the tokenizer.json that a tokenizer class builds, or None if its ids are the same.

    None means that the folder's tokenizer.json makes the same ids. `files`: the folder's tokenizer files; `config`: the
    content of tokenizer_config.json; `kind`: the class; `names`: the special tokens by name.
    """
    old = files.tokenizer["model"]
    vocabulary = old["vocab"]
    if isinstance(vocabulary, list):
        vocabulary = {one[0] if isinstance(one, list) else one: id for id, one in enumerate(vocabulary)}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": "",
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **kind.model,
             "vocab": vocabulary, "merges": old.get("merges") or []}  # fmt: skip
    if model["unk_token"] is ...:
        model["unk_token"] = str(names.get("unk_token"))
    changed = {"model": model, "added_tokens": [], "truncation": None, "padding": None}
    new = {**files.tokenizer, **kind.pipeline(config), **changed}
    if kind.adds_nothing:
        new["post_processor"] = None
    same = _settings(new) == _settings(files.tokenizer)
    if same and not _missing(files, names, files.own) and _ids_as_added(files, vocabulary):
        return None
    real = Tokenizer.from_str(json.dumps(new))
    real.add_tokens(_missing(files, names, {}))
    if kind.adds_all_special:
        real.add_tokens([AddedToken(str(one), special=True) for one in (*names.values(), *files.extra)])
    return real.to_str()


def _missing(files: _Files, names: dict[str, Any], there: dict[int, AddedToken]) -> list[AddedToken]:
    """Return the tokens that transformers adds to a tokenizer, in the order in which it adds them.

    `names`: the special tokens by name; `there`: the added tokens that the tokenizer has already, by id.
    """
    same = {repr(token) for token in there.values()}
    wanted: list[Any] = [token for _, token in sorted(files.decoder.items()) if repr(token) not in same]
    texts = {token.content for token in there.values()} | {token.content for token in wanted}
    for token in (*names.values(), *files.extra):
        if str(token) not in texts and token not in wanted:
            wanted.append(token)
    called = {str(token) for token in names.values() if str(token)}
    found = [AddedToken(token, special=True) if isinstance(token, str) else token for token in wanted]
    for token in found:
        token.special = token.special or str(token) in called
    return found


def _ids_as_added(files: _Files, vocabulary: dict[str, int]) -> bool:
    """Return whether transformers would give each added token the same id that it has in tokenizer.json.

    transformers adds the tokens to the vocabulary one after another. The result is False if the tokens that it adds are
    not those of tokenizer.json. `vocabulary`: the ids of the model's own tokens, by text.
    """
    if files.decoder.keys() != files.own.keys():
        return False
    size, highest = len(vocabulary), -1
    for id, token in sorted(files.own.items()):
        given = vocabulary.get(token.content, max(highest + 1, size))
        if given != id:
            return False
        highest = max(highest, given)
    return True


def _settings(tokenizer: dict[str, Any]) -> Any:
    """Return the settings of a tokenizer.json on which its ids depend, for comparison with another one.

    Two tokenizers with the same tokens and equal settings make the same ids.
    """
    model, post_processor = tokenizer["model"], tokenizer.get("post_processor")
    steps = [_plain(tokenizer.get(name)) for name in ("normalizer", "pre_tokenizer")]
    # A byte-level vocabulary covers every text, so the unknown token is never used.
    unknown = None if "ByteLevel" in json.dumps(steps) else (model.get("unk_token"), bool(model.get("fuse_unk")))
    options = "byte_fallback ignore_merges continuing_subword_prefix end_of_word_suffix dropout".split()
    # As a post-processor, ByteLevel only changes offsets.
    adds = None if post_processor is None or post_processor.get("type") == "ByteLevel" else post_processor
    return model.get("type"), steps, unknown, [model.get(name) or "" for name in options], adds


def _plain(step: Any) -> Any:
    """Return a normalizer or pre-tokenizer of a tokenizer.json without the settings that do not change token ids."""
    if not isinstance(step, dict):
        return step
    inner = step.get("normalizers", step.get("pretokenizers"))
    if step.get("type") == "Sequence" and inner is not None:
        steps = [_plain(one) for one in inner]
        return None if not steps else steps[0] if len(steps) == 1 else steps
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _added(token: dict[str, Any]) -> AddedToken:
    return AddedToken(**{key: value for key, value in token.items() if key not in ("id", "__type")})


def _special(token: Any) -> Any:
    return _added({**token, "special": True}) if isinstance(token, dict) else token


def _named_in(directory: Path) -> tuple[Path, Path]:
    """Return the paths of the files that name a model's special tokens."""
    return directory / "tokenizer_config.json", directory / "special_tokens_map.json"


def _token(value: Any) -> Any:
    """Return a token from its JSON value: a text unchanged, or an object as the AddedToken with its properties."""
    return _added(value) if isinstance(value, dict) and isinstance(value.get("content"), str) else value


def _mentioned(value: Any) -> Iterator[str]:
    """Yield the text of every token in a part of a JSON file that lists or names tokens."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and isinstance(value.get("content"), str):
        yield value["content"]
    elif isinstance(value, (dict, list)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _mentioned(one)


def _typed(value: Any) -> Any:
    """Return the value of a tokenizer's setting, with an object that describes a special token made an AddedToken.

    Such an object has the member `__type` with the value "AddedToken". Any other value is returned unchanged.
    """
    return _token(value) if isinstance(value, dict) and value.get("__type") == "AddedToken" else value

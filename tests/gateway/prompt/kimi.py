"""A model folder in the form of Kimi K2's: `tiktoken.model`, and a program that reads it.

The program is written here by the rules of Kimi's own, which cannot be had: its pattern of words, 258 special tokens
behind the vocabulary, tools with sorted keys, and parts of what is longer than tiktoken takes.
"""

import base64
import json
from functools import cache
from pathlib import Path

from replicas.simulated.model import sim_model_dir

from ...vllm.chat_templates import small_tokenizer

_SPECIAL = (
    *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>"),
    *("[UNK]", "<|im_system|>", "<|im_middle|>", "[PAD]"),
)
_TEMPLATE = """\
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}<|im_system|>system<|im_middle|>
{%- elif message.role == 'assistant' -%}<|im_assistant|>assistant<|im_middle|>
{%- elif message.role == 'tool' -%}<|im_system|>{{ message.name or 'tool' }}<|im_middle|>## Return of {{ message.tool_call_id }}
{%- else -%}<|im_user|>{{ message.name or message.role }}<|im_middle|>{%- endif -%}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
[{{ call.id }}]{{ call.function.arguments | tojson }}
{%- endfor -%}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
PROGRAM = r'''
import re

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer


def deep_sort_dict(value):
    if isinstance(value, dict):
        return {key: deep_sort_dict(value[key]) for key in sorted(value)}
    return [deep_sort_dict(one) for one in value] if isinstance(value, list) else value


class TikTokenTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    model_input_names = ["input_ids", "attention_mask"]
    pat_str = "|".join([
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ])

    def __init__(self, vocab_file, added_tokens_decoder=None, **kwargs):
        ranks = load_tiktoken_bpe(vocab_file)
        names = {int(id): str(token) for id, token in (added_tokens_decoder or {}).items()}
        behind = range(len(ranks), len(ranks) + 258)
        self.special_ids = {names.get(id, f"<|reserved_token_{id}|>"): id for id in behind}
        self.model = tiktoken.Encoding(
            name="kimi", pat_str=self.pat_str, mergeable_ranks=ranks, special_tokens=self.special_ids
        )
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        return {**{str(id): id for id in range(self.model.n_vocab - 258)}, **self.special_ids}

    def parts(self, text):
        for at in range(0, len(text), 400_000):
            yield from re.findall(r"(?s).{1,25000}", text[at : at + 400_000])

    def _tokenize(self, text, **kwargs):
        return [str(id) for part in self.parts(text) for id in self.model.encode(part, allowed_special="all")]

    def _convert_token_to_id(self, token):
        return self.special_ids[token] if token in self.special_ids else int(token)

    def _convert_id_to_token(self, id):
        return str(id)

    def convert_tokens_to_string(self, tokens):
        return self.model.decode([self._convert_token_to_id(token) for token in tokens])

    def save_vocabulary(self, save_directory, filename_prefix=None):
        return ()

    def apply_chat_template(self, conversation, tools=None, **kwargs):
        tools = deep_sort_dict(tools)
        return super().apply_chat_template(conversation, tools=tools, **kwargs)
'''


def bytes_to_symbols() -> dict[int, str]:
    """How a byte-level vocabulary writes each byte."""
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printed]
    return {**{byte: chr(byte) for byte in printed}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


@cache
def tokens_of_bytes() -> list[bytes]:
    """All bytes, and what the merges of the simulated engine's tokenizer make."""
    byte_of = {symbol: byte for byte, symbol in bytes_to_symbols().items()}
    whole = json.loads(small_tokenizer(sim_model_dir() / "tokenizer.json", ()))
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in whole["model"]["merges"]]
    tokens = [bytes([byte]) for byte in range(256)] + [bytes(byte_of[one] for one in a + b) for a, b in pairs]
    return list(dict.fromkeys(tokens))


def kimi_folder(folder: Path, config: dict) -> Path:
    folder.mkdir(parents=True)
    tokens = tokens_of_bytes()
    lines = [base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    added = {str(len(tokens) + i): {"content": name, **plain} for i, name in enumerate(_SPECIAL)}
    told = {
        "added_tokens_decoder": added, "additional_special_tokens": list(_SPECIAL[2:5] + _SPECIAL[6:8]),
        "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "tokenizer_class": "TikTokenTokenizer", "chat_template": _TEMPLATE,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "tokenization_kimi.py").write_text(PROGRAM)
    return folder

"""Image tokens of Gemma 3: every image has the same number of tokens, between two markers and two pairs of newlines.

Each image is scaled to one square. vLLM merges the newlines with neighbouring ones, as the tokenizer would
(`Gemma3MultiModalProcessor` of `model_executor/models/gemma3_mm.py`, the same in 0.28 and 0.32). Models with "pan and
scan" switched on are not supported here: an image then also has crops, whose number depends on settings that requests
may change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ..tokens.tokenizer import Tokenizer
from .families import Family, Files, Ids, Places, ids_of, integer

_PROCESSORS = frozenset({None, "Gemma3ImageProcessor", "Gemma3ImageProcessorFast", "Gemma3ImageProcessorPil"})
_TOKENS = 256  # the number of tokens of an image, if the files give none
# The token that begins an image, the token that is repeated, and the token that ends the image. For each: its key in
# tokenizer_config.json, the key of its id in config.json, and its default id.
_MARKERS = (
    ("boi_token", "boi_token_index", 255_999),
    ("image_token", "image_token_index", 262_144),
    ("eoi_token", "eoi_token_index", 256_000),
)


def family(files: Files, tokenizer: Tokenizer) -> Family | None:
    """Return the rule for the image tokens of a Gemma 3 model, or None for another model or unknown settings."""
    settings, images = files.settings, files.images
    if settings.get("model_type") != "gemma3" or images.get("image_processor_type") not in _PROCESSORS:
        return None
    if images.get("do_pan_and_scan") or images.get("do_resize") not in (None, True):
        return None
    count = integer(files.processor, "image_seq_length", _TOKENS)
    if count is None or count != integer(settings, "mm_tokens_per_image", _TOKENS):
        return None
    names = [_name(files, name) for name, _, _ in _MARKERS]
    ids = [integer(settings, name, default) for _, name, default in _MARKERS]
    found = [ids_of(tokenizer, "\n" * length) for length in range(1, 5)]
    if None in names or None in ids or any(len(one) != 1 for one in found):
        return None
    newlines = [ids[0] for ids in found]
    two = newlines[1]
    begin, soft, end = ids
    expected = [two, begin, soft, soft, end, two]
    written = ids_of(tokenizer, f"\n\n{names[0]}{names[1]}{names[1]}{names[2]}\n\n")
    if written != expected or len({*newlines, begin, soft, end}) != 7:
        return None
    runs = ((two, 1), (begin, 1), (soft, count), (end, 1), (two, 1))
    return Family("Gemma 3", begin, lambda width, height: runs, partial(join, newlines))


def _name(files: Files, name: str) -> str | None:
    """Return the text of the special token that tokenizer_config.json calls `name`, for example `boi_token`.

    Returns None if the file gives no token of this name, or two different ones.
    """
    extra = files.tokenizer.get("extra_special_tokens")
    told = [files.tokenizer.get(name), extra.get(name) if isinstance(extra, dict) else None]
    found = {one.get("content") if isinstance(one, dict) else one for one in told if one is not None}
    only = found.pop() if len(found) == 1 else None
    return only if isinstance(only, str) else None


def join(newlines: Sequence[int], ids: Ids, starts: Places, lengths: Places) -> tuple[Ids, Places] | None:
    """Merge adjacent newline tokens of a prompt as vLLM does; return the new token ids and positions of the images.

    `newlines`: the tokens of one, two, three and four newlines. `starts`: the positions of the images' first tokens.
    `lengths`: the images' numbers of tokens. vLLM merges in three passes, one for each pair of tokens that becomes one
    token.

    Returns None if the two newlines at an image's end are merged with a newline after the image. vLLM then does not
    find the image's tokens in the prompt, and refuses the prompt. It does find an image after a merged newline, because
    it reads a token of three newlines as one newline followed by two.
    """
    one, two, three, four = newlines
    for first, second, both in ((one, two, three), (two, one, three), (two, two, four)):
        at = _pairs(ids, first, second)
        if second == one and np.isin(at, starts + lengths - 1).any():
            return None
        ids = ids.copy()
        ids[at] = both
        ids = np.delete(ids, at + 1)
        starts = starts - np.searchsorted(at + 1, starts, side="right")
    return ids, starts


def _pairs(ids: Ids, first: int, second: int) -> Places:
    """Return the positions at which the token `second` follows `first`; each token belongs to one pair at most.

    In a run of equal tokens, pairs are formed from left to right.
    """
    at = np.flatnonzero((ids[:-1] == first) & (ids[1:] == second))
    if first != second or len(at) < 2:
        return at
    # In a run of equal tokens a pair begins at every second token.
    begins = np.flatnonzero(np.diff(at, prepend=-2) != 1)
    number = np.arange(len(at)) - np.repeat(begins, np.diff(begins, append=len(at)))
    return at[number % 2 == 0]

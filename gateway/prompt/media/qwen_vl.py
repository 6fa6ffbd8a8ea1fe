"""Image tokens of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: an image is scaled to whole square tiles, and each is one token.

A tile has `patch_size * merge_size` pixels a side, and the number of pixels of the scaled image has a lower and an
upper limit. The rule is `smart_resize` of transformers' image processor of Qwen2-VL, which all these models use.
"""

from __future__ import annotations

from math import ceil, floor, sqrt

from ..tokens.tokenizer import Tokenizer
from .families import Family, Files, Runs, integer

_TYPES = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_PROCESSORS = frozenset({None, "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil"})
_LEAST_PIXELS, _MOST_PIXELS = 56 * 56, 28 * 28 * 1280  # the image processor's defaults
_MOST_RATIO = 200  # the largest ratio of an image's sides; the processor refuses narrower images


def family(files: Files, tokenizer: Tokenizer) -> Family | None:
    """Return the rule for the image tokens of a Qwen-VL model, or None for another model or unknown settings."""
    settings, processor = files.settings, files.images
    vision, token = settings.get("vision_config"), settings.get("image_token_id")
    kind = processor.get("image_processor_type")
    if settings.get("model_type") not in _TYPES or kind not in _PROCESSORS or not isinstance(vision, dict):
        return None
    patch, merge = integer(processor, "patch_size", 14), integer(processor, "merge_size", 2)
    if type(token) is not int or patch is None or merge is None or processor.get("do_resize", True) is not True:
        return None
    # The image processor's output must have patches of the size that the model expects.
    if vision.get("patch_size", patch) != patch or vision.get("spatial_merge_size", merge) != merge:
        return None
    size = processor.get("size")
    size = size if isinstance(size, dict) else {}
    least = integer(processor, "min_pixels", size.get("shortest_edge", _LEAST_PIXELS))
    most = integer(processor, "max_pixels", size.get("longest_edge", _MOST_PIXELS))
    if type(least) is not int or type(most) is not int or not 0 < least <= most:
        return None
    tile = patch * merge

    def expansion(width: int, height: int) -> Runs | None:
        count = tokens(width, height, tile, least, most)
        return None if count is None else ((token, count),)

    return Family("Qwen-VL", token, expansion)


def tokens(width: int, height: int, tile: int, least: int, most: int) -> int | None:
    """Return the number of tokens of an image, or None if the image is too narrow and so refused.

    `width` and `height`: the image's size in pixels; `tile`: the side of a tile in pixels; `least` and `most`: the
    limits on the number of pixels of the scaled image.
    """
    if max(width, height) / min(width, height) > _MOST_RATIO:
        return None
    high, wide = round(height / tile) * tile, round(width / tile) * tile
    if high * wide > most:
        by = sqrt(height * width / most)
        high, wide = max(tile, floor(height / by / tile) * tile), max(tile, floor(width / by / tile) * tile)
    elif high * wide < least:
        by = sqrt(least / (height * width))
        high, wide = ceil(height * by / tile) * tile, ceil(width * by / tile) * tile
    return high // tile * (wide // tile)

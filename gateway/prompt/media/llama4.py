"""Image tokens of Llama 4: an image is cut into up to `max_patches` square tiles, with separators between them.

A small copy of the whole image follows the tiles. If the image is a single tile, there is only this copy.

The rules are those of two functions in transformers: `get_best_fit` of Llama 4's image processor, by which vLLM also
chooses the tiles (`model_executor/models/mllama4.py`), and `_prompt_split_image` of Llama 4's processor. Both calculate
with 32-bit floats, which decides which of two nearly equal scales is the smaller one.

Llama 3.2 Vision (mllama) is not supported: it takes images by cross attention, without tokens for their parts, and
0.10.2 was the last vLLM to serve it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from ..tokens.tokenizer import Tokenizer
from .families import Family, Files, Runs, ids_of, integer

_PROCESSORS = frozenset({None, "Llama4ImageProcessor", "Llama4ImageProcessorFast"})
_TILE, _MOST_TILES, _PATCH, _SHUFFLE = 336, 16, 14, 0.5  # defaults where the files name none
_VISION_TILE = 448  # default of a tile's side in the vision part of config.json
_PATCH_ID = 200_092
_MOST_OF_TILES = 256  # no model has nearly as many tiles; the number of grids to choose from grows with it
_NAMES = ("<|image_start|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image|>", "<|image_end|>")
# The keys of these tokens in processor_config.json, and the values that are supported. vLLM writes some of the tokens
# under these names, whatever that file says.
_RENAMED = {
    "fake_image_token": "<|image|>",
    "image_token": "<|image|>",
    "start_of_image_token": "<|image_start|>",
    "end_of_image_token": "<|image_end|>",
    "patch_token": "<|patch|>",
    "tile_x_separator_token": "<|tile_x_separator|>",
    "tile_y_separator_token": "<|tile_y_separator|>",
}
_KNOWN_SIZES = 1024  # the number of image sizes whose tiles are cached; choosing the tiles takes 15 us


def family(files: Files, tokenizer: Tokenizer) -> Family | None:
    """Return the rule for the image tokens of a Llama 4 model, or None for another model or unknown settings."""
    settings, images, vision = files.settings, files.images, files.settings.get("vision_config")
    if settings.get("model_type") != "llama4" or images.get("image_processor_type") not in _PROCESSORS:
        return None
    if not isinstance(vision, dict) or images.get("do_resize") not in (None, True):
        return None
    if any(files.processor.get(name, as_named) != as_named for name, as_named in _RENAMED.items()):
        return None
    tile, patch = integer(vision, "image_size", _VISION_TILE), integer(vision, "patch_size", _PATCH)
    shuffle, most = vision.get("pixel_shuffle_ratio", _SHUFFLE), integer(images, "max_patches", _MOST_TILES)
    if tile is None or patch is None or tile % patch or type(shuffle) not in (float, int) or not 0 < shuffle <= 1:
        return None
    largest, size = images.get("resize_to_max_canvas", False), images.get("size", {"height": _TILE, "width": _TILE})
    # The image processor's output must have the size that the model expects.
    if size != {"height": tile, "width": tile} or most is None or most > _MOST_OF_TILES or type(largest) is not bool:
        return None
    patches = (tile // patch) ** 2 // round(1 / shuffle**2)  # tokens of a tile
    ids = ids_of(tokenizer, "".join(_NAMES))
    if not patches or len(ids) != len(_NAMES) or len(set(ids)) != len(ids):
        return None
    start, inner, between_columns, behind_row, whole, end = ids
    if ids_of(tokenizer, 2 * _NAMES[1]) != [inner, inner] or inner != integer(settings, "image_token_index", _PATCH_ID):
        return None
    grid = tiling(tile, most, largest)

    @lru_cache(_KNOWN_SIZES)
    def expansion(width: int, height: int) -> Runs:
        (rows, columns), one = grid(width, height), (inner, patches)
        row = [one, (between_columns, 1)] * (columns - 1) + [one, (behind_row, 1)]
        tiles = row * rows if rows * columns > 1 else []
        return [(start, 1), *tiles, (whole, 1), one, (end, 1)]

    return Family("Llama 4", whole, expansion)


def tiling(tile: int, most: int, largest: bool) -> Callable[[int, int], tuple[int, int]]:
    """Return a function that returns the rows and columns of tiles for an image's width and height in pixels.

    `tile`: the side of a tile in pixels; `most`: the largest number of tiles; `largest`: scale an image up as far as
    possible, not as little as possible.

    Among the grids that the image fits without shrinking, the function chooses the one that enlarges the image least,
    or most with `largest`. If there is none, it chooses the grid that shrinks the image least. If several grids scale
    the image equally, it chooses the one with the fewest tiles.
    """
    by_ratio: dict[float, list[tuple[int, int]]] = {}  # in the processor's order: of equal grids the first is chosen
    for tiles in range(most, 0, -1):
        for rows in (n for n in range(1, tiles + 1) if not tiles % n):
            by_ratio.setdefault(rows / (tiles // rows), []).append((rows, tiles // rows))
    grids = [one for several in by_ratio.values() for one in several]
    sides = np.array(grids, np.float32) * np.float32(tile)
    areas = np.array([rows * columns for rows, columns in grids])

    def grid(width: int, height: int) -> tuple[int, int]:
        scales = (sides / np.array((height, width), np.float32)).min(axis=1)
        growing = scales[scales >= 1]
        scale = growing.min() if len(growing) and not largest else scales.max()
        fitting = np.flatnonzero(scales == scale)
        return grids[fitting[areas[fitting].argmin()]]

    return grid

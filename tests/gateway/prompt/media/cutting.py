"""Settings of Llama 4's image processor, and the sizes of images that it is held to with each.

`tiles.json` has what transformers' processor made of them; `python -m tests.vllm.record_media` writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .sizes import sizes

RECORDED = Path(__file__).with_name("tiles.json")


class Setting(NamedTuple):
    tile: int
    most: int
    largest: bool
    count: int  # of random sizes

    def sizes(self) -> list[tuple[int, int]]:
        return sizes(self.tile, self.most, self.count, 15)


SETTINGS = (Setting(336, 16, False, 1000), Setting(336, 16, True, 300), Setting(448, 5, False, 300), Setting(560, 1, False, 20))  # fmt: skip

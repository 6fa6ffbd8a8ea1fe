"""Sizes of images of all ratios."""

from __future__ import annotations

import random


def sizes(tile: int, most: int, count: int, bits: int = 11) -> list[tuple[int, int]]:
    """So many sizes of all ratios with sides of at most so many bits, and some where another number of tiles fits from
    one pixel to the next."""
    dice = random.Random(13)
    found = [(1, 1), (1, 900), (900, 1), (3, 5000), (20_000, 7), (tile, tile), (tile * most, tile), (tile, tile * most)]
    for _ in range(count):
        found.append(tuple(int(2 ** (bits * dice.random())) for _ in range(2)))
    for _ in range(count // 2):
        wide = dice.randint(1, most)
        high = dice.randint(1, most // wide)
        found.append((wide * tile + dice.randint(-1, 1), high * tile + dice.randint(-1, 1)))
    return list(dict.fromkeys(found))

"""Requests with images for a small model of each family, and what a real vLLM made of them.

`bodies.jsonl` has digests of the names of their blocks, made of the ids and of the keys besides tokens that vLLM's own
renderer, processor and rule gave; `python -m tests.vllm.record_media` writes it, `tests/vllm/test_media.py` asks again.
"""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_hexdigest

from cachemap import chain_seed, hash_blocks
from cachemap.hashing import covering
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, MESSAGES
from replicas.engines.vllm.versions import version_quirks

from ..recordings import Compared, Recording, read
from .gemma3_model import tiny_gemma3
from .llama4_model import TILE, TILES, tiny_llama4
from .models import assistant, blank, data_url, image, system, text, user
from .sizes import sizes
from .vision_model import tiny_qwen2_vl

HERE = Path(__file__).parent
RECORDED = HERE / "bodies.jsonl"
SIZE = 16
RANDOM = 120
Cases = dict[str, tuple[str, dict[str, Any]]]  # by name, an API's path and a body


class Family(NamedTuple):
    root: str  # where the engine was told that the model is
    folder: Callable[[Path], Path]  # makes one
    cases: Callable[[], Cases]


@cache
def bodies(family: str) -> Cases:
    return FAMILIES[family].cases()


def _of_all_kinds() -> Cases:
    """With images of all encodings and colours, of a handful of sizes."""
    urls = [
        f"data:image/png;base64,{one['data']}" for one in json.loads((HERE / "recorded.json").read_text())["images"]
    ]
    dice = random.Random(11)
    cases: Cases = {
        f"image {i}": (CHAT, {"messages": [system(20), user(text("What is this?"), image(url))]})
        for i, url in enumerate(urls)
    }
    cases["named"] = CHAT, {"messages": [user(image(urls[0], uuid="mine"), text("word " * 30), image(urls[0]))]}
    cases["no prompt"] = CHAT, {"messages": [user(image(urls[0]))], "add_generation_prompt": False}
    blocks = [_block(url) for url in urls[:2]]
    cases["messages"] = MESSAGES, {"messages": [user(text("See"), *blocks)], "max_tokens": 1, "system": "Look."}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}, blocks[0]]}
    used = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    turns = [user(text("See")), {"role": "assistant", "content": [used]}, user(result)]
    cases["result of a tool"] = MESSAGES, {"messages": turns, "max_tokens": 1}
    return {**cases, **_random(dice, urls)}


def _of_many_sizes() -> Cases:
    """An image of each size, and conversations with some of them, whose texts end and begin with newlines."""
    urls = {size: data_url(blank(*size)) for size in sizes(TILE, TILES, 100)}
    cases: Cases = {
        f"{width} x {height}": (CHAT, {"messages": [system(width % 9), user(text("See "), image(url), text("?"))]})
        for (width, height), url in urls.items()
    }
    dice, some = random.Random(12), list(urls.values())
    cases["no prompt"] = CHAT, {"messages": [user(image(some[0]))], "add_generation_prompt": False}
    cases["named"] = CHAT, {"messages": [user(image(some[0], uuid="mine"), text("word " * 30), image(some[0]))]}
    cases["messages"] = MESSAGES, {"messages": [user(text("See"), _block(some[1]))], "max_tokens": 1, "system": "Look."}
    cases["side by side"] = CHAT, {"messages": [user(*map(image, some[:20]))]}
    return {**cases, **_random(dice, some, ["", "", "\n", "\n\n", "\n\n\n", "\n\n\n\n", "\n" * 9])}


def _block(url: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}}


def _random(dice: random.Random, urls: list[str], around: Sequence[str] = ()) -> Cases:
    """Random conversations, without those that have no image."""
    talks = {f"random {i}": _talk(dice, urls, around) for i in range(RANDOM)}
    return {
        name: (CHAT, {"messages": talk})
        for name, talk in talks.items()
        if any(part["type"] != "text" for message in talk for part in message["content"] if message["role"] == "user")
    }


def _talk(dice: random.Random, urls: list[str], around: Sequence[str] = ()) -> list[dict[str, Any]]:
    """`around`: texts of which one is put before and one behind each other text."""
    talk = [system(dice.randrange(60))] if dice.random() < 0.7 else []
    for _ in range(dice.randint(1, 4)):
        parts = [
            image(dice.choice(urls))
            if dice.random() < 0.5
            else text(_between(dice, " word\n"[: dice.randint(1, 6)] * dice.randint(1, 40), around))
            for _ in range(dice.randint(1, 4))
        ]
        talk += [user(*parts), assistant("It is " + "so " * dice.randrange(9))]
    return talk[:-1]


def _between(dice: random.Random, said: str, around: Sequence[str]) -> str:
    return dice.choice(around) + said + dice.choice(around) if around else said


FAMILIES = {
    "Qwen2-VL with images": Family("tiny-qwen2-vl", tiny_qwen2_vl, _of_all_kinds),
    "Gemma 3 with images": Family("tiny-gemma3", tiny_gemma3, _of_many_sizes),
    "Llama 4 with images": Family("tiny-llama4", tiny_llama4, _of_many_sizes),
}


def digest_of_blocks(ids: Sequence[int], keys: Sequence[Sequence[Any] | None]) -> str:
    """Of the names that the engine's events give its blocks. `keys`: per block, what it covers besides tokens."""
    seed, names = chain_seed("m", SIZE), []
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        own = [list(key) for key in keys[start // SIZE] or ()]
        seed = covering(own, seed) if own else seed
        seed = hash_blocks(array("I", ids[start : start + SIZE]).tobytes(), SIZE, seed)[0]
        names.append(seed)
    return xxh3_64_hexdigest(array("Q", names).tobytes())


def compare(family: str, folder: Path, version: str, answers: dict[str, str | None]) -> Compared:
    """`answers`: of each body's name the digest of the engine's blocks, None where it refuses."""
    pipeline, found = Pipeline(folder, "m", SIZE), Compared()
    pipeline.follow(version_quirks(version))
    pipeline.media.root = FAMILIES[family].root
    for name, (path, body) in bodies(family).items():
        prompt = pipeline.prepare(path, json.dumps(body).encode())
        if answers[name] is None:
            found.refused[prompt.mode] += 1
        elif prompt.mode not in ("media", "exact"):
            found.declined[name] = prompt.note
        elif xxh3_64_hexdigest(array("Q", prompt.hashes).tobytes()) == answers[name]:
            found.equal.append(name)
        else:
            found.wrong[name] = "other blocks"
    return found


def recordings() -> list[Recording]:
    """All that was recorded. Raises ValueError where bodies have changed since."""
    return read(RECORDED, bodies, "tests.vllm.record_media")

"""Record what installed versions of vLLM make of images: `python -m tests.vllm.record_media VERSION=FOLDER ...`.

`tests/gateway/prompt/media` holds the gateway to it without a vLLM.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..gateway.prompt.media import cutting, pictures
from ..gateway.prompt.media.bodies import FAMILIES, bodies, digest_of_blocks
from ..gateway.prompt.media.bodies import RECORDED as RECORDED_BODIES
from ..gateway.prompt.recordings import digest_of_body
from .engines import by_vllm, folder, rendered

RECORDED = Path(pictures.__file__).with_name("recorded.json")
MODEL = "somebody/Tiny-Qwen2-VL"
PROCESSOR = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2}
TILES = RECORDED.with_name("tiles.json")
_LARGEST = 6000  # bytes of an image that is recorded


def vision() -> dict[str, str]:
    """The environment in which vLLM finds what models that take images import."""
    return {"PYTHONPATH": str(folder() / "vision")}


def asked(images: Iterable[bytes]) -> list[Any]:
    """Of each image the name and the tokens, None where it is refused."""
    question = {"model": MODEL, "processor": PROCESSOR, "images": [base64.b64encode(one).decode() for one in images]}
    return json.loads(by_vllm("media_names.py", asked=json.dumps(question))[-1])


def blocks(family: str, store: Path) -> dict[str, str | None]:
    """Of each body's name the digest of its blocks, None where vLLM refuses it."""
    root, cases = FAMILIES[family].root, bodies(family)
    FAMILIES[family].folder(store / root)
    [made] = rendered(store, [(root, None, cases.values())], vision())
    told = dict(zip(cases, made, strict=True))
    return {name: digest_of_blocks(one["ids"], one["keys"]) if "keys" in one else None for name, one in told.items()}


def tiles() -> list[list[list[int]]]:
    """For each of the settings of `cutting`, the rows and columns that transformers' processor of Llama 4 cuts an image
    of each size into."""
    asked = [[setting._asdict(), setting.sizes()] for setting in cutting.SETTINGS]
    return json.loads(by_vllm("media_tiles.py", asked=json.dumps(asked), env=vision())[-1])


def main() -> None:
    images = {name: image for name, image in pictures.readable().items() if len(image) <= _LARGEST}
    names, cut, answers = {}, {}, {}
    for given in sys.argv[1:]:
        version, _, os.environ["HITHERTO_VLLM"] = given.partition("=")
        names[version] = asked(images.values())
        cut[version] = [[100 * rows + columns for rows, columns in one] for one in tiles()]
        for family in FAMILIES:
            with tempfile.TemporaryDirectory() as store:
                answers[family, version] = blocks(family, Path(store))
    recorded = [
        {"what": name, "data": base64.b64encode(image).decode(), **{version: names[version][i] for version in names}}
        for i, (name, image) in enumerate(images.items())
    ]
    RECORDED.write_text(json.dumps({"model": MODEL, "processor": PROCESSOR, "images": recorded}, indent=1) + "\n")
    # A line for each version, with a number of two digits for rows and columns each.
    lines = [f" {json.dumps(version)}: {json.dumps(found)}" for version, found in cut.items()]
    TILES.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    with RECORDED_BODIES.open("w") as file:
        for family, version in itertools.product(FAMILIES, names):
            found = answers[family, version]
            told = {name: [digest_of_body(*case), found[name]] for name, case in bodies(family).items()}
            file.write(json.dumps({"family": family, "vllm": version, "answers": told}) + "\n")


if __name__ == "__main__":
    main()

"""Record what installed versions of vLLM make of images: `python -m tests.vllm.record_media VERSION=FOLDER ...`.

`tests/gateway/prompt/media` holds the gateway to it without a vLLM.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..gateway.prompt.media import cutting, pictures
from ..gateway.prompt.media.bodies import FAMILIES, bodies, digest_of_blocks, digest_of_body
from ..gateway.prompt.media.bodies import RECORDED as RECORDED_BODIES
from .engines import ENVIRONMENT

RECORDED = Path(pictures.__file__).with_name("recorded.json")
MODEL = "somebody/Tiny-Qwen2-VL"
PROCESSOR = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2}
RENDERING = Path(__file__).with_name("rendering.py")
TILING = Path(__file__).with_name("media_tiles.py")
TILES = RECORDED.with_name("tiles.json")
_LARGEST = 6000  # bytes of an image that is recorded


def asked(python: Path | str, images: Mapping[str, bytes]) -> list[Any]:
    """Of each image the name and the tokens, None where it is refused."""
    question = {"model": MODEL, "processor": PROCESSOR}
    question["images"] = [base64.b64encode(image).decode() for image in images.values()]  # type: ignore[assignment]
    program = Path(__file__).with_name("media_names.py")
    done = subprocess.run([python, program], input=json.dumps(question), capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def blocks(family: str, environment: Path, store: Path) -> dict[str, str | None]:
    """Of each body's name the digest of its blocks, None where vLLM refuses it."""
    root = FAMILIES[family].root
    FAMILIES[family].folder(store / root)
    jobs, results = store / "jobs", store / "results"
    cases = bodies(family)
    jobs.write_text(json.dumps({"folder": root, "chat_template": None, "bodies": list(cases.values())}) + "\n")
    done = subprocess.run(
        [environment / "bin" / "python", RENDERING, jobs, results], capture_output=True, text=True, cwd=store,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(environment / "vision")},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    told = dict(zip(cases, json.loads(results.read_text()), strict=True))
    return {name: digest_of_blocks(one["ids"], one["keys"]) if "keys" in one else None for name, one in told.items()}


def tiles(environment: Path) -> list[list[list[int]]]:
    """For each of the settings of `cutting`, the rows and columns that transformers' processor of Llama 4 cuts an image
    of each size into."""
    asked = [[setting._asdict(), setting.sizes()] for setting in cutting.SETTINGS]
    done = subprocess.run(
        [environment / "bin" / "python", TILING], input=json.dumps(asked), capture_output=True, text=True,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(environment / "vision")},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    environments = {version: Path(folder) for version, _, folder in (one.partition("=") for one in sys.argv[1:])}
    images = {name: image for name, image in pictures.readable().items() if len(image) <= _LARGEST}
    told = {version: asked(folder / "bin" / "python", images) for version, folder in environments.items()}
    recorded = [
        {"what": name, "data": base64.b64encode(image).decode(), **{version: told[version][i] for version in told}}
        for i, (name, image) in enumerate(images.items())
    ]
    RECORDED.write_text(json.dumps({"model": MODEL, "processor": PROCESSOR, "images": recorded}, indent=1) + "\n")
    record_tiles(environments)
    record_bodies(environments)


def record_tiles(environments: Mapping[str, Path]) -> None:
    """A line for each version, with a number of two digits for rows and columns each."""
    lines = []
    for version, folder in environments.items():
        found = [[100 * rows + columns for rows, columns in one] for one in tiles(folder)]
        lines.append(f" {json.dumps(version)}: {json.dumps(found)}")
    TILES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def record_bodies(environments: Mapping[str, Path]) -> None:
    lines = []
    for family in FAMILIES:
        for version, folder in environments.items():
            with tempfile.TemporaryDirectory() as store:
                found = blocks(family, folder, Path(store))
            answers = {name: [digest_of_body(*case), found[name]] for name, case in bodies(family).items()}
            lines.append(json.dumps({"family": family, "vllm": version, "answers": answers}) + "\n")
    RECORDED_BODIES.write_text("".join(lines))


if __name__ == "__main__":
    main()

"""Record what installed versions of vLLM make of images: `python -m tests.vllm.record_media VERSION=FOLDER ...`.

`tests/gateway/prompt/media` holds the gateway to it without a vLLM.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..gateway.prompt.media import pictures

RECORDED = Path(pictures.__file__).with_name("recorded.json")
MODEL = "somebody/Tiny-Qwen2-VL"
PROCESSOR = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2}
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


def main() -> None:
    images = {name: image for name, image in pictures.readable().items() if len(image) <= _LARGEST}
    told = {version: asked(Path(folder) / "bin" / "python", images) for version, folder in (a.split("=") for a in sys.argv[1:])}  # fmt: skip
    recorded = [
        {"what": name, "data": base64.b64encode(image).decode(), **{version: told[version][i] for version in told}}
        for i, (name, image) in enumerate(images.items())
    ]
    RECORDED.write_text(json.dumps({"model": MODEL, "processor": PROCESSOR, "images": recorded}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Record what transformers makes of the folders in `folders`: run with the Python of an engine's environment.

    ENGINE/bin/python tests/gateway/prompt/record_reading.py tests/gateway/prompt/transformers.json

Each run adds or replaces the record of the release that it runs with.
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import transformers
from folders import SHAPES, TEXTS, digest, write


def recorded(name: str, folder: Path) -> dict:
    """Named tokens, and the ids of each text without and with special tokens."""
    real = transformers.AutoTokenizer.from_pretrained(str(write(name, folder)), truncation_side="left")
    return {"named": real.special_tokens_map} | {
        key: [digest(real(text, add_special_tokens=special)["input_ids"]) for text in TEXTS]
        for key, special in (("bare", False), ("special", True))
    }


def main(path: Path) -> None:
    logging.disable(logging.WARNING)
    release = ".".join(transformers.__version__.split(".")[:2])
    kept = json.loads(path.read_text()) if path.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        kept[release] = {name: recorded(name, Path(folder) / name) for name in SHAPES}
    lines = [f" {json.dumps(name)}: {{\n" + ",\n".join(f"  {json.dumps(shape)}: {json.dumps(what, separators=(',', ':'))}"
                                                             for shape, what in one.items()) + "\n }"
             for name, one in sorted(kept.items())]  # fmt: skip
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

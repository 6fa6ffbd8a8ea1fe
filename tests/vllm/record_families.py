"""Ask the vLLM that HITHERTO_VLLM names what it makes of each family's bodies.

    HITHERTO_VLLM=FOLDER python -m tests.vllm.record_families [FAMILY ...]

writes the answers into `tests/gateway/prompt/families.jsonl`, beside what other versions made of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from ..gateway.prompt.families import (
    FAMILIES,
    RECORDED,
    TODAY,
    bodies,
    digest,
    digest_of_body,
    families_of,
    harmony_vocabulary,
)
from .engines import ENVIRONMENT, folder, version

RENDERING = Path(__file__).with_name("rendering.py")


def ask(names: list[str], store: Path) -> dict[str, dict[str, str | None]]:
    """Of each family the digests of its bodies' ids, None where vLLM refuses the body."""
    jobs, results = store / "jobs", store / "results"
    jobs.write_text("".join(json.dumps({
        "folder": str(FAMILIES[name](store / name)), "chat_template": None, "bodies": list(bodies(name).values()),
    }) + "\n" for name in names))  # fmt: skip
    more = {"VLLM_SYSTEM_START_DATE": TODAY}
    if "gpt-oss" in names:
        more["TIKTOKEN_ENCODINGS_BASE"] = str(harmony_vocabulary(store / "harmony"))
    with (store / "log").open("w") as log:
        done = subprocess.run(
            [folder() / "bin" / "python", RENDERING, jobs, results], stdout=log, stderr=log,
            env={**os.environ, **ENVIRONMENT, **more}, timeout=600, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError((store / "log").read_text()[-3000:])
    answers = [json.loads(line) for line in results.read_text().splitlines()]
    return {
        name: {
            body: digest(answer["ids"]) if "ids" in answer else None
            for body, answer in zip(bodies(name), answered, strict=True)
        }
        for name, answered in zip(names, answers, strict=True)
    }


def main() -> None:
    names, number = sys.argv[1:] or families_of(version()), ".".join(map(str, version()))
    kept = {}
    for line in RECORDED.read_text().splitlines() if RECORDED.is_file() else ():
        told = json.loads(line)
        kept[told["family"], told["vllm"]] = line
    with tempfile.TemporaryDirectory() as store:
        answers = ask(names, Path(store))
    for name, answered in answers.items():
        asked = {body: digest_of_body(*case) for body, case in bodies(name).items()}
        told = {"family": name, "vllm": number, "answers": {body: [asked[body], ids] for body, ids in answered.items()}}
        kept[name, number] = json.dumps(told)
        print(name, number, f"{sum(ids is not None for ids in answered.values())} of {len(answered)} bodies taken")
    RECORDED.write_text("".join(kept[key] + "\n" for key in sorted(kept)))


if __name__ == "__main__":
    main()

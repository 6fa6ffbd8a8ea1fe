"""Ask the vLLM that HITHERTO_VLLM names what it makes of each family's bodies.

    HITHERTO_VLLM=FOLDER python -m tests.vllm.record_families [FAMILY ...]

writes the answers into `tests/gateway/prompt/families.jsonl`, beside what other versions made of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from ..gateway.prompt.families import (
    FAMILIES,
    RECORDED,
    TODAY,
    bodies,
    digest,
    families_of,
    harmony_vocabulary,
)
from ..gateway.prompt.recordings import digest_of_body
from .engines import release, rendered, version


def ask(names: list[str], store: Path) -> dict[str, dict[str, str | None]]:
    """Of each family the digests of its bodies' ids, None where vLLM refuses the body."""
    env = {"VLLM_SYSTEM_START_DATE": TODAY}
    if "gpt-oss" in names:
        env["TIKTOKEN_ENCODINGS_BASE"] = str(harmony_vocabulary(store / "harmony"))
    jobs = [(FAMILIES[name](store / name), None, bodies(name).values()) for name in names]
    return {
        name: {body: digest(one["ids"]) if "ids" in one else None for body, one in zip(bodies(name), made, strict=True)}
        for name, made in zip(names, rendered(store, jobs, env), strict=True)
    }


def main() -> None:
    names, number = sys.argv[1:] or families_of(version()), release()
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

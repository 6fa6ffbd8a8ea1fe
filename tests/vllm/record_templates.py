"""Write down, for the page of exactness, how the templates of some ninety models compare with a real vLLM.

HITHERTO_VLLM=FOLDER python -m tests.vllm.record_templates
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from .engines import version
from .test_templates import SUMMARY, cases, compare, summary


def main() -> None:
    with tempfile.TemporaryDirectory() as store:
        compared = compare(Path(store), cases(Path(store)))
    templates = {name: summary(case) for name, case in sorted(compared.items())}
    SUMMARY.write_text(json.dumps({"vllm": version(), "templates": templates}, indent=0) + "\n")


if __name__ == "__main__":
    main()

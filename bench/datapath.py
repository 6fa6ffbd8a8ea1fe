"""What our data path costs beside the Rust routers and nginx: CPU per request of the whole process.

    python -m bench.datapath [--quick] [--json FILE] [the peers' script's own flags: --rounds --loads --peers ...]

Runs the side-by-side script (`datapath.py` in HITHERTO_PEERS, else ../shared/peers) with this gateway named
`ours`, exact routing on: real tokenizer, chat template, block hashes, prefix map, `least_time`. The script
measures every gateway in the same run on the same requests and prints each figure's ratio to the best
Rust router. Where the script is absent there is nothing to compare with, and this says so (exit code 3).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from replicas.simulated.model import sim_model_dir

ROOT = Path(__file__).parent.parent
PEERS = Path(os.environ.get("HITHERTO_PEERS", ROOT.parent / "shared" / "peers"))
OURS = (
    "ours={bin}/hitherto serve --host 127.0.0.1 --port {{port}} --admin-port {{aux}} --log-level warning"
    " --model {{model_dir}} --replica-url {{engines}}"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, within 50 seconds")
    parser.add_argument("--json", metavar="FILE")
    args, passed_on = parser.parse_known_args()
    script = PEERS / "datapath.py"
    if not script.exists():
        print(f"skipped: no side-by-side script at {script}; set HITHERTO_PEERS to its folder")
        return 3
    if args.quick:
        passed_on = ["--rounds", "1", "--loads", "plain,chat", "--peers", "sglang,vllm", *passed_on]
    command = [sys.executable, str(script), "--gateway", OURS.format(bin=Path(sys.executable).parent)]
    command += ["--model-dir", str(sim_model_dir()), *passed_on]
    if args.json:
        command += ["--json", args.json]
    return subprocess.run(command).returncode


if __name__ == "__main__":
    sys.exit(main())

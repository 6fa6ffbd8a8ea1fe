"""What two legs a request cost a gateway beside one: CPU per request of the whole process.

    python -m bench.two_legs [--rounds 3] [--loads plain,stream,chat]

Measures as `bench.datapath` does, with its two engines that answer at once: this gateway with the engines as they are
(one leg a request), with the same engines asked one after the other (NIXL's way), and the P/D mode of vllm-router in
front of them, where it is installed. All choose by `round_robin`, which sends every request in two legs: engines that
answer at once would be worth none by a price. The engines move no caches.
"""

from __future__ import annotations

import argparse
import sys

from bench.contenders import PEERS_HOME
from bench.datapath import SERVE, measure

OURS = f"{SERVE} --policy round_robin --replica-url"
GATEWAYS = {
    "one_leg": f"{OURS} {{first}} {{second}}",
    "two_legs": f"{OURS} {{first}}#role=prefill,transfer=nixl {{second}}#role=decode,transfer=nixl",
    "vllm_pd": "{peers}/vllm/bin/vllm-router --host 127.0.0.1 --port {port} --vllm-pd-disaggregation --prefill {first}"
    " --decode {second} --policy round_robin --prometheus-port {aux}",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="plain,stream,chat")
    args = parser.parse_args()
    commands = dict(GATEWAYS)
    if not (PEERS_HOME / "vllm/bin").exists():
        print("vllm-router is not installed, and left out: see `python -m bench.datapath --install`")
        del commands["vllm_pd"]
    measure(commands, args.loads.split(","), args.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())

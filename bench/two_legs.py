"""What two legs a request cost a gateway beside one: CPU per request of the whole process.

    python -m bench.two_legs [--rounds 3] [--loads plain,stream,chat] [--json FILE]

Runs the side-by-side script of `bench.datapath` with two mock engines that answer at once, and one gateway after the
other in each round: this one with the engines as they are (one leg a request), with two that are asked one after the
other (NIXL's way, engines of `bench.nixl_engine`), and the P/D mode of vllm-router in front of these, where it is
installed. All choose by `round_robin`, which sends every request in two legs: engines that answer at once
would be worth none by a price. The mock engines move no caches. Exits with 3 where the script is absent.
"""

from __future__ import annotations

import os
import subprocess
import sys

from bench.contenders import PEERS_HOME
from bench.datapath import PEERS
from replicas.simulated.model import sim_model_dir

OURS = "{bin}/hitherto serve --host 127.0.0.1 --port {port} --admin-port {aux} --log-level warning --policy round_robin --model {model} --replica-url"
NIXL_ENGINES = "BENCH_NIXL_ENGINES"
# By name: the command, and what stands for the two engines, prefiller first.
GATEWAYS = {
    "one_leg": (f"{OURS} {{first}} {{second}}", ""),
    "two_legs": (
        f"{OURS} {{nixl_first}}#role=prefill,transfer=nixl {{nixl_second}}#role=decode,transfer=nixl",
        "",
    ),
    "vllm_pd": (
        "{peers}/vllm/bin/vllm-router --host 127.0.0.1 --port {port} --vllm-pd-disaggregation --prefill {nixl_first}"
        " --decode {nixl_second} --policy round_robin --prometheus-port {aux}",
        "vllm/bin/vllm-router",
    ),
}


def become(name: str, port: str, aux: str, first: str, second: str) -> None:
    """Be that gateway, in front of these engines, or of the two in NIXL_ENGINES."""
    values = dict(zip(("nixl_first", "nixl_second"), os.environ[NIXL_ENGINES].split()))
    values |= {"port": port, "aux": aux, "first": first, "second": second, "peers": PEERS_HOME}
    values |= {"bin": os.path.dirname(sys.executable), "model": sim_model_dir()}
    command = [word.format(**values) for word in GATEWAYS[name][0].split()]
    os.execv(command[0], command)


def main() -> int:
    if sys.argv[1:2] == ["--become"]:
        become(*sys.argv[2:7])
    script = PEERS / "datapath.py"
    if not script.exists():
        print(f"skipped: no side-by-side script at {script}; set HITHERTO_PEERS to its folder")
        return 3
    command = [sys.executable, str(script), "--peers", "", "--model-dir", str(sim_model_dir()), *sys.argv[1:]]
    for name, (_, program) in GATEWAYS.items():
        if program and not (PEERS_HOME / program).exists():
            print(f"left out: {name}, {PEERS_HOME / program} is not there")
            continue
        command += [
            "--gateway",
            f"{name}={sys.executable} -m bench.two_legs --become {name} {{port}} {{aux}} {{engines}}",
        ]
    engines = [
        subprocess.Popen([sys.executable, "-m", "bench.nixl_engine"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        urls = [engine.stdout.readline().strip() for engine in engines if engine.stdout]
        return subprocess.run(command, env=os.environ | {NIXL_ENGINES: " ".join(urls)}).returncode
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()


if __name__ == "__main__":
    sys.exit(main())

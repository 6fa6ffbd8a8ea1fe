"""What a decision takes with 8 to 1,024 replicas: from the block hashes to the chosen index, as the proxy does it.

    python -m bench.decisions [--quick] [--json FILE]

Each replica holds prefixes of some conversations and has prompts and streams; each decision asks for one conversation,
and between two of them one request is sent and one answer begins, as in a running gateway. `match` in the map; `weigh`,
which is `match` and overlaps to candidates; `choose` of every policy; `decision`, `weigh` and least_time's `choose`.
Beside them `loop`, which only reads each replica's load once and takes the least: what a choice costs at least that
looks at them one by one; and `one by one`, least_time on a list of candidates. All sizes are measured in each of five
rounds, and of each size the round is shown whose decisions were quickest: others use the machine, too.
"""

import argparse
import gc
import json
import os
import platform
import random
import time

import numpy as np

from cachemap import CacheMap
from gateway.models import Models
from gateway.prompt import Prompt
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.backend import Backend
from gateway.proxy.proxy import Proxy
from policies import NAMES, CostGroup, Ledger, Router, make
from replicas import Replica, State

REPLICAS = (2, 8, 16, 24, 32, 64, 256, 1024)
BLOCKS = 256
CONVERSATIONS = 2048
TURNS = 1000
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="100 decisions each instead of 1,000")
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    options = parser.parse_args()
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, numpy {np.__version__}"
    )
    rounds = [[measure(count, 100 if options.quick else TURNS) for count in REPLICAS] for _ in range(ROUNDS)]
    quickest = [min(rows, key=lambda row: row["decision"]["p50_us"]) for rows in zip(*rounds)]
    result = {"machine": machine, "load_average": os.getloadavg()[0], "rounds": ROUNDS, "by_replicas": quickest}
    report(result)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)


class Backends:
    """So many backends behind a proxy, with requests under way. Nothing is sent."""

    def __init__(self, count: int):
        self.rng = random.Random(3)
        self.ledger, self.now = Ledger(), time.monotonic()
        self.map = CacheMap((1 << 26) + count * (1 << 18))
        self.proxy = Proxy(
            models=Models.of(Pipeline(None, "m", 16)), router=Router(make("least_time"), self.map, self.ledger, CostGroup()), metrics=None,
            retries=1, request_timeout=60, idle_timeout=60, response_headers=True, replicas={}, on_traffic=None, ask_models=None,
        )  # fmt: skip
        for number in range(count):
            name = f"10.0.{number // 250}.{number % 250}:8000"
            replica = Replica(name, "http://10.0.0.1:8000", "10.0.0.1", 8000, state=State.READY, models={"m": None})
            backend = Backend(replica, self.proxy.router.add(name, self.map.attach(name, 4096, True)))
            backend.candidate.costs.ttft.value, backend.candidate.costs.step.value = (
                self.rng.uniform(0.8, 1.2),
                self.rng.uniform(0.8, 1.2),
            )
            self.proxy.add(backend)
        self.names = [*self.proxy.backends]
        rng = np.random.default_rng(4)
        self.chains = rng.integers(1, 1 << 64, (CONVERSATIONS, BLOCKS), np.uint64)
        self.chains[:, :16] = self.chains[0, :16]
        for number, chain in enumerate(self.chains):
            self.map.store(
                number % count, chain[:200].tolist(), (chain[:200] + np.uint64(number % count)).tolist(), "gpu"
            )
        self.waiting = [self.sent(index) for index in range(count)]
        self.streams = []
        for one in (self.sent(index) for index in range(count) for _ in range(3)):
            self.ledger.first_byte(one, self.now)
            self.streams.append(one)

    def sent(self, index: int):
        return self.ledger.reserve(self.names[index], self.rng.randrange(100, 4000), 4096, now=self.now)

    def turn(self) -> None:
        """What happens between two decisions."""
        rng, self.now = self.rng, time.monotonic()
        self.waiting.append(self.sent(rng.randrange(len(self.names))))
        begun = self.waiting.pop(rng.randrange(len(self.waiting)))
        self.ledger.first_byte(begun, self.now)
        backend = self.proxy.backends[begun.replica]
        backend.candidate.costs.observe_ttft(
            rng.uniform(0.05, 0.2), begun.uncached, 4096 - begun.uncached, begun.before, begun.at
        )
        self.streams.append(begun)
        self.ledger.release(self.streams.pop(rng.randrange(len(self.streams))))


def measure(count: int, turns: int) -> dict:
    backends = Backends(count)
    proxy, policies = backends.proxy, {name: make(name) for name in NAMES}
    prompts = [Prompt("/v1/completions", "m", tokens=BLOCKS * 16 + 5, hashes=chain.tolist(), session=str(number))
               for number, chain in enumerate(backends.chains)]  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in ("match", "weigh", "loop", "one by one", *NAMES)}

    def timed(name, call, *arguments):
        begun = time.perf_counter()
        result = call(*arguments)
        times[name].append(time.perf_counter() - begun)
        return result

    gc.collect()
    gc.disable()
    for _ in range(turns):
        backends.turn()
        timed("match", proxy.router.map.match, backends.rng.choice(prompts).hashes, time.monotonic())
        demand, candidates = timed("weigh", weighed, proxy, backends.rng.choice(prompts))
        timed("least_time", policies["least_time"].choose, demand, candidates)
        for name, policy in policies.items():
            if name != "least_time":
                timed(name, policy.choose, demand, candidates)
        listed = [*candidates]
        timed("one by one", policies["least_time"].choose, demand, listed)
        timed("loop", least_loaded, listed)
        assert len(candidates) == count
    gc.enable()
    times["decision"] = [sum(parts) for parts in zip(times["weigh"], times["least_time"])]
    return {"replicas": count} | {
        name: dict(zip(("p50_us", "p99_us"), np.percentile(all_, (50, 99)) * 1e6)) for name, all_ in times.items()
    }


def weighed(proxy: Proxy, prompt):
    """A request, and what each replica holds of it: all of a decision but the policy's choice."""
    now = time.monotonic()
    demand = proxy.placing.demand(prompt, now)
    return demand, proxy.router.weighed(demand, proxy.eligible.targets(prompt), now)


def least_loaded(candidates) -> int:
    loads = [candidate.load.prefill_tokens for candidate in candidates]
    return loads.index(min(loads))


def report(result: dict) -> None:
    rows = result["by_replicas"]
    print(f"us, p50 / p99{'':7}" + "".join(f"{row['replicas']:>17,}" for row in rows))
    for name in rows[0]:
        if name != "replicas":
            print(f"{name:20}" + "".join(f"{row[name]['p50_us']:>9,.1f} /{row[name]['p99_us']:>6,.0f}" for row in rows))
    print(
        f"{'least_time / loop':20}"
        + "".join(f"{row['least_time']['p50_us'] / row['loop']['p50_us']:>9,.1f}{'':8}" for row in rows)
    )


if __name__ == "__main__":
    main()

"""What classes, limits and API keys cost a request while there is room for all.

    python -m bench.features [--quick] [--json FILE]

The proxies are the real ones, without sockets, as in `bench.stages`: one with nothing switched on, and one for each
feature. Each request goes to all of them, one after the other in an order that turns, so that whatever else the machine
does falls on all alike. The figures are medians, in microseconds and as multiples of the proxy with nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from gateway.http import upstream as wire
from gateway.http.downstream import Downstream
from gateway.proxy.admission.overload import Overload
from gateway.tenants.key_file import Entry, add, digest, new_key
from gateway.tenants.keys import Keys
from gateway.tenants.metering import Metering
from policies import Classes, QosClass, Rule, Rules, Slo

from .stages import NoTransport, as_request, bodies, build, exchange

NOTHING = "nothing"
BLOCK = 56  # requests that a proxy gets at a stretch: four conversations


class Case(NamedTuple):
    """A proxy's further arguments, and what its clients send besides."""

    features: dict[str, Any]
    headers: bytes = b""


def overload(slo: Slo) -> Overload:
    premium, free = QosClass("premium", 0.4, 100, slo), QosClass("free", 0.6, 10, slo)
    return Overload(
        Classes([premium, free], [Rule(premium, header=("x-customer-tier", "premium")), Rule(free)]), Rules(), None
    )


def cases(folder: Path) -> dict[str, Case]:
    tier, key = b"x-customer-tier: premium\r\n", new_key()
    add(folder / "keys.yaml", Entry(name="acme", sha256=digest(key).hex(), requests_per_minute=10**9))
    bearer = b"authorization: Bearer " + key.encode() + b"\r\n"
    return {
        NOTHING: Case({}),
        "classes": Case({"overload": overload(Slo())}, tier),
        "classes with limits": Case({"overload": overload(Slo(ttft=30.0, tpot=1.0))}, tier),
        "keys with a limit": Case({"keys": Keys(folder / "keys.yaml"), "metering": Metering()}, bearer),
        "figures by class": Case({"slo_figures": True}),
    }


def measure(load: str, count: int, made: dict[str, Case]) -> dict[str, float]:
    """Microseconds a request, by case."""
    clients = {}
    for name, case in made.items():
        server, proxy = build([], **case.features)
        client = clients[name] = Downstream(server.clients)
        client.connection_made(NoTransport())
        proxy.changed()
    taken: dict[str, list[float]] = {name: [] for name in made}
    names = list(made)
    gc.collect()
    gc.freeze()  # as the gateway does once it is up
    sent = bodies(load, count)
    for turn, at in enumerate(range(0, count, BLOCK)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            for number, body in enumerate(sent[at : at + BLOCK]):
                seconds = exchange(clients[name], as_request(body, made[name].headers))
                if turn and number >= BLOCK // 4:  # the first ones find the processor's caches full of another proxy
                    taken[name].append(seconds)
    return {name: statistics.median(seconds) * 1e6 for name, seconds in taken.items()}


async def measured(quick: bool) -> dict[str, dict[str, float]]:
    wire.IDLE_SECONDS = float("inf")  # the connections to the engines must last
    with tempfile.TemporaryDirectory() as folder:
        made = cases(Path(folder))
        return {load: measure(load, 560 if quick else 2800, made) for load in ("plain", "chat")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = asyncio.run(measured(args.quick))
    print(f"{'us per request':24}{'plain':>9}{'':>9}{'chat':>9}")
    for name in found["plain"]:
        columns = (f"{us[name]:9.1f}{us[name] / us[NOTHING]:8.3f}x" for us in found.values())
        print(f"{name:24}{''.join(columns)}")
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""What the figures by class and model cost a request: its first token, a look of the sweep, and its end.

    python -m bench.figures [--json FILE]

A stream went through the real proxy once, without sockets; what is called for it is then called again and again. The
best of a thousand short rounds: a busy machine only ever adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from time import monotonic, perf_counter

from gateway.ops.metrics import Metrics
from gateway.prompt import Prompt
from gateway.proxy.admission.overload import Overload
from gateway.proxy.admission.queue import Queue
from gateway.proxy.exchange import Attempt, Exchange
from gateway.proxy.observers.figures import Figures
from gateway.proxy.responses.usage import Usage
from policies import Admission, Classes, QosClass, QueuedRequest, Rule, Rules
from policies.admission import Space

from .stages import build

CALLS, ROUNDS = 300, 1000
USAGE = Usage(1000, 64, 512)
OVERLOAD = Overload(Classes([QosClass("premium"), QosClass("free")], [Rule(QosClass("free"))]), Rules(), None)


def answered() -> Exchange:
    """A stream of 64 tokens whose last byte has just come."""
    exchange = Exchange.__new__(Exchange)
    attempt = Attempt.__new__(Attempt)
    now = monotonic()
    prompt = Prompt.__new__(Prompt)
    prompt.model, prompt.tokens = "m", 1000
    exchange.stream_record = None
    exchange.prompt, exchange.begun, exchange.prepared_at, exchange.attempts = prompt, now - 1.4, now - 1.399, [attempt]
    attempt.prompt, attempt.exchange, attempt.status, attempt.streams, attempt.leg = prompt, exchange, 200, True, None
    attempt.pieces, attempt.seen_pieces, attempt.pauses, attempt.seen_late = 64, 53, 0, False
    attempt.begun_at, attempt.first_at, attempt.seen_at, attempt.ended_at = now - 1.398, now - 1.3, now - 0.2, now
    return exchange


def microseconds(call: Callable[[], object], calls: int, rounds: int) -> float:
    def one() -> float:
        begun = perf_counter()
        for _ in range(calls):
            call()
        return (perf_counter() - begun) / calls * 1e6

    return min(one() for _ in range(rounds))


async def measured(rounds: int = ROUNDS) -> dict[str, float]:
    _, proxy = build([])
    figures, queue = Figures(Metrics()), Queue(OVERLOAD, proxy.placing, Metrics())
    figures.serve(proxy.eligible.names)
    figures.class_of = queue.class_of
    exchange = answered()
    attempt = exchange.attempts[0]
    qos = OVERLOAD.classes.all[0]
    fleet = Admission(OVERLOAD.classes, OVERLOAD.rules, Space())
    queue._tickets[exchange] = fleet, QueuedRequest(qos, qos.slo, exchange.begun, "", 1000, exchange)

    found = {
        "first token": microseconds(lambda: figures.first_token(attempt, False), CALLS, rounds),
        "a look of the sweep at a stream": microseconds(
            lambda: figures.passing(exchange, attempt, attempt.ended_at), CALLS, rounds
        ),
        "end of a stream": microseconds(lambda: figures.ended(exchange, "complete", USAGE), CALLS, rounds),
    }
    found["a request: first token and end"] = found["first token"] + found["end of a stream"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = asyncio.run(measured())
    for name, us in found.items():
        print(f"{name:44}{us:8.2f} us")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

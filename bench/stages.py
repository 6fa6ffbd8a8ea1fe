"""Where each microsecond of a request goes: our own stages, timed one by one without sockets.

    python -m bench.stages [--json FILE] [--shadow POLICY ...]

The rooms are the real ones (bundled tokenizer and template, 2 replicas whose caches are followed by what is sent to
them, `least_time`); only the sockets are replaced by objects that keep nothing. Two loads, as the side-by-side
benchmark has them: `plain` (8 kB, a shared system prompt and a new question) and `chat` (conversations that grow to
32 kB). What `bench.datapath` shows beyond the sum is the kernel's and the event loop's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

from cachemap import CacheMap
from gateway.http import upstream as wire
from gateway.http.downstream import Downstream
from gateway.http.messages import Request
from gateway.http.server import Server
from gateway.http.upstream import Upstream
from gateway.models import Models
from gateway.ops.metrics import Metrics
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.backend import Backend
from gateway.proxy.exchange import Batcher
from gateway.proxy.proxy import Proxy
from policies import CostGroup, Ledger, Router, make
from replicas import Replica, State
from replicas.simulated.model import sim_model_dir

WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or had by hot word".split()
)
ANSWER = json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
                     "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello " * 64}, "finish_reason": "stop"}],
                     "usage": {"prompt_tokens": 1000, "completion_tokens": 64, "total_tokens": 1064}}).encode()  # fmt: skip


def response(prompt_tokens: int) -> bytes:
    """The engine counts as the gateway does: what follows from a difference is not to be timed here."""
    answer = ANSWER.replace(b'"prompt_tokens": 1000', b'"prompt_tokens": %d' % prompt_tokens)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(answer)
    return head + answer


def events(prompt_tokens: int, count: int) -> list[bytes]:
    """The same as a stream, each event a read of its own: the head with the first one, the usage and the end last."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    common = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}  # as vLLM writes them
    choice = {"index": 0, "delta": {"content": "hello "}, "logprobs": None, "finish_reason": None}
    told = [{**common, "choices": [choice]}, {**common, "choices": [], "usage": usage}]
    said, ends = [b"data: %b\n\n" % json.dumps(one, separators=(",", ":")).encode() for one in told]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    first, last, done = [b"%x\r\n%b\r\n" % (len(one), one) for one in (said, ends, b"data: [DONE]\n\n")]
    return [head + first, *[first] * (count - 1), last, done, b"0\r\n\r\n"]


class NoTransport:
    """Takes bytes and forgets them."""

    def write(self, data): ...
    def writelines(self, data): ...
    def is_closing(self):
        return False

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self): ...
    def resume_reading(self): ...
    def close(self): ...
    def abort(self): ...


class AtOnce(Batcher):
    """In place of what waits for the end of the loop's turn."""

    def add(self, item) -> None:
        self._work([item])


def prose(rng: random.Random, size: int) -> str:
    out: list[str] = []
    while sum(map(len, out)) + len(out) < size:
        out += rng.choices(WORDS, k=size // 8)
    return " ".join(out)[:size]


def bodies(load: str, count: int) -> list[bytes]:
    rng = random.Random(7)
    system = {"role": "system", "content": prose(rng, 4000)}

    def body(messages: list[dict]) -> bytes:
        return json.dumps({"model": "m", "stream": False, "max_tokens": 64, "messages": messages}).encode()

    if load == "plain":
        return [body([system, {"role": "user", "content": prose(rng, 4000)}]) for _ in range(count)]
    made = []
    while len(made) < count:
        messages = [system]
        for _ in range(14):
            messages.append({"role": "user", "content": prose(rng, 1000)})
            made.append(body(messages))
            messages = [*messages, {"role": "assistant", "content": prose(rng, 1000)}]
    return made[:count]


class Stopwatch:
    """Replaces methods by timed ones. A stage's own time is what it took less the stages inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self._plain: list[tuple[object, str, Callable]] = []
        self._inner = [0.0]

    def time(self, owner: object, method: str, stage: str) -> None:
        plain = getattr(owner, method)
        self._plain.append((owner, method, plain))

        def timed(*args, **kwargs):
            self._inner.append(0.0)
            begun = perf_counter()
            try:
                return plain(*args, **kwargs)
            finally:
                took = perf_counter() - begun
                self.seconds.setdefault(stage, []).append(took - self._inner.pop())
                self._inner[-1] += took

        setattr(owner, method, timed)

    def stop(self) -> None:
        for owner, method, plain in self._plain:
            setattr(owner, method, plain)


def build(shadows: list[str], **features: Any) -> tuple[Server, Proxy]:
    """`features`: further arguments of Proxy."""
    cachemap = CacheMap(1 << 28)
    router = Router(make("least_time"), cachemap, Ledger(), CostGroup())
    proxy = Proxy(
        models=Models.of(Pipeline(sim_model_dir(), "m", 16)), router=router, metrics=Metrics(), retries=2,
        request_timeout=60, idle_timeout=60, response_headers=True, replicas={},
        on_traffic=lambda replica, fault: None, ask_models=lambda: asyncio.sleep(0),
        shadows=shadows, **features,
    )  # fmt: skip
    if proxy.placing.shadows is not None:
        proxy.placing.shadows.acted = proxy.placing.shadows.judge  # at once: the event loop does not turn here
    for port in (9001, 9002):
        replica = Replica(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "127.0.0.1", port)
        replica.state, replica.models = State.READY, {"m": None}
        backend = Backend(replica, router.add(replica.id, cachemap.attach(replica.id, 8192, False)))
        upstream = Upstream(backend.pool)
        upstream.connection_made(NoTransport())
        backend.pool.release(upstream)
        proxy.add(backend)
    # One by one: what comes in a turn of the loop is otherwise worked on together, at its end.
    proxy.preparation._short = AtOnce(proxy.preparation._together)
    # And here: what takes long goes to a thread otherwise.
    proxy.preparation._prepare_in_thread = lambda one: proxy.preparation._prepared(
        one, *proxy.preparation._prepare(one), "prepare"
    )
    proxy.settling.complete = AtOnce(proxy.settling._settle_all)
    return Server(proxy), proxy


def run(load: str, count: int, watched: bool, shadows: list[str]) -> dict[str, float]:
    """Microseconds per request by stage (with `watched`), or in total under the key `total`."""
    wire.IDLE_SECONDS = float("inf")  # the two connections must last
    server, proxy = build(shadows)
    watch = Stopwatch()
    if watched:
        policy = proxy.router.policy
        watch.time(proxy.models.routes, "prepare", "prepare: JSON, render, tokens, hashes")
        watch.time(proxy.router.map, "match", "match: who holds how much")
        watch.time(policy, "choose", "choose: least_time")
        if proxy.placing.shadows is not None:
            watch.time(proxy.placing.shadows, "see", "shadow: a copy of what the choice was made from")
            watch.time(proxy.placing.shadows, "acted", "shadow: what others would choose, once it is sent")
        watch.time(proxy.router.ledger, "reserve", "reserve")
        watch.time(proxy.router.map, "expect", "expect: note what will be held")
        watch.time(Request, "forwarded", "request head")
        watch.time(Downstream, "begin_answer", "response head")
        watch.time(proxy.handler, "lines", "response head")
        watch.time(proxy.settling, "_settle", "settle: compare, count")
    client = Downstream(server.clients)
    client.connection_made(NoTransport())
    requests = [as_request(body) for body in bodies(load, count)]
    for request in requests[: count // 4]:
        exchange(client, request)
    watch.seconds.clear()
    gc.collect()
    gc.freeze()  # as the gateway does once it is up
    for request in requests[count // 4 :]:
        watch.seconds.setdefault("total", []).append(exchange(client, request))
    watch.stop()
    # Of most requests: what a busy machine does to some of them is not the stage's.
    return {name: statistics.median(seconds) * 1e6 for name, seconds in watch.seconds.items()}


def as_request(body: bytes, headers: bytes = b"") -> bytes:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + headers + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def exchange(client: Downstream, request: bytes, streamed: int = 0) -> float:
    """Returns the seconds that the gateway took for it. `streamed`: how many events its answer has, 0 for none."""
    begun = perf_counter()
    client.data_received(request)
    sent = perf_counter()
    attempt = client.exchange.attempt
    reads = events(attempt.prompt.tokens, streamed) if streamed else [response(attempt.prompt.tokens)]
    upstream, answered = attempt.upstream, perf_counter()
    for read in reads:
        upstream.data_received(read)
    return sent - begun + perf_counter() - answered


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--shadow", nargs="+", default=[], metavar="POLICY")
    args = parser.parse_args()
    count = 1400 if args.quick else 5600
    out: dict[str, dict[str, float]] = {}
    for load in ("plain", "chat"):
        total = min(run(load, count, False, args.shadow)["total"] for _ in range(3))
        stages = min((run(load, count, True, args.shadow) for _ in range(3)), key=lambda one: one["total"])
        del stages["total"]
        rest = max(total - sum(stages.values()), 0.0)
        out[load] = {
            **{name: round(us, 1) for name, us in stages.items()},
            "wire, exchange, the rest": round(rest, 1),
            "total": round(total, 1),
        }
    print(f"{'us per request':52}{'plain':>9}{'chat':>9}")
    for name in out["plain"]:
        print(f"{name:52}{out['plain'][name]:9.1f}{out['chat'][name]:9.1f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(out, file, indent=1)


async def _main() -> None:
    main()


if __name__ == "__main__":
    asyncio.run(_main())

"""What a decision costs in instructions: a number that a busy machine does not change.

    python -m bench.instructions            counts, and compares with what is recorded; fails if a step is off by more
                                            than 3 %
    python -m bench.instructions --record   counts, and records

A fixed replay of the decision path runs under valgrind, which counts each instruction: requests become prompts (JSON,
template, tokens, hashes), the map says who holds how much, `least_time` chooses among eight replicas, load is reserved.
Then whole requests, without sockets, from the client's bytes in to the answer out and what is learned from it, with two
replicas: a new question behind one system prompt (`plain`), conversations that grow (`chat`), and the former as a
stream of EVENTS events, each a read of its own (`stream`). Nothing waits or looks at a clock, and what would differ
between machines is pinned. Runs differed by 0.12 % at most, with other hash seeds, environments and folders too.
Between builds of Python 3.11 counts differ by 4 to 11 % (their ratios to those of a fixed loop in the same interpreter
by 6 to 14), so each build has values of its own; for one that has none there is nothing to compare with, and it says
so. The versions of packages are those of constraints.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import itertools
import json
import mmap
import platform
import random
import re
import secrets
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
RECORDED = ROOT / "bench/results/instructions.json"
TOLERATED = 0.03
STEPS = ("prompt", "match", "choose", "match, choose, reserve", "plain", "chat", "stream")
EVENTS = 16
BUILD_FLAGS = ("--enable-optimizations", "--with-lto", "--enable-shared", "--with-pydebug")
REQUESTS, WARM, WARM_WHOLE = (
    40,
    60,
    200,
)  # measured ones, and those before: by then the interpreter has specialised what it runs
REPLICAS = 8
# Valgrind shows every program the same processor, a Haswell; numpy and glibc are kept from going by more than any
# x86-64 has.
PINNED = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-AVX,-ERMS,-FSRM,-BMI2,-LZCNT,-MOVBE,-SSE4_2,-SSSE3",
          "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3"}  # fmt: skip


class Unavailable(Exception):
    """Nothing can be counted here; says why."""


# --- below valgrind

# x86-64: what valgrind takes for a request of the program's (valgrind.h), a no-op elsewhere. Arguments in memory at
# rdi.
REQUEST = bytes.fromhex("4889f84889f248c1c70348c1c70d48c1c73d48c1c7334887db4889d0c3")
DUMP_AT, START = 0x43540003, 0x43540004
# The name of dumps that nobody reads. What valgrind has to set to zero, it adds to the totals of the next dump again.
BEFORE = b"before"


def ask_valgrind():
    """A function that sends it a request with one argument."""
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(REQUEST)
    begin = ctypes.c_char.from_buffer(page)
    code = ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p, ctypes.c_ulong)(ctypes.addressof(begin))

    def ask(what: int, argument: bytes = b"") -> None:
        words = (ctypes.c_ulong * 6)(what, ctypes.cast(ctypes.c_char_p(argument), ctypes.c_void_p).value or 0)
        code(ctypes.addressof(words), 0)

    ask.memory = page, begin  # as long as the function
    return ask


class Request:
    """Who asks for a replica, and does nothing with it."""

    tried, able, response, model, tenant, is_forwarded = (), (), None, None, None, True

    def __init__(self, prompt):
        from gateway.http import messages
        from gateway.proxy.exchange import Attempt

        self.prompt, self.stages, self.attempt_type = prompt, [], Attempt
        self.request = messages.Request("POST", b"/v1/chat/completions", [], b"", False, True)

    def add_attempt(self, attempt):
        self.attempt = attempt

    def placed(self): ...


def replay() -> None:
    """Runs in valgrind: each step of all requests after the other, with a dump of the counts behind each."""
    secrets.randbits = random.Random(1).getrandbits  # the map chooses its buckets by these
    from bench.stages import bodies
    from cachemap import CacheMap
    from gateway.models import Models
    from gateway.ops.metrics import Metrics
    from gateway.prompt.pipeline import Pipeline
    from gateway.proxy.backend import Backend
    from gateway.proxy.placement import placing
    from gateway.proxy.proxy import Proxy
    from policies import CostGroup, Ledger, Router, make
    from replicas import Replica, State
    from replicas.simulated.model import sim_model_dir

    placing.monotonic = placing.perf_counter = itertools.repeat(1000.0).__next__
    cachemap, ledger = CacheMap(1 << 26), Ledger()
    router = Router(make("least_time"), cachemap, ledger, CostGroup())
    proxy = Proxy(
        models=Models.of(Pipeline(sim_model_dir(), "m", 16)), router=router, metrics=Metrics(), retries=2, request_timeout=60, idle_timeout=60,
        response_headers=True, replicas={}, on_traffic=lambda replica, fault: None, ask_models=lambda: asyncio.sleep(0),
    )  # fmt: skip
    for port in range(9001, 9001 + REPLICAS):
        replica = Replica(f"127.0.0.1:{port}", f"http://127.0.0.1:{port}", "127.0.0.1", port)
        replica.state, replica.models = State.READY, {"m": None}
        proxy.add(Backend(replica, router.add(replica.id, cachemap.attach(replica.id, 8192, True))))
        ledger.load(replica.id).scraped(0, 0.5)
    for load in bodies_of_both(bodies)[:WARM]:  # answered, and told of by events, but for the last: those decode
        request = Request(proxy.models.routes.prepare("/v1/chat/completions", load, None, ()))
        proxy.placing.place(request)
        cachemap.store(request.attempt.backend.slot, request.prompt.hashes, request.prompt.hashes)
        router.first_token(request.attempt.placement, None)
    count(proxy, bodies_of_both(bodies)[WARM:])
    asyncio.run(count_whole())


def bodies_of_both(bodies) -> list[bytes]:
    """New questions behind one system prompt, and conversations that grow, by turns."""
    half = (REQUESTS + WARM) // 2
    return list(itertools.chain(*zip(bodies("plain", half), bodies("chat", half), strict=True)))


def count(proxy, loads: list[bytes]) -> None:
    models, cachemap, policy = proxy.models, proxy.router.map, proxy.router.policy
    gc.collect()
    gc.disable()
    ask = ask_valgrind()
    ask(START)
    prompts = [models.routes.prepare("/v1/chat/completions", load, None, ()) for load in loads]
    ask(DUMP_AT, b"prompt")
    for prompt in prompts:
        cachemap.match(prompt.hashes, 1000.0)
    ask(DUMP_AT, b"match")
    demand, candidates, *_ = proxy.router.evaluate(
        proxy.placing.demand(prompts[-1], 1000.0), proxy.eligible.targets(prompts[-1]), 1000.0
    )
    ask(DUMP_AT, BEFORE)
    for _ in prompts:
        policy.choose(demand, candidates)
    ask(DUMP_AT, b"choose")
    requests = [Request(prompt) for prompt in prompts]
    ask(DUMP_AT, BEFORE)
    for request in requests:
        proxy.placing.place(request)
    ask(DUMP_AT, b"match, choose, reserve")


async def count_whole() -> None:
    """Count whole requests of each load, after as many that each length of conversation has had its template proven."""
    from bench.stages import NoTransport, as_request, bodies, build, exchange
    from gateway.http import upstream
    from gateway.http.downstream import Downstream
    from gateway.proxy import preparation

    upstream.IDLE_SECONDS = preparation.LOOP_SECONDS = float("inf")  # valgrind is slow
    ask = ask_valgrind()
    for load in ("plain", "chat", "stream"):
        server, _ = build([])
        client = Downstream(server.clients)
        client.connection_made(NoTransport())
        made = bodies("chat" if load == "chat" else "plain", WARM_WHOLE + REQUESTS)
        if load == "stream":
            made = [body.replace(b'"stream": false', b'"stream": true') for body in made]
        requests = [as_request(body) for body in made]
        gc.enable()
        for number, request in enumerate(requests):
            if number == WARM_WHOLE:
                gc.collect()
                gc.disable()
                ask(DUMP_AT, BEFORE)
            exchange(client, request, EVENTS if load == "stream" else 0)
        ask(DUMP_AT, load.encode())


# --- above it


def build() -> str:
    """Of Python: what makes two interpreters count alike."""
    flags = [
        flag.strip("'")
        for flag in (sysconfig.get_config_var("CONFIG_ARGS") or "").split()
        if flag.strip("'").startswith(BUILD_FLAGS)
    ]
    return ", ".join(
        [
            platform.python_implementation() + " " + platform.python_version(),
            platform.python_compiler(),
            platform.machine(),
            *sorted(flags),
        ]
    )


def counted() -> dict[str, int]:
    """Instructions a request, by step. Raises Unavailable."""
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise Unavailable(f"counts are made on x86-64 under Linux, this is {platform.machine()} under {sys.platform}")
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise Unavailable("there is no valgrind; on Debian, as root: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            valgrind,
            "--tool=callgrind",
            "--instr-atstart=no",
            f"--callgrind-out-file={folder}/counts",
            sys.executable,
            "-m",
            "bench.instructions",
            "--replay",
        ]
        done = subprocess.run(command, cwd=ROOT, env=PINNED, capture_output=True, text=True)
        if "unrecognised instruction" in done.stderr:
            raise Unavailable("valgrind does not know an instruction that is used here")
        if done.returncode:
            raise RuntimeError(f"the replay failed under valgrind:\n{done.stderr[-3000:]}")
        dumps = [path.read_text() for path in Path(folder).iterdir()]
    found = {}
    for dump in dumps:
        if name := re.search(r"^desc: Trigger: Client Request: (.*)$", dump, re.M):
            found[name[1]] = int(re.search(r"^totals: (\d+)$", dump, re.M)[1]) // REQUESTS
    return {step: found[step] for step in STEPS}


def recorded() -> dict[str, dict[str, int]]:
    return json.loads(RECORDED.read_text()) if RECORDED.exists() else {}


def off(now: dict[str, int], before: dict[str, int]) -> list[str]:
    """Steps that are not within what is tolerated, in words."""
    return [
        f"{step}: {now[step]} instructions a request, {now[step] / before[step] - 1:+.1%} of what is recorded ({before[step]})"
        for step in before
        if abs(now[step] / before[step] - 1) > TOLERATED
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    if args.replay:
        replay()
        return 0
    try:
        now = counted()
    except Unavailable as why:
        print(f"skipped: {why}")
        return 0
    before = recorded().get(build())
    print(f"{build()}\n{'instructions a request':28}{'now':>10}{'recorded':>10}")
    for step in STEPS:
        print(
            f"{step:28}{now[step]:10}"
            + (f"{was:10}{now[step] / was - 1:+8.2%}" if (was := (before or {}).get(step)) else f"{'-':>10}")
        )
    if args.record:
        # the path is another one: what other builds counted is past
        others = {} if before and off(now, before) else recorded()
        RECORDED.write_text(json.dumps({**others, build(): now}, indent=1) + "\n")
        return 0
    return 1 if before and off(now, before) else 0


if __name__ == "__main__":
    sys.exit(main())

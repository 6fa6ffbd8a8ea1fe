"""Two workers beside one in instructions a request: what sharing costs, whatever the machine does meanwhile.

    python -m bench.worker_instructions [--requests 800] [--json FILE]

Whole gateways run under valgrind, with the load `plain` of `bench.workers` on them, and valgrind counts what each process
executes in user space while requests pass. What it executes without requests is taken off. CPU time also has what two processes
on one core's two threads take from each other, in caches and execution units; this has not, nor has it the kernel's part.
Adds its figures to FILE under `instructions`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

import aiohttp

from bench.instructions import PINNED
from bench.workers import SERVES, STUB, Gateway, Load, started

IDLE_SECONDS = 40  # what happens each second happens once
# Below valgrind a request takes forty times as long. So that what happens each second happens as often a request as it does
# otherwise, sleeps of a quarter of a second and more take as much longer.
SLOWER = """
import asyncio.tasks
before = asyncio.tasks.sleep
asyncio.sleep = asyncio.tasks.sleep = lambda delay, result=None: before(40 * delay if 0.2 < delay < 5 else delay, result)
"""


class Counted(Gateway):
    """A gateway all of whose processes are below valgrind."""

    def __init__(self, stack: ExitStack, workers: int, engines: list[str]):
        self.name, self.redis, self.pids = str(workers), None, []
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (self._folder / "sitecustomize.py").write_text(SLOWER)
        command = ["valgrind", "--tool=callgrind", "--trace-children=yes", "--instr-atstart=no", f"--callgrind-out-file={self._folder}/%p", sys.executable, "-m", "gateway", "serve"]
        flags = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--model", "sim", "--workers", str(workers), "--replica-url", *engines]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, **PINNED, "PYTHONPATH": str(self._folder)})
        stack.callback(process.communicate)
        stack.callback(process.terminate)
        for line in process.stdout:
            if not line.startswith("==") and len(found := SERVES.findall(line)) == 2:  # valgrind's own lines have the command
                port, self.admin = map(int, found)
                self.ports, self._pid = [port], process.pid
                return
        raise SystemExit("the gateway ended")

    def _control(self) -> int:
        return self._pid

    def ask(self, *what: str) -> None:
        subprocess.run(["callgrind_control", *what, *map(str, self.pids)], check=True, capture_output=True)

    def counts(self, of: str) -> list[int]:
        """Of each process, in the dump of this name."""
        found: Counter[int] = Counter()
        for dump in self._folder.glob("*.*"):
            if dump.suffix != ".py" and re.search(rf"^desc: Trigger: .*\b{of}$", text := dump.read_text(), re.M):
                found[int(dump.name.split(".")[0])] += int(re.search(r"^totals: (\d+)$", text, re.M)[1])
        return [found[pid] for pid in self.pids]


async def measure(workers: int, requests: int) -> list[float]:
    """Instructions a request of each process, the control process first where there is one."""
    with ExitStack() as stack:
        engines = [f"http://127.0.0.1:{started(stack, '-c', STUB, ports=1)[0]}" for _ in range(2)]
        gateway = Counted(stack, workers, engines)
        await gateway.ready(events=False)
        load = Load(gateway, workers, "plain", {})
        tasks = [asyncio.create_task(load._shout(number)) for number in range(16 * workers)]

        async def answered(count: int) -> None:
            while load.counts["requests"] < count:
                await asyncio.sleep(0.05)
                for task in tasks:
                    if task.done():
                        task.result()

        async def silent() -> None:
            """Nothing is under way: valgrind takes seconds to begin and to end, in which requests would count for a part of them."""
            load.open.clear()
            await answered(load.counts["asked"])

        await answered(300 * workers)  # the interpreter has specialised what it runs
        await silent()
        gateway.ask("-i", "on")
        begun, before = monotonic(), load.counts["requests"]
        load.open.set()
        await answered(before + requests * workers)
        await silent()
        count = load.counts["requests"] - before
        seconds = monotonic() - begun
        gateway.ask("-d", "load")
        load.ending = True
        load.open.set()
        await asyncio.gather(*tasks)
        gateway.ask("-z")
        begun = monotonic()
        await asyncio.sleep(IDLE_SECONDS)
        gateway.ask("-d", "idle")
        idle = [part / (monotonic() - begun) for part in gateway.counts("idle")]
        return [(busy - seconds * still) / count for busy, still in zip(gateway.counts("load"), idle, strict=True)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=800, help="counted, for each worker")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    one, two = (asyncio.run(measure(workers, args.requests)) for workers in (1, 2))
    found = {"requests": args.requests, "one": round(sum(one)), "two": round(sum(two)), "two_control_and_workers": [*map(round, two)], "ratio": round(sum(two) / sum(one), 3)}
    print(json.dumps(found, indent=2))
    if args.json:
        told = json.loads(args.json.read_text()) if args.json.exists() else {}
        args.json.write_text(json.dumps({**told, "instructions": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

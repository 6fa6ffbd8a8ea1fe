"""No engine outlives the process that launched it, however that process ends."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_engine.py")

# A gateway as far as this room is concerned: a fleet on uvloop that launches, says so, and goes on.
GATEWAY = f"""
import asyncio, json, sys, uvloop
from replicas import Fleet, State
from replicas.launch import supervisor
from replicas.launch.command import Command
from replicas.engines.simulated.profile import SimProfile

class Fake(SimProfile):
    def command(self, host, ports, model):
        return Command([sys.executable, "-I", "-S", {str(FAKE)!r}, "--port", str(ports.http)], {{}})

supervisor.ORPHAN_GRACE = 0.5

async def main():
    fleet = Fleet(interval=0.1)
    replicas = await fleet.launch(2, Fake(engine="sim"))
    while not all(replica.state is State.READY for replica in replicas):
        await asyncio.sleep(0.02)
    print(json.dumps([replica.pid for replica in replicas]), flush=True)
    await asyncio.sleep(600)

uvloop.run(main())
"""


@pytest.fixture
async def gateway():
    """gateway() -> its process, leader of its own group."""
    started = []

    async def start():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, stdout=asyncio.subprocess.PIPE, start_new_session=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def engines(process) -> list[int]:
    """The engines' pids, once they are ready."""
    return json.loads(await asyncio.wait_for(process.stdout.readline(), 60))


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda s: s.name)
async def test_gateway_dies(gateway, until, alive, number):
    process = await gateway()
    pids = await engines(process)
    keepers = [parent(pid) for pid in pids]
    assert len({*pids, *keepers}) == 4 and all(alive(pid) for pid in [*pids, *keepers])
    process.send_signal(number)
    await until(lambda: not any(alive(pid) for pid in [*pids, *keepers]), "orphans")


async def test_gateway_and_keepers_are_killed_at_once(gateway, until, alive):
    process = await gateway()
    pids = await engines(process)
    for pid in [process.pid, *map(parent, pids)]:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: not any(alive(pid) for pid in pids), "orphans")


async def test_a_killed_keeper_takes_its_engine_along_and_another_one_starts(gateway, until, alive):
    process = await gateway()
    pids = await engines(process)
    os.kill(parent(pids[0]), signal.SIGKILL)
    await until(lambda: not alive(pids[0]), "the engine outlived its keeper")
    assert alive(pids[1])

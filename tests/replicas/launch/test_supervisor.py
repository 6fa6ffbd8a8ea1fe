import asyncio
import sys

import pytest

from replicas.launch.command import Command
from replicas.launch.supervisor import Backoff, Supervisor


def python(code: str) -> Command:
    return Command([sys.executable, "-I", "-S", "-c", code], {"ASKED": "yes"})


@pytest.fixture
async def supervise(monkeypatch):
    monkeypatch.setattr(Backoff, "FIRST", 0.05)
    made = []

    def supervise(command: Command, **more):
        events = asyncio.Queue()
        supervisor = Supervisor(command, on_start=events.put_nowait, on_exit=events.put_nowait, **more)
        made.append(supervisor)
        supervisor.start()
        return supervisor, events

    yield supervise
    for supervisor in made:
        await supervisor.stop(0.1)


async def following(events: asyncio.Queue):
    return await asyncio.wait_for(events.get(), 10)


def test_backoff_doubles_and_starts_over_after_a_stable_run():
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert [backoff.after(60.0), backoff.after(59.0), backoff.after(1.0)] == [0.5, 1, 2]
    assert [backoff.after(0.0) for _ in range(9)] == [4, 8, 16, 32, 64, 128, 256, 300, 300], "it never worked"
    assert backoff.after(5.0) == 30


async def test_it_starts_again_and_says_why_it_ended(supervise):
    code = "print('one'); print('ValueError: no KV cache'); raise SystemExit(3)"
    supervisor, events = supervise(python(code))
    first = await following(events)
    reason = await following(events)
    assert reason.startswith("exited with code 3 after")
    assert '; log: "ValueError: no KV cache"; next start in 0.' in reason
    assert supervisor.tail.lines == ["one", "ValueError: no KV cache"]
    assert isinstance(second := await following(events), int) and second != first
    assert (await following(events)).endswith(" s (2 starts in a row failed)")


async def test_a_missing_command_is_named(supervise):
    _, events = supervise(Command(["/nowhere/vllm", "serve"], {}))
    reason = await following(events)
    assert reason.startswith("cannot start /nowhere/vllm: No such file or directory")
    assert "is it installed?" in reason and "`executable`" in reason


async def test_an_obstacle_keeps_it_from_starting_until_it_is_gone(supervise):
    obstacles = ["port 1 is taken", "port 1 is taken"]
    _, events = supervise(python("import time; time.sleep(60)"), obstacle=lambda: obstacles.pop() if obstacles else "")
    for _ in range(2):
        assert (await following(events)).startswith("port 1 is taken; next start in")
    assert isinstance(await following(events), int)


async def test_a_restart_gives_the_reason_of_who_asked(supervise, alive):
    supervisor, events = supervise(python("import time; time.sleep(60)"))
    first = await following(events)
    supervisor.restart("it hangs")
    assert (await following(events)).startswith("it hangs; next start in")
    assert not alive(first) and await following(events) != first


async def test_stop_ends_it_for_good_and_no_exit_is_told(supervise, alive):
    supervisor, events = supervise(python("import time; time.sleep(60)"))
    pid = await following(events)
    await supervisor.stop(5)
    assert not alive(pid) and supervisor.pid is None and events.empty()
    supervisor.start()
    assert await following(events) != pid


async def test_no_restart_lets_the_process_be_but_not_return(supervise, alive):
    supervisor, events = supervise(python("import time; time.sleep(60)"))
    pid = await following(events)
    supervisor.no_restart()
    assert alive(pid)
    supervisor.restart("enough")
    assert await following(events) == "enough"
    await asyncio.wait_for(supervisor.stop(0), 5)
    assert events.empty()


async def test_cancelling_everything_leaves_no_orphan(supervise, alive, until):
    supervisor, events = supervise(python("import time; time.sleep(60)"))
    pid = await following(events)
    supervisor._task.cancel()
    await until(lambda: not alive(pid), "an orphan")


async def test_no_descriptors_left_is_a_reason_not_an_end(supervise, monkeypatch):
    def none_left():
        monkeypatch.undo()
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("replicas.launch.supervisor.socket.socketpair", none_left)
    _, events = supervise(python("import time; time.sleep(60)"))
    reason = await following(events)
    assert reason.startswith("cannot start a process: Too many open files") and "ulimit" in reason
    assert isinstance(await following(events), int)

"""From the start to a signal, and what is said of replicas that are not ready when the gateway serves."""

import asyncio
from types import SimpleNamespace

from gateway import lifetime
from gateway.lifetime import tell_awaited
from gateway.settings import Settings
from replicas import State


class Fleet:
    """Engines as far as is asked here."""

    def __init__(self, **states: State):
        self.engines = {
            id: SimpleNamespace(
                lead=SimpleNamespace(id=id, state=state, since=100.0, reason="no answer yet", managed=False)
            )
            for id, state in states.items()
        }

    def logs(self, id: str) -> list[str]:
        return ["Loading weights: 2 of 4 files", "Capturing CUDA graphs: 40 %"]


async def test_it_is_said_how_many_are_ready_and_what_the_others_do_until_all_are(caplog):
    fleet = Fleet(a=State.READY, b=State.STARTING, c=State.DEGRADED, d=State.STARTING)
    fleet.engines["b"].lead.managed = True
    caplog.set_level("INFO", "hitherto")
    telling = asyncio.create_task(tell_awaited(fleet, seconds=0.001))
    while not caplog.messages:
        await asyncio.sleep(0.001)
    fleet.engines["b"].lead.state = State.READY
    del fleet.engines["d"]
    await asyncio.wait_for(telling, 5)
    assert caplog.messages[0] == (
        "2 of 4 replicas ready; b is starting: Capturing CUDA graphs: 40 %; d is starting: no answer yet"
    )


async def test_a_signal_between_the_end_of_the_start_and_who_waits_for_it_stops_the_gateway(monkeypatch):
    done, handlers = [], []

    class Service:
        fleet, greeting = Fleet(), "it serves"

        async def start(self):
            done.append("started")
            asyncio.get_running_loop().call_soon(lambda: handlers[-1]())  # before what this start's end calls

        async def stop(self, seconds):
            done.append("stopped")

        def hurry(self): ...

    monkeypatch.setattr(lifetime, "on_signal", lambda loop, then: handlers.append(then))
    monkeypatch.setattr(lifetime, "on_hangup", lambda loop, then: None)
    settings = Settings(replica_url=("http://127.0.0.1:1",))
    await asyncio.wait_for(lifetime._serve(settings, Service, lambda: done.append("told")), 5)
    assert done == ["started", "told", "stopped"]

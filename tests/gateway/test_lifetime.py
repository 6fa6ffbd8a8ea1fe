"""From the start to a signal, and what is said of replicas that are not ready when the gateway serves."""

import asyncio
from types import SimpleNamespace

from gateway import lifetime
from gateway.lifetime import awaited, tell_awaited
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


def test_it_says_how_many_are_ready_and_what_the_others_do():
    fleet = Fleet(a=State.READY, b=State.STARTING, c=State.DEGRADED)
    fleet.engines["b"].lead.managed = True
    assert (
        awaited(fleet, "abc", 140.0)
        == "2 of 3 replicas ready; b has been starting for 40 s: Capturing CUDA graphs: 40 %"
    )
    fleet.engines["b"].lead.managed = False
    assert awaited(fleet, "abc", 140.0).endswith("b has been starting for 40 s: no answer yet")


def test_nothing_is_said_of_those_that_are_ready_or_gone():
    assert awaited(Fleet(a=State.READY), "ab", 140.0) == ""
    assert awaited(Fleet(), "", 0.0) == ""


async def test_it_is_said_until_all_are_ready(caplog):
    fleet = Fleet(a=State.STARTING)
    caplog.set_level("INFO", "hitherto")

    class Ready(Fleet):
        """Becomes ready while it is looked at for the third time."""

        looks = 0

        @property
        def engines(self):
            self.looks += 1
            if self.looks > 3:
                fleet.engines["a"].lead.state = State.READY
            return fleet.engines

    await tell_awaited(Ready.__new__(Ready), seconds=0.001)
    assert caplog.messages and all(
        line.startswith("0 of 1 replicas ready; a has been starting") for line in caplog.messages
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

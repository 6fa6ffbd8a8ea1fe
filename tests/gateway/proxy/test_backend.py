"""A replica's slot in the map belongs to what follows its events until that has really ended."""

import asyncio

from cachemap.background import Background
from gateway.proxy.backend import Backend
from gateway.proxy.failures.blame import MOST_AGREED
from policies import Candidate, CostGroup, Ledger
from replicas.replica import Replica


class Intake:
    """Follows until cancelled, and then needs a while to end, as a call to Redis may."""

    def __init__(self, name, log):
        self.name, self.log, self.may_end = name, log, asyncio.Event()

    async def run(self):
        self.log.append(f"{self.name} begins")
        try:
            await asyncio.Event().wait()
        finally:
            await self.may_end.wait()
            self.log.append(f"{self.name} ends")

    def resync(self):
        raise AssertionError("nothing failed")


def backend():
    replica = Replica(id="127.0.0.1:1", url="http://127.0.0.1:1", host="127.0.0.1", port=1)
    return Backend(replica, Candidate(replica.id, 0, Ledger().add(replica.id), CostGroup().add(replica.id), slot=0))


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def test_the_next_begins_and_the_slot_is_free_when_the_one_before_has_ended():
    one, log, loops = backend(), [], Background()
    first, second = Intake("first", log), Intake("second", log)
    one.listen(first, lambda: log.append("empty"), loops)
    await settled()
    one.listen(second, lambda: log.append("emptied"), loops)
    await settled()
    assert log == ["empty", "first begins"]
    first.may_end.set()
    await settled()
    assert log[2:] == ["first ends", "emptied", "second begins"]
    one.stop(then=lambda: log.append("free"))
    await settled()
    assert log[5:] == []
    second.may_end.set()
    await settled()
    assert log[5:] == ["second ends", "free"]


async def test_one_that_is_removed_while_the_next_still_waits_for_the_one_before():
    one, log, loops = backend(), [], Background()
    first, second = Intake("first", log), Intake("second", log)
    one.listen(first, lambda: None, loops)
    await settled()
    one.listen(None, lambda: log.append("not followed"), loops)
    one.listen(second, lambda: log.append("never"), loops)
    one.stop(then=lambda: log.append("free"))
    await settled()
    assert log == ["first begins"]
    first.may_end.set()
    await settled()
    assert log == ["first begins", "first ends", "free"]


def test_who_answers_something_is_a_witness_again():
    one = backend()
    for _ in range(MOST_AGREED):
        assert one.is_witness
        one.failures += 1
    assert not one.is_witness
    one.failures = 0  # it has answered one
    assert one.is_witness

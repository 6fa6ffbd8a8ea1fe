"""What the dispatcher keeps of a replica."""

import pytest

from gateway.dispatch.backend import LEARN_AT_ONCE, LEARN_SECONDS, Backend
from policies import CostGroup, Ledger
from replicas import Replica


@pytest.fixture
def backend():
    return Backend(Replica("a", "http://127.0.0.1:1", "127.0.0.1", 1), 0, Ledger().add("a"), CostGroup().add("a"))


def learned(backend: Backend, times: list[float]) -> int:
    return sum(backend.may_learn(at) for at in times)


def test_a_batch_is_learned_from_as_a_whole(backend):
    assert learned(backend, [1000.0] * LEARN_AT_ONCE) == LEARN_AT_ONCE


def test_more_than_enough_is_thinned_out(backend):
    times = [1000.0 + number * LEARN_SECONDS / 50 for number in range(50_000)]  # 10 s at 5,000 a second
    assert learned(backend, times) == pytest.approx(10 / LEARN_SECONDS + LEARN_AT_ONCE, abs=2)


def test_a_rate_that_a_replica_can_have_is_learned_from_whole(backend):
    times = [1000.0 + number // 30 for number in range(900)]  # thirty at once, every second
    assert learned(backend, times) == len(times)

"""The search for the fewest replicas: it finds the number, looks at its neighbour, and compares sizes of the cache
fairly."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.plan.fleet_size import Fleet, Point, Size, by_tokens, search
from loadgen.simulate import Setting
from loadgen.workload.conversations import Workload
from loadgen.workload.generators import chat
from replicas.simulated.profile import Profile, StepTime, load_profile

SLO = {"ttft": 100.0}


def tried(size: Size, least: int) -> list[int]:
    """Play the search where `least` replicas are enough."""
    numbers = []
    while (number := size.number) is not None:
        numbers.append(number)
        size.tell(Point(number, size.tokens, float(number >= least), number >= least, {}), ())
    return numbers


@given(st.integers(1, 300), st.integers(1, 256))
def test_the_fewest_are_found_and_one_fewer_was_tried(least, most):
    size = Size(1000, most)
    numbers = tried(size, least)
    assert len(set(numbers)) == len(numbers) <= 2 * most.bit_length() + 1
    if least <= most:
        assert size.kept == least and (least == 1 or size.missed == least - 1)
    else:
        assert size.kept is None and size.missed == most


def test_few_enough_are_tried():
    assert tried(Size(1000, 64), 11) == [1, 2, 4, 8, 16, 12, 10, 11]
    assert tried(Size(1000, 5), 9) == [1, 2, 4, 5]


def test_decode_times_by_share_of_the_cache_become_times_by_tokens():
    given = load_profile("gpu-8b")
    step = by_tokens(given).step
    full = given.num_blocks * given.block_size
    for sequences, context in ((1, 0), (64, full)):
        assert step.seconds(0, 0.0, sequences, context, 0.3) == pytest.approx(
            given.step.seconds(0, 0.0, sequences, context, context / full)
        )
    measured = load_profile("cpu-tiny")
    assert by_tokens(measured) is measured


@pytest.fixture
def work() -> Workload:
    conversations = chat(random.Random(1), 80, prefix_len=256, suffix_len=64, output_len=20, think_time=0.2)
    return Workload(conversations, [0.02 * number for number in range(len(conversations))])


def fleet(attainment: float = 0.9) -> Fleet:
    profile = Profile("test", StepTime(prefill=5.0, prefill_token=0.2, decode=5.0, decode_sequence=1.0), num_blocks=512)
    return Fleet(Setting("least_time", [], seed=1), profile, SLO, attainment)


def test_more_cache_never_needs_more_replicas_and_every_point_is_kept(work):
    sizes, heard = [Size(1_600, 16), Size(16_000, 16)], []
    search(work, fleet(), sizes, said=heard.append)
    small, large = sizes
    assert 1 < large.kept <= small.kept <= 16
    for size in sizes:
        assert size.points[size.kept].share >= 0.9 > size.points[size.kept - 1].share
        assert len(size.records) == 80
    assert {(point.replicas, point.tokens) for point in heard} == {
        (number, size.tokens) for size in sizes for number in size.points
    }
    rates = [size.points[small.kept].report["cache"]["hit_rate"] for size in sizes if small.kept in size.points]
    assert rates == sorted(rates)


def test_the_same_in_several_processes(work):
    alone, shared = [Size(1_600, 4), Size(16_000, 4)], [Size(1_600, 4), Size(16_000, 4)]
    search(work, fleet(), alone)
    search(work, fleet(), shared, processes=2)
    assert [size.points for size in alone] == [size.points for size in shared]


def test_requests_that_fail_are_not_within_the_slo(work):
    size = Size(64, 2)  # nothing fits
    search(work, fleet(), [size])
    assert size.kept is None and size.points[2].share == 0 and size.points[2].report["errors"] == {"http_400": 80}

"""Which replicas can fetch a prompt's cache from which others, by what is known of them."""

from typing import NamedTuple

import pytest

from replicas import pairing
from replicas.engines import TRANSFERS
from replicas.pairing import ALIKE, Traits, complaints, groups, obstacles, refusals

NIXL, MOONCAKE, LLMD = (TRANSFERS[name] for name in ("nixl", "mooncake", "llm-d"))


class One(NamedTuple):
    id: str
    traits: Traits


@pytest.mark.parametrize("name", ALIKE)
def test_what_differs_is_named_and_what_is_not_known_speaks_against_nothing(name):
    one, other = Traits(**{name: "this"}), Traits(**{name: "that"})
    [said] = refusals(one, other)
    assert said.startswith(f"{name} is this in one and that in the other")
    assert not refusals(one, one) and not refusals(one, Traits()) and not refusals(Traits(), other)


def test_a_decoders_blocks_are_a_multiple_of_the_prefillers():
    small, large = Traits(block_size=16), Traits(block_size=32)
    assert not refusals(small, large)
    assert refusals(large, small) == ["block_size 16 of the decoder is no multiple of the prefiller's 32"]


def test_what_has_no_connector_is_paired_in_no_way_that_needs_it():
    without = Traits(unable=frozenset({"nixl"}))
    assert obstacles(without, Traits(), NIXL) == ["the prefiller has no connector for NIXL"]
    assert obstacles(Traits(), without, NIXL) == ["the decoder has no connector for NIXL"]
    assert not obstacles(without, without, MOONCAKE) and not obstacles(without, without, LLMD)


def test_what_is_compared_depends_on_how_caches_are_moved():
    one, other = Traits(model="/a", kv_cache_dtype="auto"), Traits(model="/b", kv_cache_dtype="auto")
    assert obstacles(one, other, NIXL) and not obstacles(one, other, MOONCAKE)
    assert not obstacles(one, other, TRANSFERS["nixl-unchecked"]) and not obstacles(one, other, LLMD)
    assert obstacles(one, other._replace(kv_cache_dtype="fp8"), MOONCAKE)


def test_replicas_are_grouped_so_that_all_of_a_group_can_be_paired():
    auto, fp8, unknown = Traits(kv_cache_dtype="auto"), Traits(kv_cache_dtype="fp8"), Traits()
    p1, p2, p3 = One("p1", auto), One("p2", fp8), One("p3", unknown)
    d1, d2, d3, d4 = One("d1", auto), One("d2", fp8), One("d3", unknown), One("d4", auto)
    found = groups([p1, p2, p3], [d1, d2, d3, d4], NIXL)
    assert found == [([p1, p3], [d1, d4]), ([p2, p3], [d2]), ([p1, p2, p3], [d3])]
    for computing, writing in found:
        assert not any(obstacles(p.traits, d.traits, NIXL) for p in computing for d in writing)
    assert groups([p1], [d2], NIXL) == [([], [d2])]
    assert groups([p1], [], NIXL) == [([p1], [])] and groups([], [], NIXL) == [([], [])]


def test_a_kind_of_pair_is_complained_of_once_with_its_replicas():
    computing = [One(f"p{n}", Traits(kv_cache_dtype="auto")) for n in range(5)]
    writing = [One("d1", Traits(kv_cache_dtype="fp8")), One("d2", Traits())]
    [said] = complaints(computing, writing, NIXL)
    assert said.text.startswith("d1 cannot fetch what p0, p1, p2 and 2 more compute: kv_cache_dtype is auto in one")
    assert said.prefillers == computing and said.decoders == writing[:1]


def test_nobody_is_said_to_fetch_from_itself():
    a, b, c = (One(id, Traits(unable=frozenset({"nixl"}))) for id in "abc")

    def said(computing, writing):
        [one] = complaints(computing, writing, NIXL)
        return one.text.partition(": ")[0]

    assert said([a, b], [a]) == "a cannot fetch what b computes"
    assert said([a], [a, b]) == "b cannot fetch what a computes"
    assert said([a, b, c], [a]) == "a cannot fetch what b and c compute"
    assert said([a, b], [a, b]) == "a and b cannot fetch what a and b compute"
    assert said([a, b], [a, b, c]) == "c cannot fetch what a and b compute"


class Placed(NamedTuple):
    id: str
    role: str
    rank: int | None = None
    traits: Traits = Traits()


def test_each_is_on_the_sides_that_its_role_and_the_way_of_moving_caches_leave():
    p, d, both, rank = Placed("p", "prefill"), Placed("d", "decode"), Placed("b", "both"), Placed("r", "prefill", 1)

    def sides(transfer):
        return pairing.sides_of(transfer, [p, d, both, rank], lambda one: one)

    assert sides(NIXL) == ([p, both, rank], [d, both])
    assert sides(LLMD) == ([p, both], [d, both]), "its header names no rank"


def test_what_an_engine_tells_counts_before_what_it_was_launched_with():
    told = Traits(version="0.32.0", kv_cache_dtype="fp8_e4m3")
    declared = Traits(kv_cache_dtype="fp8", attention_backend="FLASHINFER")
    assert told.known(declared) == Traits("0.32.0", kv_cache_dtype="fp8_e4m3", attention_backend="FLASHINFER")


def test_groups_of_hundreds_are_found_at_once():
    """An engine is compared once for each kind of counterpart, not for each counterpart."""
    calls = []

    class Counting(type(NIXL)):
        @property
        def compares(self):
            calls.append(1)
            return ALIKE

    kinds = [Traits(kv_cache_dtype=str(n)) for n in range(3)]
    many = [One(str(n), kinds[n % 3]) for n in range(300)]
    found = groups(many, many, Counting())
    assert [len(one) for pair in found for one in pair] == [100] * 6
    assert len(calls) <= 2 * 9

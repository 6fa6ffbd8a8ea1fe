"""For each family that engines read in a way of their own, the ids are those of vLLM, or the gateway declines."""

import pytest

from .families import FAMILIES, compare, recordings

RECORDINGS = recordings()


@pytest.mark.parametrize("one", RECORDINGS, ids=lambda one: f"{one.family}, {one.version}")
def test_the_ids_are_vllms_or_the_gateway_declines(one, tmp_path):
    found = compare(FAMILIES[one.family](tmp_path / "model"), one.version, one.answers)
    assert not found.wrong
    assert len(found.equal) >= 0.9 * found.requests >= 200, found.reasons


def test_each_family_was_recorded():
    assert {one.family for one in RECORDINGS} == set(FAMILIES)

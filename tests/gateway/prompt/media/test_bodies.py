"""Blocks of requests with images are named as a real vLLM's events name them, see `bodies`."""

import pytest

from .bodies import FAMILIES, compare, recordings


@pytest.mark.parametrize("one", [pytest.param(one, id=f"{one.family}, {one.version}") for one in recordings()])
def test_blocks_are_those_that_vllm_made(one, tmp_path):
    found = compare(one.family, FAMILIES[one.family].folder(tmp_path / "model"), one.version, one.answers)
    assert not found.wrong and not found.declined
    assert len(found.equal) == sum(blocks is not None for blocks in one.answers.values()) > 100
    # What vLLM refuses because it loses an image between newlines is not called exact either.
    assert set(found.refused) <= ({"partly"} if one.family.startswith("Gemma") else {"media"})


def test_all_families_are_recorded_with_both_rules_of_naming():
    assert {(one.family, one.version) for one in recordings()} == {
        (family, version) for family in FAMILIES for version in ("0.28.0", "0.32.0")
    }

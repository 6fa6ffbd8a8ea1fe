"""For each family that vLLM reads in a way of its own, the installed vLLM makes the gateway's ids, or it declines."""

import pytest

from ..gateway.prompt.families import FAMILIES, compare, families_of
from .engines import release, version
from .record_families import ask

pytestmark = [pytest.mark.exact, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def answers(vllm, tmp_path_factory):
    return ask(families_of(version()), tmp_path_factory.mktemp("families"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ids_are_vllms_or_the_gateway_declines(name, answers, tmp_path):
    if name not in answers:
        pytest.skip("this vLLM is older than the model")
    found = compare(name, FAMILIES[name](tmp_path / "model"), release(), answers[name])
    assert not found.wrong
    assert len(found.equal) >= 0.9 * found.requests >= 200, found.reasons

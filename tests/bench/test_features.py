"""The bench of what features cost uses the features."""

from math import inf

from bench import features
from gateway.http import upstream as wire


async def test_each_case_is_answered_with_its_feature_switched_on(tmp_path, monkeypatch):
    monkeypatch.setattr(wire, "IDLE_SECONDS", inf)  # nobody opens a connection anew here, however slow the machine is
    made = features.cases(tmp_path)
    found = features.measure("plain", 3 * features.BLOCK, made)
    assert found.keys() == made.keys() and min(found.values()) > 0
    metering = made["keys with a limit"].features["metering"]
    assert [account.name for account in metering.accounts()] == ["acme"]

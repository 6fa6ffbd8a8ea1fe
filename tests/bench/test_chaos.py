"""An engine slowed to half, in virtual time: what premium keeps, and that all is given back."""

from bench.chaos import SLOW_TO, chaos


def test_premium_keeps_its_limits_while_an_engine_is_at_half_and_all_is_as_before_two_windows_later():
    found = chaos(73.4, 1, 15.0, free=0.75)
    assert found["premium_kept_while_slow"] >= 0.95
    assert found["windows_to_normal"] is not None and found["windows_to_normal"] <= 2
    assert all(one["premium_kept"] >= 0.95 for one in found["windows"][SLOW_TO:])
    assert ("halve", "free", False) in [change[1:] for change in found["steps"]], "it was taken"

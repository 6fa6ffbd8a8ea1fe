import pytest

from gateway.proxy.exactness.drift import WINDOW, Drift


def test_small_errors_never_add_up_to_a_verdict():
    drift = Drift()
    assert not any(drift.reported(992 if i % 20 else 0, 992, 1000) for i in range(50 * WINDOW))


def test_a_map_that_is_wrong_is_found_out_within_a_window():
    drift = Drift()
    verdicts = [drift.reported(900, 0, 1000) for _ in range(WINDOW)]
    assert verdicts == [False] * (WINDOW - 1) + [True]


def tells(predicted, prompt):
    """An answer whose engine reports nothing."""
    return lambda drift: drift.unreported(predicted, prompt)


def reports(predicted, cached, fetched=0):
    return lambda drift: drift.reported(predicted, cached, 1000, fetched=fetched)


def counts(queries, hits, is_drift=False, idle=True):
    """The engine's counters of lookups, and whether they say that the map is wrong."""

    def step(drift):
        assert drift.counted(queries, hits, idle=idle) is is_drift

    return step


PROMISED = tells(800, 1000)
COUNTED = {
    "speak for engines that report nothing": [
        counts(9000, 5000),  # where it began is not known
        PROMISED,
        counts(9500, 5400, idle=False),  # requests in flight: not comparable
        counts(10000, 5800),  # as promised
        PROMISED,
        counts(11000, 5800, True),  # promised 800, delivered none
    ],
    "speak also where an engine counts no lookups": [counts(None, 5000), PROMISED, counts(None, 5000, True)],
    "have what responses reported, too": [
        counts(0, 0), reports(992, 992), PROMISED, counts(2000, 1792), reports(992, 992), PROMISED,
        counts(4000, 2784, True),  # 992 of them reported: for the other nothing was found
    ],
    "know nothing of what was fetched": [counts(0, 0), reports(992, 992, fetched=900), PROMISED, counts(2000, 892)],
    "are not compared when they speak of other requests, too": [
        counts(0, 0), tells(0, 1000),
        counts(2000, 992),  # another gateway's, or one whose client left
        PROMISED,
        counts(3000, 992, True),  # alone again
    ],
    "are not compared when a request had several prompts": [
        counts(0, 0), tells(0, 1000), Drift.exclude, counts(1000, 992), tells(0, 1000), counts(2000, 1984, True),
    ],
    "fall at a restart, which is no drift": [counts(9000, 5000), PROMISED, counts(0, 0)],
}  # fmt: skip


@pytest.mark.parametrize("counters", COUNTED)
def test_counters_of_lookups(counters):
    drift = Drift()
    for step in COUNTED[counters]:
        step(drift)


@pytest.mark.parametrize("offset", [16, -16])
def test_a_steady_offset_is_told_and_is_no_reason_to_throw_the_map_away(offset):
    drift, lengths = Drift(), [32, 80, 48, 160]
    verdicts = [drift.reported(length, length - offset, length + 40, block_size=16) for length in lengths * 2 * WINDOW]
    assert not any(verdicts) and drift.offset == offset


def test_one_offset_among_answers_that_are_right_is_none():
    drift = Drift()
    for _ in range(10):
        drift.reported(64, 48, 100, block_size=16)
        drift.reported(64, 64, 100, block_size=16)
        assert not drift.offset


def test_a_beginning_that_is_always_predicted_too_short_is_a_map_that_is_wrong():
    drift = Drift()
    assert any(drift.reported(512, 2048, 3000, block_size=16) for _ in range(WINDOW))


def test_counters_tell_of_a_steady_block_too():
    drift = Drift()
    drift.counted(0, 0, idle=True, block_size=16)
    for _ in range(3):
        drift.unreported(64, 80)
    drift.unreported(0, 20)
    assert not drift.counted(260, 3 * 48, idle=True, block_size=16)
    assert drift.offset == 16

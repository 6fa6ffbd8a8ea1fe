import pytest

from gateway.proxy.exactness.drift import WINDOW, Drift


def test_small_errors_never_add_up_to_a_verdict():
    drift = Drift()
    assert not any(drift.reported(992 if i % 20 else 0, 992, 1000) for i in range(50 * WINDOW))


def test_a_map_that_is_wrong_is_found_out_within_a_window():
    drift = Drift()
    verdicts = [drift.reported(900, 0, 1000) for _ in range(WINDOW)]
    assert verdicts == [False] * (WINDOW - 1) + [True]


def test_counters_speak_for_engines_that_report_nothing():
    drift = Drift()
    assert not drift.counted(9000, 5000, idle=True)  # where it began is not known
    drift.unreported(800, 1000)
    assert not drift.counted(9500, 5400, idle=False)  # requests in flight: not comparable
    assert not drift.counted(10000, 5800, idle=True)  # as promised
    drift.unreported(800, 1000)
    assert drift.counted(11000, 5800, idle=True)  # promised 800, delivered none


def test_counters_speak_also_where_an_engine_counts_no_lookups():
    drift = Drift()
    drift.counted(None, 5000, idle=True)
    drift.unreported(800, 1000)
    assert drift.counted(None, 5000, idle=True)


def test_what_responses_reported_is_in_the_counters_too():
    drift = Drift()
    drift.counted(0, 0, idle=True)
    drift.reported(992, 992, 1000)
    drift.unreported(800, 1000)
    assert not drift.counted(2000, 1792, idle=True)
    drift.reported(992, 992, 1000)
    drift.unreported(800, 1000)
    assert drift.counted(4000, 2784, idle=True)  # 992 of them reported: for the other nothing was found


def test_counters_know_nothing_of_what_was_fetched():
    drift = Drift()
    drift.counted(0, 0, idle=True)
    drift.reported(992, 992, 1000, fetched=900)
    drift.unreported(800, 1000)
    assert not drift.counted(2000, 892, idle=True)


def test_counters_are_not_compared_when_they_speak_of_other_requests_too():
    drift = Drift()
    drift.counted(0, 0, idle=True)
    drift.unreported(0, 1000)
    assert not drift.counted(2000, 992, idle=True)  # another gateway's, or one whose client left
    drift.unreported(800, 1000)
    assert drift.counted(3000, 992, idle=True)  # alone again


def test_counters_are_not_compared_when_a_request_had_several_prompts():
    drift = Drift()
    drift.counted(0, 0, idle=True)
    drift.unreported(0, 1000)
    drift.exclude()
    assert not drift.counted(1000, 992, idle=True)
    drift.unreported(0, 1000)
    assert drift.counted(2000, 1984, idle=True)


def test_a_counter_that_falls_is_a_restart_not_drift():
    drift = Drift()
    drift.counted(9000, 5000, idle=True)
    drift.unreported(800, 1000)
    assert not drift.counted(0, 0, idle=True)


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

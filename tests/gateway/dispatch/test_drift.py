from gateway.dispatch.drift import WINDOW, Drift


def test_small_errors_never_add_up_to_a_verdict():
    drift = Drift()
    assert not any(drift.reported(992 if i % 20 else 0, 992, 1000) for i in range(50 * WINDOW))


def test_a_map_that_is_wrong_is_found_out_within_a_window():
    drift = Drift()
    verdicts = [drift.reported(900, 0, 1000) for _ in range(WINDOW)]
    assert verdicts == [False] * (WINDOW - 1) + [True]


def test_counters_speak_for_engines_that_report_nothing():
    drift = Drift()
    assert not drift.counted(5000.0, idle=True)  # where it began is not known
    drift.unreported(800, 1000)
    assert not drift.counted(5400.0, idle=False)  # requests in flight: not comparable
    assert not drift.counted(5800.0, idle=True)  # as promised
    drift.unreported(800, 1000)
    assert drift.counted(5800.0, idle=True)  # promised 800, delivered none


def test_a_counter_that_falls_is_a_restart_not_drift():
    drift = Drift()
    drift.counted(5000.0, idle=True)
    drift.unreported(800, 1000)
    assert not drift.counted(0.0, idle=True)

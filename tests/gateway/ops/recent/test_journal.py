"""What happened: said once, counted when it happens again, bounded."""

from gateway.ops.recent.journal import AGAIN_SECONDS, MOST_CHARS, MOST_ENTRIES, Journal


def test_the_newest_comes_first_and_what_repeats_is_counted():
    journal = Journal()
    journal.note(1.0, "state", "ready", "a:1")
    journal.note(2.0, "failure", "connect", "a:1", times=3)
    journal.note(3.0, "failure", "connect", "b:1")
    journal.note(4.0, "failure", "connect", "a:1")
    shown = [(one["replica"], one["text"], one["at"], one["since"], one["times"]) for one in journal.to_list(9)]
    assert shown == [("a:1", "connect", 4.0, 2.0, 4), ("b:1", "connect", 3.0, 3.0, 1), ("a:1", "ready", 1.0, 1.0, 1)]
    journal.note(4.0 + AGAIN_SECONDS + 1, "failure", "connect", "a:1")
    assert len(journal.to_list(9)) == 4 and len(journal.to_list(2)) == 2


def test_it_is_bounded_in_entries_and_characters():
    journal = Journal()
    for number in range(2 * MOST_ENTRIES):
        journal.note(float(number), "state", f"{number} " + "x" * 9000)
    assert len(journal.entries) == MOST_ENTRIES and max(len(one.text) for one in journal.entries) == MOST_CHARS


def test_a_replica_that_is_gone_leaves_no_failure_behind():
    journal = Journal()
    journal.failed(1.0, "a:1", "exit code 1")
    assert journal.failures["a:1"].why == "exit code 1"
    journal.forget("a:1")
    journal.forget("a:1")
    assert not journal.failures


def test_why_a_replica_is_down_is_kept_before_the_requests_that_failed_for_it():
    journal = Journal()
    journal.failed(1.0, "a:1", "connect", of_request=True)
    journal.failed(2.0, "a:1", "killed by SIGKILL")
    assert journal.failures["a:1"].why == "killed by SIGKILL"
    for at in (3.0, 4.0):
        journal.failed(at, "a:1", "connect", of_request=True)
        last = journal.failures["a:1"]
        assert (last.at, last.why) == (at, "killed by SIGKILL; then connect"), "the last one, and why"
    journal.failed(4.0 + AGAIN_SECONDS, "a:1", "closed", of_request=True)
    assert journal.failures["a:1"].why == "closed"

"""Compare the request rate that a load offers with the rate that was answered, and say why they differ."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from loadgen.drive.records import Record
from loadgen.report.summary import Report
from loadgen.workload.conversations import Conversation

_STOPPED = "the run was stopped early"
NEARLY_ALL = 0.95  # `steady` takes the age that this share of the requests does not exceed
REACHED = 0.8  # a run that answers less than this share of its offered rate never reached that rate


def steady(done: Sequence[Record], conversations: Sequence[Conversation]) -> tuple[float, float]:
    """Return when the load reached its offered rate and until when it held the rate, on the clock of the records.

    Later turns wait for replies, so the rate is reached only once conversations end as often as new ones begin. The
    time from the first start until then is estimated as the 95th percentile (NEARLY_ALL) of the requests' ages. A
    request's age is the time from the start of its conversation until its answer was complete. The rate is held until
    the last conversation begins. If the second value is not above the first, the rate was never reached.
    """
    first_of = dict(_roots(conversations))
    began: dict[str, float] = {}
    for record in done:
        root = first_of.get(record.conversation, record.conversation)
        began[root] = min(record.due, began.get(root, record.due))
    ages = sorted(record.last - began[first_of.get(record.conversation, record.conversation)] for record in done)
    if not ages:
        return 0.0, 0.0
    return min(began.values()) + ages[int(NEARLY_ALL * (len(ages) - 1))], max(began.values())


def _roots(conversations: Iterable[Conversation], root: str | None = None) -> Iterator[tuple[str, str]]:
    """Yield (id, root) of each conversation and of its forks, which have the conversation's id as their root."""
    for conversation in conversations:
        yield conversation.id, root or conversation.id
        for turn in conversation.turns:
            yield from _roots(turn.forks, root or conversation.id)


def per_second(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f} /s"


def rates(report: Report) -> str:
    """Return a line on the offered and answered requests per second, with the reasons for a difference."""
    return ", ".join(said for said in (offered(report), answered(report)) if said)


def answered(report: Report) -> str:
    """Return in words how many requests per second were answered and, if fewer than offered, why."""
    offered, answered = report["offered"]["rate"], report["request_throughput"]
    if offered is None:
        why = "all conversations began at once, so no rate was offered"
        if users := report["generator"]["users"]:
            why = f"none offered, since each of {users} users sends when the last answer has come"
        return f"{answered:,.2f} requests/s answered; {why}"
    line = f"{answered:,.2f} answered"
    if answered >= offered or f"{answered:.2f}" == f"{offered:.2f}":
        return f"{line}: {_STOPPED}; what is offered is the whole load's rate" if report["interrupted"] else line
    return f"{line}: {'; '.join(reasons(report))}"


def offered(report: Report) -> str:
    """Return in words the rate that the start times offer, and the rate for which they were drawn if it differs.

    Returns "" if the load offers no rate: in a closed loop, or where all conversations begin at once.
    """
    offered, drawn = report["offered"]["rate"], report.get("asked")
    if offered is None:
        return ""
    if not drawn or f"{drawn['rate']:.2f}" == f"{offered:.2f}":
        return f"{offered:,.2f} requests/s offered"
    drawn_for = f"{drawn['rate']:,.4g}: {drawn['arrivals']}, {report['conversations']:,.0f} conversations"
    return f"{offered:,.2f} requests/s offered (drawn for {drawn_for})"


def never_reached(report: Report) -> str:
    """Return a sentence if the run answered too few requests to have reached its offered rate, else "".

    The figures of such a run, even if within the SLO, are those of a lower rate.
    """
    offered, answered = report["offered"]["rate"], report["request_throughput"]
    if offered is None or answered >= REACHED * offered:
        return ""
    why = "later turns wait for a reply, and " if report["offered"]["later_turns"] else ""
    return f"of {offered:,.2f} requests/s offered {answered:,.2f} were answered, since {why}the load ends before its rate is reached"


def reasons(report: Report) -> Iterator[str]:
    """Yield in words why fewer requests per second were answered than the load offers.

    The first reasons lie in the load and its settings: turns that wait for a reply, and the limit of requests in
    flight. Then come failures, a generator that was late, the time after the last conversation began, and an
    interruption.
    """
    offered, generator = report["offered"], report["generator"]
    requests = report["requests"] + report["not_sent"]
    if offered["later_turns"]:
        pause = f" and {offered['think_s']:,.2g} s to think" if offered["think_s"] else ""
        yield f"{offered['later_turns']:,.0f} of {requests:,.0f} requests are later turns, which wait for a reply{pause}"
    if generator["max_concurrency"]:
        yield f"at most {generator['max_concurrency']} were in flight"
    if report["failed"] or report["not_sent"]:
        parts = ((report["failed"], "failed"), (report["not_sent"], "not sent"))
        yield " and ".join(f"{count:,.0f} {what}" for count, what in parts if count)
    if generator["was_the_limit"] and not generator["max_concurrency"]:
        yield "the generator was late"
    if (rest := report["duration_s"] - offered["seconds"]) > 0 and not report["interrupted"]:
        yield f"the last answer came {rest:,.{1 if rest >= 1 else 2}f} s after the last conversation had begun"
    if report["interrupted"]:
        yield _STOPPED

"""Dashboard of the SLO: what each class of requests was promised, and what was kept."""

from __future__ import annotations

from ..panels import Dashboard, Panel, growth, largest, quantiles, rate, ratio, stat, total

BY = "class"
MET = 'sum by (class) (rate(hitherto_slo_requests_total{outcome="met"}[R]))'
JUDGED = "sum by (class) (rate(hitherto_slo_requests_total[R]))"
PREDICTED = "sum by (class) (rate(hitherto_predicted_answers_total[R]))"


def burn(window: str) -> str:
    """Return the expression for the burn rate over `window`: the share of errors over the share that is allowed."""
    met, all_ = (
        f"sum by (class) (rate(hitherto_slo_requests_total{what}[{window}]))" for what in ('{outcome="met"}', "")
    )
    refused = f'sum by (class) (rate(hitherto_admission_total{{decision="refused"}}[{window}]))'
    return f"(1 - {met} / ({all_} + {refused})) / (1 - $objective)"


def by_class(metric: str) -> list[tuple[str, str]]:
    return quantiles(metric, BY, 0.5, 0.99, 0.999)


PER_ANSWER = (
    "sum by (class, phase) (rate(hitherto_answer_phase_seconds_total[R]))"
    " / on (class) group_left () sum by (class) (rate(hitherto_answer_e2e_seconds_count[R]))"
)
REFUSED = 'hitherto_admission_total{decision="refused"}'
OBJECTIVE = {
    "name": "objective",
    "label": "Objective",
    "type": "custom",
    "query": "0.9, 0.95, 0.99, 0.995, 0.999",
    "current": {"text": "0.99", "value": "0.99", "selected": True},
    "hide": 0,
    "multi": False,
    "includeAll": False,
}

SLO = Dashboard(
    "hitherto-slo",
    "Hitherto: SLO",
    "What was promised and what was kept, by class: needs limits (slo), classes (scheduler) or --slo-figures.",
    [
        (
            "Goodput",
            [
                stat(
                    "Goodput",
                    'sum (rate(hitherto_slo_requests_total{outcome="met"}[R]))',
                    "reqps",
                    "Streamed answers per second that kept their limits.",
                    width=6,
                ),
                stat(
                    "Kept",
                    ratio('hitherto_slo_requests_total{outcome="met"}', "hitherto_slo_requests_total"),
                    "percentunit",
                    "Share of the admitted that kept their limits.",
                    width=6,
                    most=1,
                ),
                stat(
                    "Refused",
                    ratio(REFUSED, 'hitherto_admission_total{decision!="queued"}'),
                    "percentunit",
                    "Share of the requests that were judged.",
                    width=6,
                ),
                stat("Waiting in the gateways", "sum (hitherto_queued_requests)", "short", width=6),
                Panel("Kept, by class", [(f"{MET} / {JUDGED}", "{{class}}")], "percentunit", most=1),
                Panel(
                    "Burn rate",
                    [(burn("5m"), "5 m {{class}}"), (burn("1h"), "1 h {{class}}"), (burn("6h"), "6 h {{class}}")],
                    about="Errors (missed, failed, refused) as a multiple of what the objective allows. Alerts are at 14.4 and 6.",
                ),
                Panel("By outcome", [rate("hitherto_slo_requests_total", "class, outcome")], "reqps", stacked=True),
            ],
        ),
        (
            "What answers took, by class",
            [
                Panel(
                    "TTFT",
                    by_class("hitherto_answer_ttft_seconds"),
                    "s",
                    about="From the complete request to the first byte of a stream.",
                ),
                Panel(
                    "Time per output token",
                    by_class("hitherto_answer_tpot_seconds"),
                    "s",
                    about="TPOT: of each answer the mean after its first token.",
                ),
                Panel(
                    "Between tokens",
                    by_class("hitherto_answer_itl_seconds"),
                    "s",
                    about="ITL, as the mean of the gaps within a quarter of a second.",
                ),
                Panel("Whole answers", by_class("hitherto_answer_e2e_seconds"), "s"),
                Panel("TTFT by model, p99", quantiles("hitherto_answer_ttft_seconds", "model", 0.99), "s"),
                Panel(
                    "Time per output token by model, p99", quantiles("hitherto_answer_tpot_seconds", "model", 0.99), "s"
                ),
            ],
        ),
        (
            "Where the time goes",
            [
                Panel(
                    "Requests in each phase",
                    [rate("hitherto_answer_phase_seconds_total", "phase")],
                    stacked=True,
                    about="Mean number.",
                ),
                Panel(
                    "Seconds of an answer in each phase",
                    [(PER_ANSWER, "{{class}} {{phase}}")],
                    "s",
                    stacked=True,
                    about="Mean; for all models.",
                ),
                Panel(
                    "Tokens",
                    [rate("hitherto_answer_tokens_total", "class, kind")],
                    about="Per second; cached ones are part of the input.",
                ),
            ],
        ),
        (
            "Admission",
            [
                Panel("Decisions", [rate("hitherto_admission_total", "class, decision")], "reqps", stacked=True),
                Panel("Why refused", [rate('hitherto_admission_total{decision="refused"}', "class, reason")], "reqps"),
                Panel("Waiting", [total("hitherto_queued_requests", "class")]),
                Panel(
                    "Time in the queue",
                    quantiles("hitherto_queue_seconds", "class"),
                    "s",
                    about="Of requests that waited and were sent.",
                ),
                Panel(
                    "First tokens: predicted and delivered",
                    [
                        (
                            "sum by (class) (rate(hitherto_predicted_ttft_seconds_total[R])) / " + PREDICTED,
                            "predicted {{class}}",
                        ),
                        (
                            "sum by (class) (rate(hitherto_delivered_ttft_seconds_total[R])) / " + PREDICTED,
                            "delivered {{class}}",
                        ),
                    ],
                    "s",
                    about="Mean.",
                ),
                Panel("Bytes waiting", [total("hitherto_queued_bytes", "instance")], "bytes"),
            ],
        ),
        (
            "The control of overload",
            [
                Panel(
                    "Pressure",
                    [largest("hitherto_control_pressure_ratio", "class, model")],
                    "percentunit",
                    about="The slowest answers of a window as a share of the class's limit.",
                    width=6,
                ),
                Panel(
                    "Steps taken from lower classes now",
                    [largest("hitherto_control_level", "instance, model")],
                    width=6,
                ),
                Panel(
                    "Steps",
                    [growth("hitherto_control_steps_total", "step, class, change")],
                    about="Taken and undone.",
                    width=6,
                ),
                Panel(
                    "More replicas wanted",
                    [largest("hitherto_more_replicas_wanted", "model")],
                    kind="state-timeline",
                    width=6,
                ),
            ],
        ),
    ],
    choices=("model",),
    more=[OBJECTIVE],
)

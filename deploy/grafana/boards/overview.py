"""Dashboard on whether the gateway pays: cache hits, latencies, and what shadow policies would have done."""

from __future__ import annotations

from ..panels import FAILED, GREEN, PREDICTED, READY, RED, REPORTED, YELLOW, Dashboard, Panel, quantiles, rate, stat


def saved(metric: str) -> str:
    """Return the expression for what policies in shadow would have saved, less what they would have cost."""
    each = [f'sum by (policy) (rate({metric}{{effect="{effect}"}}[R]))' for effect in ("saved", "cost")]
    return " - ".join(each)


OVERVIEW = Dashboard(
    "hitherto-overview",
    "Hitherto: overview",
    "Does it pay? What was not computed again, what clients wait for, and what another policy would have made of it.",
    [
        (
            "",
            [
                stat(
                    "Cache hit rate",
                    REPORTED,
                    "percentunit",
                    "Share of prompt tokens that engines report as cached.",
                    most=1,
                ),
                stat(
                    "Prefill saved",
                    "sum (rate(hitherto_prefill_saved_tokens_total[R]))",
                    "short",
                    "Prompt tokens per second that were not computed again.",
                ),
                stat(
                    "TTFT p50",
                    quantiles("hitherto_ttft_seconds")[0][0],
                    "s",
                    "From the complete request to the answer's first byte.",
                ),
                stat("TTFT p99", quantiles("hitherto_ttft_seconds")[1][0], "s"),
                stat(
                    "Failed",
                    FAILED,
                    "percentunit",
                    "Requests that ended with 5xx or were cut off.",
                    thresholds=[(None, GREEN), (0.001, YELLOW), (0.01, RED)],
                ),
                stat(
                    "Replicas ready",
                    READY,
                    "short",
                    "As the gateway sees them that sees most.",
                    thresholds=[(None, RED), (1, GREEN)],
                ),
            ],
        ),
        (
            "Does it pay",
            [
                Panel(
                    "Hit rate: predicted and reported",
                    [(REPORTED, "reported by engines"), (PREDICTED, "predicted by the map")],
                    "percentunit",
                    about="Where the two lines part, the map of who holds what is wrong: see the dashboard Cache map.",
                    most=1,
                ),
                Panel(
                    "Prefill: saved and computed",
                    [
                        ("sum (rate(hitherto_prefill_saved_tokens_total[R]))", "saved"),
                        (
                            "sum (rate(hitherto_prompt_tokens_total[R])) - sum (rate(hitherto_prefill_saved_tokens_total[R]))",
                            "computed",
                        ),
                    ],
                    about="Prompt tokens per second.",
                    stacked=True,
                ),
                Panel("Requests by status", [rate("hitherto_requests_total", "status")], "reqps", stacked=True),
            ],
        ),
        (
            "What clients wait for",
            [
                Panel("TTFT", quantiles("hitherto_ttft_seconds", "", 0.5, 0.9, 0.99), "s"),
                Panel(
                    "Whole requests",
                    quantiles("hitherto_request_seconds"),
                    "s",
                    about="From the complete request to the answer's last byte.",
                ),
                Panel(
                    "In flight and waiting",
                    [
                        ("sum (hitherto_inflight_requests)", "in flight"),
                        ("sum (max by (replica) (hitherto_replica_waiting_requests))", "waiting in engines"),
                        ("sum (hitherto_queued_requests) or vector(0)", "waiting in gateways"),
                    ],
                ),
            ],
        ),
        (
            "Shadow: what other policies would have saved (below zero: cost), with --shadow",
            [
                Panel(
                    "Prefill",
                    [(saved("hitherto_shadow_prefill_tokens_total"), "{{policy}}")],
                    about="Prompt tokens per second.",
                    width=12,
                    below_zero=True,
                ),
                Panel(
                    "Waiting",
                    [
                        (saved("hitherto_shadow_ttft_seconds_total"), "first tokens {{policy}}"),
                        (saved("hitherto_shadow_answer_seconds_total"), "last tokens {{policy}}"),
                    ],
                    "s",
                    about="Predicted seconds of all requests together, per second.",
                    width=12,
                    below_zero=True,
                ),
            ],
        ),
    ],
)

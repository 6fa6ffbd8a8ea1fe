"""Dashboard of the replicas: health, load, latency and failures of each."""

from __future__ import annotations

from ..panels import Dashboard, Panel, growth, largest, quantiles, rate, ratio, state, total

REPLICAS = Dashboard(
    "hitherto-replicas",
    "Hitherto: replicas",
    "Each replica's state, load, latency and failures.",
    [
        (
            "Health",
            [
                Panel("States", [state("hitherto_replica_state", "replica, state")], kind="state-timeline", width=12),
                Panel(
                    "Failures",
                    [rate("hitherto_upstream_errors_total", "replica, kind")],
                    "reqps",
                    about="What went wrong there, by kind; requests were tried elsewhere while their clients had nothing.",
                    width=6,
                ),
                Panel(
                    "Restarts",
                    [growth("hitherto_replica_restarts_total", "replica")],
                    about="Of engines that the gateway launched.",
                    width=6,
                ),
            ],
        ),
        (
            "Load",
            [
                Panel("Requests", [rate("hitherto_replica_requests_total", "replica")], "reqps"),
                Panel(
                    "In flight",
                    [total("hitherto_inflight_requests", "replica")],
                    about="Sent by all gateways and not finished.",
                ),
                Panel(
                    "In the engine",
                    [
                        largest("hitherto_replica_running_requests", "replica", "running"),
                        largest("hitherto_replica_waiting_requests", "replica", "waiting"),
                    ],
                    about="As engines report it.",
                ),
                Panel(
                    "Prefill on its way",
                    [total("hitherto_reserved_prefill_tokens", "replica")],
                    about="Uncached prompt tokens whose first byte is not there.",
                ),
                Panel(
                    "Context being written to",
                    [total("hitherto_reserved_context_tokens", "replica")],
                    about="Tokens of streams past their first byte.",
                ),
                Panel(
                    "KV cache in use", [largest("hitherto_replica_kv_usage_ratio", "replica")], "percentunit", most=1
                ),
            ],
        ),
        (
            "What it answers",
            [
                Panel("TTFT, median", quantiles("hitherto_replica_ttft_seconds", "replica", 0.5), "s"),
                Panel("TTFT, p99", quantiles("hitherto_replica_ttft_seconds", "replica", 0.99), "s"),
                Panel(
                    "Whole answers, mean",
                    [
                        (
                            "sum by (replica) (rate(hitherto_replica_answer_seconds_total[R])) / "
                            'sum by (replica) (rate(hitherto_replica_requests_total{status="2xx"}[R]))',
                            "{{replica}}",
                        )
                    ],
                    "s",
                ),
                Panel(
                    "Time per token, mean",
                    [
                        (
                            ratio(
                                "hitherto_replica_decode_seconds_total",
                                "hitherto_replica_decode_tokens_total",
                                "replica",
                            ),
                            "{{replica}}",
                        )
                    ],
                    "s",
                    about="Of the tokens after the first, in complete answers.",
                ),
                Panel(
                    "Hit rate",
                    [
                        (
                            ratio(
                                "hitherto_reported_cached_tokens_total",
                                "hitherto_reported_prompt_tokens_total",
                                "replica",
                            ),
                            "{{replica}}",
                        )
                    ],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Connections",
                    [total("hitherto_upstream_connections", "replica")],
                    about="Open from the gateways, idle ones included.",
                ),
                Panel("Answers by status", [rate("hitherto_replica_requests_total", "replica, status")], "reqps"),
                Panel(
                    "Long prompts sent",
                    [rate("hitherto_long_prompts_total", "replica, sent")],
                    "reqps",
                    about="As token ids, which the engine need not make again, or as text.",
                ),
            ],
        ),
    ],
)

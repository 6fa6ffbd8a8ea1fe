"""Dashboard of the gateway itself: the time it adds to requests, its answers, and the resources it needs."""

from __future__ import annotations

from ..panels import NONE, Dashboard, Panel, growth, largest, quantiles, rate, state, total

GATEWAY = Dashboard(
    "hitherto-gateway",
    "Hitherto: gateway",
    "The gateway itself: what it takes of a request's time, what it answers, and what it needs.",
    [
        (
            "Latency budget",
            [
                Panel(
                    "Own stages, median",
                    quantiles("hitherto_stage_seconds", "stage", 0.5),
                    "s",
                    about="Preparing a prompt (in a thread if it is long), choosing a replica.",
                ),
                Panel("Own stages, p99", quantiles("hitherto_stage_seconds", "stage", 0.99), "s"),
                Panel(
                    "Time of the loop by stage",
                    [("sum by (instance, stage) (rate(hitherto_stage_seconds_sum[R]))", "{{stage}} {{instance}}")],
                    "percentunit",
                    about="Share of one core.",
                    stacked=True,
                ),
                Panel(
                    "Delay of the event loop",
                    quantiles("hitherto_loop_delay_seconds", "instance"),
                    "s",
                    about="How much later than due its timers run: what every request waits before anybody looks at it.",
                ),
                Panel(
                    "Waiting for Redis' choice",
                    quantiles("hitherto_shared_decision_seconds", "instance"),
                    "s",
                    about="With --redis-url.",
                ),
                Panel(
                    "Where requests are",
                    [rate("hitherto_answer_phase_seconds_total", "phase")],
                    stacked=True,
                    about="Mean number of requests in each phase; with classes, limits or --slo-figures.",
                ),
            ],
        ),
        (
            "Requests",
            [
                Panel("By path and status", [rate("hitherto_requests_total", "path, status")], "reqps", stacked=True),
                Panel(
                    "Errors by path",
                    [rate('hitherto_requests_total{status!~"2xx|3xx"}', "path, status")],
                    "reqps",
                    about="4xx and 5xx, clients that left (aborted), answers that broke off (cut).",
                ),
                Panel(
                    "Refused by the gateway, or by all engines asked",
                    [rate("hitherto_rejections_total", "reason")],
                    "reqps",
                ),
                Panel(
                    "Retries", [rate("hitherto_retries_total", "reason")], "reqps", about="What clients were spared."
                ),
                Panel("Failures of replicas", [rate("hitherto_upstream_errors_total", "kind")], "reqps"),
                Panel(
                    "Prompts routed by load alone",
                    [rate("hitherto_prompt_failures_total", "reason")],
                    "reqps",
                    about="A template or tokenizer failed.",
                ),
            ],
        ),
        (
            "What it needs",
            [
                Panel("CPU", [("rate(process_cpu_seconds_total[R])", "{{instance}}")], "percentunit", about="Cores."),
                Panel(
                    "Memory",
                    [
                        ("process_resident_memory_bytes", "{{instance}}"),
                        total("hitherto_request_bytes", "instance", "of it requests"),
                        total("hitherto_prompt_memo_bytes", "instance", "of it prompts seen before"),
                    ],
                    "bytes",
                ),
                Panel(
                    "Connections",
                    [
                        total("hitherto_client_connections", "instance", "clients"),
                        total("hitherto_upstream_connections", "instance", "replicas"),
                        ("process_open_fds", "open files {{instance}}"),
                    ],
                ),
                Panel(
                    "Faults of its background work",
                    [
                        (
                            "sum by (instance) (increase(hitherto_background_failures_total[R])) or " + NONE,
                            "{{instance}}",
                        )
                    ],
                ),
                Panel("Up since", [largest("hitherto_uptime_seconds", "instance")], "s"),
                Panel(
                    "Version and policy",
                    [largest("hitherto_build_info", "instance, version, policy")],
                    kind="state-timeline",
                ),
                Panel(
                    "Workers up",
                    [state("hitherto_worker_up", "instance, worker")],
                    kind="state-timeline",
                    about="With --workers.",
                ),
                Panel("Workers replaced", [growth("hitherto_worker_restarts_total", "instance")]),
                Panel("Clients that left", [rate("hitherto_client_aborts_total", "path")], "reqps"),
            ],
        ),
        (
            "Tenants, with --api-keys",
            [
                Panel(
                    "Requests",
                    [rate("hitherto_tenant_requests_total", "tenant, status")],
                    "reqps",
                    stacked=True,
                    width=6,
                ),
                Panel("Tokens", [rate("hitherto_tenant_tokens_total", "tenant, kind")], about="Per second.", width=6),
                Panel(
                    "Refused by a limit", [rate("hitherto_tenant_refusals_total", "tenant, limit")], "reqps", width=6
                ),
                Panel(
                    "Running, of those with limits",
                    [
                        (
                            "sum by (tenant) (hitherto_tenant_running_requests) or "
                            "0 * sum by (tenant) (hitherto_tenant_requests_total)",
                            "{{tenant}}",
                        )
                    ],
                    width=6,
                ),
            ],
        ),
    ],
    choices=("replica", "model"),
)

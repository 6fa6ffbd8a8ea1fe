"""Dashboard of what several gateways share through Redis: cache map and ledger of the load."""

from __future__ import annotations

from ..panels import GREEN, RED, Dashboard, Panel, growth, largest, quantiles, rate, ratio, stat, state, total

REDIS = Dashboard(
    "hitherto-redis",
    "Hitherto: Redis",
    "What gateways share: the map of the caches, and the ledger of the load. Needs --redis-url.",
    [
        (
            "",
            [
                stat(
                    "Redis answers",
                    "min (hitherto_map_redis_up)",
                    "bool_yes_no",
                    "For the shared map, of all gateways.",
                    width=6,
                    thresholds=[(None, RED), (1, GREEN)],
                ),
                stat(
                    "Ledger joined",
                    "min (hitherto_ledger_joined)",
                    "bool_yes_no",
                    "By all gateways.",
                    width=6,
                    thresholds=[(None, RED), (1, GREEN)],
                ),
                stat(
                    "Map is behind",
                    "max (hitherto_map_follower_lag_seconds)",
                    "s",
                    "From a change's arrival in Redis to its being known everywhere.",
                    width=6,
                ),
                stat(
                    "Choices shared",
                    ratio('hitherto_shared_decisions_total{outcome="shared"}', "hitherto_shared_decisions_total"),
                    "percentunit",
                    "Share of choices that were made in the ledger of all gateways.",
                    width=6,
                    most=1,
                ),
            ],
        ),
        (
            "The ledger of the load",
            [
                Panel(
                    "Choices",
                    [rate("hitherto_shared_decisions_total", "instance, outcome")],
                    "reqps",
                    stacked=True,
                    about="In the shared ledger, by the gateway's own view because that came too late, or because Redis is away.",
                ),
                Panel(
                    "Waiting for a choice", quantiles("hitherto_shared_decision_seconds", "instance", 0.5, 0.99), "s"
                ),
                Panel("Joined", [largest("hitherto_ledger_joined", "instance")], kind="state-timeline"),
                Panel("Loads mended", [growth("hitherto_ledger_repairs_total", "instance, what")]),
                Panel(
                    "Limits of tenants decided",
                    [rate("hitherto_limit_decisions_total", "outcome")],
                    "reqps",
                    about="With --api-keys.",
                ),
            ],
        ),
        (
            "The shared map",
            [
                Panel("Up", [largest("hitherto_map_redis_up", "instance")], kind="state-timeline"),
                Panel("Behind", [largest("hitherto_map_follower_lag_seconds", "instance")], "s"),
                Panel(
                    "Replicas followed for all",
                    [total("hitherto_map_leases", "instance")],
                    stacked=True,
                    about="Leases of each gateway.",
                ),
                Panel(
                    "How each part is kept",
                    [state("hitherto_map_role", "instance, replica, role")],
                    kind="state-timeline",
                ),
                Panel(
                    "Taken over, loaded anew, saved",
                    [
                        growth("hitherto_map_takeovers_total", "instance", "takeovers"),
                        growth("hitherto_map_reloads_total", "instance", "reloads"),
                        growth("hitherto_map_snapshots_total", "instance", "snapshots"),
                    ],
                ),
                Panel("Calls that failed", [rate("hitherto_map_redis_errors_total", "instance")], "reqps"),
            ],
        ),
    ],
    choices=("model", "replica"),
)

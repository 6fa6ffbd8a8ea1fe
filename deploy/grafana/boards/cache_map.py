"""Dashboard of the cache map: which blocks the gateway believes that replicas hold, and how often it is right."""

from __future__ import annotations

from ..panels import PREDICTED, REPORTED, Dashboard, Panel, growth, largest, rate, state, total

CACHE_MAP = Dashboard(
    "hitherto-cache-map",
    "Hitherto: cache map",
    "What the gateway believes that replicas hold, where it has that from, and how often it is right.",
    [
        (
            "Predicted against delivered",
            [
                Panel(
                    "Hit rate",
                    [(REPORTED, "reported by engines"), (PREDICTED, "predicted by the map")],
                    "percentunit",
                    most=1,
                ),
                Panel(
                    "Predictions",
                    [rate("hitherto_predictions_total", "outcome")],
                    "reqps",
                    about="That an engine's report confirmed (equal), or corrected.",
                    stacked=True,
                ),
                Panel(
                    "Distance",
                    [rate("hitherto_prediction_error_tokens_total", "replica, direction")],
                    about="Tokens per second by which predictions were over or under.",
                ),
                Panel(
                    "Repairs",
                    [growth("hitherto_heals_total", "replica")],
                    about="A replica's part of the map had drifted and was learned again.",
                ),
                Panel(
                    "How prompts' tokens were found",
                    [rate("hitherto_prompts_total", "mode")],
                    "reqps",
                    stacked=True,
                    about="Exact; as the engine counts them; matched as text; or routed by load alone.",
                ),
                Panel(
                    "Prompts counted otherwise",
                    [rate("hitherto_prompt_mismatches_total", "replica")],
                    "reqps",
                    about="The engine counted another number of tokens: another tokenizer, template or flag.",
                ),
            ],
        ),
        (
            "KV events",
            [
                Panel(
                    "State of the event streams",
                    [state("hitherto_events_state", "replica, state")],
                    kind="state-timeline",
                ),
                Panel(
                    "Staleness",
                    [
                        largest("hitherto_event_lag_seconds", "replica", "events of"),
                        ("max (hitherto_map_follower_lag_seconds) or vector(0)", "map shared through Redis"),
                    ],
                    "s",
                    about="From an engine's sending of its last batch to the map, by the clocks of both.",
                ),
                Panel("Batches", [rate("hitherto_event_batches_total", "replica")]),
                Panel(
                    "Blocks stored and removed",
                    [
                        rate("hitherto_event_blocks_stored_total", "replica", "stored"),
                        rate("hitherto_event_blocks_removed_total", "replica", "removed"),
                    ],
                ),
                Panel(
                    "Blocks left out",
                    [
                        rate("hitherto_event_blocks_orphaned_total", "replica", "orphaned"),
                        rate("hitherto_event_blocks_ignored_total", "replica", "ignored"),
                    ],
                    about="Stored blocks that do not reach the map. Orphaned: what they follow is not known. Ignored: slower tiers "
                    "have them in a form that cannot be mapped.",
                ),
                Panel(
                    "Lost and fetched again",
                    [
                        growth("hitherto_event_gaps_total", "replica", "gaps"),
                        growth("hitherto_event_batches_replayed_total", "replica", "batches replayed"),
                    ],
                ),
            ],
        ),
        (
            "The map itself",
            [
                Panel("Blocks by replica", [largest("hitherto_map_replica_blocks", "replica")]),
                Panel("Blocks in all", [largest("hitherto_map_blocks", "instance")]),
                Panel(
                    "Memory",
                    [
                        total("hitherto_map_bytes", "instance", "used"),
                        total("hitherto_map_budget_bytes", "instance", "budget"),
                    ],
                    "bytes",
                ),
                Panel(
                    "Dropped to stay within the budget",
                    [rate("hitherto_map_evicted_blocks_total", "instance")],
                    about="Blocks per second. More than none: raise --cache-budget.",
                ),
            ],
        ),
    ],
)

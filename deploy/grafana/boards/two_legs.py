"""Dashboard of requests in two legs (prefill and decode on two replicas): how many, how they end, what moving takes."""

from __future__ import annotations

from ..panels import GREEN, RED, Dashboard, Panel, growth, quantiles, rate, ratio, stat

FAILED = 'sum (rate(hitherto_legs_total{outcome="failed"}[R])) / sum (rate(hitherto_legs_total{leg="prefill"}[R]))'


def mean(metric: str, count: str = "hitherto_transfer_seconds_count") -> str:
    """Return the expression for the mean of `metric` per transfer, by the replica that fetched."""
    return f"sum by (replica) (rate({metric}[R])) / sum by (replica) (rate({count}[R]))"


TWO_LEGS = Dashboard(
    "hitherto-two-legs",
    "Hitherto: Two legs",
    "Prompts computed on one replica and answered by another. Needs replicas with role=prefill or role=decode.",
    [
        (
            "",
            [
                stat(
                    "In two legs",
                    ratio('hitherto_leg_choices_total{choice="apart"}', "hitherto_leg_choices_total"),
                    "percentunit",
                    "Share of the requests that could have had two.",
                    width=6,
                    most=1,
                ),
                stat(
                    "Legs that failed",
                    FAILED,
                    "percentunit",
                    "Of the prompts computed elsewhere: a leg that was refused or given up is no failure, and requests of which nothing was answered went on.",
                    width=6,
                    thresholds=[(None, GREEN), (0.1, RED)],
                ),
                stat(
                    "A transfer",
                    "histogram_quantile(0.5, sum by (le) (rate(hitherto_transfer_seconds_bucket[R])))",
                    "s",
                    "Median of what a first token takes beyond what its decoder takes itself.",
                    width=6,
                ),
                stat(
                    "Taken, of what was predicted",
                    "sum (rate(hitherto_transfer_seconds_sum[R])) / sum (rate(hitherto_predicted_transfer_seconds_total[R]))",
                    "percentunit",
                    "100 %: transfers are priced as they come. Learned for each pair of replicas.",
                    width=6,
                ),
            ],
        ),
        (
            "Requests and legs",
            [
                Panel(
                    "Apart or whole",
                    [rate("hitherto_leg_choices_total", "choice")],
                    "reqps",
                    stacked=True,
                    about="Two legs are taken where they cost less.",
                ),
                Panel("Legs by how they ended", [rate("hitherto_legs_total", "leg, outcome")], "reqps", stacked=True),
                Panel(
                    "Legs that failed, by why",
                    [growth("hitherto_leg_failures_total", "leg, reason")],
                    about="docs/disaggregation.md says what the gateway does then.",
                ),
            ],
        ),
        (
            "Transfers",
            [
                Panel("What they take", quantiles("hitherto_transfer_seconds", "", 0.5, 0.9, 0.99), "s"),
                Panel(
                    "Predicted and taken, mean by decoder",
                    [
                        (mean("hitherto_predicted_transfer_seconds_total"), "predicted {{replica}}"),
                        (mean("hitherto_transfer_seconds_sum"), "taken {{replica}}"),
                    ],
                    "s",
                    about="What is not alike after some hundred transfers is a link or a decoder whose load changes.",
                ),
                Panel("Transfers", [rate("hitherto_transfer_seconds_count", "replica")], "ops", stacked=True),
            ],
        ),
        (
            "What other rules would do",
            [
                Panel(
                    "Two legs by a policy in shadow",
                    [rate("hitherto_shadow_legs_total", "policy, choice")],
                    "reqps",
                    about="With --shadow legs:RULE.",
                ),
            ],
        ),
    ],
)

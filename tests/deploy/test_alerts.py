"""Each alert fires when it should and clears when it is over: in virtual time, with its own durations, on series
that look as gateways' do. With real faults: test_faults.py (`make test-alerts`)."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ALERTS = Path(__file__).parents[2] / "deploy/alerts.yml"
GROUPS = yaml.safe_load(ALERTS.read_text())["groups"]
NAMES = [rule["alert"] for group in GROUPS for rule in group["rules"]]
REPLICA, GATEWAY = 'replica="r1"', 'instance="g1"'


def slo(good: str, bad: str) -> dict[str, str]:
    return {f'hitherto_slo_requests_total{{class="free", outcome="{what}"}}': values for what, values in (("met", good), ("missed", bad))} | {
        'hitherto_admission_total{class="free", decision="refused"}': "0x400"}  # fmt: skip


def state(name: str, values: str) -> dict[str, str]:
    return {f'hitherto_replica_state{{{GATEWAY}, {REPLICA}, state="{name}"}}': values}


def ttft(replica: str, fast: str, every: str) -> dict[str, str]:
    series = f'hitherto_replica_ttft_seconds_bucket{{{GATEWAY}, replica="{replica}"'
    return {f'{series}, le="{le}"}}': values for le, values in (("0.1", fast), ("5", every), ("+Inf", every))} | {
        f'hitherto_replica_models{{replica="{replica}", model="m"}}': "1x100"}  # fmt: skip


# Alert -> series, a value a minute from minute 0 on; the minutes in which it fires, and those in which it does not.
SCENES: dict[str, tuple[dict[str, str], list[int], list[int]]] = {
    "HithertoGatewayDown": ({f'up{{job="hitherto", {GATEWAY}}}': "1x5 0x10 1x20"}, [8, 15], [5, 6, 20]),
    "HithertoWorkerDown": ({f'hitherto_worker_up{{{GATEWAY}, worker="1"}}': "1x5 0x10 1x20"}, [8], [5, 20]),
    "HithertoLoopDelayed": (
        {
            f'hitherto_loop_delay_seconds_bucket{{{GATEWAY}, le="0.1"}}': "0+240x10 2400x20 2400+240x40",
            f'hitherto_loop_delay_seconds_bucket{{{GATEWAY}, le="5"}}': "0+240x80",
            f'hitherto_loop_delay_seconds_bucket{{{GATEWAY}, le="+Inf"}}': "0+240x80",
        },
        [25],
        [9, 50],
    ),
    "HithertoUnusableFile": (
        {f'hitherto_unusable_files{{{GATEWAY}, file="api_keys"}}': "0x5 1x15 0x20"},
        [15],
        [8, 30],
    ),
    "HithertoPolicyFailing": (
        {f'hitherto_policy_failures_total{{{GATEWAY}, policy="mine.py:Mine"}}': "0x5 0+1x3 3x40"},
        [8],
        [4, 20],
    ),
    "HithertoBackgroundFailures": (
        {f'hitherto_background_failures_total{{{GATEWAY}, work="care for replicas"}}': "0x5 0+2x10 20x40"},
        [14],
        [4, 45],
    ),
    "HithertoErrors": (
        {
            f'hitherto_requests_total{{{GATEWAY}, path="chat", status="2xx"}}': "0+60x60",
            f'hitherto_requests_total{{{GATEWAY}, path="chat", status="5xx"}}': "0x10 0+10x15 150x40",
        },
        [20],
        [9, 45],
    ),
    "HithertoRefusing": (
        {
            'hitherto_admission_total{class="free", decision="admitted"}': "0+60x70",
            'hitherto_admission_total{class="free", decision="refused", reason="full"}': "0x10 0+10x20 200x40",
            'hitherto_admission_total{class="paid", decision="admitted"}': "0+60x70",
            'hitherto_admission_total{class="paid", decision="refused", reason="no_replica"}': "0x35 0+10x35",
            'hitherto_admission_total{class="paid", decision="refused", reason="shutting_down"}': "0x35 0+10x35",
            f'hitherto_requests_total{{{GATEWAY}, path="chat", status="2xx"}}': "0+60x70",
            f'hitherto_rejections_total{{{GATEWAY}, reason="engines_full"}}': "0x35 0+10x10 100x25",
        },
        [25, 44],
        [9, 36, 60],
    ),
    "HithertoTenantRefused": (
        {
            f'hitherto_tenant_requests_total{{{GATEWAY}, tenant="acme", status="2xx"}}': "0+60x80",
            f'hitherto_tenant_requests_total{{{GATEWAY}, tenant="acme", status="4xx"}}': "0x10 0+20x25 500x45",
            f'hitherto_tenant_refusals_total{{{GATEWAY}, tenant="acme", limit="requests"}}': "0x10 0+20x25 500x45",
            f'hitherto_tenant_refusals_total{{{GATEWAY}, tenant="acme", limit="day"}}': "0x80",
            f'hitherto_tenant_requests_total{{{GATEWAY}, tenant="bolt", status="2xx"}}': "0+60x80",
            f'hitherto_tenant_refusals_total{{{GATEWAY}, tenant="bolt", limit="requests"}}': "0+1x80",
        },
        [30],
        [9, 55],
    ),
    "HithertoQueueing": ({'hitherto_queued_requests{class="free"}': "0x5 3x20 0x20"}, [18], [4, 30]),
    "HithertoMoreReplicasWanted": ({'hitherto_more_replicas_wanted{model="m"}': "0x5 1x20 0x20"}, [18], [4, 12, 30]),
    "HithertoSloBurnFast": (slo("0+60x60 3600+30x30 4500+60x60", "0x60 0+30x30 900x60"), [86], [60, 75, 100]),
    "HithertoSloBurnSlow": (slo("0+60x60 3600+30x60 5400+60x60", "0x60 0+30x60 1800x60"), [105], [60, 165]),
    "HithertoNoReplica": (
        state("ready", "1x5 0x10 1x14 stale")
        | state("degraded", "0x30 stale")
        | state("failed", "0x5 1x10 0x14 stale")
        | {f"hitherto_uptime_seconds{{{GATEWAY}}}": "0+60x50"},
        [8, 40],
        [4, 20, 28],
    ),
    "HithertoModelAway": (
        {
            f'hitherto_replica_models{{{GATEWAY}, {REPLICA}, model="m"}}': "1x5 stale _x10 1x100",
            f'hitherto_replica_models{{{GATEWAY}, replica="r2", model="m"}}': "1x60 stale",
            f'hitherto_replica_models{{{GATEWAY}, replica="r3", model="other"}}': "1x200",
            f'hitherto_replica_state{{{GATEWAY}, {REPLICA}, state="failed"}}': "0x5 1x11 0x64 1x20 stale",
            f'hitherto_replica_state{{{GATEWAY}, {REPLICA}, state="ready"}}': "1x5 0x11 1x64 0x20 stale",
            f'hitherto_replica_state{{{GATEWAY}, replica="r2", state="ready"}}': "1x60 0x140",
            f'hitherto_replica_state{{{GATEWAY}, replica="r2", state="stopped"}}': "0x60 1x140",
            f'hitherto_replica_state{{{GATEWAY}, replica="r3", state="ready"}}': "1x200",
        },
        [90, 100],
        [4, 10, 70, 82, 115],
    ),
    "HithertoModelGone": (
        {  # the second time a replica that failed is left: HithertoModelAway fires until minute 400
            f'hitherto_model_gone{{{GATEWAY}, model="m"}}': "_x5 1x20 stale _x13 1x410 stale",
            f'hitherto_replica_models{{{GATEWAY}, {REPLICA}, model="m"}}': "_x30 1x9 stale",
            f'hitherto_replica_state{{{GATEWAY}, {REPLICA}, state="failed"}}': "_x30 0x9 1x500",
            f'hitherto_replica_state{{{GATEWAY}, {REPLICA}, state="ready"}}': "_x30 1x9 0x500",
            f'hitherto_replica_state{{{GATEWAY}, replica="r3", state="ready"}}': "1x500",
            f'hitherto_replica_models{{{GATEWAY}, replica="r3", model="other"}}': "1x500",
        },
        [16, 24, 415, 440],
        [4, 14, 27, 45, 60, 200, 395, 405, 460],
    ),
    "HithertoReplicaDown": (state("failed", "0x5 1x10 0x20"), [9], [4, 20]),
    "HithertoReplicaDegraded": (state("degraded", "0x5 1x10 0x20"), [9], [4, 20]),
    "HithertoReplicaStopped": (state("stopped", "0x5 1x20 0x5 1x40 0x20"), [65], [4, 25, 34, 60, 75]),
    "HithertoReplicaRestarts": ({f"hitherto_replica_restarts_total{{{REPLICA}}}": "0x5 1 1 2x40"}, [9], [6, 30]),
    "HithertoReplicaSlow": (
        ttft("r1", "0+60x90", "0+60x90") | ttft("r2", "0+60x20 1200x30 1200+60x40", "0+60x90"),
        [45],
        [19, 75],
    ),
    "HithertoReplicaWritesSlowly": (
        {f'hitherto_replica_models{{replica="r{number}", model="m"}}': "1x100" for number in (1, 2)}
        | {f'hitherto_replica_decode_tokens_total{{{GATEWAY}, replica="r{number}"}}': "0+6000x90" for number in (1, 2)}
        | {
            f'hitherto_replica_decode_seconds_total{{{GATEWAY}, replica="r1"}}': "0+60x90",
            f'hitherto_replica_decode_seconds_total{{{GATEWAY}, replica="r2"}}': "0+60x20 1200+480x30 15600+60x40",
        },
        [45],
        [19, 75],
    ),
    "HithertoLegsFailing": (
        {
            f'hitherto_legs_total{{{GATEWAY}, leg="prefill", outcome="complete"}}': "0+60x70",
            f'hitherto_legs_total{{{GATEWAY}, leg="decode", outcome="failed"}}': "0x10 0+12x20 240x40",
            f'hitherto_legs_total{{{GATEWAY}, leg="prefill", outcome="refused"}}': "0+30x70",
        },
        [28],
        [9, 50],
    ),
    "HithertoEventsNotFollowed": (
        {
            f'hitherto_events_state{{{REPLICA}, state="gap"}}': "_x5 1x10 stale",
            f'hitherto_events_state{{{REPLICA}, state="live"}}': "1x5 stale _x10 1x20",
        },
        [12],
        [4, 20],
    ),
    "HithertoPredictionsWrong": (
        {
            f'hitherto_prediction_error_tokens_total{{{REPLICA}, direction="over"}}': "0x10 0+100x20 2000x40",
            f"hitherto_reported_prompt_tokens_total{{{REPLICA}}}": "0+1000x70",
        },
        [28],
        [9, 50],
    ),
    "HithertoPromptsCountedOtherwise": ({f"hitherto_prompt_mismatches_total{{{REPLICA}}}": "0x5 3x40"}, [7], [4, 30]),
    "HithertoMapFull": ({f"hitherto_map_evicted_blocks_total{{{GATEWAY}}}": "0x5 0+10x25 250x40"}, [25], [4, 50]),
    "HithertoRedisAway": (
        {f"hitherto_map_redis_up{{{GATEWAY}}}": "1x5 0x5 1x20", f"hitherto_ledger_joined{{{GATEWAY}}}": "1x40"},
        [8],
        [4, 15],
    ),
    "HithertoMapBehind": ({f"hitherto_map_follower_lag_seconds{{{GATEWAY}}}": "0.01x5 3x15 0.01x20"}, [15], [4, 25]),
}


def test_every_alert_has_a_scene():
    assert set(SCENES) == set(NAMES)


@pytest.mark.skipif(
    not shutil.which("promtool"), reason="promtool is not installed (Debian: apt-get install prometheus)"
)
@pytest.mark.parametrize("name", NAMES)
def test_each_alert_fires_and_clears(tmp_path, name):
    """With its own rule and those whose alerts it names: all of them on the series of each would take as many times as
    long."""
    series, firing, quiet = SCENES[name]
    known = {rule["alert"]: rule for group in GROUPS for rule in group["rules"]}
    named = [rule for other, rule in known.items() if other == name or f'"{other}"' in known[name]["expr"]]
    fires = f'count(ALERTS{{alertname="{name}", alertstate="firing"}})'
    test = {
        "interval": "1m", "name": name,
        "input_series": [{"series": one, "values": values} for one, values in series.items()],
        "promql_expr_test": [
            *({"expr": fires, "eval_time": f"{minute}m", "exp_samples": [{"labels": "{}", "value": 1}]} for minute in firing),
            *({"expr": fires, "eval_time": f"{minute}m"} for minute in quiet),
        ],
    }  # fmt: skip
    rules, file = tmp_path / "rules.yml", tmp_path / "tests.yml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "one", "rules": named}]}))
    file.write_text(yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [test]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr

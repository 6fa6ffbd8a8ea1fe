"""Fleets that offload: what is predicted is what the engines deliver, from all their tiers."""

from dataclasses import replace

from replicas.simulated.profile import load_profile

from .test_fleet_faults import hit_rate, play, work

SMALL = load_profile("gpu-8b", num_blocks=200)
LOAD = work(600, rate=20.0, think=6.0)


def right(outcome):
    """Share of the requests of which just what was predicted was delivered."""
    done = [record for record in outcome.done if record.error is None]
    # vLLM counts the last block of a prompt that ends with it, if it fetches it; the prediction ends before it.
    return sum(
        0 <= one.cached_tokens - one.predicted_tokens <= 16 * (not one.prompt_tokens % 16) for one in done
    ) / len(done)


def test_predicted_is_delivered_with_evictions_to_host_memory():
    without = play(load=LOAD, profile=SMALL, event_delay=0.0)
    outcome = play(load=LOAD, profile=replace(SMALL, cpu_blocks=6000), event_delay=0.0)
    assert hit_rate(outcome) > hit_rate(without) + 0.08, "much comes from host memory"
    assert right(outcome) >= 0.999

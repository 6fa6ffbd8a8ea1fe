"""The smallest pools for a load: held to the same engines in virtual time, and what each limit does."""

import json

import pytest

from loadgen.cli import main
from loadgen.plan.pools import Engines, Load, decode_pool, prefill_pool, smallest, waited
from loadgen.plan.transfers import last_token_seconds, transfer
from policies.kv_space import KvSpace, read
from replicas.simulated.profile import Profile, StepTime, load_profile
from tests.policies.test_kv_space import LLAMA_8B

# Only prompts take time, only answers take time: the two pools by themselves.
PREFILL = "step: {prefill: 16.5, prefill_token: 0.01518, prefill_token_squared: 4.21e-7}\n"
DECODE = "num_blocks: 32768\nstep: {decode: 5.74, decode_context_token: 0.000108}\n"


def engines(profile: Profile, tokens: int = 7_500, link: float | None = None, streams: float = 60.0) -> Engines:
    return Engines(profile, transfer(KvSpace(read(LLAMA_8B)), tokens, 128, link, profile), link, streams)


def load(rate: float = 10.0, ttft: float | None = None, tpot: float | None = None, share: float = 0.9) -> Load:
    return Load(rate, 7_500, 300, ttft, tpot, share)


def simulated(tmp_path, text: str, replicas: int, output: int, requests: int) -> dict:
    profile, report = tmp_path / "engine.yaml", tmp_path / "report.json"
    profile.write_text(text)
    flags = ("--dataset-name", "random", "--random-input-len", "7500", "--random-output-len", str(output), "--range-ratio", "0",
             "--request-rate", "10", "--num-prompts", str(requests), "--policies", "least_time")  # fmt: skip
    assert (
        main(["simulate", *flags, "--replicas", str(replicas), "--profile", str(profile), "--json", str(report)]) == 0
    )
    (found,) = json.loads(report.read_text())["targets"].values()
    return found


@pytest.mark.parametrize("replicas", [2, 3])
def test_first_tokens_come_as_in_virtual_time(tmp_path, replicas):
    measured = simulated(tmp_path, PREFILL, replicas, 1, 2_000)["ttft_ms"]
    engine = engines(load_profile(tmp_path / "engine.yaml"))
    for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99")):
        found = prefill_pool(load(share=share), engine, replicas, 0.0)
        here = (found.ttft - last_token_seconds(engine.profile, 7_500)) * 1000  # and no decoder computes the last token
        assert here == pytest.approx(measured[name], rel=0.15)


@pytest.mark.parametrize("replicas", [3, 4])
def test_decode_steps_take_as_long_as_in_virtual_time(tmp_path, replicas):
    measured = simulated(tmp_path, DECODE, replicas, 300, 1_000)["tpot_ms"]
    engine = engines(load_profile(tmp_path / "engine.yaml"))
    assert decode_pool(load(share=0.5), engine, replicas).step * 1000 == pytest.approx(measured["p50"], rel=0.1)
    assert decode_pool(load(share=0.9), engine, replicas).step * 1000 == pytest.approx(measured["p90"], rel=0.1)


# As `loadgen calibrate` writes what it has learned of an engine: times of requests and steps, and how far these vary.
LEARNED = """num_blocks: 32768
request: {latency: 1.2, work: 0.8, token: 0.0003, text: 0.4, text_token: 0.0011}
step: {base: 4.1, prefill: 3.8, prefill_token: 0.0152, attention: 1.2e-6, decode_sequence: 0.11, decode_context_token: 0.00011, spread: 0.08}
"""


def apart(tmp_path, prefill: int, decode: int, prompt: int, output: int, rate: int, slo: str, profile: str) -> dict:
    """The same load in virtual time, each request in two legs."""
    report = tmp_path / "report.json"
    pools = f"{{p: {{launch: {prefill}, role: prefill}}, d: {{launch: {decode}, role: decode}}}}"
    flags = ("--pools", pools, "--legs", "always", "--link-gbit-per-s", "100", "--dataset-name", "random", "--random-input-len", str(prompt),
             "--random-output-len", str(output), "--range-ratio", "0", "--request-rate", str(rate), "--num-prompts", "1000", "--slo", slo)  # fmt: skip
    assert main(["simulate", *flags, "--policies", "least_time", "--profile", profile, "--json", str(report)]) == 0
    (found,) = json.loads(report.read_text())["targets"].values()
    return found


@pytest.mark.parametrize(("profile", "prompt", "output", "rate", "slo"), [
    (None, 1_000, 200, 60, "ttft:300ms,tpot:30ms"), ("gpu-8b", 2_000, 500, 20, "ttft:500ms,tpot:30ms"),
])  # fmt: skip
def test_pools_do_as_in_virtual_time_and_one_decode_replica_less_does_not(tmp_path, profile, prompt, output, rate, slo):
    """Without a profile it is that of an engine that was measured."""
    learned, report = tmp_path / "learned.yaml", tmp_path / "plan.json"
    learned.write_text(LEARNED)
    profile = profile or str(learned)
    model = "--layers 32 --kv-heads 8 --head-dim 128 --chunk-size 8192 --link 100Gbit/s".split()
    load = f"--rate {rate} --prompt-tokens {prompt} --output-tokens {output} --slo {slo}".split()
    assert main(["plan", "--pools", *model, *load, "--profile", profile, "--json", str(report)]) == 0
    plan = json.loads(report.read_text())["pools"]
    prefill, decode = plan["prefill"]["pool"], plan["decode"]["pool"]
    if profile == "gpu-8b":
        assert (prefill["replicas"], decode["replicas"]) == (2, 5)
    enough, fewer = (
        apart(tmp_path, prefill["replicas"], number, prompt, output, rate, slo, profile)
        for number in (decode["replicas"], decode["replicas"] - 1)
    )
    assert prefill["ttft"] * 1000 == pytest.approx(enough["ttft_ms"]["p90"], rel=0.15)
    assert decode["step"] * 1000 == pytest.approx(enough["tpot_ms"]["p90"], rel=0.1)
    assert enough["goodput"]["share"] > 0.9 > fewer["goodput"]["share"]


def test_a_decoder_computes_the_last_token_of_what_it_fetches():
    """Many short prompts keep its steps long, although others computed them."""
    plain, costly = (Profile("test", StepTime(prefill=prefill, decode=10.0)) for prefill in (0.0, 16.0))
    rare, often = Load(1.0, 100, 10, None, None, 0.9), Load(1_000.0, 100, 2, None, None, 0.9)
    steps = [[decode_pool(load, engines(profile), 1).step for load in (rare, often)] for profile in (plain, costly)]
    assert steps[0] == [0.010, 0.010] and 0.010 < steps[1][0] < 0.0105
    assert steps[1][1] == pytest.approx(0.026, abs=1e-4)  # in every step


ENGINE = Profile("test", StepTime(prefill_token=0.02, decode=5.0, decode_sequence=0.5), max_num_seqs=64)


@pytest.mark.parametrize(("rate", "streams", "link", "limit"), [
    (10.0, 100.0, None, "TPOT"), (5.0, 4.0, None, "KV cache"), (5.0, 100.0, 1e9, "link"),
])  # fmt: skip
def test_what_limits_a_decode_pool(rate, streams, link, limit):
    engine = engines(ENGINE, link=link, streams=streams)
    tpot = 0.008 if limit == "TPOT" else 1.0
    sizing = smallest(lambda number: decode_pool(load(rate, tpot=tpot), engine, number), 64)
    assert sizing.pool.limits == () and limit in sizing.one_less.limits
    assert sizing.one_less.replicas == sizing.pool.replicas - 1


def test_a_scheduler_that_is_full_is_no_cache_that_is_full():
    flat = Profile("test", StepTime(decode=20.0), max_num_seqs=8)
    sizing = smallest(lambda number: decode_pool(load(), engines(flat, streams=100.0), number), 64)
    assert sizing.one_less.limits == ("max_num_seqs",) and sizing.pool.streams <= 8


def test_prompts_that_come_faster_than_they_are_computed_and_first_tokens_that_come_late():
    engine = engines(ENGINE)  # 0.15 s a prompt
    found = [prefill_pool(load(ttft=0.3), engine, number, 0.01) for number in (1, 2, 3)]
    assert [pool.limits for pool in found] == [("prefill rate",), ("TTFT",), ()]
    assert found[0].ttft is None and found[1].ttft > found[2].ttft > 0.15


def test_a_transfer_is_a_part_of_the_first_token():
    near, far = (prefill_pool(load(1.0), engines(ENGINE, link=link), 2, 0.01) for link in (100e9, 2e9))
    assert far.ttft - near.ttft == pytest.approx(
        engines(ENGINE, link=2e9).transfer.seconds - engines(ENGINE, link=100e9).transfer.seconds
    )


def test_more_replicas_never_do_worse_and_a_looser_limit_never_needs_more():
    engine = engines(ENGINE, link=12.5e9)
    waits = [prefill_pool(load(), engine, number, 0.01).ttft for number in range(2, 12)]
    steps = [decode_pool(load(), engine, number).step for number in range(1, 12)]
    assert waits == sorted(waits, reverse=True) and steps == sorted(steps, reverse=True)
    needed = [
        smallest(lambda number, t=tpot: decode_pool(load(tpot=t), engine, number), 64).pool.replicas
        for tpot in (0.006, 0.008, 0.02)
    ]
    assert needed == sorted(needed, reverse=True) and needed[0] > needed[-1]


def test_nothing_helps_where_the_prompt_alone_takes_too_long():
    sizing = smallest(lambda number: prefill_pool(load(ttft=0.1), engines(ENGINE), number, 0.01), 8)
    assert sizing.pool.replicas == 8 and sizing.pool.limits == ("TTFT",) and sizing.one_less is None


def test_one_server_waits_as_an_m_d_1_queue_does():
    # at half load half of the requests wait, for a mean of service / (2 * (1 - 0.5))
    assert waited(0.5, 1, 1.0, 0.5) == waited(0.01, 1_000, 0.1, 0.99) == 0.0
    assert waited(0.5, 1, 1.0, 0.9) == pytest.approx(1.609, abs=0.001)  # ln(0.5 / 0.1)

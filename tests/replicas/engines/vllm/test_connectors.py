"""What a vLLM profile says of its engines' caches: how they are passed on, and what they must have in common."""

import textwrap

import pytest

from replicas.launch import profile
from replicas.pairing import refusals

NIXL = "kv_transfer_config: {kv_connector: NixlConnector}\n"
SEVERAL = "kv_transfer_config: {kv_connector: MultiConnector, kv_connector_extra_config: {connectors: [%s]}}"


def parse(fields: str):
    return profile.parse("engine: vllm\n" + textwrap.dedent(fields))


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


CONNECTOR = "kv_transfer_config: {kv_connector: %s}"


@pytest.mark.parametrize(
    ("fields", "transfer", "said"),
    [
        (NIXL, "nixl", ""),
        (CONNECTOR % "MooncakeConnector", "mooncake", ""),
        (SEVERAL % "{kv_connector: NixlConnector}, {kv_connector: LMCacheConnectorV1}", "nixl", ""),
        ("", "", "add `kv_transfer_config"),
        (CONNECTOR % "NixlPushConnector", "", "its kv_connector is NixlPushConnector"),
        (CONNECTOR % "LMCacheConnectorV1", "", "use NixlConnector to move caches"),
        (CONNECTOR % "LMCacheMPConnector", "", "MultiConnector (docs/disaggregation.md)"),
        (SEVERAL % "{kv_connector: OffloadingConnector}", "", "its kv_connector is OffloadingConnector"),
        (CONNECTOR % "MultiConnector", "", "MultiConnector without connectors"),
        # vLLM 0.32 replaces the connector without a word
        (NIXL + "kv_offloading_size: 8", "", "its kv_connector is OffloadingConnector"),
    ],
)
def test_connectors_that_the_gateway_cannot_speak_for_are_named(fields, transfer, said):
    found = parse(fields)
    assert found.transfer == transfer and said in found.no_transfer and bool(said) == bool(found.no_transfer)

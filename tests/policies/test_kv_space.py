"""KV arithmetic: sizes of known models, what windows, latents and parallelism change, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.kv_space import RESERVE, BadModel, KvSpace, Layers, Shape, memory_for_kv, read

GIB = 1 << 30
LLAMA_8B = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131_072, "torch_dtype": "bfloat16"}  # fmt: skip
QWEN3_8B = {**LLAMA_8B, "model_type": "qwen3", "num_hidden_layers": 36, "head_dim": 128, "max_position_embeddings": 40_960,
            "sliding_window": None, "use_sliding_window": False}  # fmt: skip
QWEN25_7B = {"model_type": "qwen2", "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
             "max_position_embeddings": 32_768, "sliding_window": 131_072, "use_sliding_window": False, "dtype": "bfloat16"}  # fmt: skip
DEEPSEEK_V3 = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
               "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
               "max_position_embeddings": 163_840, "torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8"}}  # fmt: skip
GEMMA3_27B = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": {
    "model_type": "gemma3_text", "num_hidden_layers": 62, "hidden_size": 5376, "num_attention_heads": 32, "num_key_value_heads": 16,
    "head_dim": 128, "sliding_window": 1024, "max_position_embeddings": 131_072}}  # fmt: skip
GPT_OSS_20B = {"model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
               "head_dim": 64, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
               "max_position_embeddings": 131_072, "dtype": "bfloat16"}  # fmt: skip
QWEN3_NEXT = {**QWEN3_8B, "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4, "head_dim": 256,
              "num_key_value_heads": 2, "linear_key_head_dim": 128}  # fmt: skip


@pytest.mark.parametrize(("config", "expected"), [
    (LLAMA_8B, 131_072), (QWEN3_8B, 147_456), (QWEN25_7B, 57_344), (DEEPSEEK_V3, 70_272), (GEMMA3_27B, 507_904),
    (GPT_OSS_20B, 49_152), (QWEN3_NEXT, 24_576),
])  # fmt: skip
def test_bytes_of_a_token(config, expected):
    assert KvSpace(read(config)).token_bytes == expected


def test_one_kind_of_layers_is_one_group():
    space = KvSpace(read(LLAMA_8B))
    assert space.groups == 1 and space.block_bytes == 16 * 131_072
    assert space.blocks(40 * GIB) == 20_480
    assert space.size(20_480) == space.kept(20_480) == 327_680
    assert space.longest(20_480) == 131_072  # the model's own end
    assert space.longest(1_001) == 16_000  # one block is the engine's
    assert space.longest(1) == 0


def test_fp8_halves_a_token_and_doubles_the_cache():
    plain, half = KvSpace(read(LLAMA_8B)), KvSpace(read(LLAMA_8B), "fp8")
    assert half.token_bytes * 2 == plain.token_bytes and half.blocks(GIB) == 2 * plain.blocks(GIB)


@pytest.mark.parametrize(("dtype", "head"), [
    ("fp8_per_token_head", 128 + 4), ("int8_per_token_head", 128 + 4), ("int4_per_token_head", 64 + 4), ("nvfp4", 64 + 8),
])  # fmt: skip
def test_quantised_caches_have_their_scales(dtype, head):
    assert KvSpace(read(LLAMA_8B), dtype).token_bytes == 32 * 8 * 2 * head
    with pytest.raises(BadModel, match=f"{dtype} is for heads, and this model caches a latent: auto or fp8"):
        KvSpace(read(DEEPSEEK_V3), dtype)


def test_tensor_parallel_shares_heads_until_each_gpu_has_one():
    shares = [KvSpace(read(LLAMA_8B), tensor_parallel=n).token_bytes for n in (1, 2, 8, 16)]
    assert shares == [131_072, 65_536, 16_384, 16_384]
    with pytest.raises(BadModel, match="8 KV heads can't be shared out over 3 GPUs"):
        KvSpace(read(LLAMA_8B), tensor_parallel=3)


def test_a_latent_is_on_every_gpu_unless_the_context_is_split():
    whole = KvSpace(read(DEEPSEEK_V3), tensor_parallel=8, block_size=64)
    split = KvSpace(read(DEEPSEEK_V3), tensor_parallel=8, block_size=64, context_parallel=8)
    assert whole.token_bytes == split.token_bytes == 70_272
    assert split.kept(1_000) == 8 * whole.kept(1_000) == 512_000
    with pytest.raises(BadModel, match="must divide"):
        KvSpace(read(DEEPSEEK_V3), tensor_parallel=8, context_parallel=3)


def test_sparse_attention_keeps_an_index_beside_the_latent():
    shape = read({**DEEPSEEK_V3, "model_type": "deepseek_v32", "index_head_dim": 128})
    assert KvSpace(shape).token_bytes == 61 * (576 * 2 + 132)
    assert KvSpace(shape, "fp8").token_bytes == 61 * (656 + 132)


def test_windows_make_groups_of_equal_size():
    gemma = KvSpace(read(GEMMA3_27B))
    assert gemma.shape.layers == (Layers(10), Layers(52, 1024))
    assert (gemma.group_size, gemma.groups) == (10, 7)  # 52 layers are six groups of at most ten
    assert gemma.needed(131_072) == 8_192 + 6 * (-(-(1023 + 16_384) // 16) + 1)
    assert gemma.needed(100) == 7 + 6 * 8  # short requests need all, and each window may begin within a block
    assert KvSpace(read(GPT_OSS_20B)).groups == 2
    assert any("52 of 62 layers need only the last 1,024" in note for note in gemma.shape.notes)


def test_hardly_more_layers_of_one_kind_are_no_further_group():
    shape = read(
        {**GPT_OSS_20B, "num_hidden_layers": 25, "layer_types": [*GPT_OSS_20B["layer_types"], "full_attention"]}
    )
    assert (KvSpace(shape).group_size, KvSpace(shape).groups) == (13, 2)


@pytest.mark.parametrize(("config", "layers"), [
    ({**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}, (Layers(32, 4096),)),
    ({**LLAMA_8B, "model_type": "gemma2", "sliding_window": 4096}, (Layers(16), Layers(16, 4096))),
    ({**LLAMA_8B, "sliding_window": 4096, "sliding_window_pattern": 4}, (Layers(8), Layers(24, 4096))),
    ({**LLAMA_8B, "sliding_window": 4096, "sliding_window_pattern": "LLLG"}, (Layers(8), Layers(24, 4096))),
    ({**LLAMA_8B, "layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8}, (Layers(32),)),
    ({**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, (Layers(8),)),
    ({**LLAMA_8B, "hybrid_override_pattern": "M-M*-M*E"}, (Layers(2),)),
    ({**LLAMA_8B, "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16}, (Layers(4),)),
    ({**LLAMA_8B, "num_kv_shared_layers": 20}, (Layers(12),)),
    (QWEN3_NEXT, (Layers(12),)),
])  # fmt: skip
def test_what_layers_keep(config, layers):
    shape = read(config)
    assert shape.layers == layers
    assert bool(shape.notes) == (layers != (Layers(32),))  # what is not counted is said


@pytest.mark.parametrize(("change", "dtype"), [
    ({"torch_dtype": "float16"}, "float16"), ({"torch_dtype": "torch.bfloat16"}, "bfloat16"), ({"torch_dtype": "float32"}, "bfloat16"),
    ({"torch_dtype": None}, "bfloat16"), ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "fp8"),
    ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "fp8"), ({"quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
])  # fmt: skip
def test_what_auto_is(change, dtype):
    assert read({**LLAMA_8B, **change}).dtype == dtype


def test_heads_by_other_names():
    falcon = {
        "num_hidden_layers": 32,
        "hidden_size": 4544,
        "num_attention_heads": 71,
        "multi_query": True,
        "max_position_embeddings": 2048,
    }
    assert read(falcon).kv_heads == 1
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
    assert KvSpace(read(gpt2)).token_bytes == 12 * 12 * 2 * 64 * 2


@pytest.mark.parametrize(("change", "why"), [
    ({"num_hidden_layers": None}, "there is no num_hidden_layers"), ({"num_hidden_layers": "32"}, "'32', and must be a whole number"),
    ({"hidden_size": 16}, "32 attention heads do not fit"),
    ({"swa_head_dim": 128}, "its layers differ in size"), ({"mamba_d_state": 16}, "no field says which"), ({"torch_dtype": "int4"}, "dtype is 'int4'"),
    ({"layer_types": ["sliding_attention"] * 32}, "no sliding_window says how long"), ({"layer_types": ["hyena"] * 32}, "'hyena', which is not known"),
    ({"layer_types": ["mamba"] * 32}, "no attention layers"),
])  # fmt: skip
def test_what_is_not_known_is_refused(change, why):
    with pytest.raises(BadModel, match=why):
        read({**LLAMA_8B, **change})


def test_an_unknown_dtype_of_the_cache_is_refused_with_the_known_ones():
    with pytest.raises(BadModel, match="turboquant_k8v4 is not known here; known are auto, float16, bfloat16, fp8"):
        KvSpace(read(LLAMA_8B), "turboquant_k8v4")


def test_memory_left_for_the_cache():
    assert memory_for_kv(80 * GIB, 16 * GIB, 1) == int(0.92 * 80 * GIB) - 16 * GIB - RESERVE
    assert memory_for_kv(80 * GIB, 16 * GIB, 2) - memory_for_kv(80 * GIB, 16 * GIB, 1) == 8 * GIB
    with pytest.raises(BadModel, match="140.0 GiB of weights on each GPU leave no room"):
        memory_for_kv(80 * GIB, 140 * GIB, 1)


shapes = st.builds(Shape, layers=st.one_of(
    st.tuples(st.builds(Layers, st.integers(1, 80))),
    st.tuples(st.builds(Layers, st.integers(1, 80)), st.builds(Layers, st.integers(1, 80), st.integers(1, 8192)))),
    kv_heads=st.sampled_from((1, 2, 4, 8)), head_size=st.sampled_from((64, 128)), latent=st.just(0), index=st.just(0),
    dtype=st.just("bfloat16"), context=st.integers(1, 300_000))  # fmt: skip


@given(shapes, st.integers(1, 100_000), st.sampled_from((16, 32, 64)), st.sampled_from(("auto", "fp8")))
def test_the_longest_request_fits_and_a_longer_one_does_not(shape, blocks, block_size, dtype):
    space = KvSpace(shape, dtype, block_size)
    longest = space.longest(blocks)
    assert longest == 0 or space.needed(longest) <= blocks - 1
    assert longest == shape.context or space.needed(longest + 1) > blocks - 1


@given(shapes, st.integers(1, 1 << 38))
def test_blocks_fill_the_memory_and_groups_hold_all_layers(shape, memory):
    space = KvSpace(shape)
    assert 0 <= memory - space.blocks(memory) * space.block_bytes < space.block_bytes
    assert space.groups * space.block_bytes >= space.token_bytes * 16  # padding, never less
    assert len(shape.layers) > 1 or space.block_bytes == space.token_bytes * 16


fields = st.sampled_from((
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "torch_dtype", "dtype",
    "sliding_window", "sliding_window_pattern", "layer_types", "hybrid_override_pattern", "full_attention_interval", "attn_layer_period",
    "kv_lora_rank", "qk_rope_head_dim", "index_head_dim", "num_kv_shared_layers", "quantization_config", "text_config", "model_type"))  # fmt: skip
values = st.one_of(st.none(), st.booleans(), st.integers(-2, 9), st.floats(), st.text("LGM*x", max_size=4), st.lists(st.sampled_from(
    ("full_attention", "sliding_attention", "mamba", 3)), max_size=4), st.dictionaries(st.just("kv_cache_scheme"), st.text("fp8x", max_size=2)))  # fmt: skip


@given(st.sampled_from((LLAMA_8B, DEEPSEEK_V3, GPT_OSS_20B, QWEN3_NEXT)), st.dictionaries(fields, values, max_size=3))
def test_any_config_is_read_or_refused(config, changes):
    try:
        assert KvSpace(read({**config, **changes})).token_bytes > 0
    except BadModel as error:
        assert str(error)

"""The KV arithmetic of `hitherto plan` is vLLM's: its own log says as many tokens, blocks and as long a context."""

import json
import re

import pytest

from policies.kv_space import KvSpace, read

from .engines import by_vllm, version

MEMORY = 64 << 20
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 3, "torch_dtype": "bfloat16", "hidden_act": "silu",
         "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
         "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True}  # fmt: skip
MODELS = {
    "heads": LLAMA,
    "window": {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 8, "sliding_window": 512,
               "layer_types": ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] + ["full_attention"],
               "query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 1e4},
    "latent": {**LLAMA, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": 4, "kv_lora_rank": 512,
               "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": None, "first_k_dense_replace": 3,
               "n_routed_experts": 2, "n_shared_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 64, "moe_layer_freq": 1,
               "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False,
               "routed_scaling_factor": 1.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def logged(vllm, tmp_path_factory) -> dict[str, dict]:
    """By name, what vLLM says of a cache of MEMORY bytes: one process for all models, each left to fit its context
    itself."""
    cases = {}
    for name, config in MODELS.items():
        if name == "latent" and version() < (0, 29):
            continue  # its CPU build can't load one
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(config))
        cases[name] = {"folder": str(folder), "kv_cache_memory_bytes": MEMORY, "max_model_len": -1}
        cases[name]["max_num_batched_tokens"] = 2048
    lines = by_vllm("kv_sizes.py", asked=json.dumps(cases))
    sizes = [json.loads(line.removeprefix("SIZE ")) for line in lines if line.startswith("SIZE ")]
    tokens = re.findall(r"KV cache size: ([\d,]+) tokens", "\n".join(lines))
    assert len(sizes) == len(tokens) == len(cases)
    return {size["name"]: size | {"tokens": int(said.replace(",", ""))} for size, said in zip(sizes, tokens)}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_tokens_and_context_are_those_of_vllms_log(name, logged):
    if name not in logged:
        pytest.skip("this vLLM has no MLA on a CPU")
    said = logged[name]
    space = KvSpace(read(MODELS[name]), block_size=said["block_size"], in_flight=said["in_flight"])
    blocks = space.blocks(MEMORY)
    assert blocks == said["blocks"]
    assert space.size(blocks, said["context"]) == said["tokens"]
    # the block that vLLM keeps for itself: it would accept that much and never finish it
    forgotten = version() < (0, 29)
    assert space.longest(blocks + forgotten) == said["context"]

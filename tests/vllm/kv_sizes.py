"""Run by vLLM's own Python: load each model given, without weights, and let vLLM log how large its cache is.

Standard input: {"name": {"folder": ..., options of vllm.LLM}}. A line "SIZE {...}" comes after each model's log.
"""

import json
import sys

from vllm import LLM

for name, options in json.load(sys.stdin).items():
    model = LLM(
        options.pop("folder"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        distributed_executor_backend="uni",
        **options,
    )
    config = model.llm_engine.vllm_config  # which forgets its blocks when the engine goes
    said = {"name": name, "blocks": config.cache_config.num_gpu_blocks, "block_size": config.cache_config.block_size,
            "context": config.model_config.max_model_len, "in_flight": config.max_in_flight_tokens}  # fmt: skip
    print("SIZE", json.dumps(said), flush=True)

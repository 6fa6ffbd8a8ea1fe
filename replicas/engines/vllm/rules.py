"""What a vLLM profile must not say at once, each with the reason. Pure: fields in, complaints out.

These are vLLM's own refusals (read in 0.28.0 and 0.32.0), told in a second instead of after the minute or more in
which it loads weights; and what would keep the gateway from its work.
"""

from __future__ import annotations

from collections.abc import Iterator

from replicas.engines.vllm.fields import ATTENTION_BACKENDS, Fields
from replicas.roles import DECODE

Rule = tuple[object, str]  # (true if broken, reason)

MLA_DTYPES = ("fp8_ds_mla", "nvfp4_ds_mla")
PLAIN_DTYPES = ("auto", "float16", "bfloat16")  # all that these backends store:
PLAIN_ONLY = ("FLEX_ATTENTION", "FLASH_ATTN_MLA")
ON_CPU = ("CPU_ATTN", "CPU_MLA", "AMX_MLA")

SHORT = {
    "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size",
    "-dcp": "--decode-context-parallel-size", "-pcp": "--prefill-context-parallel-size", "-q": "--quantization",
    "-ep": "--enable-expert-parallel", "-sc": "--speculative-config", "-cc": "--compilation-config",
}  # fmt: skip
# Flags that would take the engine out of the gateway's sight.
OURS = {
    "--host": "the gateway chooses the address", "--port": "the gateway chooses a free port",
    "--uds": "the gateway talks TCP to its engines", "--root-path": "the gateway expects the API at the root",
    "--model": "it comes from the gateway's --model", "--served-model-name": "it comes from the gateway's --served-model-name",
    "--kv-events-config": "the gateway sets the endpoints; `kv_events: false` turns events off",
    "--no-enable-prompt-tokens-details": "the gateway compares its predictions with them",
    "--api-key": "the gateway's own probes carry no key, and the port is on the loopback address",
    "--ssl-keyfile": "the gateway speaks plain HTTP to its engines", "--ssl-certfile": "the gateway speaks plain HTTP to its engines",
    "--headless": "an engine without an API cannot be routed to", "--grpc": "the gateway speaks HTTP",
    "--config": "its fields belong in the profile, where they are checked",
}  # fmt: skip


def contradictions(profile: Fields) -> list[str]:
    """Every reason against the profile, [] if there is none."""
    rules = (_parallel, _attention, _memory, _scheduling, _legs, _execution, _speculation, _adapters, _events, _on_cpu)
    found = [reason for rule in rules for broken, reason in rule(profile) if broken]
    return found + list(_extra(profile))


def _parallel(p: Fields) -> Iterator[Rule]:
    tp, pcp, dcp, dp = (
        p.tensor_parallel_size,
        p.prefill_context_parallel_size,
        p.decode_context_parallel_size,
        p.data_parallel_size,
    )
    yield (
        p.enable_expert_parallel and tp * pcp * dp == 1,
        "enable_expert_parallel: experts are spread over tensor and data parallel ranks, and both sizes are 1: set "
        "tensor_parallel_size or data_parallel_size",
    )
    yield (
        p.enable_eplb and not p.enable_expert_parallel,
        "enable_eplb balances expert parallelism: set enable_expert_parallel: true",
    )
    yield (
        p.all2all_backend and not (p.enable_expert_parallel and dp > 1),
        "all2all_backend is how data parallel ranks reach each other's experts: it needs enable_expert_parallel and "
        "data_parallel_size above 1",
    )
    if pcp == 1:
        yield (
            tp % dcp,
            f"decode_context_parallel_size {dcp} splits the cache over the tensor parallel ranks: "
            f"tensor_parallel_size {tp} must be a multiple of it",
        )
    else:
        sizes = ", ".join(map(str, sorted({1, pcp, tp * pcp})))
        yield (
            dcp not in (1, pcp, tp * pcp),
            f"decode_context_parallel_size {dcp} with prefill_context_parallel_size {pcp} must be one of {sizes}",
        )
    yield (
        p.distributed_executor_backend == "uni" and p.world > dp,
        f"distributed_executor_backend uni runs one device in one process, and a rank has {p.world // dp}: use mp",
    )


def _attention(p: Fields) -> Iterator[Rule]:
    backend, dtype = p.attention_backend or "", p.kv_cache_dtype or "auto"
    mla = "MLA" in backend
    yield (
        dtype in MLA_DTYPES and not mla,
        f"kv_cache_dtype {dtype} is the layout of MLA models, and attention_backend is {backend or 'not set'}: "
        "set one that reads it, such as FLASHMLA_SPARSE",
    )
    yield (
        backend in PLAIN_ONLY and dtype not in PLAIN_DTYPES,
        f"attention_backend {backend} keeps the cache in the model's own type: leave out kv_cache_dtype {dtype}",
    )
    yield mla and dtype == "fp8_e5m2", f"attention_backend {backend} does not read fp8_e5m2: use kv_cache_dtype fp8"
    unit = ATTENTION_BACKENDS.get(backend, 1)
    yield (
        p.block_size and p.block_size % unit,
        f"attention_backend {backend} takes block sizes that are multiples of {unit}, not {p.block_size}",
    )


def _memory(p: Fields) -> Iterator[Rule]:
    connector = p.kv_transfer_config.kv_connector if p.kv_transfer_config else ""
    yield (
        p.gpu_memory_utilization and p.kv_cache_memory_bytes,
        "gpu_memory_utilization and kv_cache_memory_bytes both size the cache, and vLLM would ignore the first: keep one",
    )
    yield (
        p.kv_offloading_size and connector,
        f"kv_offloading_size sets up a KV connector of its own, and would replace {connector}: keep one of the two",
    )
    yield p.kv_offloading_backend and not p.kv_offloading_size, "kv_offloading_backend needs kv_offloading_size (GiB)"
    expandable = "expandable_segments:True" in p.env.get("PYTORCH_CUDA_ALLOC_CONF", "")
    yield (
        expandable and (p.enable_sleep_mode or connector),
        "env PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True moves memory that sleep mode and KV connectors have "
        "registered: leave it out",
    )


def _scheduling(p: Fields) -> Iterator[Rule]:
    budget, longest = p.max_num_batched_tokens, p.max_model_len if isinstance(p.max_model_len, int) else None
    yield (
        p.enable_chunked_prefill is False and budget and longest and budget < longest,
        f"without chunked prefill a prompt must fit into one step: max_num_batched_tokens {budget} is less than "
        f"max_model_len {longest}",
    )
    yield (
        p.enable_chunked_prefill is False and p.long_prefill_token_threshold,
        "long_prefill_token_threshold cuts prompts into chunks, and enable_chunked_prefill is false: keep one",
    )
    yield (
        budget and p.max_num_seqs and budget < p.max_num_seqs,
        f"max_num_batched_tokens {budget} must be at least max_num_seqs {p.max_num_seqs}: each takes a token a step",
    )
    yield (
        p.long_prefill_token_threshold and longest and p.long_prefill_token_threshold > longest,
        f"long_prefill_token_threshold {p.long_prefill_token_threshold} is above max_model_len {longest}",
    )


def _legs(p: Fields) -> Iterator[Rule]:
    connector = p.kv_transfer_config.kv_connector if p.kv_transfer_config else ""
    yield (
        p.role == DECODE and connector.startswith("Nixl") and p.pipeline_parallel_size > 1,
        f"role {DECODE}: {connector} moves caches to engines of one pipeline stage only, and pipeline_parallel_size is "
        f"{p.pipeline_parallel_size}: use tensor_parallel_size in its place",
    )


def _execution(p: Fields) -> Iterator[Rule]:
    graphs = {
        "cudagraph_capture_sizes": p.cudagraph_capture_sizes,
        "max_cudagraph_capture_size": p.max_cudagraph_capture_size,
        "compilation_config": p.compilation_config,
    }
    given = [name for name, value in graphs.items() if value]
    yield (
        p.enforce_eager and given,
        f"enforce_eager means no CUDA graphs and no compilation, and {', '.join(given)} is about them: keep one",
    )
    sizes, most = p.cudagraph_capture_sizes, p.max_cudagraph_capture_size
    yield (
        sizes and most and max(sizes) != most,
        f"the largest of cudagraph_capture_sizes must be max_cudagraph_capture_size {most}: leave that out",
    )


def _speculation(p: Fields) -> Iterator[Rule]:
    s = p.speculative_config
    if s is None:
        return
    yield not s.method and not s.model, "speculative_config: name a method (ngram, eagle3, mtp ...) or a draft model"
    yield (
        s.method in ("eagle", "eagle3", "medusa", "draft_model", "dflash") and not s.model,
        f"speculative_config: method {s.method} needs a model that drafts",
    )
    yield (
        s.method not in ("suffix", None) and not s.num_speculative_tokens,
        "speculative_config: num_speculative_tokens is missing",
    )
    lookup = s.prompt_lookup_min or s.prompt_lookup_max
    yield (
        lookup and not (s.method or "").startswith("ngram"),
        f"speculative_config: prompt_lookup_* belong to method ngram, not to {s.method or s.model}",
    )
    yield (
        s.prompt_lookup_min and s.prompt_lookup_max and s.prompt_lookup_min > s.prompt_lookup_max,
        "speculative_config: prompt_lookup_min is above prompt_lookup_max",
    )
    yield (
        p.async_scheduling and s.method in ("ngram", "medusa", "suffix", "mlp_speculator"),
        f"async_scheduling: method {s.method} drafts from tokens that the host has not seen yet: leave it out",
    )
    draft = s.draft_tensor_parallel_size
    yield (
        draft and draft not in (1, p.tensor_parallel_size),
        f"speculative_config: draft_tensor_parallel_size must be 1 or tensor_parallel_size {p.tensor_parallel_size}",
    )


def _adapters(p: Fields) -> Iterator[Rule]:
    limits = [name for name in ("max_loras", "max_lora_rank", "max_cpu_loras") if getattr(p, name)]
    yield (
        limits and not (p.enable_lora or p.lora_modules),
        f"{', '.join(limits)} without adapters: give lora_modules, or enable_lora: true for those loaded later",
    )
    yield (
        p.max_cpu_loras and p.max_loras and p.max_cpu_loras < p.max_loras,
        f"max_cpu_loras {p.max_cpu_loras} must be at least max_loras {p.max_loras}",
    )


def _events(p: Fields) -> Iterator[Rule]:
    yield (
        p.kv_events and not p.enable_prefix_caching,
        "kv_events tell what the prefix cache holds, and enable_prefix_caching is false: set kv_events: false too",
    )
    yield (
        "CUDA_VISIBLE_DEVICES" in p.env,
        "env CUDA_VISIBLE_DEVICES would give every replica the same devices: set it for the gateway, which shares them out",
    )


def _on_cpu(p: Fields) -> Iterator[Rule]:
    if p.device != "cpu":
        return
    yield p.enable_sleep_mode, "enable_sleep_mode: vLLM has no sleep mode on CPU"
    offloads = [name for name in ("kv_offloading_size", "cpu_offload_gb") if getattr(p, name)]
    yield offloads, f"{', '.join(offloads)}: on CPU there is no device memory to offload from"
    yield (
        p.cudagraph_capture_sizes or p.max_cudagraph_capture_size,
        "cudagraph_capture_sizes, max_cudagraph_capture_size: a CPU has no CUDA graphs",
    )
    yield (
        p.attention_backend and p.attention_backend not in ON_CPU,
        f"attention_backend {p.attention_backend} runs on GPUs: leave it out on CPU",
    )
    yield (
        p.kv_cache_dtype and not p.kv_cache_dtype.startswith(("auto", "bfloat16", "float16", "fp8")),
        f"kv_cache_dtype {p.kv_cache_dtype} is not stored on CPU: leave it out, or use fp8",
    )
    yield p.enable_eplb, "enable_eplb: vLLM balances experts on GPUs only"
    yield (
        p.prefill_context_parallel_size > 1 or p.decode_context_parallel_size > 1,
        "context parallel sizes are for GPUs: leave them out on CPU",
    )


def _extra(p: Fields) -> Iterator[str]:
    fields = type(p).model_fields
    for word in p.extra_args:
        flag = word.partition("=")[0]
        flag = SHORT.get(flag, flag)
        if not flag.startswith("--"):
            continue
        if flag in OURS:
            yield f"extra_args: {flag}: {OURS[flag]}"
        name = flag[2:].removeprefix("no-").replace("-", "_")
        if name in p.model_fields_set and name in fields:
            yield f"extra_args: {flag} is given by the field {name} already: keep one"

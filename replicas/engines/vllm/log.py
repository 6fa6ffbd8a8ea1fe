"""The format of vLLM's log, and remedies for its error messages (0.28 and 0.32)."""

import re

from replicas.launch.exits import COMMON_REMEDIES, LogGrammar

_REMEDIES = (
    (r"KV cache is needed, which is larger than the available|max seq len .* is larger than|No available memory for the cache blocks",
     "the KV cache is too small for the model's length: lower max_model_len (or `auto`), or give the cache more memory"),
    (r"(CUDA|HIP) out of memory|OutOfMemoryError|less than (desired (GPU|CPU) memory utilization|requested memory)|DefaultCPUAllocator: can't allocate",
     "too little free memory: stop what else uses it, or lower gpu_memory_utilization, kv_cache_memory_bytes or"
     " max_model_len in the profile"),
    (r"Cannot find any model weights|no weights|does not appear to have a file|Repository Not Found"
     r"|not a valid model|is not a (local folder|directory)|model directory|Can't load (the )?config|Incorrect path_or_model_id"
     r"|not the path to a directory|No `?config\.json`?|Invalid repository ID|Repo id must be",
     "a file is missing: check --model and the paths in the profile"),
    (r"\[type=\w+, input_value=", "vLLM refuses a field of the profile, or fields together: correct them or leave them out"),
    (r"Unknown attention backend", "vLLM does not know that value of the profile: correct it or leave it out"),
)  # fmt: skip

# Several processes write one log: `(EngineCore pid=12) ERROR 11-20 12:58:51 [core.py:1234] ...`.
GRAMMAR = LogGrammar(
    writer=re.compile(r"\((\w+)(?: pid=\d+)?\) ?"),
    stamp=re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL) \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?"),
    remedies=_REMEDIES + COMMON_REMEDIES,
    names_above=re.compile(r"^(?!.*Value error, ).*\[type=\w+, input_value="),  # pydantic's, below the field's name
    echo=re.compile(
        r"[Ss]ee (root cause|stack trace)|EngineDeadError|initialization failed|Failed core proc|leaked \w+ objects|warnings\.warn\("
    ),
    died=re.compile(r"EngineDeadError|died unexpectedly"),
    bystanders=("", "APIServer"),
)

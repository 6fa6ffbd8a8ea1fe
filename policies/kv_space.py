"""KV cache arithmetic from a model's config.json: bytes of a token, blocks of a GPU, the longest context.

It counts as vLLM does (0.28 to 0.32; tests/vllm compares it with vLLM's own log). A block is `block_size` tokens in a
group of layers. If all layers keep the same tokens, they form one group. If some layers keep only a sliding window of
the last tokens, the layers with a window and those without are each cut into groups of equally many layers. Then all
blocks have one size, and a request takes blocks for every group from one pool. Pure: no files, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A memory format of numbers: `bits` for each number, and a scale of `scale` bytes for every `group` numbers.

    If `group` is 0, one scale is for all numbers of a head's key or value.
    """

    bits: int
    scale: int = 0
    group: int = 0

    def bytes(self, count: int) -> int:
        return count * self.bits // 8 + self.scale * (count // self.group if self.group else 1)


# The formats as vLLM 0.32 stores them: its Triton backend keeps a 32-bit scale with each head's key and value, and
# nvfp4 has a scale of one byte for every 16 numbers.
KV_DTYPES = {
    **dict.fromkeys(("float16", "bfloat16"), NumberFormat(16)),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2"), NumberFormat(8)),
    **dict.fromkeys(("fp8_per_token_head", "int8_per_token_head"), NumberFormat(8, 4)),
    "int4_per_token_head": NumberFormat(4, 4),
    "nvfp4": NumberFormat(4, 1, 16),
}
_WEIGHT_DTYPES = {"half": "float16", "float16": "float16"} | dict.fromkeys(("bfloat16", "float32", "float"), "bfloat16")
# The bytes that vLLM takes for an fp8 latent of 512 + 64 numbers for sparse attention (`fp8_ds_mla`), scales included.
_PACKED_LATENT = 656
# The bytes of a GPU for activations, CUDA and its graphs: an estimate until vLLM's log gives the value (docs/plan.md).
RESERVE = 2 << 30
UTILIZATION = 0.92  # vLLM's default of --gpu-memory-utilization

_LATENT_NOT_CACHED = ("minicpm3",)  # model types with kv_lora_rank of which vLLM caches the heads, not the latent
# The fields of a config.json by which layers may differ in size.
_UNEQUAL = ("global_head_dim", "swa_head_dim", "swa_num_key_value_heads", "compress_ratios", "block_configs", "per_layer_config")  # fmt: skip
_ASK_ENGINE = "start the engine once and give the tokens that its log says (--kv-tokens)"
# By model type: every n-th layer has full attention, as a default of the model's class.
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
_FULL = ("full_attention", "attention", "chunked_attention")  # vLLM keeps all tokens of chunked attention by default


class BadModel(ValueError):
    """A model configuration that this arithmetic cannot handle; the message says why."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A number of layers that keep the same tokens: all tokens (`window` is None), or the last `window` tokens."""

    count: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """The properties of a model that determine the size of its KV cache."""

    layers: tuple[Layers, ...]
    kv_heads: int
    head_size: int
    latent: int  # with MLA, where one latent vector stands for all heads: its numbers per token and layer; otherwise 0
    index: int  # with sparse attention: the bytes of its index per token and layer; otherwise 0
    dtype: str  # the number format that --kv-cache-dtype auto stands for
    context: int  # the model's longest context in tokens, max_position_embeddings
    notes: tuple[str, ...] = ()  # for the user: assumptions, and layers that are not counted

    def bytes(self, dtype: str, tensor_parallel: int) -> int:
        """Return the bytes of one token's KV cache in one layer on one GPU, in the number format `dtype`.

        Attention heads are divided among the `tensor_parallel` GPUs, with at least one on each. A latent vector (MLA)
        is stored whole on each GPU.
        """
        if not self.latent:
            return max(1, self.kv_heads // tensor_parallel) * 2 * KV_DTYPES[dtype].bytes(self.head_size)
        if self.index and dtype.startswith("fp8"):
            return _PACKED_LATENT + self.index
        return KV_DTYPES[dtype].bytes(self.latent) + self.index


@dataclass(frozen=True, slots=True)
class KvSpace:
    """The KV cache of one replica of `tensor_parallel` GPUs, each of which stores its part of every token.

    `context_parallel`: how many of these GPUs divide the tokens among themselves instead
    (--decode-context-parallel-size).
    `in_flight`: how many tokens can be scheduled and not finished at one time: two batches in vLLM. Layers with a
    sliding window need room for these as well.
    """

    shape: Shape
    dtype: str = "auto"
    block_size: int = 16
    tensor_parallel: int = 1
    context_parallel: int = 1
    in_flight: int = 2 * 8192

    def __post_init__(self) -> None:
        shape, dtype, gpus, heads = self.shape, self.dtype, self.tensor_parallel, self.shape.kv_heads
        if dtype != "auto" and dtype not in KV_DTYPES:
            raise BadModel(
                f"the size of --kv-cache-dtype {dtype} is not known here; known are auto, {', '.join(KV_DTYPES)}"
            )
        if shape.latent and dtype != "auto" and KV_DTYPES[dtype].scale:
            raise BadModel(f"--kv-cache-dtype {dtype} is for heads, and this model caches a latent: auto or fp8")
        if not shape.latent and heads % gpus and gpus % heads:
            raise BadModel(f"{heads} KV heads can't be shared out over {gpus} GPUs: one number must divide the other")
        if gpus % self.context_parallel:
            raise BadModel(f"context parallel ({self.context_parallel}) must divide tensor parallel ({gpus})")
        if self.context_parallel > 1 and any(layers.window for layers in shape.layers):
            raise BadModel("layers with a window can't be split along the context: leave context parallel at 1")

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's KV cache on one GPU if every layer keeps the token."""
        return sum(layers.count for layers in self.shape.layers) * self._layer_bytes

    @property
    def block_bytes(self) -> int:
        """The bytes of one block on one GPU: `block_size` tokens in one group of layers."""
        return self.group_size * self._layer_bytes * self.block_size

    @property
    def group_size(self) -> int:
        """The number of layers in each group (layers that take blocks together).

        It is the number of layers of the rarer kind, or of the commoner kind if that has less than 1.5 times as many.
        """
        counts = [layers.count for layers in self.shape.layers]
        return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)

    @property
    def groups(self) -> int:
        """The number of groups of layers, which is also the number of blocks for `block_size` tokens."""
        return sum(self._groups(layers) for layers in self.shape.layers)

    def blocks(self, memory: int) -> int:
        """Return how many blocks fit into `memory` bytes of each GPU: vLLM's `num_gpu_blocks`; it reserves one."""
        return memory // self.block_bytes

    def needed(self, tokens: int) -> int:
        """Return how many blocks one request of `tokens` tokens takes while it is computed."""
        return sum(self._groups(layers) * self._blocks_of(layers, tokens) for layers in self.shape.layers)

    def size(self, blocks: int, context: int | None = None) -> int:
        """Return the KV cache size in tokens that vLLM logs for this many blocks.

        The size is how many requests of `context` tokens each fit at once, times `context`. None means the model's
        longest context.
        """
        context = context or self.shape.context
        return int(blocks / self.needed(context) * context)

    def kept(self, blocks: int) -> int:
        """Return how many tokens a prefix cache of this many blocks can hold if every layer keeps all of them."""
        return blocks // self.groups * self.block_size * self.context_parallel

    def longest(self, blocks: int, context: int | None = None) -> int:
        """Return the length in tokens of the longest request that fits into the blocks alone; 0 if none fits.

        The result is at most `context`; None means the model's longest context.
        """
        low, high = 0, context or self.shape.context
        while low < high:
            middle = (low + high + 1) // 2
            if self.needed(middle) <= blocks - 1:
                low = middle
            else:
                high = middle - 1
        return low

    def moved(self, tokens: int) -> int:
        """Return the bytes of KV cache that one GPU sends to another engine for a prompt of `tokens` tokens.

        They are counted as vLLM's NIXL connector does: in whole blocks. Layers with a sliding window send only the
        blocks that the prompt's last window may touch.
        """
        blocks = sum(layers.count * self.moved_blocks(layers, tokens) for layers in self.shape.layers)
        return blocks * self.layer_block_bytes

    def moved_blocks(self, layers: Layers, tokens: int) -> int:
        """Return how many blocks one layer of this kind sends to another engine for a prompt of `tokens` tokens."""
        blocks = -(-tokens // self.block_size)
        return min(blocks, -(-layers.window // self.block_size) + 1) if layers.window else blocks

    @property
    def layer_block_bytes(self) -> int:
        """The bytes of one block in one layer on one GPU."""
        return self._layer_bytes * self.block_size

    @property
    def _layer_bytes(self) -> int:
        return self.shape.bytes(self.shape.dtype if self.dtype == "auto" else self.dtype, self.tensor_parallel)

    def _groups(self, layers: Layers) -> int:
        return -(-layers.count // self.group_size)

    def _blocks_of(self, layers: Layers, tokens: int) -> int:
        if layers.window is None:
            return -(-tokens // (self.block_size * self.context_parallel))
        # One more block, as a window may begin within a block.
        return -(-min(layers.window - 1 + self.in_flight, tokens) // self.block_size) + 1


def memory_for_kv(gpu: int, weights: int, tensor_parallel: int, utilization: float = UTILIZATION) -> int:
    """Return how many bytes a GPU with `gpu` bytes has left for the KV cache; raise BadModel if none are left.

    `weights`: the bytes of the whole model, divided among `tensor_parallel` GPUs; `utilization`: the share of the GPU's
        memory that the engine may use.
    """
    left = int(gpu * utilization) - weights // tensor_parallel - RESERVE
    if left <= 0:
        each, most = weights / tensor_parallel / 2**30, f"{100 * utilization:.3g}% of {gpu / 2**30:.0f} GiB"
        raise BadModel(
            f"{each:.1f} GiB of weights on each GPU leave no room for a cache in {most}: larger GPUs, more of them "
            "(--tensor-parallel-size) or quantised weights would"
        )
    return left


def read(config: Mapping[str, object]) -> Shape:
    """Return the properties, from a config.json, that determine the size of the model's KV cache.

    Raises BadModel if a field is missing or has an unknown value.
    """
    inner = (config.get(key) for key in ("text_config", "llm_config", "language_config"))
    text: Mapping[str, object] = next((one for one in inner if isinstance(one, dict)), config)
    for key in _UNEQUAL:
        if text.get(key):
            raise BadModel(f"its layers differ in size ({key}), and this arithmetic takes them as equal: {_ASK_ENGINE}")
    heads = _number(text, "num_attention_heads", "n_head")
    latent = bool(text.get("kv_lora_rank")) and text.get("model_type") not in _LATENT_NOT_CACHED
    index = _number(text, "index_head_dim", default=0)
    layers, notes = _layers(text)
    dtype, said = _dtype(config, text)
    kv_heads = 1 if latent else _kv_heads(text, heads)
    size = _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim") if latent else 0
    context = _number(text, "max_position_embeddings", "n_positions", "seq_length")
    notes = (*notes, *said)
    return Shape(layers, kv_heads, _head_size(text, heads), size, index + index // 128 * 4, dtype, context, notes)


def prompt_bytes(config: Mapping[str, object], block_size: int) -> Callable[[int], int] | None:
    """Return a function that computes the bytes of KV cache sent to another engine from a prompt's number of tokens.

    Returns None if the model's config.json is not understood. The bytes are the sum over the sender's GPUs: the keys
    and values of every attention head once or, for latent attention (MLA), each token's latent vector once per layer.
    Numbers have the format that the checkpoint names.
    """
    try:
        return KvSpace(read(config), block_size=block_size).moved
    except ValueError:
        return None


def _number(config: Mapping[str, object], *names: str, default: int | None = None) -> int:
    """Return the value of the first of the fields `names` that is set, or `default` if none is.

    Raises BadModel if the value is not a whole number above 0, or if no field is set and there is no default.
    """
    for name in names:
        if (value := config.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise BadModel(f"{name} is {value!r}, and must be a whole number above 0")
            return value
    if default is None:
        raise BadModel(f"there is no {names[0]}: is this a language model's config.json?")
    return default


def _kv_heads(config: Mapping[str, object], heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1  # as in Falcon-7B and StarCoder
    names = "n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups"
    return _number(config, *names, default=heads)


def _head_size(config: Mapping[str, object], heads: int) -> int:
    if config.get("head_dim"):  # some models set 0 where the field does not apply
        return _number(config, "head_dim")
    if (width := _number(config, "hidden_size", "n_embd")) < heads:
        raise BadModel(f"{heads} attention heads do not fit in a hidden size of {width}")
    return width // heads


def _dtype(config: Mapping[str, object], text: Mapping[str, object]) -> tuple[str, list[str]]:
    """Return the number format in which an engine stores this model's KV cache by default, and notes for the user.

    It is the format that the checkpoint names for its quantised cache or, if it names none, that of its weights.
    """
    told = (said.get("quantization_config") for said in (config, text))
    quantized: Mapping[str, object] = next((one for one in told if isinstance(one, dict)), {})
    scheme, algorithm = quantized.get("kv_cache_scheme"), quantized.get("kv_cache_quant_algo")
    if (isinstance(scheme, dict) and scheme.get("num_bits") == 8) or str(algorithm).lower() == "fp8":
        return "fp8", ["the checkpoint says that its cache is fp8"]
    for said in (config, text):
        if name := said.get("dtype") or said.get("torch_dtype"):
            if (name := str(name).removeprefix("torch.")) not in _WEIGHT_DTYPES:
                raise BadModel(f"dtype is {name!r}; known are {', '.join(_WEIGHT_DTYPES)}")
            return _WEIGHT_DTYPES[name], []
    return "bfloat16", ["no dtype is said: taken as bfloat16"]


def _layers(config: Mapping[str, object]) -> tuple[tuple[Layers, ...], tuple[str, ...]]:
    """Return the layers that keep a KV cache of tokens, in one or two kinds, and notes for the user on other layers.

    Layers that use another layer's cache, or keep a state of fixed size, are not counted.
    """
    kinds = _kinds(config, _number(config, "num_hidden_layers", "n_layer", "num_layers"))
    shared = _number(config, "num_kv_shared_layers", default=0) if config.get("num_kv_shared_layers") else 0
    kinds = kinds[: len(kinds) - shared]
    windows = [layer for layer in kinds if type(layer) is int]
    full, states, all_ = kinds.count("full"), kinds.count("state"), len(kinds)
    if not full and not windows:
        raise BadModel("it has no attention layers, so no KV cache that grows with the context")
    found, notes = [Layers(full)] if full else [], []
    if windows:
        found.append(Layers(len(windows), windows[0]))
        notes.append(f"{len(windows)} of {all_} layers need only the last {windows[0]:,} tokens of a running request")
    if states:
        notes.append(f"{states} of {all_} layers keep a state of fixed size for each request, which is not counted")
    if shared:
        notes.append(f"the last {shared} layers use the cache of others")
    return tuple(found), tuple(notes)


def _kinds(config: Mapping[str, object], count: int) -> list[str | int]:
    """Return the kind of each of `count` layers; raise BadModel if it is unknown.

    The kind is "full" for full attention, "state" for a state of fixed size, or the layer's window in tokens.
    """
    sliding = config.get("sliding_window") and config.get("use_sliding_window", True)
    window = _number(config, "sliding_window") if sliding else None
    named = config.get("layer_types") or config.get("layers_block_type")
    if isinstance(named, list):
        return [_kind(name, window) for name in named[:count]]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H: * attention, M Mamba, - and E have no cache
        return ["full" if letter == "*" else "state" for letter in str(pattern) if letter in "*M"]
    if config.get("full_attention_interval"):  # Qwen3-Next
        every = _number(config, "full_attention_interval")
        return ["full" if (layer + 1) % every == 0 else "state" for layer in range(count)]
    if config.get("attn_layer_period"):  # Jamba
        every = _number(config, "attn_layer_period")
        return ["full" if layer % every == config.get("attn_layer_offset", 0) else "state" for layer in range(count)]
    if any(key.startswith(("mamba", "ssm_", "linear_", "conv_")) for key in config):
        raise BadModel(f"some of its layers keep a state instead of tokens, and no field says which: {_ASK_ENGINE}")
    if window is None:
        return ["full"] * count
    own = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    pattern = own or _PATTERNS.get(str(config.get("model_type")))
    if isinstance(pattern, str):  # EXAONE 4: LLLG, local and global
        return [window if pattern[layer % len(pattern)] == "L" else "full" for layer in range(count)]
    if pattern is not None and (type(pattern) is not int or pattern < 1):
        raise BadModel(f"sliding_window_pattern is {pattern!r}: give a whole number above 0, or letters like LLLG")
    return [window if pattern is None or (layer + 1) % pattern else "full" for layer in range(count)]


def _kind(name: object, window: int | None) -> str | int:
    if name in _FULL:
        return "full"
    if name in ("sliding_attention", "sliding_window_attention"):
        if window is None:
            raise BadModel(f"layer_types names {name}, and no sliding_window says how long it is")
        return window
    if str(name).startswith(("linear", "mamba", "conv", "recurrent", "gated_delta")):
        return "state"
    raise BadModel(f"layer_types names {name!r}, which is not known here: {_ASK_ENGINE}")

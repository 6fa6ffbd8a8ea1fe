"""The properties of a simulated engine: its cache's size, its scheduler's limits, and the duration of its steps."""

import math
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import ClassVar, Literal

from replicas import yaml_text

PROFILES = Path(__file__).parent / "profiles"
# The least value of each of these fields.
_LEAST = dict.fromkeys("block_size max_num_seqs max_num_batched_tokens max_model_len chunk_blocks".split(), 1)
_LEAST |= {"num_blocks": 2, "cpu_blocks": 0, "context_parallel": 1}


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one engine step, as a formula fitted to measurements. Coefficients are in milliseconds.

    Any step takes `base`. If the step computes prompt tokens (prefill), it takes in addition
        prefill + prefill_token * t + prefill_token_squared * t^2 + attention * sum(t_i * (c_i + t_i / 2))
    for t new prompt tokens in all, of which t_i belong to request i, which has c_i tokens computed already.
    If the step decodes, it takes in addition
        max(decode_least, decode + decode_sequence * n + decode_context_token * k
                          + decode_usage * u + decode_usage_squared * u^2)
    for n sequences with k tokens of context in all. u is k divided by the cache's capacity in tokens, at most 1: shared
    blocks are read once for each sequence, and prompts that are still being computed are not read. `spread` is not a
    time but a share: the standard deviation of the logarithm of a step's duration around this formula.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    base: float = 0.0
    prefill: float = 0.0
    prefill_token: float = 0.0
    prefill_token_squared: float = 0.0
    attention: float = 0.0
    decode: float = 0.0
    decode_least: float = 0.0
    decode_sequence: float = 0.0
    decode_context_token: float = 0.0
    decode_usage: float = 0.0
    decode_usage_squared: float = 0.0
    spread: float = 0.0

    def seconds(self, tokens: int, pairs: float, sequences: int, context: int, usage: float) -> float:
        """Return the seconds that a step takes by the formula of this class.

        `tokens`: t. `pairs`: the sum of t_i * (c_i + t_i / 2). `sequences`: n. `context`: k. `usage`: u.
        """
        ms = self.base
        if tokens:
            by_tokens = tokens * (self.prefill_token + self.prefill_token_squared * tokens)
            ms += self.prefill + by_tokens + self.attention * pairs
        if sequences:
            by_context = self.decode + self.decode_sequence * sequences + self.decode_context_token * context
            ms += max(self.decode_least, by_context + usage * (self.decode_usage + self.decode_usage_squared * usage))
        return ms * 1e-3


@dataclass(frozen=True, slots=True)
class RequestTime:
    """The time that a request takes outside engine steps, in milliseconds: HTTP, tokenizing, the way to the scheduler.

    The API server works on one request after the other. For a prompt of n tokens it works for `work + token * n`. If
    the prompt is text, it works for `text + text_token * n` more. If the engine computes at that time, text takes
    another `busy_token * n`, since on a CPU both need the same cores. `latency` delays only the request itself. All
    this time is spent before the request's first step.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    latency: float = 0.0
    work: float = 0.0
    token: float = 0.0
    text: float = 0.0
    text_token: float = 0.0
    busy_token: float = 0.0

    def work_seconds(self, tokens: int, text: bool, busy: bool) -> float:
        as_text = self.text + tokens * (self.text_token + self.busy_token * busy) if text else 0.0
        return 1e-3 * (self.work + tokens * self.token + as_text)


class StepDurations:
    """The durations of an engine's steps, in seconds, with random deviations as the profile's `spread` says.

    A step's deviation is drawn once, so its duration may be read several times before the step is taken. `differ`:
    whether steps take different times even while the same requests decode.
    """

    __slots__ = ("differ", "_time", "_speedup", "_in_use", "_chance", "_drawn")

    def __init__(self, profile: "Profile"):
        time = self._time = profile.step
        self._speedup = profile.speedup
        self._in_use = profile.in_use
        self._chance = Random(0)
        self._drawn: deque[float] = deque()  # drawn for steps that were read and not taken yet

        self.differ = bool(time.spread or time.decode_context_token or time.decode_usage or time.decode_usage_squared)

    def seconds(self, tokens: int, pairs: float, sequences: int, context: int, step: int = 0) -> float:
        """Return the duration of a later step, in seconds; `step`: how many steps are taken before it.

        The other arguments are explained at `StepTime.seconds`.
        """
        seconds = self._time.seconds(tokens, pairs, sequences, context, self._in_use(context)) / self._speedup
        if spread := self._time.spread:
            drawn = self._drawn
            while len(drawn) <= step:
                drawn.append(math.exp(self._chance.gauss(0, spread)))
            seconds *= drawn[step]
        return seconds

    def taken(self, steps: int) -> None:
        """Move on by `steps` steps, which have been taken: `seconds` counts from the step after them."""
        for _ in range(min(steps, len(self._drawn))):
            self._drawn.popleft()


class FrontEnd:
    """The engine's HTTP front end, which delays requests on their way to the scheduler.

    It reads no clock: the caller says when a request arrived.
    """

    __slots__ = ("_time", "_speedup", "_free")

    def __init__(self, profile: "Profile"):
        self._time, self._speedup, self._free = profile.request, profile.speedup, 0.0

    def reaches_engine(self, arrived: float, tokens: int, text: bool = False, busy: bool = False) -> float:
        """Return the time at which a request reaches the scheduler, by the clock of `arrived` (seconds).

        `tokens`: of the prompt. `text`: the prompt came as text, not as ids. `busy`: the engine has requests running.
        The result is `arrived` if the profile has no times for requests.
        """
        self._free = max(arrived, self._free) + self._time.work_seconds(tokens, text, busy) / self._speedup
        return self._free + self._time.latency * 1e-3 / self._speedup


@dataclass(frozen=True, slots=True)
class Profile:
    """The properties of one kind of simulated engine. Fields that vLLM has as flags have their names and meanings.

    `speedup` divides every duration.
    """

    __pydantic_config__: ClassVar[dict] = {"extra": "forbid"}

    name: str
    step: StepTime
    request: RequestTime = RequestTime()
    num_blocks: int = 16_384
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    max_model_len: int = 131_072
    # Further cache groups besides full attention: the sliding window of each in tokens, 0 for a group of Mamba layers.
    # With "replay" the groups keep only blocks from which a later prompt can resume (vLLM 0.32), with "all" all (0.28).
    windows: tuple[int, ...] = ()
    retention: Literal["replay", "all"] = "replay"
    context_parallel: int = 1  # GPUs that share each block's tokens; /metrics reports one's share
    drops_block: bool = False  # recomputes the last block of a cache hit, as vLLM does with EAGLE and MTP
    # Host memory behind the cache: its size in blocks (0: none), blocks per chunk, and the speed of a fetch: 128 KiB a
    # token (Llama 3 8B in 16 bits) over PCIe 4.0 x16.
    cpu_blocks: int = 0
    chunk_blocks: int = 1
    lmcache: bool = False  # host memory is LMCache's server, with chunks of 256 tokens by default
    kv_bytes_per_token: float = 131_072
    cpu_gb_per_s: float = 25.0
    speedup: float = 1.0

    def __post_init__(self):
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)!r}")
        for name in ("speedup", "kv_bytes_per_token", "cpu_gb_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)!r}")
        if not all(window > 1 or window == 0 for window in self.windows):
            raise ValueError(f"windows must be of 2 tokens or more, or 0, not {self.windows!r}")
        if self.block_size % self.context_parallel:
            raise ValueError(f"context_parallel must divide block_size, {self.block_size}")
        if self.drops_block and self.windows:
            raise ValueError("drops_block cannot be had with windows")
        if self.windows and self.cpu_blocks:
            raise ValueError("windows cannot be had with cpu_blocks")
        if self.lmcache and not self.cpu_blocks:
            raise ValueError("lmcache needs cpu_blocks")
        if self.max_num_batched_tokens < self.max_num_seqs:
            what = f"max_num_batched_tokens ({self.max_num_batched_tokens})"
            raise ValueError(f"{what} must not be below max_num_seqs ({self.max_num_seqs}), as in vLLM")

    @property
    def times_by_share(self) -> bool:
        """Whether decode steps take longer, the larger the share of the cache in use.

        Then the same requests decode faster in a larger cache.
        """
        return bool(self.step.decode_usage or self.step.decode_usage_squared)

    def in_use(self, context: int) -> float:
        """Return the share of the cache, 0 to 1, that a decode step reads: u in the formula of `StepTime`.

        `context`: tokens of all decoding sequences.
        """
        return min(1.0, context / (self.num_blocks * self.block_size))

    @property
    def context_length(self) -> int:
        """The most tokens that a prompt and its output may have together.

        It is `max_model_len`, or the cache's capacity if that is less.
        """
        return min(self.max_model_len, (self.num_blocks - 1) // (1 + len(self.windows)) * self.block_size)


def load_profile(name_or_path: str | Path, **changes) -> Profile:
    """Return the bundled profile with this name, or the one in a YAML file; `changes` replace fields (None: keep).

    Raises ValueError, which says what is wrong in the file and where.
    """
    path = PROFILES / f"{name_or_path}.yaml"
    if not path.is_file():
        path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in PROFILES.glob("*.yaml")))
        raise ValueError(f"no profile {str(name_or_path)!r}: give the path of a YAML file or one of {known}")
    try:
        given = yaml_text.load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ValueError(f"{path}: it is not UTF-8 text") from None
    except yaml_text.NotYaml as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path}: a profile is a mapping with a mapping `step` in it")
    from pydantic import TypeAdapter, ValidationError  # here, since simulations with a profile at hand need no pydantic

    from replicas.tables import explain

    try:
        profile = TypeAdapter(Profile).validate_python({"name": path.stem, **given})
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error)}") from None
    return replace(profile, **{name: value for name, value in changes.items() if value is not None})

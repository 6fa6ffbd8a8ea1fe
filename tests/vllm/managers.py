"""vLLM's own cache managers, asked what they find of prompts and what they publish. Run by vLLM's Python, which has
nothing of this project: requests on stdin, what came of them on stdout, both as JSON.

Of 0.33 there is no build for CPUs: put its Python before 0.32's (PYTHONPATH), whose environment has all else.
"""

import base64
import inspect
import json
import random
import sys

CHUNK = 256  # tokens of a prompt that are computed in one step
VOCABULARY = 500


def texts(seed: int, length: int) -> list[list[int]]:
    """Texts that share beginnings of all lengths, at the edges of blocks and between them."""
    dice = random.Random(seed)
    found = [dice.choices(range(VOCABULARY), k=length) for _ in range(3)]
    for _ in range(9):
        at = dice.choice((64, 80, 128, 150, 160, 161, 256, 300, 512, 544))
        found.append(dice.choice(found)[:at] + dice.choices(range(VOCABULARY), k=length - at))
    return found


def asks(seed: int, count: int, longest: int) -> list[tuple[int, int, int]]:
    """Prompts as (number of a text, tokens of it, tokens that are answered); every third ends with a block."""
    dice = random.Random(seed)
    lengths = [dice.choice((dice.randrange(20, longest), 16 * dice.randrange(2, longest // 16))) for _ in range(count)]
    return [(dice.randrange(12), length, dice.randrange(1, 60)) for length in lengths]


class Managed:
    """One engine's cache, as its scheduler has it. `kind`: full, windows, mamba; `size`: of one GPU's blocks;
    `drops`: it speculates; `ahead`: tokens behind a block that name it then, from 0.33 on."""

    def __init__(self, kind: str, size: int, dcp: int, drops: bool, blocks: int, ahead: int = 0):
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1 import kv_cache_interface as interface
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.request import Request

        self.ahead = ahead if drops else 0
        self.drops, self.unit, self.whole = drops, size, size * dcp
        if kind != "mamba":
            self.unit = self.whole
        of_heads = {"block_size": size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        specs = [interface.FullAttentionSpec(**of_heads)]
        if kind == "windows":
            specs += [interface.SlidingWindowSpec(**of_heads, sliding_window=window) for window in (80, 17, 80)]
        if kind == "mamba":
            specs += [
                interface.MambaSpec(block_size=size, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode="align")
            ]
        groups = [interface.KVCacheGroupSpec([f"layer {number}"], spec) for number, spec in enumerate(specs)]
        more = self.of_version(kv_cache_utils)
        if not getattr(Managed, "seeded", False):
            kv_cache_utils.init_none_hash(sha256)
            Managed.seeded = True
        self.hasher = kv_cache_utils.get_request_block_hasher(self.unit, sha256, **more)
        self.manager = KVCacheManager(
            interface.KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups), max_model_len=4096,
            scheduler_block_size=self.whole, hash_block_size=self.unit, enable_caching=True, use_eagle=drops and not more,
            enable_kv_cache_events=True, dcp_world_size=dcp, **more,
        )  # fmt: skip
        answer = SamplingParams(max_tokens=64)
        self.request = lambda name, ids: Request(name, ids, answer, None, block_hasher=self.hasher)
        self.number = 0

    def of_version(self, kv_cache_utils) -> dict:
        """What the hasher takes besides, where blocks are named by the token behind them."""
        known = "num_hash_lookahead_tokens" in inspect.signature(kv_cache_utils.get_request_block_hasher).parameters
        return {"num_hash_lookahead_tokens": self.ahead} if known and self.ahead else {}

    def serve(self, ids: list[int], prompt: int) -> tuple[int, list]:
        """A prompt, and its answer behind it: tokens found, and what was published."""
        manager, self.number = self.manager, self.number + 1
        request = self.request(str(self.number), ids[:prompt])
        found, hit, *junction = manager.get_computed_blocks(request)
        if junction and isinstance(junction[0], int):
            request.shared_prefix_boundary = junction[0]
        at, tail = hit, (prompt - 1) // self.unit * self.unit
        while at < len(ids):
            if at < prompt:
                end = min(prompt, at + CHUNK)
                if end < prompt:
                    end -= end % self.whole if end - end % self.whole > at else 0
                if at < tail < end:
                    end = tail
            else:
                request.append_output_token_ids(ids[at])
                end = at + 1
            manager.new_step_starts()
            given = (hit, found) if at == hit else (0, None)
            if manager.allocate_slots(request, end - at, *given, num_lookahead_tokens=1 if self.drops else 0) is None:
                raise RuntimeError("the cache is too small for one request")
            if take := getattr(manager, "take_kv_cache_block_copies", None):
                # as the scheduler does after a step, in which these blocks are copied
                manager.block_pool.free_blocks(take()[1])
            request.num_computed_tokens = at = end
        manager.free(request)
        return hit, manager.take_events()


def main() -> None:
    import msgspec

    said = sys.stdout
    sys.stdout = sys.stderr  # where vLLM may log
    for line in sys.stdin:
        job = json.loads(line)
        managed = Managed(job["kind"], job["size"], job["dcp"], job["drops"], job["blocks"], job.get("ahead", 0))
        written = texts(job["seed"], job["longest"] + 60)
        for text, prompt, more in asks(job["seed"], job["requests"], job["longest"]):
            hit, events = managed.serve(written[text][: prompt + more], prompt)
            payload = msgspec.msgpack.encode([0.0, events, 0])
            said.write(json.dumps([hit, base64.b64encode(payload).decode()]) + "\n")
        said.flush()


if __name__ == "__main__":
    main()

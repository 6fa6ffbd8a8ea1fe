"""Parts of SGLang's own engine, driven by the tests on a CPU: its radix trees with their event publisher, and its
/tokenize. Run by vLLM's Python with SGLang's wheel first on PYTHONPATH. A job comes as a line of JSON on stdin; for a
tree its prompts follow, and an empty line ends them. What was found is written to stdout.

The wheel imports packages of which nothing runs here; `Absent` stands in for them, and for them only.
"""

import importlib
import importlib.abc
import importlib.machinery
import json
import sys
from array import array
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

ABSENT = ("triton", "IPython", "gguf")  # a compiler for GPUs, notebooks, and files of another engine's models
ADAPTER = "0123456789abcdef" * 2


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module):
        pass


class Tree:
    """A radix tree of `tokens` slots over SGLang's own allocator, and its own publisher of events."""

    def __init__(self, tree: str, page: int, eagle: bool, tokens: int, events: dict):
        import torch
        from sglang.srt.disaggregation.kv_events import EventPublisherFactory
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.events import KvEventLoraNames
        from sglang.srt.mem_cache.radix_cache import RadixCache
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        more = (torch.float32, "cpu", MagicMock(), False)
        self.slots = (
            PagedTokenToKVPoolAllocator(tokens, page, *more) if page > 1 else TokenToKVPoolAllocator(tokens, *more)
        )
        names = KvEventLoraNames()
        names.register(SimpleNamespace(lora_id=ADAPTER, extra_key=ADAPTER), "red")
        params = CacheInitParams(
            disable=False, req_to_token_pool=MagicMock(spec=[]), token_to_kv_pool_allocator=self.slots, page_size=page,
            is_eagle=eagle, enable_kv_cache_events=True, kv_event_lora_names=names,
            tree_components=(ComponentType.FULL,), tree_core_backend=None if tree == "RadixCache" else tree,
        )  # fmt: skip
        self.tree = (RadixCache if tree == "RadixCache" else UnifiedRadixCache)(params)
        self.name = type(getattr(self.tree, "tree_core", self.tree)).__name__
        self.page, self.eagle, self.published = page, eagle, 0
        self.publisher = EventPublisherFactory.create(json.dumps(events), 0)

    def serve(self, ids: list[int], prompt: int, salt: str | None, adapter: bool) -> int:
        """Return how many tokens of the prompt are found, after which it and its answer are cached, as a scheduler
        does with a request that is over."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        def key(tokens: list[int]) -> RadixKey:
            return RadixKey(array("q", tokens), extra_key=ADAPTER if adapter else None, cache_salt=salt)

        found = self.tree.match_prefix(MatchPrefixParams(key=key(ids[:prompt]))).device_prefix_len
        size = len(ids) // self.page * self.page
        if (short := size - self.slots.available_size()) > 0:
            self.tree.evict(EvictParams(num_tokens=short))
        rows, kept = self.slots.alloc(size), (size - self.eagle) // self.page * self.page
        known = self.tree.insert(InsertParams(key=key(ids[:size]), value=rows)).prefix_len
        self.slots.free(rows[kept:])
        if self.name == "RadixCache":  # the others free what they had already
            self.slots.free(rows[:known])
        self.publish()
        return found

    def publish(self) -> None:
        from sglang.srt.disaggregation.kv_events import KVEventBatch

        if events := self.tree.take_events():
            self.publisher.publish(KVEventBatch(ts=0.0, events=events))
            self.published += 1


def tree(job: dict) -> None:
    from sglang.srt.runtime_context import describe_kv_events_publisher
    from sglang.srt.server_args import ServerArgs

    folder, events = job.pop("folder"), job["events"]
    args = ServerArgs(model_path=folder, device="cpu", page_size=job["page"], kv_events_config=json.dumps(events))
    made = Tree(**job)
    made.publish()
    tell(name=made.name, kv_events=describe_kv_events_publisher(args), published=made.published)
    while (line := sys.stdin.readline()).strip():
        tell(found=made.serve(**json.loads(line)), published=made.published)
    made.publisher.shutdown()
    tell()


def tokenize(job: dict) -> None:
    """Answer /tokenize at a port of 127.0.0.1, by SGLang's own handler, from now on."""
    import threading

    import uvicorn
    from fastapi import FastAPI, Request
    from sglang.srt.entrypoints.openai.protocol import TokenizeRequest
    from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
    from sglang.srt.parser.template_manager import TemplateManager
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.hf_transformers import get_tokenizer

    folder = job["folder"]
    args = ServerArgs(model_path=folder, device="cpu")
    publish(args, role="tokenizer")
    settings = json.loads((Path(folder) / "config.json").read_text())
    model = SimpleNamespace(
        is_multimodal=False, context_len=settings["max_position_embeddings"], hf_config=SimpleNamespace(**settings),
        get_default_sampling_params=dict,
    )  # fmt: skip
    manager = SimpleNamespace(
        tokenizer=get_tokenizer(folder), model_config=model, server_args=args, served_model_name="tiny", model_path=folder,
        config_value=lambda name: getattr(args, name), request_logger=SimpleNamespace(log_requests=False),
    )  # fmt: skip
    templates = TemplateManager()
    templates.load_chat_template(manager, None, folder)
    serving, app = OpenAIServingTokenize(manager, templates), FastAPI()

    @app.post("/tokenize")
    async def _(request: TokenizeRequest, raw_request: Request):
        return await serving.handle_request(request, raw_request)

    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=job["port"], log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        threading.Event().wait(0.01)
    tell()


def tell(**told) -> None:
    print(json.dumps(told), file=SAID, flush=True)


if __name__ == "__main__":
    SAID, sys.stdout = sys.stdout, sys.stderr  # where SGLang may log
    for name in ("torch._dynamo", "torch._inductor.compile_fx", "torch.utils.flop_counter", "transformers"):
        importlib.import_module(name)  # before there seems to be a compiler for GPUs, which these would use
    sys.meta_path.append(Absent())
    while line := sys.stdin.readline():
        given = json.loads(line)
        {"tree": tree, "tokenize": tokenize}[given.pop("part")](given)

"""What a worker does with what the control process tells it."""

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace

from gateway.workers.worker import Worker


class Pipeline:
    """Notes what it is brought to."""

    tokenizer = object()

    def __init__(self, directory):
        self.directory, self.adopted = directory, []

    def follow(self, version, at_once): ...
    def read_as(self, how):
        return how

    def adopt(self, how, confirmed, differs):
        self.adopted.append(how)


async def test_what_was_heard_while_a_model_was_loaded_is_not_taken_back(monkeypatch):
    """A worker without --model learns from replicas what it serves; loading takes seconds, and the comparison goes on meanwhile."""
    loading = {"first": threading.Event(), "second": threading.Event()}

    def load(settings, directory, name):
        loading[str(directory)].wait(10)
        return Pipeline(str(directory))

    monkeypatch.setattr("gateway.workers.worker.datapath", SimpleNamespace(pipeline=load, limits=lambda settings, pipeline: None))
    worker, sent = object.__new__(Worker), asyncio.Queue()
    worker.settings, worker.served_name, worker.model_dir = None, "m", None
    worker.dispatcher, worker.server = SimpleNamespace(pipeline=Pipeline(None)), SimpleNamespace()
    worker.channel, worker._tasks, worker._reading = SimpleNamespace(send=sent.put_nowait), set(), asyncio.Lock()

    def hear(folder, how):
        worker._heard_pipeline(16, None, None, folder, {"how": how, "confirmed": True, "differs": {}})

    hear("first", "as transformers 4")
    hear("second", "as transformers 4")
    hear("second", "as transformers 5")  # an engine was compared meanwhile
    loading["second"].set()
    assert (await sent.get())["model_dir"] == "second"
    loading["first"].set()
    assert (await sent.get())["model_dir"] == "first"
    while worker._tasks:
        await asyncio.wait(worker._tasks)
    assert worker.dispatcher.pipeline.directory == "second" and Counter(worker.dispatcher.pipeline.adopted) == {"as transformers 5": 1}

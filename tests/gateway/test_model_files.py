"""Which files each replica's prompts are made of, and when they are read: models without a gateway around them."""

import asyncio
import errno
import json
import os
import shutil
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from gateway import model_files
from gateway.models import Models
from gateway.ops.comparison import TokenizerComparison
from gateway.ops.view import View
from gateway.settings import ConfigError, Settings
from replicas import Replica, State
from replicas.simulated.model import sim_model_dir

from .http.talk import eventually as soon

eventually = partial(soon, seconds=60)  # loading a tokenizer takes a second, on a busy machine many


@pytest.fixture(autouse=True)
def no_engines(monkeypatch):
    """There is nobody to compare tokens with."""
    monkeypatch.setattr(TokenizerComparison, "compare", lambda self, replica: None)


@pytest.fixture
def folder(tmp_path):
    """The folder of a model, by its name."""

    def made(name: str):
        if not (tmp_path / name).exists():
            shutil.copytree(sim_model_dir(), tmp_path / name)
        return tmp_path / name

    return made


def replica(id: str, root, name: str) -> Replica:
    made = Replica(id, f"http://{id}", "127.0.0.1", 1)
    made.state, made.models, made.root, made.incarnation = State.READY, {name: None}, str(root), "1"
    made.version, made.block_size = "0.33.0", 16
    return made


def change(folder) -> None:
    template = folder / "chat_template.jinja"
    template.write_text("Speak plainly." + template.read_text())


def is_exact(models: Models, id: str) -> bool:
    space = models.members[id].space
    return space.loading is None and space.pipeline.tokenizer is not None


async def adopted(models: Models, *replicas: Replica) -> None:
    for one in replicas:
        models.adopt(one)
    for one in replicas:
        await eventually(partial(is_exact, models, one.id))


async def test_an_engine_keeps_the_files_it_was_started_from_when_another_model_is_found(folder):
    models = Models(Settings(), None, "model")
    await adopted(models, replica("a:1", folder("a"), "a"))
    member = models.members["a:1"]
    source, pipeline = member.source, member.space.pipeline
    change(folder("a"))
    await adopted(models, replica("b:1", "sim", "sim"), replica("c:1", folder("c"), "c"))
    assert (member.source, member.space.pipeline) == (source, pipeline) and is_exact(models, "a:1")
    models.stop()


async def test_an_engine_that_restarts_is_of_the_files_as_they_are_then(folder):
    models = Models(Settings(), None, "model")
    one, other = replica("a:1", folder("a"), "a"), replica("a:2", folder("a"), "a")
    await adopted(models, one, other)
    await eventually(lambda: models.members["a:1"].space is models.members["a:2"].space)
    before = models.members["a:2"].source
    change(folder("a"))
    one.incarnation = "2"
    models.adopt(one)
    await eventually(lambda: models.members["a:1"].source != before)
    await eventually(partial(is_exact, models, "a:1"))
    assert models.members["a:2"].source == before
    assert models.members["a:1"].space is not models.members["a:2"].space
    models.stop()


@pytest.mark.parametrize("where", ["Pipeline", "contents", "model_dir"])
async def test_files_that_the_system_refuses_for_want_of_descriptors_are_read_again(folder, monkeypatch, caplog, where):
    monkeypatch.setattr(model_files, "RETRY_SECONDS", 0.0)
    if where == "model_dir":
        monkeypatch.setattr(model_files, "folder_here", lambda root: None)
    read, refusals = getattr(model_files, where), [OSError(errno.EMFILE, "Too many open files")] * 2

    def refused(directory, *args, **more):
        if directory is not None and refusals:
            try:
                raise refusals.pop()
            except OSError as error:
                raise model_files.ModelError(str(error)) from error
        return read(directory, *args, **more)

    monkeypatch.setattr(model_files, where, refused)
    models = Models(Settings(), None, "m")
    await adopted(models, replica("a:1", folder("m"), "m"))
    assert is_exact(models, "a:1") and not refusals
    assert len([one for one in caplog.messages if "tried again in 0 s" in one]) == 2
    models.stop()


async def test_a_disk_that_cannot_be_read_is_given_up(folder, monkeypatch, caplog):
    monkeypatch.setattr(model_files, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(model_files, "MOST_RETRY_SECONDS", 0.004)
    reads = []

    def fails(*_):
        reads.append(1)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(model_files, "contents", fails)
    models = Models(Settings(), None, "m")
    models.adopt(replica("a:1", folder("m"), "m"))
    given_up = []
    models.on_change = lambda: given_up.append(len(reads))
    await eventually(lambda: given_up and not models.loading)
    assert given_up[0] == 3 and not is_exact(models, "a:1")
    assert "looking for the files of replica a:1 failed" in caplog.text
    assert "Input/output error" in models.members["a:1"].problem
    await eventually(lambda: len(reads) > 6)
    assert not models.loading, "it is looked at again, and not waited for"
    models.stop()


async def test_a_further_replica_and_a_restart_are_exact_while_their_files_are_read(folder, monkeypatch):
    models = Models(Settings(), None, "model")
    one = replica("a:1", folder("a"), "a")
    await adopted(models, one)
    gate = threading.Event()
    monkeypatch.setattr(model_files, "contents", lambda *_: gate.wait(20) and 0)
    try:
        space = models.members["a:1"].space
        one.incarnation = "2"
        assert models.adopt(one) is models.adopt(replica("a:2", folder("a"), "a")) is space
        assert is_exact(models, "a:1")
    finally:
        gate.set()
        models.stop()


async def test_a_replica_that_comes_back_to_an_empty_gateway_is_exact_at_once(folder):
    models = Models(Settings(), None, "model")
    await adopted(models, one := replica("a:1", folder("a"), "a"))
    space = models.members["a:1"].space
    models.forget(one)
    assert models.adopt(replica("a:1", folder("a"), "a")) is space and is_exact(models, "a:1")
    models.stop()


async def test_who_was_taken_for_the_model_given_is_not_once_that_one_is_there(folder):
    models = Models(Settings(model=str(folder("given"))), folder("given"), "given")
    first = replica("a:1", folder("a"), "a")
    await adopted(models, first)
    assert models.members["a:1"].source.directory == folder("given")
    await adopted(models, replica("b:1", folder("given"), "given"))
    await eventually(lambda: models.members["a:1"].source.directory == folder("a"))
    models.stop()


async def test_a_model_is_not_waited_for_while_another_variant_of_it_serves(folder, monkeypatch):
    gate, find = threading.Event(), model_files.model_dir
    models = Models(Settings(), None, "model")
    await adopted(models, replica("a:1", folder("a"), "a"))
    monkeypatch.setattr(model_files, "model_dir", lambda *names: gate.wait(20) and find(*names))
    upgraded = replica("b:1", "elsewhere", "a")
    models.adopt(upgraded)
    await asyncio.sleep(0)
    assert models.members["b:1"].finding is not None and not models.loading
    models.members["a:1"].replica.state = State.STOPPED
    assert models.loading == {"a"}
    gate.set()
    await eventually(lambda: not models.loading)
    models.stop()


async def test_what_is_looked_for_is_told_until_it_is_there(folder, monkeypatch):
    gate, changes = threading.Event(), []
    monkeypatch.setattr(model_files, "model_dir", lambda *_: gate.wait(20) and folder("a"))
    models = Models(Settings(), None, "model")
    models.on_change = lambda: changes.append(True)
    models.adopt(replica("a:1", "elsewhere", "a"))
    await asyncio.sleep(0)
    assert models.waiting_for == "the tokenizer of a, which is being loaded" and not changes
    assert models.loading == {"a"}
    gate.set()
    await eventually(lambda: models.waiting_for is None)
    assert not models.loading
    assert is_exact(models, "a:1") and changes
    models.stop()


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ROLES = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
DEEP = '{"chat_template": ' + "[" * 200_000 + "]" * 200_000 + "}"


@pytest.mark.parametrize(
    ("name", "text", "reads"),
    [
        ("chat_template.jinja", LOOPS + ROLES, True),
        ("chat_template.jinja", "{% for m in messages %}{% if 'please' in m.content %}" + LOOPS + "{% endif %}{% endfor %}" + ROLES, True),
        ("chat_template.jinja", "{% for c in 'abcdefgh' * 999 %}{% for d in 'abcdefgh' * 999|int %}{% endfor %}{% endfor %}" + ROLES, True),
        ("chat_template.jinja", "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}" + ROLES, True),
        ("chat_template.jinja", "{{ 'a' * 10 ** 10 }}" + ROLES, True),
        ("chat_template.jinja", "{% if messages %}" * 3_000 + "{% endif %}" * 3_000 + ROLES, True),
        ("chat_template.jinja", ROLES + "{# " + "x" * 3_000_000 + " #}", True),
        ("tokenizer_config.json", DEEP, False),
        ("config.json", DEEP, False),
        ("special_tokens_map.json", DEEP, False),
    ],
)  # fmt: skip
async def test_a_model_whose_files_are_made_to_do_harm_goes_by_text_and_others_stay_exact(folder, name, text, reads):
    """Its template would never end or fill the memory, or it nests deeper than a reader may: a thread would never come
    back, or the event loop would not."""
    (folder("bad") / name).write_text(text)
    models = Models(Settings(), None, "model")
    good, bad = replica("127.0.0.1:1", folder("good"), "good"), replica("127.0.0.1:2", folder("bad"), "bad")
    try:
        models.adopt(good)
        models.adopt(bad)
        await eventually(lambda: all(not one.finding for one in models.members.values()))
        await eventually(lambda: all(one.loading is None for one in models.spaces))
        body = json.dumps({"messages": [{"role": "user", "content": "please " * 40}]}).encode()
        told = {one: models.members[one.id].space.pipeline.prepare("/v1/chat/completions", body) for one in (good, bad)}
        assert told[good].mode == "exact" and told[bad].mode == "text" and len(told[bad].hashes) > 2
        assert is_exact(models, bad.id) == reads and models.waiting_for is None
        view = SimpleNamespace(models=models)
        assert View._of_template(view, good) == []
        if "range" in text or "macro" in text or "* 10" in text:
            assert "as text: the chat template does or makes more than" in View._of_template(view, bad)[0]
    finally:
        models.stop()


def fifo(path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def large(path) -> None:
    path.touch()
    os.truncate(path, 40 << 30)


def many(path) -> None:
    path.mkdir()
    for number in range(101):
        (path / f"{number}.jinja").touch()


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("config.json", fifo, "config.json: it is no regular file"),
        ("config.json", endless, "config.json: it is no regular file"),
        ("tokenizer.json", fifo, "tokenizer.json: it is no regular file"),
        ("added_tokens.json", large, "added_tokens.json: it has more than 16 MiB"),
        ("tokenizer.json", large, "tokenizer.json: it has more than 128 MiB"),
        ("additional_chat_templates", many, "more than 100 files additional_chat_templates/*.jinja"),
        ("config.json", lambda path: path.write_text('{"architectures": 5}'), "config.json: TypeError"),
    ],
)
async def test_a_file_that_cannot_be_read_is_a_problem_until_it_can(folder, monkeypatch, name, make, why):
    monkeypatch.setattr(model_files, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(model_files, "MOST_RETRY_SECONDS", 0.05)
    good, bad = replica("a:1", folder("good"), "good"), replica("b:1", folder("bad"), "bad")
    make(folder("bad") / name)
    models = Models(Settings(), None, "m")
    models.adopt(bad)
    await adopted(models, good)
    view = SimpleNamespace(models=models)
    await eventually(lambda: View._of_template(view, bad))
    assert why in View._of_template(view, bad)[0] and not View._of_template(view, good)
    assert not models.loading and not models.waiting_for and bad.tokenizer.startswith("not compared: its model's files")
    with pytest.raises(ConfigError, match=why.replace("*", ".")):
        Models(Settings(), folder("bad"), "bad")
    if (path := folder("bad") / name).is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if (sim_model_dir() / name).exists():
        shutil.copy(sim_model_dir() / name, path)
    await eventually(partial(is_exact, models, "b:1"))
    assert not View._of_template(view, bad)
    models.stop()


async def test_folders_that_never_answer_hold_up_nothing_else(folder, monkeypatch, tmp_path):
    """Six engines name one each, and one of them restarts again and again and names another each time."""
    monkeypatch.setattr(model_files, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(model_files, "MOST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(model_files, "READ_SECONDS", 0.05)
    gate, real, late = threading.Event(), model_files.contents, []

    def contents(directory, *args):
        if directory.name.startswith("hung"):
            late.append(directory)
            gate.wait()
        return real(directory, *args)

    monkeypatch.setattr(model_files, "contents", contents)
    models = Models(Settings(), None, "m")
    hung = [replica(f"h:{i}", folder(f"hung{i}"), f"hung{i}") for i in range(6)]
    try:
        for one in hung:
            models.adopt(one)
        await adopted(models, replica("a:1", folder("good"), "good"))
        await eventually(lambda: all(models.members[one.id].problem for one in hung))
        for again in range(50):
            hung[0].incarnation, hung[0].root = str(again + 2), str(folder(f"hung{again % 3}-again"))
            models.adopt(hung[0])
            await asyncio.sleep(0)
        await eventually(lambda: "has not ended yet" in models.members["h:0"].problem)
        assert "hung1 takes longer than 0.05 s" in models.members["h:1"].problem
        assert len(late) == 6 and not models.loading and not models.waiting_for
        assert await asyncio.to_thread(lambda: "free") == "free"
        await adopted(models, replica("a:2", folder("good2"), "good2"))
    finally:
        gate.set()
    for one in hung:
        await eventually(partial(is_exact, models, one.id))
    models.stop()

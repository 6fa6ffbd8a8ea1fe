"""`hitherto doctor` against real simulated engines, healthy and broken in one way each."""

import asyncio
import json
import re
import shutil
import socket
import threading
import time
import urllib.request
from types import SimpleNamespace

import pytest

from gateway import cli
from gateway.ops import replica_checks, trial
from replicas.engines.vllm.events import Decoder
from replicas.simulated.model import sim_model_dir

from .examined import METRICS, TRIED, doctor_lines, examine, free_port, once_read, told_by

pytestmark = pytest.mark.usefixtures("settings")


def test_a_healthy_engine(capsys, engines):
    code, found = examine(capsys, "--replica-url", engines[0].url)
    assert code == 0, found
    assert {subject for subject, (level, _) in found.items() if level != "ok"} == {"gateway"}, "none runs"
    expected = "config gateway model tokenizer,chat template,turn by turn,replica models,block size,tokens events cache"
    for subject in (one for part in expected.split(",") for one in ([part] if part in found else part.split())):
        assert subject in found, subject
    came, blocks = map(int, re.search(r"(\d+) of (\d+) blocks", found["events"][1]).groups())
    assert came == blocks >= 3
    assert found["tokens"][1].endswith("fills its chat template alike")


BLOCKS = "block_size is set to 32 tokens, but its engine caches blocks of 16, so what it holds is matched in " \
         "steps of 32 and predictions leave out up to 16 cached tokens of a prompt.*leave --block-size out"  # fmt: skip


@pytest.mark.parametrize(
    "flags, code, subject, level, said",
    [
        ("{0} {localhost}", 0, "twice", "warn", "the same engine is also given as localhost:[0-9]+: its load"),
        ("{0}#role=prefill {1}#role=decode,transfer=llm-d", 1, "roles", "fail", "same transfer="),
        ("{0}#role=prefill", 1, "roles", "fail", "#role=decode"),
        ("{1}", 0, "events", "warn", "--no-events"),
        ("{1}", 0, "cache", "warn", "--no-cached-tokens"),
        ("{0}#events=tcp://127.0.0.1:{free}", 1, "events", "fail", "silent.*#events=tcp://HOST:PORT"),
        (
            "{0} {2}",
            0,
            "block size",
            "warn",
            r"differs between replicas of sim: 127\S+ 16, 127\S+ 32\. They are variants",
        ),
        (
            "{2} --block-size 16",
            1,
            "block size",
            "fail",
            "KV events cannot be matched with prompts.*leave --block-size out",
        ),
        ("{0} {2} --block-size 32", 0, "block size", "warn", BLOCKS),
        ("http://127.0.0.1:{free}", 1, "replica", "fail", "cannot connect.*correct its URL"),
        ("{0} --chat-template other.jinja", 1, "tokens", "fail", "give --model and --chat-template as it was started"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said_with_its_remedy(
    capsys, engines, tmp_path, monkeypatch, flags, code, subject, level, said
):
    monkeypatch.setattr(trial, "EVENT_SECONDS", 1.0)
    (tmp_path / "other.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    urls = [engine.url for engine in engines]
    given = flags.format(*urls, localhost=urls[0].replace("127.0.0.1", "localhost"), free=free_port())
    told, found = examine(capsys, "--replica-url", *given.split())
    assert (told, found[subject][0]) == (code, level), found
    assert re.search(said, found[subject][1])


@pytest.mark.parametrize("replay", ["", ",replay=tcp://127.0.0.1:9"])
def test_events_without_their_replay(capsys, engines, replay):
    published = told_by(engines[0].url + "/kv_event_sources")["0"]["endpoint"].rpartition(":")[2]
    code, found = examine(capsys, "--replica-url", f"{engines[0].url}#events=tcp://127.0.0.1:{published}{replay}")
    assert code == 0 and found["events"][0] == "ok"
    assert found["replay"][0] == "warn" and "--replay-port" in found["replay"][1]


def test_blocks_of_many_gpus_are_tried_in_the_size_that_events_tell(capsys, start_engine, monkeypatch):
    """Of which vLLM before 0.32 tells one GPU's part, so that three of these fill no block; beside an engine that tells
    pages of its blocks."""
    monkeypatch.setattr(trial, "EVENT_SECONDS", 1.0)
    wide = start_engine("--block-size", "128", "--decode-context-parallel-size", "16", "--num-blocks", "90")
    pages = start_engine("--num-blocks", "26000", sglang=True)
    for engine in (wide, pages):
        code, found = examine(capsys, "--replica-url", engine.wait().url)
        assert (code, found["events"][0]) == (0, "ok") and re.match(r"(\d+) of \1 blocks", found["events"][1]), found


def test_a_variant_with_another_template_is_tried_with_its_own(capsys, engines, start_engine, tmp_path, monkeypatch):
    """As the gateway treats it: a rolling upgrade is no fault of the engine that is ahead."""
    monkeypatch.delenv("HITHERTO_MODEL")
    folder = tmp_path / "upgraded"
    shutil.copytree(sim_model_dir(), folder)
    template = folder / "chat_template.jinja"
    template.write_text("Speak plainly. " + template.read_text())
    ahead = start_engine("--model", str(folder), "--served-model-name", "sim").wait()
    code = doctor_lines(capsys, "--replica-url", engines[0].url, ahead.url)
    assert code[0] == 0, code[1]
    assert code[1].count("fills its chat template alike") == 2 and str(folder) in code[1]


def test_a_template_that_rewrites_earlier_turns(capsys, tmp_path):
    (tmp_path / "moves.jinja").write_text(
        "{% for m in messages %}{% if loop.last %}{{ messages[0].content }}{% endif %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    )
    code, found = examine(capsys, "--launch", "1", "--chat-template", "moves.jinja")
    assert code == 0
    level, text = found["turn by turn"]
    kept, total = map(int, re.search(r"only (\d+) of the first one's (\d+) tokens", text).groups())
    assert level == "warn" and kept < total


def test_engines_are_looked_at_all_at_once_and_told_in_their_order(capsys, fake):
    """Neither answers before the other was asked as well, each time that they are."""
    asked = threading.Barrier(2, timeout=10)

    class Together(dict):
        def get(self, path, default=None):
            if path == "/health":
                asked.wait()
            return super().get(path, default)

    urls = [fake(Together(TRIED)), fake(Together(TRIED))]
    for given in (urls, urls[::-1]):
        out = doctor_lines(capsys, "--replica-url", *given)[1]
        assert re.findall(r"^ok    replica (\S+)", out, re.M) == [url.removeprefix("http://") for url in given], out


def test_an_engine_that_takes_connections_and_answers_nothing(capsys, monkeypatch):
    """As a process that was stopped does."""
    monkeypatch.setattr(replica_checks, "PROBE_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as stopped:
        code, found = examine(capsys, "--replica-url", f"http://127.0.0.1:{stopped.getsockname()[1]}")
    level, text = found["replica"]
    assert code == 1 and level == "fail" and "/health did not answer within 0.3 s it hangs, still loads" in text
    assert "`py-spy dump --pid PID` of its process and restart it" in text and "correct its URL" not in text


def test_a_model_that_only_replicas_could_name_is_not_blamed_while_none_answers(capsys, monkeypatch):
    monkeypatch.delenv("HITHERTO_MODEL")
    for flags in ((), ("--replica-url", f"http://127.0.0.1:{free_port()}")):
        code, found = examine(capsys, *flags)
        assert code == 1 and "model" not in found, found


def test_no_replica_at_all_and_no_tokenizer(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HITHERTO_MODEL", str(tmp_path))
    code, found = examine(capsys)
    assert code == 1
    assert found["replicas"][0] == "fail" and "--replica-url" in found["replicas"][1]
    assert found["tokenizer"][0] == "fail" and "tokenizer.json" in found["tokenizer"][1]


@pytest.mark.parametrize(
    "change, subject, level, said",
    [
        ({}, "replica", "ok", "adapters sql, 100 blocks of 16"),
        ({}, "events", "warn", "--kv-events-config"),
        ({"/kv_event_sources": 404}, "events", "warn", "URL#events=tcp://HOST:PORT"),
        ({"/kv_event_sources": {"0": {"endpoint": "tcp://10.0.0.7:5557"}}}, "events", "warn", "tcp://*:PORT"),
        ({"/metrics": "python_info 1.0\n"}, "metrics", "warn", "--disable-log-stats"),
        ({"/metrics": "python_info 1.0\n"}, "block size", "warn", "give --block-size"),
        (
            {"/metrics": METRICS.replace("requests_waiting", "queued")},
            "metrics",
            "warn",
            "lacks vllm:num_requests_waiting",
        ),
        ({"/metrics": METRICS.replace("True", "False")}, "caching", "fail", "--no-enable-prefix-caching"),
        ({"/v1/models": 401, "/v1/completions": 401, "/tokenize": 401}, "model names", "warn", "--engine-api-key"),
        ({"/v1/models": 401, "/v1/completions": 401, "/tokenize": 401}, "trial", "warn", "clients' keys are passed on"),
        ({"/v1/completions": 500}, "trial", "fail", "the engine's own log says more"),
        ({"/v1/completions": {"usage": {"prompt_tokens": 60}}}, "cache", "warn", "--enable-prompt-tokens-details"),
        ({"/v1/completions": 404, "/v1/embeddings": {"usage": {"prompt_tokens": 60}}}, "cache", "ok", "/v1/embeddings"),
        ({"/v1/completions": 404, "/classify": {"usage": {"prompt_tokens": 60}}}, "cache", "ok", "/classify"),
        ({"/v1/completions": 404}, "trial", "fail", "/v1/completions answers 404"),
        ({"/tokenize": {"tokens": [1, 2, 3]}}, "tokens", "fail", "give --model and --chat-template"),
        ({"/tokenize": "<html>"}, "tokens", "warn", "/tokenize tells no token ids"),
        ({"/tokenize": []}, "tokens", "warn", "/tokenize tells no token ids"),
        ({"/version": 404}, "replica", "ok", "version unknown"),
    ],
)
def test_what_an_engine_does_not_tell_or_do_is_said_with_its_remedy(capsys, fake, change, subject, level, said):
    code, found = examine(capsys, "--replica-url", fake({**TRIED, **change}))
    assert found[subject][0] == level and said in found[subject][1], found
    assert code == (1 if "fail" in {level for level, _ in found.values()} else 0)


def test_ranks_are_tried_one_by_one_and_one_without_events_is_named(capsys, fake):
    two = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    sources = {"0": {"endpoint": f"tcp://*:{free_port()}"}, "1": {"endpoint": "tcp://10.0.0.7:5557"}}
    url = fake({**TRIED, "/metrics": two, "/kv_event_sources": sources, "/v1/completions": 503})
    cli.main(["doctor", "--replica-url", url])
    out = capsys.readouterr().out
    name = url.removeprefix("http://")
    assert "2 data-parallel ranks" in out and f"trial {name}-dp0" in out and f"trial {name}-dp1" in out
    assert re.search(rf"warn  events {name}-dp1 .*vLLM connects to rather than binds", out)


def test_a_rank_that_may_be_on_another_node_is_said_not_to_be_supported(capsys, fake, monkeypatch):
    monkeypatch.setattr(trial, "EVENT_SECONDS", 0.1)
    monkeypatch.setattr(trial, "JOIN_SECONDS", 0.1)
    two = METRICS + METRICS.replace('engine="0"', 'engine="1"')
    sources = {str(rank): {"endpoint": f"tcp://*:{free_port()}"} for rank in range(2)}
    cli.main(["doctor", "--replica-url", fake({**TRIED, "/metrics": two, "/kv_event_sources": sources})])
    first, second = re.findall(r"fail  events .*-dp\d +silent: .*\n +-> (.*)", capsys.readouterr().out)
    assert "another node" in second and "--data-parallel-external-lb" in second
    assert "another node" not in first  # it is where the server is


TIERED = METRICS + 'vllm:external_prefix_cache_queries_total{engine="0"} 5.0\n'


@pytest.mark.parametrize(
    "metrics, version, warned", [(TIERED, "0.28.1", True), (TIERED, "0.32.0", False), (METRICS, "0.28.1", False)]
)
def test_engines_with_slower_tiers_whose_blocks_no_other_finds(capsys, fake, metrics, version, warned):
    """Two replicas; of one nobody else could want the blocks."""
    pages = {**TRIED, "/metrics": metrics, "/version": {"version": version}}
    urls = [fake(pages), fake(pages)]
    _, found = examine(capsys, "--replica-url", *urls)
    level, text = found.get("hash seeds", ("", ""))
    assert (level == "warn" and "PYTHONHASHSEED" in text) == warned == bool(text)
    _, found = examine(capsys, "--replica-url", urls[0])
    assert "hash seeds" not in found


@pytest.mark.parametrize("told", [True, False])
def test_slower_tiers_of_which_the_events_tell_nothing(capsys, start_engine, monkeypatch, told):
    """As those of an engine with LMCache in its process, whose own blocks are told all the same."""
    engine = start_engine("--cpu-blocks", "500").wait()
    body = json.dumps({"model": "sim", "prompt": "word " * 1500, "max_tokens": 1}).encode()
    ask = urllib.request.Request(f"{engine.url}/v1/completions", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(ask).read()
    if not told:
        decode = Decoder.decode

        def of_the_gpu(self, payload):
            batch = decode(self, payload)
            return batch._replace(events=[one for one in batch.events if one.tier == "gpu"])

        monkeypatch.setattr(Decoder, "decode", of_the_gpu)
    code, found = examine(capsys, "--replica-url", engine.url)
    assert code == 0 and found["events"][0] == "ok" and ("tiers" in found) != told, found
    if not told:
        assert found["tiers"][0] == "warn" and "predictions leave it out run the simulated" in found["tiers"][1]


def test_tokenizer_files_that_bring_code(capsys, fake, tmp_path):
    folder = shutil.copytree(sim_model_dir(), tmp_path / "model")
    config = folder / "tokenizer_config.json"
    own_code = {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | own_code))
    _, found = examine(capsys, "--replica-url", fake(TRIED), "--model", str(folder))
    level, text = found["tokenizer files"]
    assert level == "warn" and "code of its own" in text and "/tokenize" in text


@pytest.mark.parametrize(
    "found, level, said",
    [
        ({"said": "the gateway's, as it is; fills its chat template alike"}, "ok", "alike"),
        ({"said": "differs: 'a' is 1 here", "differs": "'a' is 1 here"}, "fail", "what differs is matched as text"),
        ({"said": "differs: of a chat", "chats": "of a chat"}, "fail", "give --model and --chat-template"),
        ({"said": "the gateway's", "efforts": "of a chat it makes other tokens"}, "fail", "with an effort to reason"),
        ({"said": "its chats cannot be compared yet: busy", "chats": "busy", "unasked": True}, "warn", "/tokenize"),
        ({"said": "the gateway's; it prints Sunday", "day": "; it prints Sunday"}, "warn", "start them with one TZ"),
    ],
)
async def test_what_a_gateway_would_find_of_an_engines_tokens_is_said_in_its_words(monkeypatch, found, level, said):
    """The comparison itself is tested in test_comparison.py."""
    engine = SimpleNamespace(**{"differs": "", "chats": "", "unasked": False, "efforts": "", "day": ""} | found)

    async def compare_once(self, replica):
        return engine

    monkeypatch.setattr(trial.TokenizerComparison, "compare_once", compare_once)
    finding = await trial._same_tokens(SimpleNamespace(id="a:1", pipeline=object(), replica=None))
    assert (finding.level, finding.subject) == (level, "tokens a:1")
    assert said in f"{finding.text} {finding.remedy}"
    assert engine.said.removeprefix("the gateway's") in finding.text + engine.efforts


def test_an_engine_that_is_full_is_no_broken_one(capsys, fake, monkeypatch):
    """And the doctor does not wait for each of its answers in turn."""
    monkeypatch.setattr(trial, "ANSWER_SECONDS", 0.2)

    class Slow(dict):
        def get(self, path, default=None):
            if path == "/v1/completions":
                time.sleep(0.5)
            return super().get(path, default)

    code, found = examine(capsys, "--replica-url", fake(Slow(TRIED)))
    level, text = found["trial"]
    assert (code, level) == (0, "warn")
    assert "does not answer a short prompt within 0.2 s; no known requests wait" in text


def test_a_model_by_any_name_is_looked_for_where_the_engine_has_it_from(capsys, fake, monkeypatch):
    monkeypatch.delenv("HITHERTO_MODEL")
    other = {**TRIED, "/v1/models": {"data": [{"id": "support-bot", "root": str(sim_model_dir())}]}}
    code, found = examine(capsys, "--replica-url", fake(other))
    assert found["model"] == ("ok", f"support-bot, tokenizer and template from {sim_model_dir()}")


async def test_events_that_came_while_the_doctor_was_held_up_are_not_taken_for_late():
    read = []

    def true() -> bool:
        if not read:
            asyncio.get_running_loop().call_soon(read.append, "an event")
            time.sleep(0.4)  # the event loop does not run meanwhile
            return False
        return True

    assert await trial._until(true, 0.3)
    assert not await trial._until(lambda: False, 0.1)


def test_a_new_prompt_fills_three_blocks_of_any_size_and_is_new():
    pipeline = once_read(sim_model_dir(), "sim", 16, chat_template=None)
    prompts = {trial.new_prompt(size): size for size in (16, 32, 128) for _ in range(2)}
    assert len(prompts) == 6
    for text, size in prompts.items():
        assert len(pipeline.tokenizer.encode(text)) // 4 >= 3 * size

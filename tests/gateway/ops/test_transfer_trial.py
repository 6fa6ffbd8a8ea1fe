"""`hitherto doctor` tries one transfer for each kind of pair, of simulated engines that are wrong in one way each."""

import json
import urllib.request
from types import SimpleNamespace

import pytest

from gateway import cli
from gateway.ops import doctor, trial
from replicas.engines.vllm import VLLM
from replicas.engines.vllm.transfer import NIXL, Nixl


@pytest.fixture(scope="module")
def engines(start_engine):
    """By what each is told of connectors."""
    ways = {"nixl": ["--kv-connector"], "also nixl": ["--kv-connector"], "none": [],
            "other": ["--kv-connector", "--block-size", "32"]}  # fmt: skip
    started = {name: start_engine(*flags) for name, flags in ways.items()}
    return {name: engine.wait() for name, engine in started.items()}


def pair(engines, prefiller, decoder, transfer=""):
    way = f",transfer={transfer}" if transfer else ""
    return [f"{engines[prefiller].url}#role=prefill{way}", f"{engines[decoder].url}#role=decode{way}"]


def examined(monkeypatch, *urls):
    """The exit code, and of each transfer that was tried what was found."""
    found, line = {}, doctor.line

    def noted(finding):
        if finding.subject.startswith("transfer "):
            assert finding.subject not in found
            found[finding.subject] = (finding.level, f"{finding.text} {finding.remedy}")
        return line(finding)

    monkeypatch.setattr(doctor, "line", noted)
    return cli.main(["doctor", "--replica-url", *urls]), found


def test_a_pair_that_works(monkeypatch, engines):
    _, found = examined(monkeypatch, *pair(engines, "nixl", "also nixl"))
    [(subject, (level, text))] = found.items()
    assert level == "ok" and f"127.0.0.1:{engines['also nixl'].port} answered a prompt that was computed there" in text
    assert subject == f"transfer 127.0.0.1:{engines['nixl'].port}"


@pytest.mark.parametrize(
    "prefiller, decoder, transfer, level, said",
    [
        ("none", "nixl", "nixl-unchecked", "fail", "--kv-connector"),
        ("nixl", "none", "nixl-unchecked", "warn", "may have computed the prompt again"),
        ("nixl", "nixl on order", "", "fail", "did not answer the second leg"),
    ],
)
def test_a_pair_that_does_not(monkeypatch, engines, prefiller, decoder, transfer, level, said):
    if decoder == "nixl on order":
        decoder = "also nixl"
        fails_second_legs(monkeypatch, engines[decoder])
    code, found = examined(monkeypatch, *pair(engines, prefiller, decoder, transfer))
    [(told_level, text)] = found.values()
    assert told_level == level and said in text and code == (level == "fail")


@pytest.mark.parametrize("locked", ["first", "second"])
async def test_an_engine_that_wants_a_key_is_to_be_given_one(locked):
    class Engine(SimpleNamespace):
        remedies = VLLM.remedies

        async def post(self, path, body):
            if self.id == locked:
                raise trial.Locked("it wants an API key")
            return {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]}}

    first, second = Engine(id="first"), Engine(id="second")
    pair = SimpleNamespace(first=first, second=second, transfer=NIXL, body=b'{"model": "sim", "prompt": "x"}')
    [found] = [finding async for finding in trial.try_transfer(pair)]
    assert (found.level, found.remedy) == ("warn", VLLM.remedies.models) and "it wants an API key" in found.text


def fails_second_legs(monkeypatch, engine):
    """What the decoder is asked right after a first leg was read fails, as where it cannot reach the prefiller."""
    read = Nixl.parameters

    def then_fails(self, answer):
        order = urllib.request.Request(f"{engine.url}/faults", json.dumps({"error_500": 1}).encode())
        urllib.request.urlopen(order).close()
        return read(self, answer)

    monkeypatch.setattr(Nixl, "parameters", then_fails)


def test_one_of_each_kind_of_pair_is_tried(monkeypatch, engines):
    urls = [
        f"{engines['nixl'].url}#role=prefill",
        f"{engines['also nixl'].url}#role=prefill",
        f"{engines['other'].url}#role=decode",
    ]
    _, found = examined(monkeypatch, *urls)
    assert list(found) == [f"transfer 127.0.0.1:{engines['nixl'].port}"]


def test_without_roles_nothing_is_tried(monkeypatch, engines):
    _, found = examined(monkeypatch, engines["nixl"].url, engines["also nixl"].url)
    assert not found

"""What `hitherto doctor` reads out of a running gateway's status, and says of one that does not tell it."""

import socket
import socketserver
import threading

import pytest

from gateway import cli
from gateway.ops import gateway_checks, trial
from gateway.ops.findings import Finding
from gateway.ops.replica_checks import Engines
from replicas.adopt import Facts
from replicas.duplicates import Name, duplicate
from replicas.engines.dialect import Told
from replicas.lifecycle import State
from replicas.problems import Problem, block_size_set

from . import examined
from .examined import TRIED, an_engine, doctor_lines, examine, found_in, free_port, status, told_by
from .stand_in import Gateway

pytestmark = pytest.mark.usefixtures("settings")


def config(*flags):
    return cli.load_config(cli._parse(["doctor", *flags]))


def told(running, *flags) -> list[Finding]:
    return found_in(gateway_checks.Gateway(config(*flags), status=running))


def test_what_a_running_gateway_says_of_itself():
    assert [finding.level for finding in told(status())] == ["ok"]
    (finding,) = told(status(ready=False, why_not="no replica is ready: a:1 is failed (exit code 1)"))
    assert finding.level == "fail" and "exit code 1" in finding.text
    assert [f.subject for f in told(status(totals={"prompts": {"exact": 50, "load": 50}}))] == ["gateway", "prompts"]
    refused = {"prompts": {}, "requests": 50, "refused_by_engines": {"engines_full": 40, "engines_unauthorized": 10}}
    found = [finding.text for finding in told(status(totals=refused)) if finding.subject == "refused by engines"]
    assert "40 of 50 requests got 429" in found[0] and "10 of 50 requests got 401 or 403" in found[1]
    tenant = {"tenant": "team-a", "limit": "requests per minute", "requests": 4.0}
    (_, limited) = told(status(refused_tenants=[tenant]))
    assert (limited.level, limited.subject) == ("warn", "tenant team-a")
    assert limited.text == "its limit of requests per minute refused 4 requests since the start"


def test_a_replica_whose_events_are_not_followed_is_a_failure():
    why = "KV events are not followed, the cache is guessed from traffic: no layer has full attention"
    page = {"id": "a:1", "url": "http://a:1", "events": "unobserved", "problems": [why]}
    (unobserved,) = found_in(an_engine("http://a:1", status=status(replicas=[page])), "problems")
    assert (unobserved.level, unobserved.subject, unobserved.text) == ("fail", "traffic a:1", why)
    page |= {"events": "gap", "problems": [], "events_reason": "7 were lost"}
    (gap,) = found_in(an_engine("http://a:1", status=status(replicas=[page])), "problems")
    assert (gap.level, gap.subject) == ("fail", "events a:1") and gap.text.endswith("(7 were lost)")


@pytest.mark.parametrize("given, level", [(24, "fail"), (32, "warn")])
def test_a_block_size_that_does_not_fit_is_said_once(given, level):
    """By the gateway where one runs, and else by the doctor, with the same remedy."""
    problem, facts = block_size_set(given, 16), Facts(serving=True, told=Told(block_size=16))
    page = {"id": "a:1", "url": "http://a:1", "problems": [str(problem)]}
    for size in (None, given):
        (found,) = found_in(an_engine("http://a:1", facts, status(replicas=[page]), block_size=size), "problems")
        assert (found.level, found.subject, found.text) == (level, "traffic a:1", str(problem))
    [own] = found_in(an_engine("http://a:1", facts, block_size=given), "problems")
    assert own == Finding(level, problem.what, problem.remedy, "block size a:1")


@pytest.mark.parametrize("speaks_http", [True, False])
def test_another_server_at_the_admin_port_is_called_so(capsys, fake, speaks_http):
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Closing) as closing:
        threading.Thread(target=closing.serve_forever, args=(0.02,), daemon=True).start()
        port = fake({}).rpartition(":")[2] if speaks_http else str(closing.server_address[1])
        code, found = examine(capsys, "--launch", "1", "--admin-port", port)
        closing.shutdown()
    no_side = "what answers there, with status 404, is no gateway's admin side"
    there = no_side if speaks_http else "something else answers"
    level, said = found["admin_port"]
    assert (code, level) == (1, "fail") and "Address already in use" in said and there in said
    assert said.endswith(" stop what holds the port, or give another with --admin-port (and --admin-host)")
    level, said = found["gateway"]
    assert level == "warn" and said.startswith(f"none runs with these settings at http://127.0.0.1:{port} ({there}")


class Closing(socketserver.BaseRequestHandler):
    """Says something of its own and goes, as servers of other protocols do."""

    def handle(self):
        self.request.sendall(b"-ERR unknown command\r\n")


def test_a_gateway_that_is_named_has_to_run(capsys, fake, engines):
    url = f"http://127.0.0.1:{free_port()}"
    code, found = examine(capsys, "--replica-url", engines[0].url, "--admin", url)
    assert (code, found["gateway"][0]) == (1, "fail") and f"at {url} (nothing listens there)" in found["gateway"][1]
    assert cli.main(["doctor", "--admin", "ftp://gw:1"]) == 2
    code, found = examine(capsys, "--replica-url", engines[0].url, "--admin", fake({"/status": status(replicas=[])}))
    assert (code, found["gateway"][0]) == (0, "ok") and "port" not in found


def test_what_a_running_gateway_says_of_redis_and_of_its_own_background_work():
    redis = {"ledger_joined": True, "ledger_reason": "joined", "trouble": ""}
    assert [finding.level for finding in told(status(map={"redis": redis}, background_failures={}))] == ["ok"]
    away = {"ledger_joined": False, "ledger_reason": "READONLY", "trouble": examined.redis_trouble("NOPERM")}
    _, map_, ledger = told(status(map={"redis": redis | away}))
    assert (map_.level, map_.subject) == ("fail", "redis: map") and "NOPERM" in map_.text
    assert (ledger.level, ledger.subject) == ("fail", "redis: ledger") and "READONLY" in ledger.text
    failures = {"failures": 3, "last": "KeyError: 7", "seconds_ago": 2.0}
    _, failed = told(status(background_failures={"shared map: publish": failures}))
    assert failed.level == "fail" and "shared map: publish failed 3 times" in failed.text and "KeyError" in failed.text
    _, failed = told(status(policy_failures={"./mine.py:Mine": failures | {"last": "line 7 failed: KeyError"}}))
    assert (failed.level, failed.subject) == ("fail", "policy") and "restart the gateway" in failed.remedy
    assert failed.text == "./mine.py:Mine failed 3 times, 2 s ago: line 7 failed: KeyError"


async def test_what_to_do_about_a_failed_engine_goes_by_the_fault_that_the_gateway_tells():
    gateway = Gateway()
    replica = gateway.fleet.add("http://a:1", State.FAILED)
    by_itself, left = (
        {"managed": True, "reason": "exited with code 1"},
        "nothing, it finishes the 0 requests that it has",
    )
    for changes, level, remedy in (
        ({"reason": "no answer for 15 s", "fault": "timeout"}, "fail", "it hangs, still loads"),
        ({"fault": "connect"}, "fail", "start it, "),
        ({"fault": ""}, "fail", "start it, "),
        ({"fault": "refused"}, "fail", "another program may listen there, which `ss -ltnp 'sport = :1'`"),
        ({"state": State.STOPPED}, "warn", "hitherto replicas add http://a:1 --admin http://127.0.0.1:8081"),
        # Its port may be closed, and it is not to be started.
        ({"state": State.LEAVING}, "warn", f"{left}; to use it again, start it when it has ended"),
        ({"state": State.DRAINING}, "warn", f"{left}; to use it again, hitherto replicas add http://a:1"),
        (
            {"state": State.FAILED, "fault": "", **by_itself},
            "fail",
            "the gateway starts it by itself, and again whenever",
        ),
    ):
        for name, value in changes.items():
            setattr(replica, name, value)
        found, *_ = await examined.checked(an_engine("http://a:1", status=gateway.status()), "replica")
        assert (found.level, found.remedy[: len(remedy)]) == (level, remedy)
        assert replica.reason in found.text
        if replica.state is State.LEAVING:
            assert gateway.status()["replicas"][0]["problems"][0].startswith("its engine ends: ")


def test_a_file_that_the_running_gateway_cannot_use_is_said_whatever_the_doctor_was_given():
    limits = {"joined": None, "reason": "counted by this gateway alone", "gateways": 1}
    usable = {"api_keys": {"problem": "", "limits": limits}, "tls": None}
    assert [finding.level for finding in told(status(**usable))] == ["ok"]
    problem = "keys.yaml:2: sha256: is missing"
    _, keys, tls = told(status(api_keys=usable["api_keys"] | {"problem": problem}, tls={"problem": "no PEM"}))
    assert (keys.level, keys.subject) == ("fail", "api keys") and problem in keys.text
    assert (tls.level, tls.subject) == ("fail", "tls") and "no PEM" in tls.text


def test_an_engine_of_two_names_is_told_by_the_gateway_that_knows_it():
    names = {id: Name(id, "10.0.0.1", 1, 5.25) for id in ("a:1", "b:1")}
    problems = {id: [str(duplicate(name, names.values()))] for id, name in names.items()}
    running = status(replicas=[{"id": id, "url": f"http://{id}", "problems": problems[id]} for id in problems])
    engines = [an_engine(f"http://{id}", Facts(serving=True), running) for id in names]
    seen = [finding for one in engines for finding in found_in(one, "problems")]
    assert [one.subject for one in seen] == ["traffic a:1", "traffic b:1"], "b:1 was added with POST /replicas"
    assert "also given as a:1" in seen[1].text
    assert not found_in(Engines(engines[0].settings, engines), "twice")


def test_what_the_gateway_says_of_a_replica_is_printed_in_its_words():
    """And what the engine says of itself is not, as the gateway has read it too."""
    facts = Facts(serving=True, problems={"role": Problem("it is for one leg alone", "")})
    slow, problem = {"text": "takes 8 x as long"}, "12 KV events were passed over (unknown type 'X')"
    page = {"id": "a:1", "url": "http://a:1", "problems": [problem], "slow": slow}
    found = found_in(an_engine("http://a:1", facts, status(replicas=[page])), "problems")
    assert [(one.level, one.subject) for one in found] == [("warn", "traffic a:1")] * 2
    assert [one.text for one in found] == [slow["text"], *page["problems"]]
    page["state"] = "failed"
    assert not found_in(an_engine("http://a:1", facts, status(replicas=[page])), "problems"), "`replica` says why"
    known = status(replicas=[{"id": "a:1", "url": "http://a:1"}])
    assert not found_in(an_engine("http://a:1", facts, known), "problems")


def test_replicas_that_were_added_to_the_running_gateway_are_looked_at_as_well(capsys, engines, gateway):
    added = f"127.0.0.1:{free_port()}"
    away = {"id": added, "url": f"http://{added}", "state": "failed", "reason": "nothing listens there"}
    gateway(status(replicas=[{"id": "x", "url": engines[0].url, "events": "live"}, away]))
    code, out = doctor_lines(capsys, "--replica-url", engines[0].url)
    assert code == 1 and out.count(f"replica 127.0.0.1:{engines[0].port} ") == 1
    assert f"{added} " in out and "the gateway calls it failed: nothing listens there" in out


def test_events_that_only_the_running_gateway_knows_of(capsys, fake, engines, gateway, monkeypatch):
    """An older engine does not say where its events are: their address stands in the gateway's flags."""
    published = told_by(engines[0].url + "/kv_event_sources")["0"]
    ends = {"endpoint": published["endpoint"], "replay": published["replay_endpoint"]}
    source = {name: end.replace("*", "127.0.0.1") for name, end in ends.items()} | {"topic": ""}
    url = fake({**TRIED, "/kv_event_sources": 404})
    replica = {"id": "x", "url": url, "rank": None, "events": "live", "event_source": source}
    gateway(status(replicas=[replica]))
    monkeypatch.setattr(trial, "EVENT_SECONDS", 0.1)
    _, found = examine(capsys)
    assert source["endpoint"] in found["events"][1], found  # listened to; this fake publishes nothing there
    unknown = "its KV events are unknown: URL#events=tcp://HOST:PORT"
    replica |= {"event_source": None, "events": "off", "problems": [unknown]}
    gateway(status(replicas=[replica]))
    _, found = examine(capsys)
    assert found["traffic x"] == ("warn", replica["problems"][0]) and "events" not in found, "said once"


def test_what_the_running_gateway_says_of_a_file_is_not_said_twice(capsys, gateway, tmp_path):
    (tmp_path / "keys.yaml").write_text(examined.BAD_KEYS)
    problem = "keys.yaml:1: name: 'team a!' is not a name of 1 to 64 letters, digits, '.', '_' and '-'"
    gateway(status(api_keys={"problem": problem}, replicas=[]))
    _, out = doctor_lines(capsys, "--api-keys", "keys.yaml")
    assert out.count("api keys") == out.count("team a!") == 1 and "the keys read before stay good" in out
    _, out = doctor_lines(capsys)
    assert "the gateway that runs cannot use its file" in out


def test_what_the_gateway_says_of_a_replica_comes_before_one_look_at_what_answers_there(
    capsys, fake, gateway, monkeypatch
):
    monkeypatch.delenv("HITHERTO_MODEL")
    url = fake({"/health": ""} | dict.fromkeys(("/v1/models", "/version", "/metrics", "/tokenize"), "<html>"))
    name, reason = url.removeprefix("http://"), "something else than the engine answers there"
    one = {"id": name, "url": url, "state": "warming", "reason": reason, "problems": ["KV events are off"]}
    gateway(status(ready=False, why_not=f"no replica is ready: {name} is warming ({reason})", replicas=[one]))
    code, found = examine(capsys, "--replica-url", url)
    assert code == 1 and found["replica"][0] == "fail" and f"warming: {reason}" in found["replica"][1]
    assert set(found) == {"config", "gateway", "replica"}, "nothing else is known of it"


def test_that_no_gateway_runs_stands_in_the_last_line_and_where_it_was_looked_for_in_its_own(capsys, engines):
    port = free_port()
    code, out = doctor_lines(capsys, "--replica-url", engines[0].url, "--admin-port", str(port))
    assert f" none runs with these settings at http://127.0.0.1:{port} (nothing listens there)\n" in out
    assert "      -> start it with `hitherto serve`" in out
    assert code == 0 and out.endswith("checks: 0 broken, 1 worth a look; no gateway runs with these settings\n")
    code, out = doctor_lines(capsys)
    assert code == 1 and out.endswith("1 worth a look; no gateway runs with these settings\n")


def test_a_gateway_that_hangs_is_restarted_and_keeps_its_port(capsys, engines, monkeypatch):
    """As a process that was stopped does: the kernel takes its connections, and nobody answers."""
    monkeypatch.setattr(gateway_checks, "ADMIN_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as clients, socket.create_server(("127.0.0.1", 0)) as admin:
        monkeypatch.setenv("HITHERTO_PORT", str(clients.getsockname()[1]))
        monkeypatch.setenv("HITHERTO_ADMIN_PORT", str(admin.getsockname()[1]))
        code, found = examine(capsys, "--replica-url", engines[0].url)
        _, out = doctor_lines(capsys, "--replica-url", engines[0].url)
    level, text = found["gateway"]
    assert code == 1 and level == "fail" and "holds the admin port" in text and "does not answer" in text
    assert "it hangs: save `py-spy dump --pid PID`" in text and "HithertoGatewayDown" in text
    assert "port" not in found and found["events"][0] == "ok", "the engines are looked at all the same"
    assert "no gateway runs" not in out

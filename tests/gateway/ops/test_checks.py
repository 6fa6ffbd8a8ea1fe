"""What `hitherto doctor` reads out of a running gateway's status."""

import pytest

from gateway import cli
from gateway.ops import checks
from gateway.ops.trial import Finding
from replicas import Replica, pairing, twins
from replicas.adopt import IS_GATEWAY, Facts
from replicas.engines.dialect import Told
from replicas.replica import parse_url
from replicas.twins import Name


def status(**changes) -> dict:
    replica = {"id": "a:1", "url": "http://a:1", "events": "live"}
    return {
        "ready": True,
        "why_not": None,
        "policy": "least_time",
        "totals": {"prompts": {"exact": 99, "load": 1}},
        "replicas": [replica],
        **changes,
    }


def told(running) -> list[Finding]:
    return list(checks.check_gateway(cli.load_config(cli._parse(["doctor"])).settings, running))


def test_what_a_running_gateway_says_of_itself():
    assert [finding.level for finding in told(status())] == ["ok"]
    (finding,) = told(status(ready=False, why_not="no replica is ready: a:1 is failed (exit code 1)"))
    assert finding.level == "fail" and "exit code 1" in finding.text
    assert [f.subject for f in told(status(totals={"prompts": {"exact": 50, "load": 50}}))] == ["gateway", "prompts"]
    why = "none of the engine's layers has full attention"
    page = {"id": "a:1", "url": "http://a:1", "events": "unobserved", "events_reason": why}
    unobserved = told(status(replicas=[page]))
    assert [(f.level, f.subject) for f in unobserved] == [("ok", "gateway"), ("fail", "events a:1")]
    assert why in unobserved[1].text


def test_what_a_running_gateway_says_of_redis_and_of_its_own_background_work():
    redis = {"ledger_joined": True, "ledger_reason": "joined", "trouble": ""}
    assert [finding.level for finding in told(status(map={"redis": redis}, background_failures={}))] == ["ok"]
    _, map_, ledger = told(
        status(
            map={"redis": redis | {"ledger_joined": False, "ledger_reason": "READONLY", "trouble": "leases: NOPERM"}}
        )
    )
    assert (map_.level, map_.subject) == ("fail", "redis: map") and "NOPERM" in map_.text
    assert (ledger.level, ledger.subject) == ("fail", "redis: ledger") and "READONLY" in ledger.text
    _, failed = told(
        status(background_failures={"shared map: publish": {"failures": 3, "last": "KeyError: 7", "seconds_ago": 2.0}})
    )
    assert (
        failed.level == "fail" and "shared map: publish failed 3 times" in failed.text and "KeyError: 7" in failed.text
    )


def test_a_file_that_the_running_gateway_cannot_use_is_said_whatever_the_doctor_was_given():
    limits = {"joined": None, "reason": "counted by this gateway alone", "gateways": 1}
    usable = {"api_keys": {"problem": "", "limits": limits}, "tls": None}
    assert [finding.level for finding in told(status(**usable))] == ["ok"]
    _, keys, tls = told(
        status(api_keys=usable["api_keys"] | {"problem": "keys.yaml:2: sha256: is missing"}, tls={"problem": "no PEM"})
    )
    assert (keys.level, keys.subject) == ("fail", "api keys") and "keys.yaml:2: sha256: is missing" in keys.text
    assert (tls.level, tls.subject) == ("fail", "tls") and "no PEM" in tls.text


def test_an_engine_that_is_for_another_role_than_its_url_says():
    facts = Facts(told=Told(role="decode"))
    found = list(checks.check_own_words(parse_url("http://a:1#role=prefill"), facts))
    assert [(one.level, one.subject) for one in found] == [("warn", "role a:1")] and "role=decode" in found[0].text
    for right in ("http://a:1", "http://a:1#role=decode"):
        assert not list(checks.check_own_words(parse_url(right), facts))


def of_model(root: str | None, *names: str) -> Facts:
    return Facts(alive=True, serving=True, root=root, models=dict.fromkeys(names))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((of_model("/m", "a"), of_model("/m", "b")), "one model by different names"),
        ((of_model("/m", "a", "b"), of_model("/n", "b")), "one model by different names"),
        ((of_model("/m", "a"), of_model("/n", "b", "c"), of_model(None, "c", "a")), "one model by different names"),
        ((of_model("/m", "a"), of_model("/n", "b")), "different models"),
        ((of_model(None, "a"), of_model(None, "b")), "different models"),
        ((of_model("/m", "a"), of_model("/n", "a")), "all 2 replicas serve a"),
    ],
)
def test_replicas_are_of_one_model_where_they_share_a_name_or_what_they_were_started_from(found, said):
    """As the gateway counts them, which refuses a prompt without a name only where there are several."""
    one = checks.check_models([(parse_url(f"http://a:{port}"), facts) for port, facts in enumerate(found, 1)])
    assert said in one.text and one.text.count("share") == (not said.startswith("all"))
    assert ("names none is refused" in (one.remedy or "")) == (said == "different models")


def test_an_engine_that_is_given_by_two_names_is_named():
    given = [Name("a:1", "127.0.0.1", 1, 5.25), Name("b:1", "10.0.0.1", 1, 5.25), Name("c:1", "::1", 1, 5.25)]
    others = [Name("a:2", "127.0.0.1", 2, 5.75), Name("d:1", "10.0.0.9", 1, None)]
    assert not list(checks.check_twice([*given[:1], *others]))
    [finding] = checks.check_twice([*given, *others])
    assert finding == checks.Finding("warn", "twice a:1", "the same engine is also given as b:1 and c:1: its load and its cache count "
                       "under each name", "give an engine once, by one of its names")  # fmt: skip


def test_an_address_that_several_names_lead_to_is_a_guess_unless_their_processes_tell():
    at = [("10.0.0.1", 1), ("10.0.0.1", 1)]
    named = lambda *created: [Name(id, *place, one) for id, place, one in zip("ab", at, created, strict=True)]  # noqa: E731
    for unsure in (named(None, None), named(5.25, None)):
        [finding] = checks.check_twice(unsure)
        assert "b leads to 10.0.0.1:1 as well: if no proxy there tells engines apart by name, it is one" in finding.text
    assert not list(checks.check_twice(named(5.25, 5.75))), "a proxy is there"


def test_of_three_names_at_one_place_each_is_told_what_is_sure_or_else_the_guess():
    at = lambda *created: [Name(id, "10.0.0.1", 1, one) for id, one in zip("abc", created, strict=True)]  # noqa: E731
    guess = "{} lead to 10.0.0.1:1 as well: if no proxy there tells engines apart by name, all of them are one engine that counts under each name"
    sure = "the same engine is also given as {}: its load and its cache count under each name"
    told = lambda names: [(id, problem.what) for id, problem in twins.complaints(names)]  # noqa: E731
    assert told(at(None, None, None)) == [(a, guess.format(f"{b} and {c}")) for a, b, c in ("abc", "bac", "cab")]
    assert told(at(5.25, 5.25, None)) == [
        ("a", sure.format("b")),
        ("b", sure.format("a")),
        ("c", guess.format("a and b")),
    ]
    assert [one.subject for one in checks.check_twice(at(5.25, 5.25, None))] == ["twice a", "twice c"]


def test_an_engine_whose_other_name_only_the_gateway_knows_is_told_by_it():
    names = {id: Name(id, "10.0.0.1", 1, 5.25) for id in ("a:1", "b:1")}
    problems = {id: [str(problem)] for id, problem in twins.complaints(names.values())}
    running = {"replicas": [{"id": id, "url": f"http://{id}", "problems": problems[id]} for id in problems]}
    seen = list(checks.check_seen_by_gateway(running, [], (), [names["a:1"]]))
    assert [one.subject for one in seen] == ["traffic a:1", "traffic b:1"], "b:1 was added with POST /replicas"
    assert "also given as a:1" in seen[1].text
    assert not list(checks.check_seen_by_gateway(running, [], (), reversed(names.values()))), "check_twice says it"


@pytest.mark.parametrize("continues", (False, True))
def test_variants_that_do_not_go_on_with_each_others_streams_are_named(continues):
    space = {"models": ["m"], "directory": None, "block_size": 16, "max_model_len": None, "versions": [], "variants": 2}
    running = {"spaces": [{**space, "replicas": ["a:1"]}, {**space, "replicas": ["b:1"], "block_size": 32}]}
    [finding] = checks.check_variants(running, continues)
    assert "a:1 (blocks of 16" in finding.text and "b:1 (blocks of 32" in finding.text
    assert ("by a replica of its own variant alone" in finding.text) is continues
    assert "two legs" not in finding.text
    running["replicas"] = [{"id": "a:1", "role": "both"}, {"id": "b:1", "role": "decode"}]
    [finding] = checks.check_variants(running, continues)
    assert "both legs of a request are at replicas of one of them" in finding.text


@pytest.mark.parametrize("dtype", (None, "float16"))
def test_what_engines_do_not_tell_of_a_transfer_is_said_to_be_left_to_the_trial(dtype):
    traits = pairing.Traits(*["alike"] * 6, block_size=16)._replace(dtype=dtype)
    roles = [
        Replica(f"{role}:1", f"http://{role}:1", role, 1, role=role, declared=traits) for role in ("prefill", "decode")
    ]
    found = checks.check_roles(roles)
    assert found.level == "ok" and ("not dtype, which" in found.text) is (dtype is None)
    assert "attention_backend" not in found.text


def test_a_gateway_that_is_given_as_a_replica_is_not_to_be_started():
    found = checks.check_reached(parse_url("http://a:1"), Facts(fault="refused", error=IS_GATEWAY))
    assert found.level == "fail" and "engines behind that gateway" in found.remedy and "start it" not in found.remedy
    assert (
        "start it"
        in checks.check_reached(parse_url("http://a:1"), Facts(fault="connect", error="nothing listens")).remedy
    )

"""What `hitherto doctor` finds in the replicas' own words, each alone and beside the others."""

import pytest
from aiohttp import web

from gateway.ops import replicas_check
from gateway.ops.trial import Finding
from replicas import Replica, pairing
from replicas.adopt import IS_GATEWAY, Facts
from replicas.duplicates import Name, duplicate
from replicas.problems import Problem
from replicas.replica import parse_url


def test_what_an_engine_tells_of_itself_is_said_with_its_remedy():
    facts = Facts(problems={"role": Problem("it is for one leg alone", "start it for both"), "events": Problem("", "")})
    [found] = replicas_check.check_own_words(parse_url("http://a:1"), facts)
    assert found == Finding("warn", "role a:1", "it is for one leg alone", "start it for both")


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
        ((of_model("/m", "a"), of_model("/n", "a")), "all 2 replicas that answer serve a"),
        ((of_model(None), of_model("/m", "a"), of_model("/m", "a")), "all 2 replicas that tell a model serve a"),
        ((of_model(None), of_model(None)), "all 2 replicas that answer serve unnamed models"),
    ],
)
def test_replicas_are_of_one_model_where_they_share_a_name_or_what_they_were_started_from(found, said):
    """As the gateway counts them, which refuses a prompt without a name only where there are several."""
    one = replicas_check.check_models([(parse_url(f"http://a:{port}"), facts) for port, facts in enumerate(found, 1)])
    assert said in one.text and one.text.count("share") == (not said.startswith("all"))
    assert ("names none is refused" in (one.remedy or "")) == (said == "different models")


def test_a_replica_that_tells_no_model_is_of_the_only_one_that_others_tell():
    """It wants an API key that the doctor has not, and its prompts are no reason to speak of another model."""
    locked, first, other = of_model(None), of_model("/m", "a"), of_model("/n", "b")
    groups = lambda *found: [[facts for _, facts in group] for group in replicas_check.by_model([*enumerate(found)])]  # noqa: E731
    assert groups(locked, first, first) == [[first, first, locked]]
    assert groups(locked, first, other) == [[first], [other], [locked]]


def test_an_engine_that_is_given_by_two_names_is_named():
    given = [Name("a:1", "127.0.0.1", 1, 5.25), Name("b:1", "10.0.0.1", 1, 5.25), Name("c:1", "::1", 1, 5.25)]
    others = [Name("a:2", "127.0.0.1", 2, 5.75), Name("d:1", "10.0.0.9", 1, None)]
    assert not list(replicas_check.check_duplicates([*given[:1], *others]))
    [finding] = replicas_check.check_duplicates([*given, *others])
    assert finding == Finding("warn", "twice a:1", "the same engine is also given as b:1 and c:1: its load and its cache count "
                       "under each name", "give an engine once, by one of its names")  # fmt: skip


def test_one_address_of_several_names_counts_where_a_process_does_not_tell():
    at = [("10.0.0.1", 1), ("10.0.0.1", 1)]
    named = lambda *created: [Name(id, *place, one) for id, place, one in zip("ab", at, created, strict=True)]  # noqa: E731
    for unsure in (named(None, None), named(5.25, None)):
        [finding] = replicas_check.check_duplicates(unsure)
        assert finding.text == (
            "by its address and port it may be the same engine as b: then its load and its cache count under each name"
        )
        assert finding.remedy == "if it is one engine, give it once, by one of its names"
    assert not list(replicas_check.check_duplicates(named(5.25, 5.75))), "a proxy is there"
    three = [Name(id, *at[0], None) for id in "abc"]
    assert [one.subject for one in replicas_check.check_duplicates(three)] == ["twice a"]
    assert "may be the same engine as a and b: " in str(duplicate(three[2], three))
    mixed = [*named(5.25, 5.25), Name("c", *at[0], None)]
    told = [(one.subject, one.text.split(":")[0]) for one in replicas_check.check_duplicates(mixed)]
    assert told == [
        ("twice a", "the same engine is also given as b"),
        ("twice c", "by its address and port it may be the same engine as a and b"),
    ]


@pytest.mark.parametrize("dtype", (None, "float16"))
def test_what_engines_do_not_tell_of_a_transfer_is_said_to_be_left_to_the_trial(dtype):
    traits = pairing.Traits(*["alike"] * 6, block_size=16)._replace(dtype=dtype)
    roles = [
        Replica(f"{role}:1", f"http://{role}:1", role, 1, role=role, declared=traits) for role in ("prefill", "decode")
    ]
    found = replicas_check.check_roles(roles)
    assert found.level == "ok" and ("not dtype, which" in found.text) is (dtype is None)
    assert "attention_backend" not in found.text


def test_a_gateway_that_is_given_as_a_replica_is_not_to_be_started():
    found = replicas_check.check_reached(parse_url("http://a:1"), Facts(fault="refused", error=IS_GATEWAY))
    assert found.level == "fail" and "engines behind that gateway" in found.remedy and "start it" not in found.remedy
    assert (
        "start it"
        in replicas_check.check_reached(parse_url("http://a:1"), Facts(fault="connect", error="nothing listens")).remedy
    )


async def test_clocks_that_differ(monkeypatch):
    from replicas.access import Access

    async def health(request):
        return web.Response(headers={"Date": "Thu, 01 Jan 2026 00:00:00 GMT"})

    app = web.Application()
    app.add_routes([web.get("/health", health)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    way = Access(f"http://127.0.0.1:{runner.addresses[0][1]}", "127.0.0.1")
    moment = 1767225600.0  # the same in seconds since 1970
    try:
        for offset, level in ((0.5, "ok"), (-1.5, "ok"), (60.0, "warn"), (-60.0, "warn")):
            monkeypatch.setattr(replicas_check.time, "time", lambda offset=offset: moment + offset)
            finding = await replicas_check.check_clock({"a": way})
            assert finding.level == level, offset
    finally:
        await way.close()
    assert "60 s" in finding.text and "NTP" in finding.remedy
    await runner.cleanup()

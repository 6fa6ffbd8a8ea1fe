"""What `hitherto doctor` finds in the replicas' own words, each alone and beside the others."""

import pytest

from gateway.ops.findings import Finding
from gateway.ops.replica_checks import Engine, Engines, Model, by_model
from replicas import Replica, pairing
from replicas.adopt import IS_GATEWAY, Facts
from replicas.duplicates import Name, duplicate
from replicas.problems import Problem

from .examined import an_engine, found_in


def test_what_an_engine_tells_of_itself_is_said_with_its_remedy():
    facts = Facts(
        serving=True,
        problems={"role": Problem("it is for one leg alone", "start it for both"), "events": Problem("", "")},
    )
    [found] = found_in(an_engine("http://a:1", facts), "problems")
    assert found == Finding("warn", "it is for one leg alone", "start it for both", "role a:1")


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
    serving = [an_engine(f"http://a:{port}", facts) for port, facts in enumerate(found, 1)]
    [one] = found_in(Engines(serving[0].settings, serving), "models")
    assert said in one.text and one.text.count("share") == (not said.startswith("all"))
    assert ("names none is refused" in one.remedy) == (said == "different models")


def test_a_replica_that_tells_no_model_is_of_the_only_one_that_others_tell():
    """It wants an API key that the doctor has not, and its prompts are no reason to speak of another model."""
    locked, first, other = of_model(None), of_model("/m", "a"), of_model("/n", "b")

    def groups(*found):
        return [[one.facts for one in group] for group in by_model(an_engine("http://a:1", facts) for facts in found)]

    assert groups(locked, first, first) == [[first, first, locked]]
    assert groups(locked, first, other) == [[first], [other], [locked]]


def given_as(monkeypatch, *names: Name) -> list[Finding]:
    """What is found where engines are known by these names."""
    engines = [an_engine(f"http://{one.id}", Facts(serving=True)) for one in names]
    by_id = {one.id: one for one in names}
    monkeypatch.setattr(Engine, "name", property(lambda engine: by_id[engine.id]))
    return found_in(Engines(engines[0].settings, engines), "twice")


def test_an_engine_that_is_given_by_two_names_is_named(monkeypatch):
    given = [Name("a:1", "127.0.0.1", 1, 5.25), Name("b:1", "10.0.0.1", 1, 5.25), Name("c:1", "::1", 1, 5.25)]
    others = [Name("a:2", "127.0.0.1", 2, 5.75), Name("d:1", "10.0.0.9", 1, None)]
    assert not given_as(monkeypatch, *given[:1], *others)
    [finding] = given_as(monkeypatch, *given, *others)
    assert finding == Finding("warn", "the same engine is also given as b:1 and c:1: its load and its cache count "
                       "under each name", "give it once, by one of its names", "twice a:1")  # fmt: skip


def test_one_address_of_several_names_counts_where_a_process_does_not_tell(monkeypatch):
    def found(*created):
        return given_as(monkeypatch, *(Name(f"{id}:1", "10.0.0.1", 1, one) for id, one in zip("abc", created)))

    for unsure in (None, None), (5.25, None):
        [finding] = found(*unsure)
        assert finding.text == (
            "by its address and port it may be the same engine as b:1: then its load and its cache count under each name"
        )
        assert finding.remedy == "if it is one engine, give it once, by one of its names"
    assert not found(5.25, 5.75), "a proxy is there"
    assert [one.subject for one in found(None, None, None)] == ["twice a:1"]
    three = [Name(id, "10.0.0.1", 1, None) for id in "abc"]
    assert "may be the same engine as a and b: " in str(duplicate(three[2], three))
    told = [(one.subject, one.text.rpartition(":")[0]) for one in found(5.25, 5.25, None)]
    assert told == [
        ("twice a:1", "the same engine is also given as b:1"),
        ("twice c:1", "by its address and port it may be the same engine as a:1 and b:1"),
    ]


@pytest.mark.parametrize("dtype", (None, "float16"))
def test_what_engines_do_not_tell_of_a_transfer_is_said_to_be_left_to_the_trial(dtype, monkeypatch):
    traits = pairing.Traits(*["alike"] * 6, block_size=16)._replace(dtype=dtype)
    roles = [
        Replica(f"{role}:1", f"http://{role}:1", role, 1, role=role, declared=traits) for role in ("prefill", "decode")
    ]
    engines = [an_engine(one.url) for one in roles]
    monkeypatch.setattr(Engine, "replicas", property(lambda engine: [roles[engines.index(engine)]]))
    [found] = found_in(Model(engines), "roles")
    assert found.level == "ok" and ("not dtype, which" in found.text) is (dtype is None)
    assert "attention_backend" not in found.text


def test_a_gateway_that_is_given_as_a_replica_is_not_to_be_started():
    [found] = found_in(an_engine("http://a:1", Facts(fault="refused", error=IS_GATEWAY)), "replica")
    assert found.level == "fail" and "engines behind that gateway" in found.remedy and "start it" not in found.remedy
    [found] = found_in(an_engine("http://a:1", Facts(fault="connect", error="nothing listens")), "replica")
    assert "start it" in found.remedy

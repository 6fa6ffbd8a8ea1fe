"""Which model's replicas a request may go to, by the names that engines tell."""

from gateway import routes
from gateway.models import Models
from gateway.prompt.pipeline import Pipeline
from gateway.routes import Routes
from gateway.spaces import Member
from replicas import Replica, State


def member(space, number, names, context):
    replica = Replica(f"127.0.0.1:{number}", f"http://127.0.0.1:{number}", "127.0.0.1", number)
    replica.state, replica.models = State.READY, dict.fromkeys(names)
    made = Member(replica, space=space, served=frozenset(names), context=context)
    space.members[replica.id] = made
    space.names |= set(names)
    return made


def test_what_replicas_of_many_names_have_in_common_is_found_once(monkeypatch):
    """Of an engine that listed 100,000 names each was compared with all, and the gateway stood still for minutes."""
    asked = []
    found = routes._contexts
    monkeypatch.setattr(routes, "_contexts", lambda *given: asked.append(given) or found(*given))
    (space,) = Models.of(Pipeline(None, "m", 16)).spaces
    members = [member(space, 1, ["a", *map(str, range(1000))], 4096), member(space, 2, ["a"], 8192)]
    made = Routes([space], members)
    assert len(asked) <= 2  # for these spaces, and for none
    assert {made.contexts[name] for name in ("a", "7")} == {(4096, 8192)}
    known, unknown = (
        made.prepare("/v1/completions", b'{"model": "%b", "prompt": "x"}' % name, None, ())
        for name in (b"999", b"1000")
    )
    assert known.mode == "text" and unknown.note == "no replica is known to serve its model"

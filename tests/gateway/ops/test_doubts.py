"""Which kinds of bodies an engine's counts make inexact."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.ops.doubts import ENOUGH, MOST_KINDS, Doubts
from gateway.prompt import Prompt

CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"


def prompt(path: str, tokens: int) -> Prompt:
    return Prompt(path, "", tokens=tokens)


def test_clients_that_name_many_kinds_make_no_more_of_another_api_inexact():
    doubts = Doubts()
    for i in range(MOST_KINDS):
        doubts.miscounted(frozenset((CHAT, f"field{i}=")), prompt(CHAT, i), "one")
    for _ in range(2):
        doubts.miscounted(frozenset((MESSAGES, "user")), prompt(MESSAGES, 5), "two")
    assert not doubts.held, "it was the same body twice"
    doubts.miscounted(frozenset((MESSAGES, "user")), prompt(MESSAGES, 6), "two")
    assert set(doubts.held) == {frozenset((MESSAGES,))}
    assert not any(known <= {COMPLETIONS, "text"} for known in doubts.kinds)
    doubts.miscounted(frozenset((CHAT, "another=")), prompt(CHAT, 99), "three")
    assert doubts.held[frozenset((CHAT,))] == "three" and len(doubts.kinds) < 5


FEATURES = st.frozensets(st.sampled_from("abcdefgh"), max_size=5)
EVENTS = st.tuples(
    st.sampled_from((CHAT, MESSAGES, COMPLETIONS)),
    st.one_of(FEATURES, st.none(), st.integers(0, 300).map(lambda i: frozenset((f"field{i}=",)))),
    st.integers(0, 3),
    st.booleans(),
)


@given(st.lists(EVENTS, max_size=200))
def test_no_kind_covers_all_apis_and_only_a_second_body_makes_one_inexact(events):
    doubts, miscounted = Doubts(), 0
    for path, features, tokens, alike in events:
        body = None if features is None else features | {path}
        if alike and body is not None:
            doubts.counted_alike(body)
        else:
            miscounted += 1
            doubts.miscounted(body, prompt(path, tokens), "why")
        assert len(doubts.kinds) <= MOST_KINDS + 3
        assert all(len(known & {CHAT, MESSAGES, COMPLETIONS}) == 1 for known in doubts.kinds)
        assert 2 * len(doubts.held) <= miscounted
    for _ in range(ENOUGH):
        for known in list(doubts.kinds):
            doubts.counted_alike(known)
    assert not doubts.kinds

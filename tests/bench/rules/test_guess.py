"""The peers' tree of what was sent, as a dict: longest prefix, least recently used out, never a hole."""

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.rules.guess import Guess

from .fleets import chain


def test_a_prompt_that_was_sent_is_matched_as_far_as_it_is_the_same():
    guess, prompt = Guess(100), chain(5)
    guess.add("a", prompt)
    assert guess.blocks("a", prompt) == 5
    assert guess.blocks("a", chain(9, after=prompt[:3])) == 3
    assert guess.blocks("a", prompt[:2]) == 2
    assert guess.blocks("a", chain(4)) == guess.blocks("a", []) == guess.blocks("b", prompt) == 0


def test_the_least_recently_sent_prompt_goes_first_and_a_shared_beginning_stays():
    guess, old = Guess(20), chain(4)
    fork, others = chain(4, after=old[:2]), [chain(2) for _ in range(7)]
    for prompt in (old, *others[:3], fork, *others[3:]):
        guess.add("a", prompt)
    assert guess.size("a") == 20 and guess.blocks("a", old) == 4, "all of it fits"
    guess.add("a", chain(2))
    assert guess.size("a") <= 18 and [guess.blocks("a", prompt) for prompt in others] == [0, 2, 2, 2, 2, 2, 2]
    assert guess.blocks("a", old) == 2 and guess.blocks("a", fork) == 4, (
        "the shared blocks were sent later than old's own"
    )


def test_a_prompt_longer_than_all_that_is_kept_is_kept_at_its_beginning():
    guess, prompt = Guess(4), chain(9)
    guess.add("a", prompt)
    assert guess.blocks("a", prompt) == 4


def test_a_replica_that_leaves_is_forgotten():
    guess, prompt = Guess(10), chain(3)
    guess.add("a", prompt)
    guess.forget("a")
    guess.forget("never seen")
    assert guess.blocks("a", prompt) == guess.size("a") == 0


@settings(max_examples=60)
@given(st.integers(4, 30), st.lists(st.tuples(st.integers(0, 8), st.integers(1, 9)), max_size=40))
def test_it_stays_bounded_and_has_no_holes(limit, prompts):
    """Each prompt goes on from a prefix of an earlier one, as conversations and forks do."""
    guess, sent = Guess(limit), [[]]
    for shared, further in prompts:
        before = sent[shared % len(sent)][: 2 * shared]
        sent.append(chain(len(before) + further, after=before))
        guess.add("a", sent[-1])
        assert guess.size("a") <= limit
    for prompt in sent:
        known = guess.blocks("a", prompt)
        assert [guess.blocks("a", prompt[: end + 1]) == end + 1 for end in range(len(prompt))] == [
            place < known for place in range(len(prompt))
        ]

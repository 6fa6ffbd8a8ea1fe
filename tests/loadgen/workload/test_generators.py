"""Each made-up load shares what it says, and is as large as asked."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workload import generators
from loadgen.workload.conversations import Conversation, Turn, spans_of

ALL = (generators.prefix_repetition, generators.random_tokens, generators.chat, generators.rag, generators.agents,
       generators.rollouts)  # fmt: skip


def every(conversations: list[Conversation]) -> list[Conversation]:
    """With the forks, each after the conversation that it left."""
    return [
        one
        for conversation in conversations
        for one in (conversation, *every([fork for turn in conversation.turns for fork in turn.forks]))
    ]


def turns(conversations) -> list[Turn]:
    return [turn for conversation in every(conversations) for turn in conversation.turns]


def says(turn: Turn) -> list[tuple[int, int]]:
    return [(span.ids[0], span.length) for span in spans_of(turn.messages)]


@pytest.mark.parametrize("make", ALL)
@settings(max_examples=15)
@given(requests=st.integers(1, 60), seed=st.integers(0, 1000))
def test_as_many_requests_as_asked_and_the_same_again(make, requests, seed):
    made = make(random.Random(seed), requests)
    assert sum(conversation.requests for conversation in made) == len(turns(made)) == requests
    assert made == make(random.Random(seed), requests)
    names = [conversation.id for conversation in every(made)]
    assert len(set(names)) == len(names)
    for turn in turns(made):
        assert turn.max_tokens >= 1 and all(span.length > 0 for span in spans_of(turn.messages))


@pytest.mark.parametrize("make", ALL)
def test_a_name_always_has_one_length(make):
    lengths = {}
    for turn in turns(make(random.Random(1), 80)):
        for span in spans_of([*turn.messages, turn.reply or {}]):
            assert lengths.setdefault(span.ids[0], span.length) == span.length


def test_no_sharing_at_all():
    names = [name for turn in turns(generators.random_tokens(random.Random(0), 200)) for name, _ in says(turn)]
    assert len(set(names)) == len(names) == 200


@pytest.mark.parametrize("zipf, ratio", [(0.0, 1.0), (1.0, 2.0)])
def test_popularity_follows_zipf(zipf, ratio):
    made = generators.prefix_repetition(random.Random(0), 20_000, num_prefixes=5, zipf=zipf)
    asked = Counter(says(turn)[0][0] for turn in turns(made))
    assert len(asked) == 5
    assert asked[0] / asked[1] == pytest.approx(ratio, rel=0.1)


def test_lengths_vary_as_far_as_asked():
    made = turns(generators.random_tokens(random.Random(0), 500, suffix_len=1000, range_ratio=0.2))
    lengths = [says(turn)[0][1] for turn in made]
    assert 800 <= min(lengths) < 810 and 1190 < max(lengths) <= 1200
    assert {says(turn)[0][1] for turn in turns(generators.random_tokens(random.Random(0), 9, suffix_len=77))} == {77}


def test_a_chat_goes_on_after_its_replies_with_time_to_think():
    made = generators.chat(random.Random(0), 2000, turns=6, think_time=5.0)
    assert all(turn.reply["role"] == "assistant" for turn in turns(made))
    assert sum(turn.think for turn in turns(made)) / 2000 == pytest.approx(5.0, rel=0.1)
    assert {len(turn.messages) for conversation in made for turn in conversation.turns[1:]} == {1}
    assert made[0].turns[0].messages[0]["role"] == "system"


def test_rag_draws_passages_again_and_none_twice_in_a_prompt():
    made = turns(generators.rag(random.Random(0), 300, num_prefixes=50, documents_per_prompt=4))
    found = [[name for name, _ in says(turn)] for turn in made]
    assert all(len(set(names)) == len(names) == 1 + 4 + 1 for names in found)
    assert len({names[0] for names in found}) == 1  # instructions
    assert len({name for names in found for name in names[1:5]}) == 50
    assert len(turns(generators.rag(random.Random(0), 3, num_prefixes=2, documents_per_prompt=4))) == 3


def test_agents_share_tools_and_fork():
    made = generators.agents(random.Random(0), 600, num_prefixes=3, forks=2)
    assert len({says(conversation.turns[0])[0] for conversation in made}) == 3
    forked = [turn for turn in turns(made) if turn.forks]
    assert len(forked) > len(made) / 4
    assert max(len(turn.forks) for turn in forked) == 2
    assert not any(turn.forks for turn in turns(fork for one in forked for fork in one.forks))  # no forks of forks


def test_rollouts_sample_each_task_and_go_on_for_twenty_to_sixty_turns():
    made = generators.rollouts(random.Random(0), 4000, best_of=4)
    assert {len(conversation.turns) for conversation in made[:-1]} <= set(range(20, 61))
    tasks = [says(conversation.turns[0]) for conversation in made]
    assert tasks[0] == tasks[3] != tasks[4] == tasks[7]
    assert tasks[0][0] == tasks[4][0], "one set of instructions"
    later = [says(turn) for conversation in made for turn in conversation.turns[1:]]
    assert all(len(spans) == 1 for spans in later) and len({spans[0][0] for spans in later}) == len(later)
    assert all(conversation.turns[0].think == 0 for conversation in made)


def test_replies_of_rollouts_have_the_mean_and_the_tail_asked_for():
    lengths = [turn.max_tokens for turn in turns(generators.rollouts(random.Random(0), 20_000, output_len=200))]
    assert sum(lengths) / len(lengths) == pytest.approx(200, rel=0.1)
    assert max(lengths) > 8 * 200 > 16 * 200 - max(lengths) >= 0
    even = turns(generators.rollouts(random.Random(0), 100, output_len=200, output_sigma=0.0))
    assert {turn.max_tokens for turn in even} == {200}


def test_coding_agents_are_rollouts_of_one_sample():
    made = generators.rollouts(random.Random(0), 400, best_of=1)
    tasks = [tuple(says(conversation.turns[0])) for conversation in made]
    assert len(set(tasks)) == len(tasks)

"""Files of requests: what becomes of good lines, and what is said of bad ones."""

import gzip
import itertools
import json
import os
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemap import chain_seed, hash_blocks
from loadgen.workload.conversations import BadWorkload, Span, spans_of
from loadgen.workload.files import Reader
from loadgen.workload.synthetic import token_ids
from loadgen.workload.traces import azure_trace, conversation_file, guess, hash_trace, replay


def write(path, *lines, compress=False):
    data = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()
    path.write_bytes(gzip.compress(data) if compress else data)
    return path


def u(text):
    return {"role": "user", "content": text}


def a(text, **more):
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("compress, name", [(False, "x.jsonl"), (True, "x.jsonl.gz")])
def test_a_file_becomes_turns(tmp_path, compress, name):
    call = a(None, tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}])
    system, result = {"role": "system", "content": "s"}, {"role": "tool", "tool_call_id": "1", "content": "r"}
    messages = [system, u("q1"), a("12345678"), u("q2"), call, result, a("end"), u("bye")]
    lines = [{"id": "one", "messages": messages, "tools": [{"f": 1}]}, "", [u("q"), a("x" * 400)]]
    path = write(tmp_path / name, *lines, compress=compress)
    made = {item.id: item for item in conversation_file(path, None, None, 0.0, random.Random(0))}
    one, other = made["one"], made["line-3"]
    assert [len(turn.messages) for turn in one.turns] == [2, 1, 1, 1]
    assert [turn.reply for turn in one.turns] == [a("12345678"), call, a("end"), None]
    assert one.turns[0].max_tokens == 2 and other.turns[0].max_tokens == 100
    assert one.extra == {"tools": [{"f": 1}]} and other.extra == {}


def test_a_file_is_cut_or_repeated_to_the_number_of_requests(tmp_path):
    path = write(tmp_path / "x.jsonl", *([u("q"), a("r"), u("q"), a("r")] for _ in range(3)))
    for requests in (1, 5, 6, 7, 20):
        made = conversation_file(path, requests, 9, 1.0, random.Random(0))
        assert sum(len(item.turns) for item in made) == requests
        assert len({item.id for item in made}) == len(made)
        assert all(turn.max_tokens == 9 for item in made for turn in item.turns)


@pytest.mark.parametrize(
    "line, why",
    [
        ("{", "line 2: not JSON"),
        ("3", "line 2: expected"),
        ({"messages": 3}, "line 2: expected"),
        ({"messages": [3]}, 'line 2: every message is an object with a "role"'),
        ({"messages": [{"content": "x"}]}, "line 2: every message"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, why):
    path = write(tmp_path / "x.jsonl", [u("q")], line)
    with pytest.raises(BadWorkload, match=why):
        conversation_file(path, None, None, 0.0, random.Random(0))


def test_files_that_are_no_use(tmp_path):
    with pytest.raises(BadWorkload, match="No such file"):
        conversation_file(tmp_path / "none.jsonl", None, None, 0.0, random.Random(0))
    system = write(tmp_path / "x.jsonl", [{"role": "system", "content": "s"}])
    with pytest.raises(BadWorkload, match="no conversation"):
        conversation_file(system, None, None, 0.0, random.Random(0))
    bad = tmp_path / "x.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(BadWorkload, match=r"x\.jsonl\.gz"):
        conversation_file(bad, None, None, 0.0, random.Random(0))


def line(at, length, ids, output=5, **more):
    return {"timestamp": at, "input_length": length, "output_length": output, "hash_ids": ids, **more}


def played(path, block=16, unit=1.0, requests=None, skip=False, output_len=None, **slice):
    reader = Reader(path, skip)
    return replay(hash_trace(reader, block, unit, output_len), reader, requests, random.Random(0), **slice)


def prompt(conversation) -> Span:
    (turn,) = conversation.turns
    (span,) = spans_of(turn.messages)
    return span


def common(one, other) -> int:
    shorter = min(len(one), len(other))
    return next((place for place in range(shorter) if one[place] != other[place]), shorter)


def test_a_trace_becomes_requests_at_their_times(tmp_path):
    path = write(tmp_path / "m.jsonl", line(500, 1024, [3, 4]), line(1500, 700, [3, 9], 0))
    load = played(path, 512, 1e-3)
    assert load.starts == [0.0, 1.0] and load.requests == 2 and load.notes == []
    assert [prompt(conversation).length for conversation in load.conversations] == [1024, 700]
    assert list(prompt(load.conversations[1]).ids) == [3, 9]
    assert [conversation.turns[0].max_tokens for conversation in load.conversations] == [5, 1]
    assert played(path, 512, output_len=9).conversations[0].turns[0].max_tokens == 9


@given(st.data())
def test_sharing_is_kept_to_the_token(tmp_path_factory, data):
    """Prompts that go on from prompts before them, as a trace has them: the common prefix is what ids and lengths
    say."""
    block, chains, lines = data.draw(st.sampled_from([16, 512])), [[]], []
    for name in range(data.draw(st.integers(2, 8))):
        chain = [*data.draw(st.sampled_from(chains)), *range(100 * name + 1, 100 * name + data.draw(st.integers(2, 4)))]
        chains.append(chain)
        lines.append(line(name, (len(chain) - 1) * block + data.draw(st.integers(1, block)), chain))
    load = played(write(tmp_path_factory.mktemp("t") / "t.jsonl", *lines), block)
    tokens = [token_ids([prompt(conversation)]) for conversation in load.conversations]
    for one, first in zip(lines, tokens):
        assert len(first) == one["input_length"]
        for other, second in zip(lines, tokens):
            said = min(block * common(one["hash_ids"], other["hash_ids"]), one["input_length"], other["input_length"])
            assert common(first, second) == said


def mooncake_like(requests: int, rng: random.Random) -> list[dict]:
    """Prompts of up to 40 ids of 512 tokens that grow from one another, on a clock of 3 s; a last id that is not full
    is nobody else's."""
    chains, ids, lines = [[0]], itertools.count(1), []
    for number in range(requests):
        shared = rng.choice(chains)
        chain = shared[: rng.randint(1, len(shared))] + [next(ids) for _ in range(rng.randint(1, 20))]
        chains.append(chain[:40])
        rest = rng.randint(1, 511)
        lines.append(line(3000 * (number // 8), 512 * len(chains[-1]) + rest, [*chains[-1], next(ids)]))
    return lines


def test_blocks_of_16_repeat_exactly_where_a_trace_repeats_its_512(tmp_path):
    load = played(write(tmp_path / "m.jsonl", *mooncake_like(400, random.Random(4))), 512, 1e-3)
    seen, names, seed, shared = set(), set(), chain_seed("m", 16), 0
    for conversation in load.conversations:
        span = prompt(conversation)
        hashes = hash_blocks(token_ids([span]).tobytes(), 16, seed)
        known = next((place for place, name in enumerate(span.ids) if name not in names), len(span.ids))
        assert sum(one in seen for one in hashes) == min(known * 32, len(hashes))
        seen.update(hashes)
        names.update(span.ids)
        shared += known
    assert shared > 400 and load.notes == [
        "400 requests have 50 different times: --trace-jitter 3 spreads them over the steps"
    ]


def test_chats_of_a_trace_carry_their_first_ones_name(tmp_path):
    parents = {1: -1, 2: 1, 3: -1, 4: 2, 5: 77}
    lines = (line(at, 20, [at, at + 9], chat_id=at, parent_chat_id=parent) for at, parent in parents.items())
    path = write(tmp_path / "b.jsonl", *lines)
    assert [conversation.id for conversation in played(path).conversations] == ["1", "1", "3", "1", "5"]


def test_what_has_no_id_is_shared_with_nobody(tmp_path):
    same, whole = line(0, 40, [1, 2]), line(0, 40, [1, 2, 3])
    path = write(tmp_path / "b.jsonl", same, same, {**same, "hash_ids": None}, whole)
    tokens = [token_ids([prompt(conversation)]) for conversation in played(path).conversations]
    assert all(len(one) == 40 for one in tokens)
    assert [common(tokens[0], other) for other in tokens[1:]] == [32, 0, 32]


def test_slices_speed_and_jitter(tmp_path):
    path = write(tmp_path / "t.jsonl", *(line(at, 16, [at]) for at in range(100, 200)))
    assert played(path, start=10, seconds=5).starts == [0, 1, 2, 3, 4]
    assert played(path, start=10, requests=2, speed=4).starts == [0, 0.25]
    moved = played(path, jitter=50, speed=2)
    assert moved.starts == sorted(moved.starts) and len(set(moved.starts)) == 100
    ahead = [at * 2 - (prompt(one).ids[0] - 100) for one, at in zip(moved.conversations, moved.starts)]
    assert 0 <= min(ahead) < 5 and 45 < max(ahead) < 50
    assert played(path, jitter=50, speed=2).starts == moved.starts
    with pytest.raises(BadWorkload, match="no request in that part of it"):
        played(path, start=1000)


def test_reading_ends_with_the_slice(tmp_path):
    path = write(tmp_path / "t.jsonl", line(0, 16, [1]), line(1, 16, [2]), "broken")
    assert played(path, requests=2).requests == 2
    with pytest.raises(BadWorkload, match="line 3"):
        played(path)


@pytest.mark.parametrize(
    "bad, why",
    [
        ("{", "not JSON"),
        ("[]", '"timestamp" is missing'),
        (line("soon", 16, [1]), "\"timestamp\" is 'soon' and no number"),
        (line(0, 0, [1]), '"input_length" is 0 and no number of tokens'),
        (line(0, 16.5, [1]), "no number of tokens"),
        (line(0, 16, [1], -1), '"output_length" is -1'),
        (line(0, 16, ["a"]), '"hash_ids" holds something that is no whole number'),
        (line(0, 16, [1.5]), "no whole number"),
        (line(0, 16, 7), '"hash_ids" has no list'),
        (line(0, 6758, list(range(14))), '"hash_ids" has 14 entries, but 6758 tokens are 423 blocks of 16'),
    ],
)
def test_a_bad_line_stops_or_is_left_out_as_asked(tmp_path, bad, why):
    path = write(tmp_path / "t.jsonl", line(0, 16, [1]), bad, "", line(1, 16, [2]))
    with pytest.raises(BadWorkload) as error:
        played(path)
    assert str(error.value).startswith(f"{path}, line 2: ") and why in str(error.value)
    load = played(path, skip=True)
    assert load.requests == 2
    assert load.notes[0] == f"{path}: 1 of 3 entries left out, for example:" and load.notes[1].startswith("line 2: ")


def test_a_trace_with_nothing_good_in_it_says_why(tmp_path):
    with pytest.raises(BadWorkload, match="2 of 2 entries left out.*line 1: not JSON"):
        played(write(tmp_path / "t.jsonl", "x", "y"), skip=True)


def test_a_compressed_file_that_ends_too_soon(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    lines = (line(at, 16, [at * random.Random(at).getrandbits(30)]) for at in range(2000))
    whole = write(path, *lines, compress=True).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(BadWorkload, match=r"t\.jsonl\.gz, after line \d+: Compressed file ended"):
        played(path)
    load = played(path, skip=True)
    assert 500 < load.requests < 1500 and "Compressed file ended" in load.notes[1]


def azure(path, skip=False):
    reader = Reader(path, skip)
    return replay(azure_trace(reader, None), reader, None, random.Random(0))


def test_azure_tells_times_and_lengths_and_shares_nothing(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,40,44\n2023-11-16 18:15:50.9951690,40,0\n"
        "2024-05-10 00:00:00.009930+00:00,7,1\n"
    )
    load = azure(path)
    assert load.starts[:2] == pytest.approx([0, 4.314579])
    assert [(prompt(one).length, one.turns[0].max_tokens) for one in load.conversations] == [(40, 44), (40, 1), (7, 1)]
    first, second = (token_ids([prompt(one)]) for one in load.conversations[:2])
    assert common(first, second) == 0


@pytest.mark.parametrize(
    "bad, why",
    [
        ("yesterday,1,1", "'yesterday' is no time"),
        ("2023-11-16,0,1", "'0' and '1' are no lengths"),
        ("2023-11-16,x,1", "'x' and '1' are no lengths"),
        ("2023-11-16,1", "2 columns where 3 are needed"),
    ],
)
def test_a_bad_row_of_azure(tmp_path, bad, why):
    path = tmp_path / "a.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,1,1\n{bad}\n")
    with pytest.raises(BadWorkload, match=f"line 3: {why}"):
        azure(path)
    assert azure(path, skip=True).requests == 1


def test_a_table_without_the_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(BadWorkload, match="line 1: expected the columns TIMESTAMP, ContextTokens, GeneratedTokens"):
        azure(path, skip=True)


def shared(*said: tuple[str, str]) -> list[dict]:
    return [{"from": who, "value": text} for who, text in said]


SHARED = [
    {"id": "x1", "conversations": shared(("human", "hä"), ("gpt", "12345678"), ("human", "q"))},
    {"conversations": shared(("system", "s"), ("user", "q"), ("assistant", "r"))},
]


@pytest.mark.parametrize("as_array", [True, False])
def test_sharegpt_whole_conversations(tmp_path, as_array):
    lines = [json.dumps(SHARED, ensure_ascii=False, indent=1)] if as_array else SHARED
    path = write(tmp_path / "s.json", *lines)
    made = {one.id: one for one in conversation_file(path, None, None, 0.0, random.Random(0))}
    assert sorted(made) == ["line-2", "x1"]
    assert [turn.messages for turn in made["x1"].turns] == [[u("hä")], [u("q")]]
    assert made["x1"].turns[0].reply == a("12345678") and made["x1"].turns[0].max_tokens == 2
    assert [message["role"] for message in made["line-2"].turns[0].messages] == ["system", "user"]


def test_a_bad_entry_of_sharegpt(tmp_path):
    path = write(tmp_path / "s.json", json.dumps([SHARED[0], {"conversations": [{"from": "human"}]}, {"x": 1}]))
    with pytest.raises(BadWorkload, match='entry 2: every message is an object with "from" and "value"'):
        conversation_file(path, None, None, 0.0, random.Random(0))
    reader = Reader(path, skip=True)
    assert len(conversation_file(path, None, None, 0.0, random.Random(0), reader=reader)) == 1
    assert (
        reader.notes()[2]
        == 'entry 3: expected {"messages": [...]} with OpenAI messages, {"conversations": [...]} or {"prompt": "..."}'
    )
    broken = write(tmp_path / "b.json", json.dumps(SHARED)[:-5])
    for reader in (Reader(broken), Reader(broken, skip=True)):
        with pytest.raises(BadWorkload, match="not JSON"):
            conversation_file(broken, None, None, 0.0, random.Random(0), reader=reader)


def test_vllms_custom_prompts(tmp_path):
    path = write(tmp_path / "c.jsonl", {"prompt": "one", "output_tokens": 10}, {"prompt": "two"})
    made = conversation_file(path, None, None, 0.0, random.Random(0), shuffle=False)
    assert [(one.turns[0].messages, one.turns[0].max_tokens) for one in made] == [([u("one")], 10), ([u("two")], 256)]
    with pytest.raises(BadWorkload, match='line 1: expected .*{"prompt": "..."}'):
        conversation_file(write(tmp_path / "d.jsonl", {"prompt": 3}), None, None, 0.0, random.Random(0))


def test_no_more_is_held_than_can_be_needed_and_every_line_has_its_chance(tmp_path):
    path = write(tmp_path / "c.jsonl", *({"prompt": str(number)} for number in range(40)))

    def drawn(seed, **how):
        made = conversation_file(path, 5, None, 0.0, random.Random(seed), **how)
        return [one.turns[0].messages[0]["content"] for one in made]

    assert drawn(0, shuffle=False) == ["0", "1", "2", "3", "4"]
    assert len(set(drawn(1))) == 5 and drawn(1) == drawn(1)
    assert {text for seed in range(60) for text in drawn(seed)} == {str(number) for number in range(40)}


@pytest.mark.parametrize(
    "first, name",
    [
        (json.dumps(line(0, 16, [1])), "mooncake"),
        (json.dumps(line(0, 16, [1], chat_id=1)), "bailian"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens", "azure"),
        ("[{", "conversations"),
        (json.dumps(SHARED), "conversations"),
        (json.dumps(SHARED[0]), "conversations"),
        ('{"prompt": "x"}', "conversations"),
        ('{"messages": []}', "conversations"),
        (json.dumps([u("x")]), "conversations"),
        ("Once upon a time", None),
        ("", None),
        ("{broken", "conversations"),
    ],
)
def test_what_a_file_is_shows_in_its_first_line(tmp_path, first, name):
    path = tmp_path / "file"
    path.write_text(f"\n{first}\nmore")
    assert guess(path) == name


def test_a_pipe_is_not_looked_into_before_it_is_read(tmp_path):
    """What was read to see what it is would be gone, and a pipe that nobody writes to would be waited for."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadWorkload, match="pipe: it is a pipe, which cannot be read more than once; name a trace"):
        guess(tmp_path / "pipe")


def test_ids_are_held_in_as_few_bytes_as_they_need(tmp_path):
    load = played(write(tmp_path / "t.jsonl", line(0, 32, [1, 2]), line(0, 32, [1, 1 << 40])))
    assert [prompt(one).ids.typecode for one in load.conversations] == ["I", "Q"]
    assert prompt(load.conversations[1]).ids == array("Q", [1, 1 << 40])

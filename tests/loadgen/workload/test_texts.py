import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.workload.conversations import BadWorkload
from loadgen.workload.documents import Document, file_documents, stdlib_documents
from loadgen.workload.texts import multi_turn

DOCUMENTS = [Document(f"d{number}", f"text {number} " * 300, ("d.a", "d.b", "d.c")) for number in range(5)]


@settings(max_examples=50)
@given(st.integers(1, 80), st.integers(1, 9), st.integers(0, 1000))
def test_multi_turn_makes_as_many_requests_as_asked_and_the_same_again(requests, turns, seed):
    made = multi_turn(DOCUMENTS, requests, turns, 1.0, 40, random.Random(seed))
    assert sum(len(conversation.turns) for conversation in made) == requests
    assert made == multi_turn(DOCUMENTS, requests, turns, 1.0, 40, random.Random(seed))
    assert made != multi_turn(DOCUMENTS, requests, turns, 1.0, 40, random.Random(seed + 1))
    for conversation in made:
        assert [message["role"] for message in conversation.turns[0].messages] == ["system", "user"]
        assert all([message["role"] for message in turn.messages] == ["user"] for turn in conversation.turns[1:])
        assert len(conversation.turns) <= turns + turns // 2
        assert all(20 <= turn.max_tokens <= 60 for turn in conversation.turns)
        assert all(turn.think > 0 for turn in conversation.turns)
    assert len({conversation.id for conversation in made}) == len(made)


def test_multi_turn_takes_documents_evenly():
    made = multi_turn(DOCUMENTS, 10_000, 1, 0.0, 4, random.Random(0))
    counts = {}
    for conversation in made:
        system = conversation.turns[0].messages[0]["content"]
        counts[system] = counts.get(system, 0) + 1
    assert set(counts.values()) == {2000}


def test_the_standard_library_talks_about_itself():
    documents = stdlib_documents(24, 8000)
    assert len(documents) == 24 and len({document.title for document in documents}) == 24
    assert documents == stdlib_documents(24, 8000)
    assert all(4000 < len(document.text) <= 8000 for document in documents)
    logging = next(document for document in documents if document.title == "logging")
    assert "logging.Formatter" in logging.topics and "Formatter instances are used to convert" in logging.text


@given(st.lists(st.text("ab \n", max_size=60), min_size=1, max_size=20), st.integers(1, 100))
def test_a_text_file_is_cut_at_paragraphs_and_nothing_is_lost(tmp_path_factory, paragraphs, length):
    path = tmp_path_factory.mktemp("text") / "f.txt"
    text = "\n\n".join(paragraphs)
    path.write_text(text, newline="")
    if not text.strip():
        with pytest.raises(BadWorkload, match="no text"):
            file_documents(path, length)
        return
    documents = file_documents(path, length)
    assert all(document.text and document.topics for document in documents)
    assert "".join("".join(document.text for document in documents).split()) == "".join(text.split())


def test_text_files_that_are_no_use(tmp_path):
    with pytest.raises(BadWorkload, match="No such file"):
        file_documents(tmp_path / "none.txt", 100)
    (tmp_path / "binary").write_bytes(b"ok \xff\xfe")
    with pytest.raises(BadWorkload, match="not UTF-8 text .byte 3"):
        file_documents(tmp_path / "binary", 100)

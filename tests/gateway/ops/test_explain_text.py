"""`hitherto explain` in a terminal: a sentence, a table of 100 columns, a legend."""

from pathlib import Path

import pytest

from gateway.ops.explain_text import TABLE_WIDTH, WIDTH, show
from gateway.ops.reasons import TERMS, sentence, span
from policies import Demand, Load
from policies.outputs import Outputs

from .decided import BUSY, TOKENS, decided, replica


def two():
    return decided("least_time", replica("a:1"), replica("b:1", 960, BUSY, lower=(("cpu", 32),)))


def learned(*answers):
    """`answers`: (tokens, root, session) of those that ended."""
    made = Outputs()
    for tokens, root, session in answers:
        made.learn(Demand(TOKENS, root=root, session=session), tokens)
    return made


@pytest.mark.parametrize(
    ("outputs", "max_tokens", "said"),
    [
        (learned(), None, "200 tokens expected, assumed, as no answer of this model has ended yet"),
        (learned(), 16, "16 tokens expected, which the request allows at most; else 200, assumed, as no answer of this model has ended yet"),
        (learned((50, 1, None)), None,
         "170 tokens expected, learned from the last answer of this model and the 200 expected otherwise, which count as 4"),
        (learned(*[(50, 77, None)] * 90), None,
         "50 tokens expected, learned from the last 64 answers to prompts with the same first block (± 14) and the 56 expected otherwise, which count as 4"),
        (learned(*[(50, 77, None)] * 90, *[(500, 1, "s")] * 3), 900,
         "244 tokens expected, learned from the last 3 answers of its session (± 223) and the 51 expected otherwise, which count as 4"),
        (learned(*[(50, 77, "s")] * 90), 9,
         "9 tokens expected, which the request allows at most; else 50, "
         "learned from the last 16 answers of its session (± 0) and the 50 expected otherwise, which count as 4"),
    ],
)  # fmt: skip
def test_it_says_where_the_expected_tokens_come_from(outputs, max_tokens, said):
    told = decided("least_time", replica("a:1"), outputs=outputs, session="s", max_tokens=max_tokens)
    text = show(told)
    head = text.partition("\n\n")[2].partition("\n\n")[0]
    assert f"answer {said} policy" in " ".join(head.split())
    assert max(map(len, text.splitlines())) <= WIDTH


def rows_of(text):
    lines = text.splitlines()
    start = next(at for at, line in enumerate(lines) if line.split()[:1] == ["replica"])
    return lines[start : lines.index("", start)]


def figure(cell):
    return float(cell.replace(",", ""))


def test_the_sentence_comes_first_and_the_chosen_row_has_its_figures():
    told = two()
    text = show(told)
    assert " ".join(text.partition("\n\n")[0].split()) == sentence(told)
    assert "4321 characters rendered, 1000 tokens, 62 full blocks of 16 (exact)" in text
    head, chosen, other = rows_of(text)
    assert chosen.split()[:6] == ["->", "b:1", "992", "(99%),", "32", "cpu"] and other.split()[0] == "a:1"
    assert head.split()[-1] == "cost"
    assert figure(chosen.split()[-1]) == pytest.approx(1e3 * told["replicas"][1]["seconds"], rel=0.005)


def test_terms_that_cost_nothing_on_any_replica_take_no_column_and_no_line_of_the_legend():
    told = two()
    assert all(one["terms"]["room"] == 0 for one in told["replicas"])
    text = show(told)
    head = rows_of(text)[0].split()
    assert "prefill" in head and "fetch" in head and "room" not in head
    for name, term in TERMS.items():
        assert (term.meaning in text) == (name in head)


def loaded(number):
    """A replica of which no term is zero."""
    load = Load(
        requests=90 + number, prefilling=30, prefill_tokens=250_000 + 999 * number, decoding=60, context_tokens=99_000,
        output_tokens=60 * 200, capacity_tokens=200_000, kv_usage=0.97, recent=12.0,
    )  # fmt: skip
    return replica(f"replica-{number:02}.inference.svc.cluster.example:8000", 16 * number, load, lower=(("cpu", 160),))


@pytest.mark.parametrize("count", [2, 30])
def test_whatever_the_terms_and_the_names_the_table_fits(count):
    told = decided("least_time", *(loaded(number) for number in range(count)), tokens=200_000)
    assert all(sum(value > 0 for value in one["terms"].values()) >= 8 for one in told["replicas"])
    text = show(told)
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    head, *rows = rows_of(text)
    assert "rest" in head.split() and rows[0].startswith("->"), "the chosen one stands first"
    rest = next(line for line in text.splitlines() if line.startswith("  rest "))
    shown = {name for name in TERMS if name in head.split()}
    weighed = {name for one in told["replicas"] for name, value in one["terms"].items() if value}
    folded = {name.strip(" ,") for name in rest.split()[1:]}
    assert shown and folded == weighed - shown
    for cells in (row.split() for row in rows if "more" not in row):
        *parts, total = map(figure, cells[-len(shown) - 2 :])
        assert sum(parts) == pytest.approx(total, rel=1e-3), "the columns add up to the cost"
    assert ("and 10 more; --json has all" in text) == (count == 30)


def test_ties_are_marked():
    text = show(decided("least_time", replica("a:1"), replica("b:1"), replica("c:1", 0, BUSY)))
    assert [row.split()[0] for row in rows_of(text)[1:]] == ["->", "=", "c:1"]
    assert "=: costs the same as the least" in text


def test_policies_that_weigh_no_seconds_have_no_cost_column():
    text = show(decided("round_robin", replica("a:1"), replica("b:1")))
    assert rows_of(text)[0].split()[-2:] == ["TTFT", "answer"] and "cost:" not in text
    assert "policy   round_robin: its turn" in text


def test_a_prompt_that_was_not_read_says_so():
    text = show(decided("random", replica("a:1"), tokens=0, mode="load", note="unknown path"))
    assert "not read, so what replicas hold of it does not count" in text and "note     unknown path" in text


def test_the_sentence_and_the_table_say_when_the_last_token_comes_and_that_a_cost_is_no_duration():
    told = decided("least_time", replica("a:1"), replica("b:1", 960))
    text, chosen = show(told), next(one for one in told["replicas"] if one["chosen"])
    assert chosen["answer_seconds"] > chosen["ttft_seconds"]
    last = span(chosen["answer_seconds"])
    assert f"{span(chosen['ttft_seconds'])}, the last after about {last}), and" in " ".join(text.split())
    head, row, _ = rows_of(text)
    assert "rest" not in head
    answers = row.split()[len(row.split()) - len(head.split()) + head.split().index("answer")]
    assert figure(answers) == pytest.approx(1e3 * chosen["answer_seconds"], rel=0.005)
    assert "answer: until the last one" in text and "not how long it takes" in text


@pytest.mark.parametrize("policy", ["least_time", "round_robin"])
def test_a_request_that_writes_no_tokens_is_priced_without_decode_and_has_an_answer_but_no_last_token(policy):
    """And an answer that says otherwise teaches nothing."""
    outputs = Outputs()
    outputs.learn(Demand(TOKENS, root=77, writes=False), 900)
    told = decided(policy, replica("a:1"), path="/v1/embeddings", outputs=outputs)
    assert told["output_tokens"] == 0 and not told["replicas"][0]["terms"].get("decode")
    assert told["replicas"][0]["answer_seconds"] == told["replicas"][0]["ttft_seconds"]
    text = show(told)
    assert "no tokens, as requests of this path write none" in text and "expected" not in text
    assert "answer after" in text and "first token after" not in text
    assert outputs.basis(Demand(TOKENS)).kind == "prior"


def test_the_documents_show_what_it_prints():
    """docs/operations.md has all above the legend."""
    load = Load(requests=3, decoding=3, context_tokens=2400)
    replicas = replica("gpu1:8000"), replica("gpu2:8000", 960, load), replica("gpu3:8000", 320)
    outputs = learned(*[(tokens, 77, None) for tokens in (75, 87, 99)] * 10, (87, 77, None))
    text = show(decided("least_time", *replicas, outputs=outputs)).partition("\n\ntimes in ms")[0]
    page = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    shown = page.partition("    $ hitherto explain request.json\n")[2].partition("\n\n`request.json`")[0]
    assert [line.removeprefix("    ") for line in shown.splitlines()] == text.splitlines()

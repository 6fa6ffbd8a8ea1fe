"""The search is pure and is tried on made-up servers; the verb runs against a scripted one."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen import cli, sweep
from loadgen.options import BadOption
from loadgen.sweep import Search, Sweep, own_rate
from loadgen.workload.conversations import Conversation, Turn, Workload, at_rate

RATES = st.floats(0.01, 1e4)


def report(met: int, of: int = 100, **fields) -> dict:
    counts = {"requests": of, "completed": of, "errors": {}, "request_throughput": 1.0}
    offered, generator = {"rate": None, "later_turns": 0}, {"core_was_full": False}
    return {"goodput": {"share": met / of}, **counts, "offered": offered, "generator": generator, **fields}


def highest(measure, search: Search, slo: dict) -> Sweep:
    """Search with `measure`, which gives the report of a load at some rate."""
    sweep = Sweep(search, slo, 0.9, [])
    while (rate := search.rate) is not None:
        sweep.add(rate, measure(rate))
    return sweep


def searched(first: float, capacity: float, **how) -> Sweep:
    return highest(lambda rate: report(95 if rate <= capacity else 20), Search(first, **how), {"ttft": 500.0})


@given(RATES, st.floats(1 / 30, 100), st.floats(0.01, 0.5))
def test_the_rate_found_is_within_the_precision_of_the_true_one(first, factor, precision):
    capacity = first * factor
    search = searched(first, capacity, precision=precision).search
    assert search.kept <= capacity < search.missed <= search.kept * (1 + precision) * (1 + 1e-9)
    assert "within" in search.stopped and search.rate is None


@given(RATES, RATES, RATES)
def test_a_search_ends_and_tries_nothing_above_its_limit(first, capacity, limit):
    found = searched(first, capacity, limit=limit)
    rates = [step["rate"] for step in found.steps]
    assert 1 <= len(rates) <= 16 and max(rates) <= limit and len(set(rates)) == len(rates)
    assert found.search.stopped
    assert found.search.kept == max((step["rate"] for step in found.steps if step["kept"]), default=None)


def test_a_rate_that_its_load_never_reached_is_not_said_to_be_kept_without_saying_so():
    offered = {"rate": 27.55, "later_turns": 160}
    reached = searched(1.0, 2.0, limit=2.0)
    assert "But" not in reached.answer
    found = highest(
        lambda rate: report(100, offered=offered, request_throughput=5.52), Search(20.0, limit=20.0), {"ttft": 500.0}
    )
    assert found.answer.startswith("At least 20 requests/s, the highest rate that was tried, keep the SLO")
    assert found.answer.endswith(
        "But of 27.55 requests/s offered 5.52 were answered, since later turns wait for a reply, and the load ends before "
        "its rate is reached: ask more (--num-prompts)."
    )


@given(st.lists(st.booleans(), min_size=20, max_size=20))
def test_whatever_is_measured_kept_stays_below_missed(answers):
    told = iter(answers)
    found = highest(lambda rate: report(100 * next(told)), Search(1.0), {"ttft": 1.0})
    assert not found.search.kept or not found.search.missed or found.search.kept < found.search.missed


def test_nothing_kept_is_said():
    found = searched(32.0, 0.0)
    assert found.search.stopped == "Stopped: not even 1 requests/s keep it."
    assert found.answer == "No rate that was tried kept the SLO: 90 % of requests within TTFT 500 ms."


@pytest.mark.parametrize("how", [{"limit": 5.0}, {"given": (2.0, 5.0)}])
def test_where_every_rate_kept_the_highest_is_known_from_below_only(how):
    found = searched(1.0, 100.0, **how)
    assert found.search.stopped and found.answer == (
        "At least 5 requests/s, the highest rate that was tried, keep the SLO: 90 % of requests within TTFT 500 ms."
    )


@pytest.mark.parametrize("met, kept", [(89, False), (90, True)])
def test_a_rate_is_kept_from_the_share_that_was_asked_for(met, kept):
    step = Sweep(Search(1.0), {"ttft": 1.0}, 0.9, []).add(1.0, report(met))
    assert step["share"] == met / 100 and step["kept"] is kept


def test_the_figures_say_how_they_were_found():
    found = searched(1.0, 3.0)
    figures = found.figures()
    assert figures["rate"] == found.search.kept and 2.85 < figures["rate"] <= 3
    assert [step["rate"] for step in figures["steps"]][:3] == [1, 2, 4] and figures["steps"][3]["rate"] == math.sqrt(8)
    assert figures["answer"].startswith(
        f"{found.search.kept:.4g} requests/s is the highest rate that kept the SLO: 90 % of requests within TTFT 500 ms."
    )
    assert json.dumps(figures)


def load(starts: list[float]) -> Workload:
    return Workload([Conversation(str(index), [Turn([], 1), Turn([], 1)]) for index in range(len(starts))], starts)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=30), RATES)
def test_a_load_at_another_rate_has_the_same_pattern(gaps, rate):
    starts = [0.0]
    for gap in gaps:
        starts.append(starts[-1] + gap)
    moved = at_rate(load(starts), rate)
    assert own_rate(moved) == pytest.approx(rate)
    assert moved.starts == pytest.approx([start * moved.starts[-1] / starts[-1] for start in starts])


@pytest.mark.parametrize("starts", [[], [3.0], [0.0, 0.0]])
def test_a_load_without_a_rate_is_refused(starts):
    with pytest.raises(BadOption, match="a sweep needs a load whose conversations begin at different times"):
        own_rate(load(starts))


def arguments(url: str, *flags: str):
    load = f"sweep --base-url {url} --dataset-name random --num-prompts 20 --suffix-len 40 --output-len 3"
    return cli.build_parser("loadgen").parse_args(" ".join((load, *flags)).split())


@pytest.mark.parametrize(
    "flags, reason",
    [
        ((), "needs an SLO"),
        (("--goodput", "ttft:1s", "--users", "3"), "--users: a sweep is an open loop"),
        (("--goodput", "ttft:1s", "--max-concurrency", "3"), "--max-concurrency"),
    ],
)
def test_what_makes_no_sweep_is_refused(flags, reason):
    with pytest.raises(BadOption, match=reason):
        sweep.check(arguments("http://127.0.0.1:1", *flags))


@pytest.fixture
def console():
    with open("/dev/null", "w") as nowhere:
        yield Console(file=nowhere, record=True, width=120)


async def test_a_sweep_of_a_live_target(engine, wire, tmp_path, monkeypatch, console):
    monkeypatch.setattr(sweep, "_LEAST_SECONDS", 0.04)
    async with engine(wire.openai()) as server:
        files = (f"--{kind} {tmp_path / 's'}.{kind}" for kind in ("json", "html", "csv"))
        args = arguments(server.url, "--request-rate 200 --goodput ttft:30s", *files)
        assert await sweep.sweep_verb(args, console) == 0
        prompts = [tuple(request.json["prompt"]) for request in server.requests if request.path == "/v1/completions"]
    figures = json.loads((tmp_path / "s.json").read_text())
    rates = [step["rate"] for step in figures["sweep"]["steps"]]
    assert len(rates) >= 2 and rates[0] == 200 and rates[1] <= 400 and figures["sweep"]["rate"] == rates[-1]
    assert "Ask more (--num-prompts)" in figures["sweep"]["stopped"] and figures["workload"]["seed"] == 0
    assert all(step["report"]["completed"] == 20 for step in figures["sweep"]["steps"])
    assert len(set(prompts)) == len(prompts) == 20 * len(rates)  # other tokens in every step
    page = (tmp_path / "s.html").read_text()
    assert "TTFT against load" in page and figures["sweep"]["answer"] in page
    assert page.count('<td class="yes">') == len(rates)
    assert (tmp_path / "s.csv").read_text().count("\n") == 1 + len(prompts)


async def test_a_target_that_answers_nothing_ends_the_sweep(engine, wire, monkeypatch, console):
    monkeypatch.setattr(sweep, "_LEAST_SECONDS", 0.01)
    async with engine(wire.openai(wire.whole({"error": {"message": "no"}}, 400))) as server:
        assert await sweep.sweep_verb(arguments(server.url, "--request-rate 1000 --goodput ttft:1s"), console) == 1
    assert "Stopped: no request was answered (http_400)." in console.export_text()


@pytest.mark.parametrize("answers, slo", [("nothing", "ttft:1s"), ("one token", "ttft:30s,tpot:1s")])
async def test_a_sweep_without_ttft_or_tpot_is_written_all_the_same(
    engine, wire, tmp_path, monkeypatch, console, answers, slo
):
    """Nothing answered: no TTFT. Replies of one token: no TPOT."""
    monkeypatch.setattr(sweep, "_LEAST_SECONDS", 0.04)
    reply = wire.whole({"error": {"message": "no"}}, 400) if answers == "nothing" else wire.answer("one")
    files = [tmp_path / name for name in ("s.json", "s.html", "s.csv")]
    async with engine(wire.openai(reply)) as server:
        flags = [word for file in files for word in (f"--{file.suffix[1:]}", str(file))]
        code = await sweep.sweep_verb(
            arguments(server.url, f"--request-rate 400 --output-len 1 --goodput {slo}", *flags), console
        )
    assert code == (1 if answers == "nothing" else 0) and all(file.stat().st_size for file in files)
    page, figures = files[1].read_text(), json.loads(files[0].read_text())["sweep"]
    assert figures["answer"] in page and "<td>–" in page and page.count("<tr><td>") >= len(figures["steps"])


async def test_made_up_tokens_are_below_the_vocabulary_and_an_error_names_the_flag(engine, wire, monkeypatch, console):
    """As vLLM 0.32 answers a token outside its vocabulary: 200, and an error in the stream."""
    monkeypatch.setattr(sweep, "_LEAST_SECONDS", 0.04)
    refused = wire.stream(wire.event(error={"message": "Token id 31000 is out of vocabulary", "code": 400}), wire.DONE)

    async def respond(request, writer):
        if request.path == "/v1/models":
            writer.write(wire.whole({"data": [{"id": "tiny"}]}))
        else:
            writer.write(wire.answer("one two") if max(request.json["prompt"]) < 2000 else refused)

    flags = "--request-rate 400 --goodput ttft:30s"
    async with engine(respond) as server:
        assert await sweep.sweep_verb(arguments(server.url, flags), console) == 1
        assert "--vocab-size" in console.export_text()
        assert await sweep.sweep_verb(arguments(server.url, flags, "--vocab-size 2000"), console) == 0


def test_given_rates_are_tried_and_no_others():
    search = Search(1.0, given=(2.0, 4.0, 8.0))
    for keeps in (True, False, True):  # what is kept above a rate that was missed is luck
        search.tell(search.rate, keeps)
    assert (search.kept, search.missed, search.rate) == (2.0, 4.0, None)
    assert search.stopped == "All rates that were asked for have been tried."


async def test_a_sweep_with_seeds_has_the_range_over_them(engine, wire, tmp_path, console):
    async with engine(wire.openai()) as server:
        flags = ("--rates", "200,100,400", "--seeds", "2", "--goodput", "ttft:30s", "--percentiles", "50,95")
        args = arguments(server.url, *flags, f"--json {tmp_path / 's.json'} --html {tmp_path / 's.html'}")
        assert await sweep.sweep_verb(args, console) == 0
        prompts = [tuple(request.json["prompt"]) for request in server.requests if request.path == "/v1/completions"]
    assert len(prompts) == len(set(prompts)) == 3 * 2 * 20  # other tokens for every step and seed
    steps = json.loads((tmp_path / "s.json").read_text())["sweep"]["steps"]
    assert [step["rate"] for step in steps] == [100, 200, 400]
    assert all(len(step["report"]["by_seed"]) == 2 for step in steps)
    printed, page = console.export_text(), (tmp_path / "s.html").read_text()
    assert "p95" in printed and "–" in printed
    assert "TTFT p95" in page and "offered /s<th>answered /s" in page

"""The page is one file, says everything, and survives whatever a run may lack."""

import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.report import page, plots, show
from loadgen.report.summary import setting

ABOUT = {
    "setting": setting(["loadgen", "compare", "--target", "a=<b>"], 7),
    "workload": {"dataset_name": "chat", "requests": 40, "users": None, "notes": ["2 of 9 entries left out"]},
    "fleet": {"replicas": 8, "event_delay_s": 0.005, "outages": []},
}


def page_of(both, about=ABOUT) -> str:
    return page.page(*both, about)


@pytest.fixture
def no_plots(monkeypatch):
    monkeypatch.setattr(page, "can_draw", lambda: False)


class Tags(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.found, self.loads = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action")]


def test_a_page_needs_nothing_else_and_its_plots_take_its_colours(runs):
    text = page_of(runs(["one", "two"]))
    tags = Tags(text)
    assert all(link.startswith(("#", "data:")) for link in tags.loads) and tags.loads
    assert not {"script", "link", "iframe"} & set(tags.found)
    assert not re.search(r"@import|url\((?!['\"]?#)", text)
    assert tags.found.count("svg") >= 6
    assert "prefers-color-scheme: dark" in text
    svgs = text[text.index("<figure") :]
    assert "fill: var(--soft)" in svgs and "#01020" not in svgs and "#000000" not in svgs.lower()


def test_a_page_says_where_its_figures_come_from(runs, no_plots):
    text = page_of(runs(["one"], slo={"ttft": 100.0}))
    made = ABOUT["setting"]
    for part in (
        made["machine"],
        "seed 7",
        "loadgen compare --target &#39;a=&lt;b&gt;&#39;",
        f"hitherto {made['versions']['hitherto']}",
        "2 of 9 entries left out",
        "40 of 40 requests answered in",
        "<dt>cached, reported</dt>",
        "within TTFT 100 ms",
        "<td>r2",
        "to the last token",
        "<dt>event_delay_s</dt><dd>0.005</dd>",
    ):
        assert part in text, part
    assert "users" not in text and "outages" not in text  # what was not set is not listed
    assert "virtual time" in text.split("<pre")[0]  # which has no date
    dated = {**ABOUT, "setting": {**made, "date": "2026-11-23 22:00:00+00:00"}}
    assert "2026-11-23 22:00:00+00:00" in page_of(runs(["one"]), dated).split("<pre")[0]


def test_names_are_text_and_nothing_else(runs):
    name = "<script>alert(1)</script> & $x_1$"
    text = page_of(runs([name, "b"], replica=name))
    assert "<script" not in text and text.count("&lt;script&gt;") > 3


@pytest.mark.parametrize(
    "lacking", [{"output_tokens": 1, "gaps": []}, {"error": "connect", "first": None}], ids=["no TPOT", "no TTFT"]
)
def test_the_tables_of_rates_and_of_fleets_survive_a_latency_that_is_missing(runs, lacking):
    both = runs(["4/s"], slo={"ttft": 100.0}, **lacking)
    point = {"rate": 4.0, "tokens": 1000, "replicas": 2, "share": 0.0, "kept": False, "report": both[0]["4/s"]}
    asked = {"slo_ms": {"ttft": 100.0}, "attainment": 0.9, "steps": [point]}
    sweep = {"answer": "no rate", "stopped": "all tried", "rate": None, **asked}
    plan = {"answers": ["no fleet"], "assumed": ["nothing"], "attainment": 0.9, "points": [point]}
    tried = show.tried(("replicas",), [(("2",), point["report"], False)])
    for about in ({"sweep": sweep}, {"plan": plan}):
        text = page_of(both, {**ABOUT, **about, "tried": tried})
        assert "<td>–" in text and '<td class="no">' in text and "that was tried" in text


def test_targets_side_by_side_with_the_best_marked(runs):
    both = runs(["one", "two", "three"])
    text = page_of(both)
    best = min(both[0], key=lambda name: both[0][name]["ttft_ms"]["mean"])
    assert re.findall(r'<th class="id"><svg.*?</svg>(\w+)', text, re.S) == ["one", "two", "three"]
    rows = {row[0]: row[1] for row in re.findall(r"<tr><td>([^<]+)(.*?)</tr>", text, re.S)}
    cells = re.findall(r"<td([^>]*)>([^<]*)", rows["TTFT mean"])
    assert len(cells) == 3 and (' class="best"', f"{both[0][best]['ttft_ms']['mean']:,.0f} ms") in cells
    counts = "  ".join(str(figures["requests"]) for figures in both[0]["two"]["replicas"].values())
    assert counts in rows["requests per replica"] and "requests/s, offered" in rows
    for plot in ("TTFT", "TPOT", "E2E", "ITL"):
        assert f"{plot} distribution" in text
    assert "the band above reaches to p99" in text
    assert "Worse with two" in text and "two against" in text


@pytest.mark.parametrize(
    "number, lacking, known",
    [
        (7, {"replica": None}, {"hits"}),
        (7, {"prompt_tokens": None}, set()),
        (7, {"cached_tokens": None, "predicted_tokens": None}, set()),
        (7, {"error": "connect", "first": None}, {"errors"}),
        (7, {"output_tokens": 1, "gaps": []}, {"hits"}),
        (7, {"first": 150.0, "last": 150.0, "sent": 150.0, "due": 150.0}, {"hits"}),
        (7, {"cached_tokens": 0, "predicted_tokens": 0}, {"hits"}),
        (0, {}, set()),
        (1, {"cached_tokens": 0}, set()),
        (1, {"error": "connect", "first": None}, {"errors"}),
    ],
)
def test_what_is_missing_is_left_out(runs, number, lacking, known):
    text = page_of(runs(["one", "two"], number, **lacking))
    assert text.count("<figure") == text.count("<svg xmlns:xlink")
    signs = {"hits": "Hit rate over time", "errors": f"{number} × connect"}
    assert {what for what, sign in signs.items() if sign in text} == known


def test_the_same_figures_make_the_same_files(runs):
    first = page_of(runs(["one", "two"]))
    assert page_of(runs(["one", "two"])) == first


def test_without_matplotlib_there_are_the_tables(runs, no_plots):
    for names in (["one"], ["one", "two"]):
        text = page_of(runs(names))
        assert "No plots: they need matplotlib" in text and "<figure" not in text and "TTFT" in text


@given(st.integers(1, 70))
def test_no_two_targets_look_alike_before_there_are_more_than_32(number):
    drawn = plots.lines(map(str, range(number)))
    assert len({(line.colour, str(line.dash)) for line in drawn.values()}) == min(number, 32)

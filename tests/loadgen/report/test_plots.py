import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.drive.records import Record
from loadgen.options import BadOption
from loadgen.report import files, plots

LIVES = st.lists(st.tuples(st.floats(0, 100), st.floats(0.001, 50)), min_size=1, max_size=30)


@given(LIVES, st.integers(2, 40))
def test_in_flight_is_the_mean_number_of_requests_between_two_moments(lives, number):
    records = [Record("c", 0, 5 + at, sent=5 + at, last=5 + at + long) for at, long in lives]
    edges = np.linspace(0, 160, number)
    mean = plots.in_flight(records, edges, 5.0)
    assert (mean > -1e-6).all() and (mean < len(lives) + 1e-6).all()
    assert (mean * np.diff(edges)).sum() == pytest.approx(sum(long for _, long in lives), rel=1e-6, abs=1e-6)


def test_in_flight_by_hand():
    records = [Record("c", 0, 0, sent=0.0, last=2.0), Record("c", 0, 0, sent=1.0, last=4.0)]
    assert plots.in_flight(records, np.array([0.0, 1.0, 3.0, 4.0, 5.0]), 0.0) == pytest.approx([1.0, 1.5, 1.0, 0.0])


@given(st.integers(1, 70))
def test_no_two_targets_look_alike_before_there_are_more_than_32(number):
    drawn = plots.lines(map(str, range(number)))
    assert len({(line.colour, str(line.dash)) for line in drawn.values()}) == min(number, 32)


def test_png_is_one_sheet_for_any_number_of_targets(tmp_path, runs):
    for number in (1, 9):
        both = runs([f"policy_{index}" for index in range(number)])
        files.draw(*both, {}, None, tmp_path / "p.png")
        data = (tmp_path / "p.png").read_bytes()
        assert data.startswith(b"\x89PNG") and len(data) > 20_000


def test_without_matplotlib_a_page_is_written_and_a_sheet_of_plots_is_not(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "can_draw", lambda: False)
    args = types.SimpleNamespace(slo=None, json=None, csv=None, html=tmp_path / "r.html", png=None)
    files.check(args)
    args.png = tmp_path / "r.png"
    with pytest.raises(BadOption, match=r"--png needs matplotlib: pip install 'hitherto\[plots\]'"):
        files.check(args)

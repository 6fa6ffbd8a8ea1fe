"""Which aims a rule meets, from figures made up by hand."""

import pytest

from bench import field_verdict
from bench.field_tables import ORACLE_ANSWER, OURS, judged, near


def run(e2e=1000.0, ttft=100.0, wall=100.0, hit=0.9):
    latencies = {"ttft_mean": ttft, "ttft_p99": ttft, "e2e_mean": e2e, "e2e_p99": e2e, "tpot_p99": 10.0}
    return latencies | {"wall": wall, "hit": hit}


def cell(**rules):
    return {"rate": 1.0, **{rule: {"1": figures} for rule, figures in rules.items()}}


def met(name, found):
    """The aims that mean something in this cell, and whether each is met."""
    [one] = judged({name: found})
    return {aim.short: gap.met for aim in field_verdict.AIMS if (gap := aim.gap(one))}


def test_one_per_cent_of_the_whole_answer_and_three_of_the_first_token():
    rivals = {"round_robin": run(e2e=1100), "lmetric": run(ttft=100)}
    assert all(met("agents 10%", cell(**{OURS: run(e2e=1009, ttft=102)}, **rivals)).values())
    missed = met("agents 10%", cell(**{OURS: run(e2e=1011, ttft=104)}, **rivals))
    assert missed == {"E2E mean": False, "E2E blind": True, "TTFT mean": False, "TTFT p99": False, "E2E p99": True}


def test_who_balances_load_alone_today_must_not_lose_by_the_change():
    found = cell(**{OURS: run(e2e=1031)}, least_load=run(e2e=1000), round_robin=run(e2e=1200))
    assert met("agents 10%", found)["E2E blind"] is False


def test_wall_time_is_judged_by_the_best_sticky_rule_and_hits_by_any():
    name = "rollouts 4 users a replica"
    rivals = {"session_hash": run(wall=120, hit=0.95), "sticky_least_loaded": run(wall=100), "lmetric": run(wall=50)}
    assert met(name, cell(**{OURS: run(wall=89, hit=0.945)}, **rivals))["wall"] is True
    assert met(name, cell(**{OURS: run(wall=91, hit=0.945)}, **rivals))["wall"] is False
    assert met(name, cell(**{OURS: run(wall=89, hit=0.93)}, **rivals))["wall"] is False
    assert "wall" not in met("agents 10%", cell(**{OURS: run()}, **rivals))


def test_thrash_is_survived_when_neither_time_nor_hits_are_lost():
    name = "rollouts 12 users a replica, thrash"
    rivals = {"session_hash": run(wall=400, hit=0.5), "sticky_least_loaded": run(wall=100, hit=0.9)}
    for ours, survived in ((run(wall=99, hit=0.9), True), (run(wall=101, hit=0.9), False), (run(hit=0.5), False)):
        assert met(name, cell(**{OURS: ours}, **rivals)).get("thrash") is survived
        assert "wall" not in met(name, cell(**{OURS: ours}, **rivals))


def test_the_oracle_of_answers_is_no_rival_and_is_asked_at_seventy_per_cent():
    found = cell(**{OURS: run(e2e=1090), ORACLE_ANSWER: run(e2e=1000)}, lmetric=run(e2e=1090))
    assert met("agents 70%", found)["oracle"] is True and met("agents 70%", found)["E2E mean"] is True
    assert "oracle" not in met("agents 30%", found)
    assert met("agents 70%", found | {OURS: {"1": run(e2e=1110)}})["oracle"] is False


def test_the_text_counts_cells_and_names_the_worst():
    cells = {
        f"agents {share}%": cell(**{OURS: run(e2e=e2e)}, round_robin=run(e2e=1100), lmetric=run())
        for share, e2e in ((10, 1000), (30, 1050), (50, 1020))
    }
    said = field_verdict.text(cells)
    line = next(line for line in said.splitlines() if "within 1 % of the least" in line)
    assert "1 of  3      3  MISSED" in line and '+5.0% in "agents 30%" (lmetric)' in line


def test_a_variant_from_another_tree_is_judged_on_its_own_and_is_no_rival():
    other = f"{OURS}@tree"
    found = {"agents 10%": cell(**{OURS: run(), other: run(e2e=500)}, lmetric=run())}
    said = field_verdict.text({"agents 10%": found["agents 10%"]})
    assert "+0.0%" in said and f"{other}: what is aimed at" in said
    assert f"{OURS} against {other}" in said and "+100.0%" in said
    assert judged(found)[0].others == ["lmetric"]


def test_rules_near_in_any_compared_figure_are_run_again():
    found = cell(**{OURS: run()}, close=run(e2e=1029, ttft=300), far=run(e2e=1040, ttft=300), better=run(e2e=700))
    assert near(found, 0.03) == {OURS, "close", "better"}
    assert near({"rate": 1.0, "far": {"1": run()}}, 0.03) == set()


def three_cells():
    return {
        "agents 10%": cell(**{OURS: run(e2e=1050)}, round_robin=run(e2e=1000), sticky_least_loaded=run(ttft=99)),
        "agents 70%": cell(**{OURS: run()}, vllm_kv_aware=run(), oracle_answer=run(e2e=990)),
        "coders 2 users a replica": cell(**{OURS: run(wall=104, hit=0.88)}, sticky_least_loaded=run(e2e=1001)),
    }


def test_a_verdict_that_was_written_down_is_read_as_it_was():
    cells = three_cells()
    cells["agents 10%"][OURS]["2"] = run(e2e=1100)
    cells["agents 10%"]["round_robin"]["2"] = run(e2e=1000)
    judged_so = field_verdict.gaps(judged(cells))
    read = field_verdict.read("the command, a commit\n\n" + field_verdict.text(cells) + "\nother tables +1.0%*\n")
    assert {short: set(found) for short, found in read.items()} == {
        short: set(found) for short, found in judged_so.items()
    }
    for short, found in judged_so.items():
        for name, gap in found.items():
            again = read[short][name]
            assert (again.rule, again.met) == (gap.rule, gap.met)
            assert again.value == pytest.approx(gap.value, abs=6e-4)
            assert again.error == pytest.approx(gap.error, abs=6e-4)
            assert again.hits == (gap.hits if gap.hits is None else pytest.approx(gap.hits, abs=6e-4))
    assert field_verdict.missed(read) == field_verdict.missed(judged_so) != []


def test_a_gap_has_an_error_where_there_are_several_seeds_and_none_with_one():
    cells = three_cells()
    assert "+-" not in field_verdict.text(cells)
    for rule, e2e in ((OURS, 1070), ("round_robin", 1000)):
        cells["agents 10%"][rule]["2"] = run(e2e=e2e)
    assert '+6.0% +-1.0% in "agents 10%" (round_robin)' in field_verdict.text(cells)

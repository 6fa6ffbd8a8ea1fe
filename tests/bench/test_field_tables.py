"""What the field's text says of itself: the commit, the seeds, and every figure of every rule; from made-up figures."""

import subprocess

from bench import field_tables
from bench.field_tables import OURS

FIGURES = (
    "requests ttft_mean ttft_p50 ttft_p90 ttft_p99 e2e_mean e2e_p99 tpot_mean tpot_p99 tokens_s tokens_s_busy "
    "wall trajectory goodput hit hit_least spread halves"
).split()


def cell(seeds, **factors):
    """Each rule's figures are those of ours times its factor."""
    return {"rate": 1.0} | {
        rule: {str(seed): dict.fromkeys(FIGURES, 0.5 * factor) for seed in range(1, seeds.get(rule, 1) + 1)}
        for rule, factor in factors.items()
    }


def cells(**seeds):
    names = "agents 10%", "rollouts 2 users a replica"
    return {name: cell(seeds, **{OURS: 1.0}, round_robin=2.0, sticky_least_loaded=1.5) for name in names}


def test_one_seed_is_said_to_be_one():
    said = field_tables.text(cells())
    assert "one seed in each cell" in said and "+-" not in said and "further seeds" not in said


def test_several_seeds_are_counted():
    said = field_tables.text(cells(**{OURS: 3}, sticky_least_loaded=3))
    assert "2 with one seed, 4 with 3 seeds" in said and f"{OURS} has 3 seeds in 2 cells" in said


def test_each_figure_has_a_matrix_with_every_rule_and_those_of_closed_loops_have_them_alone():
    blocks = [block.splitlines() for block in field_tables.text(cells()).split("\n\n")]
    for figure, title in field_tables._LISTED.items():
        title += f", as a multiple of {OURS}'s" * (figure in field_tables.COMPARED)
        [(_, *heads, closed)] = [block for block in blocks if block[0] == title]
        if figure not in ("tokens_s_busy", "wall", "trajectory"):
            assert heads.pop().startswith("agents 10%"), title
        assert " ".join(heads).split() == ["sticky", "least", "round", "least", "time", "robin", "loaded"]
        scale = 100 if figure in ("goodput", "hit", "hit_least") else 1
        multiples = [1.0, 2.0, 1.5] if figure in field_tables.COMPARED else [0.5 * scale, 1.0 * scale, 0.75 * scale]
        assert [float(value) for value in closed.removeprefix("rollouts 2 users a replica").split()] == multiples


def test_the_first_line_names_the_commit_and_the_day(tmp_path, monkeypatch):
    def git(*what):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e@x", *what], cwd=tmp_path, check=True)

    monkeypatch.setattr(field_tables, "__file__", str(tmp_path / "field_tables.py"))
    (tmp_path / "field_tables.py").write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    short = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.strip()
    today = f"{field_tables.date.today():%d %B %Y}"
    assert field_tables.made_by("python -m bench.field") == f"python -m bench.field, commit {short}, {today}"
    (tmp_path / "field_tables.py").write_text("two")
    assert f"commit {short}+changes," in field_tables.made_by("python -m bench.field")


def test_without_a_checkout_the_commit_is_unknown(tmp_path, monkeypatch):
    monkeypatch.setattr(field_tables, "__file__", str(tmp_path / "field_tables.py"))
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert "commit unknown," in field_tables.made_by("python -m bench.field")

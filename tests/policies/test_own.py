"""A rule in a file of one's own: it is used as it stands, and what is wrong with it is said before any request."""

import re
from pathlib import Path

import pytest

from cachemap import background
from gateway import cli
from gateway.app import Gateway
from gateway.settings import ConfigError, Settings
from loadgen import cli as loadgen
from policies import Candidate, CostGroup, Demand, Load, legs, make
from policies.rules.least_time import LeastTime
from replicas.simulated.model import sim_model_dir
from tests.gateway.running import counted

DOCS = Path(__file__).parents[2] / "docs/your-policy.md"
MINE, ITS_TEST = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S)


@pytest.fixture
def written(tmp_path, monkeypatch):
    """`written(text)` is the name of the class Mine in a file with it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "mine.py").write_text(text)
        return "./mine.py:Mine"

    return write


def candidates(*overlaps: int, requests: int = 0) -> list[Candidate]:
    group = CostGroup()
    return [
        Candidate(str(i), overlap, Load(requests=requests), group.add(str(i))) for i, overlap in enumerate(overlaps)
    ]


def test_the_pages_example_chooses_by_its_filter_and_says_why(written):
    policy = make(written(MINE))
    found = candidates(32, 64)
    choice = policy.choose(Demand(tokens=100), found)
    assert policy.name == "mine" and choice.index == 1 and choice.reason == "holds 64 of 100 tokens, 0 requests there"
    found[1].load = Load(requests=1)
    assert policy.choose(Demand(tokens=100), found).index == 0, (
        "a system prompt's holder does not get all that share it"
    )
    found[1].load = Load(requests=40)
    assert policy.choose(Demand(tokens=100), found).index == 0
    test = {"Mine": type(policy._rule)}
    exec(ITS_TEST.replace("from mine import Mine", ""), test)
    test["test_a_busy_holder_is_left_out"]()


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        (MINE, "./other.py:Mine", "other.py: no such file"),
        (MINE, "./mine.py", "./mine.py: a class is missing, as in mine.py:Mine"),
        (MINE, "./mine.py:Nine", "mine.py has no class 'Nine'"),
        ("class Mine:\n  def choose(self", "./mine.py:Mine", "mine.py, line 2: "),
        ("import nothing_like_it\n", "./mine.py:Mine", "line 1: ModuleNotFoundError"),
        ("class Mine:\n    def __init__(self, weight): ...\n", "./mine.py:Mine", "Mine: TypeError: "),
        ("class Mine:\n    pass\n", "./mine.py:Mine", "AttributeError"),
        ("class Mine:\n    def choose(self, demand, candidates, explain=False):\n        return 0\n", "./mine.py:Mine", "not a Choice"),
        ("class Mine:\n    def choose(self, demand, candidates, explain=False):\n        return 1 / 0\n", "./mine.py:Mine", "line 3: ZeroDivision"),
        ("from policies import Choice\nclass Mine:\n    def choose(self, *_):\n        return Choice(1)\n", "./mine.py:Mine", "about 1 candidates"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_it_is_said_where_it_is_named(written, capsys, text, name, said):
    written(text)
    with pytest.raises(ConfigError) as refused:
        cli.load_config(cli._parse(["serve", "--policy", name, "--launch", "1"]))
    assert said in str(refused.value) and str(refused.value).startswith("flag --policy: ")
    with pytest.raises(SystemExit):
        loadgen.main(["simulate", "--policy", name])
    assert said in " ".join(capsys.readouterr().err.split())


def test_serve_takes_it_as_the_policy_and_in_shadow(written):
    name = written(MINE)
    assert cli.load_config(cli._parse(["serve", "--policy", name, "--launch", "1"])).settings.policy == name
    assert cli.load_config(cli._parse(["serve", "--shadow", name, "--launch", "1"])).settings.shadow == (name,)
    with pytest.raises(ConfigError, match="least_time"):
        cli.load_config(cli._parse(["serve", "--policy", "mine", "--launch", "1"]))


def test_simulate_plays_it_beside_others(written, capsys):
    load = ("--num-prompts", "20", "--dataset-name", "random", "--replicas", "2")
    assert loadgen.main(["simulate", "--policies", f"round_robin,{written(MINE)}", *load]) == 0
    assert "./mine.py:Mine" in capsys.readouterr().out


def test_what_fails_later_is_logged_once_and_costs_no_request(written, caplog):
    text = MINE.replace("        free =", "        1 / (demand.tokens - 7)\n        free =") + (
        "\n    def placed(self, demand, candidates, choice):\n        raise KeyError(choice.index)\n"
    )
    policy = make(written(text))
    two = candidates(0, 64)
    two[0].load = Load(requests=3)
    for _ in range(2):
        choice = policy.choose(Demand(tokens=7), two)
        assert choice.index == 1 and "ZeroDivisionError" in choice.reason, "the fewest requests"
    policy.placed(Demand(tokens=8), two, choice)
    assert len(caplog.records) == 1 and "mine.py, line" in caplog.text
    assert getattr(policy, "first", None) is None and getattr(policy, "cost", None) is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("Choice(2)", "IndexError: 2 is no index of 2 candidates"),
        ("Choice(0.0)", "TypeError: 'float' object cannot be interpreted as an integer"),
        ("None", "AttributeError: 'NoneType' object has no attribute 'index'"),
    ],
)
def test_a_choice_that_is_none_costs_no_request(written, answer, said):
    text = MINE.replace(
        "        free =", f"        if demand.tokens == 7:\n            return {answer}\n        free ="
    )
    choice = make(written(text)).choose(Demand(tokens=7), candidates(0, 64))
    assert choice.index in (0, 1) and choice.reason.endswith(said)


COSTS = """
class Failing:
    def of_all(self, *given):
        raise KeyError("it is asked in the middle of a request")
class Mine(Mine):
    in_seconds, cost = True, Failing()
    @property
    def leg_cost(self):
        raise KeyError("and so is this")
"""


def test_a_cost_of_its_own_cannot_fail_in_a_request_and_least_times_is_kept(written):
    policy = make(written(MINE + COSTS))
    assert legs.price(policy) is legs.of_policy(policy) is None
    derived = "from policies.rules.least_time import LeastTime\nclass Mine(LeastTime):\n    name = 'mine'\n"
    policy = make(written(derived))
    assert legs.of_policy(policy) is LeastTime.cost and legs.price(policy) is LeastTime.leg_cost


def test_of_a_choice_only_what_the_router_can_use_is_passed_on(written):
    returns = "        return Choice(0, None, ttft='soon', among=7)\n        free ="
    choice = make(written(MINE.replace("        free =", returns))).choose(Demand(tokens=7), candidates(0, 64))
    assert (choice.index, choice.reason, choice.ttft, choice.among) == (0, "None", None, None)


async def test_what_fails_later_is_on_the_operators_pages_until_it_is_minutes_ago(written, monkeypatch):
    fails = "        if demand.tokens == 7:\n            raise KeyError('no\\n' + 'x' * 999)\n        free ="
    text = MINE.replace("        free =", fails)
    name = written(text)
    settings = Settings(policy=name, shadow=(name,), replica_url=("http://127.0.0.1:1",), model=str(sim_model_dir()))
    gateway = Gateway(settings)

    async def failures() -> float:
        return counted((await gateway.metrics.exposition())[0].decode(), "hitherto_policy_failures_total", policy=name)

    assert await failures() == 0 and gateway.view.status()["policy_failures"] == {}
    acting, (in_shadow,) = gateway.proxy.router.policy, gateway.proxy.placing.shadows.policies.values()
    for policy in (acting, acting, in_shadow):
        policy.choose(Demand(tokens=7), candidates(0, 64))
    assert await failures() == 3
    told = gateway.view.status()["policy_failures"][name]
    assert told["failures"] == 3 and re.match(r"mine.py, line \d+ failed: KeyError: 'no", told["last"])
    assert len(told["last"]) < 300 and "\n" not in told["last"]
    monkeypatch.setattr(background, "RECENT_SECONDS", 0.0)
    assert gateway.view.status()["policy_failures"] == {}


def test_a_rule_for_legs_is_shadowed_beside_it(written):
    settings = Settings(
        policy=written(MINE), shadow=("legs:always",), replica_url=("http://a:1",), model=str(sim_model_dir())
    )
    assert Gateway(settings).proxy.placing.shadows.policies["legs:always"].name == "mine"

"""Classes, limits and the queue as operators write them: they are read, and what is wrong is said with its place."""

from pathlib import Path

import pytest

from gateway import cli
from gateway.durations import parse_seconds, show_seconds
from gateway.settings import ConfigError, load, overload_of
from gateway.settings import overload as tables
from gateway.settings.warnings import find_warnings
from policies import QosClass, Rule, Rules, Slo
from policies.classes import DEFAULT_CLASS
from policies.decisions import STEPS

# As the issue and the book have it.
FILE = """
scheduler:
  qos_classes:
    - {name: premium,  reserved_fraction: 0.10, priority: 100}
    - {name: standard, reserved_fraction: 0.30, priority: 50}
    - {name: free,     reserved_fraction: 0.60, priority: 10}
request_router:
  routes:
    - match: {header: "x-customer-tier: premium"}
      qos: premium
    - match:            # last, without a condition: the default
      qos: free
"""


pytestmark = pytest.mark.usefixtures("empty_folder")


def read(text, **flags):
    Path("hitherto.yaml").write_text(text)
    return overload_of(load(flags, environ={}).settings)


PODS = "{selector: a=b, url: 'http://{ip}:8000', labels: {spill: slow}, namespace: n, api: 'http://127.0.0.1:8001'}"


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ("admission: {when_full: [wait, spill]}", "admission.when_full"),
        ("scheduler: {qos_classes: [{name: free, when_full: spill}]}", "scheduler.qos_classes.free.when_full"),
        ("admission: {when_full: wait}", ""),
        ("admission: {when_full: spill}\nreplica_url: ['http://a:1#spill=yes']", ""),
        ("admission: {when_full: spill}\npools: {slow: {profile: sim, launch: 1, spill: true}}", ""),
        (f"admission: {{when_full: spill}}\ndiscover: {PODS}", ""),
        ("", ""),
    ],
)
def test_spilling_without_a_slow_pool_is_warned_of(more, places):
    Path("hitherto.yaml").write_text(more)
    said = [str(one) for one in find_warnings(load({}, environ={}).settings) if "spill" in one.what]
    if places:
        assert said[0].startswith(f"{places}: spill is passed over") and "#spill=yes" in said[0]
    assert len(said) == bool(places)


CLASSES = "scheduler: {qos_classes: [{name: gold, priority: 2}, {name: silver, priority: 1}, {name: free}]}\n"
ROUTES = "request_router: {routes: [%s]}\n"
OF_GOLD, OF_ALL = "{match: {header: x-gold}, class: gold}", "{class: silver}"
OF_KEY = "{match: {key: team-a}, class: silver}"
HASH = "0" * 64


@pytest.mark.parametrize(
    ("more", "keys", "said"),
    [
        ("", None, "gold, silver"),
        (ROUTES % OF_GOLD, None, "silver"),
        (ROUTES % f"{OF_GOLD}, {OF_ALL}", None, "free"),  # which all without a route would be of
        (ROUTES % f"{OF_GOLD}, {OF_KEY}", None, "silver"),  # nobody brings a key
        (ROUTES % f"{OF_GOLD}, {OF_KEY}", f"- {{name: a, sha256: '{HASH}'}}", ""),
        (ROUTES % OF_GOLD, f"- {{name: a, sha256: '{HASH}', class: silver}}", ""),
        (ROUTES % OF_GOLD, f"- {{name: a, sha256: '{HASH}'}}", "silver"),
    ],
)
def test_a_class_that_no_request_is_of_is_warned_of(more, keys, said, capsys):
    Path("hitherto.yaml").write_text(CLASSES + more + ("api_keys: keys.yaml\n" if keys is not None else ""))
    Path("keys.yaml").write_text(keys or "")
    found = [str(one) for one in find_warnings(load({}, environ={}).settings)]
    of_classes = [one for one in found if "no request is of" in one]
    assert len(of_classes) == bool(said)
    if said:
        start = f"scheduler.qos_classes: no request is of {said}, since no route and no API key"
        assert of_classes[0].startswith(start)
    assert cli.main(["config"]) == 0
    assert capsys.readouterr().err == "".join(f"hitherto: {one}\n" for one in found)


OF_REST = "{class: free}"


@pytest.mark.parametrize(
    ("text", "keyed", "said"),
    [
        (CLASSES + ROUTES % f"{OF_GOLD}, {OF_KEY}, {OF_REST}", False, "request_router: no request matches key: team-a, since"),
        (CLASSES + ROUTES % f"{OF_KEY}, {OF_REST}", True, ""),
        ("slo: {ttft: 2s}\n", True, "keys.yaml: class: gold says nothing, since there are no classes. Name"),
        ("", True, "keys.yaml: class: gold says nothing, since there are no classes. Name"),
        ("", False, ""),
    ],
)  # fmt: skip
def test_routes_and_classes_of_keys_that_are_never_used_are_warned_of(text, keyed, said, capsys):
    Path("hitherto.yaml").write_text(text + "api_keys: keys.yaml\n" * keyed)
    Path("keys.yaml").write_text(f"- {{name: a, sha256: '{HASH}', class: gold}}")
    found = [one for one in map(str, find_warnings(load({}, environ={}).settings)) if "no request is of" not in one]
    assert len(found) == bool(said) and all(one.startswith(said) for one in found)
    assert cli.main(["config"]) == 0
    assert all(f"hitherto: {one}\n" in printed for printed in [capsys.readouterr().err] for one in found)


def test_a_key_that_is_added_later_leads_to_its_class(capsys):
    Path("hitherto.yaml").write_text(CLASSES + ROUTES % OF_GOLD + "api_keys: keys.yaml\n")
    Path("keys.yaml").write_text(f"- {{name: a, sha256: '{HASH}'}}")
    settings = load({}, environ={}).settings
    [warning] = find_warnings(settings)
    cli.main(["doctor", "--replica-url", "http://127.0.0.1:1"])
    assert f"{warning.what}\n      -> {warning.remedy}\n" in capsys.readouterr().out
    for keys in (f"- {{name: a, sha256: '{HASH}', class: silver}}", "broken: ["):  # the latter is an error of its own
        Path("keys.yaml").write_text(keys)
        assert not find_warnings(settings)


def test_the_file_is_read_as_it_stands():
    found = read(FILE)
    premium, standard, free = found.classes.all
    assert premium == QosClass("premium", 0.1, 100) and standard == QosClass("standard", 0.3, 50)
    assert free == QosClass("free", 0.6, 10)
    assert found.classes._rules == (Rule(premium, ("x-customer-tier", "premium")), Rule(free))


def test_a_routes_class_has_the_name_that_it_has_everywhere_else_too():
    assert read(FILE.replace("qos: ", "class: ")).classes._rules == read(FILE).classes._rules


def test_limits_are_of_all_unless_a_class_has_its_own():
    found = read(FILE.replace("priority: 100}", "priority: 100, slo: {ttft: 500ms}}") + "slo: {ttft: 2s, tpot: 50ms}")
    assert [one.slo for one in found.classes.all] == [Slo(0.5, 0.05), Slo(2.0, 0.05), Slo(2.0, 0.05)]


@pytest.mark.parametrize("text", ["ttft=2s,tpot=50ms", "ttft:2s,tpot:50ms"])
def test_limits_alone_need_no_classes(text):
    found = read("", slo=text)
    assert [(one.name, one.slo) for one in found.classes.all] == [("default", Slo(2.0, 0.05))]


def test_the_queue_is_as_it_is_set():
    found = read("admission: {when_full: reject, engine_wait: 50ms, max_bytes: 64MiB, tenant_header: X-Team}")
    assert (found.rules.when_full, found.rules.engine_wait, found.rules.max_bytes) == (("reject",), 0.05, 64 * 2**20)
    assert found.tenant_header == b"x-team"


def test_what_is_tried_when_all_are_full_is_said_in_its_order_of_all_and_by_class():
    free = "{name: free, when_full: [degrade, spill, reject], max_tokens_floor: 32}"
    found = read(f"admission: {{when_full: [wait, spill], max_tokens_floor: 64}}\n{classes(free)}")
    assert (found.rules.when_full, found.rules.max_tokens_floor) == (("wait", "spill"), 64)
    assert found.classes.all == (QosClass("free", when_full=("degrade", "spill", "reject"), max_tokens_floor=32),)


def test_the_control_of_overload_has_a_window_or_is_switched_off():
    given = ("{control_window: 5s}", "{control_window: never}", "{}")
    assert [read(f"admission: {text}").rules.control_window for text in given] == [5.0, None, 30.0]


def test_a_time_is_shown_so_that_it_can_be_read_again():
    for seconds in (1e-8, 2.5e-7, 0.05, 1.0, 90.5, 3600.0):
        assert parse_seconds(show_seconds(seconds)) == pytest.approx(seconds, rel=1e-11)


def test_what_is_not_set_is_as_the_policies_have_it():
    found = read("admission: {}")
    assert (found.rules, found.classes.all, found.tenant_header) == (Rules(), (DEFAULT_CLASS,), None)
    assert tables.STEPS == STEPS


def test_without_any_of_it_there_is_nothing():
    assert read("") is None


def test_what_config_prints_reads_back(capsys, empty_folder):
    (empty_folder / "hitherto.yaml").write_text(FILE + "slo: {ttft: 2s}\nadmission: {max_bytes: 64MiB}\n")
    assert cli.main(["config"]) == 0
    (empty_folder / "again.yaml").write_text(capsys.readouterr().out)
    assert load(environ={}, file="again.yaml").settings == load(environ={}).settings


@pytest.mark.parametrize("text, seconds", [("2s", 2.0), ("50ms", 0.05), ("1.5 m", 90.0)])
def test_times_have_units(text, seconds):
    assert parse_seconds(text) == pytest.approx(seconds)


CLASS = "{name: free, reserved_fraction: 0.6, priority: 10}"


def classes(*entries):
    return "scheduler: {qos_classes: [" + ", ".join(entries) + "]}\n"


def routed(routes):
    return f"{classes(CLASS)}request_router: {{routes: [{routes}]}}"


@pytest.mark.parametrize(
    "text, place, remedy",
    [
        ("slo: {ttft: 2}", "hitherto.yaml:1: slo: ttft: 2 has no unit", "like 2s or 50ms"),
        ("slo: {ttft: fast}", "slo: ttft: 'fast' is not a time", "like 2s or 50ms"),
        ("slo: {ttft: 0s}", "slo: ttft: '0s' is out of range", "above 0"),
        ("slo: {itl: 2s}", "slo: 'itl' is an unknown setting", "ttft, tpot"),
        ("slo: {ttft: 1s, ttft: 2s}", "hitherto.yaml:1: ", "'ttft' is there twice; keep one of them"),
        ("slo: {ttft: '\u0663s'}", "slo: ttft: '\u0663s' is not a time", "like 2s or 50ms"),
        ("slo: {}", "slo: it has no limit", "ttft: 2s"),
        (classes("{name: a, reserved_fraction: 1.2}"), "qos_classes[0].reserved_fraction: 1.2 is not a", "up to 1"),
        (classes("{name: a, reserved_fraction: .nan}"), "reserved_fraction: nan is not a number up to 1", ""),
        ("pools: {a: {profile: sim, launch: 257}}", "a.launch: 257 is not a whole number up to 256", ""),
        (classes("{name: a, reserved_fraction: 0.7}", CLASS), "add up to 1.3", "make them smaller"),
        (classes(CLASS, CLASS), "'free' is there twice", "a name of its own"),
        (classes("{priority: 1}"), "qos_classes[0].name is missing", "classes of service"),
        (classes("{name: a, priority: high}"), "qos_classes[0].priority: 'high'", "whole number"),
        (classes("{name: a, slo: {tpot: 50}}"), "qos_classes[0].slo.tpot: 50 has no unit", "50ms"),
        (classes("{name: a, weight: 1}"), "qos_classes[0]: 'weight' is an unknown setting", "reserved_fraction"),
        ("scheduler: {qos_classes: []}", "qos_classes: it must be a list", "one entry or more"),
        (routed("{qos: gold}"), "routes[0].class: there is no class 'gold'", "free"),
        (routed("{class: gold}"), "routes[0].class: there is no class 'gold'", ""),
        (routed("{}"), "routes[0].class: it has no value", "qos_classes: free"),
        (routed("{class: }"), "routes[0].class: it has no value", "free"),
        (routed("{class: free, qos: free}"), "routes[0]: 'qos' is an unknown setting", "match, class"),
        (routed("{qos: free}, {qos: free}"), "yaml:2: request_router: routes[0]: it has no condition", "put it last"),
        (routed("{match: {user: x}, qos: free}"), "routes[0].match: 'user' is an unknown", "header, model, path, key"),
        (routed("{match: {model: 7}, qos: free}"), "routes[0].match.model: 7 is not text", "put it in quotes"),
        (routed("{match: {model: }, qos: free}"), "routes[0].match: model: it has no value", "write one, or leave"),
        (routed("{match: false, qos: free}"), "routes[0].match: ", "header"),
        (routed('{match: {header: "a b: c"}, qos: free}'), "routes[0].match.header: 'a b' is not a header", "colon"),
        ("request_router: {routes: [{qos: free}]}", "request_router: its routes lead to", "scheduler.qos_classes"),
        ("admission: {when_full: shed}", "admission: when_full[0]: 'shed' is none of wait", "reject"),
        ("admission: {when_full: }", "admission: when_full: it has no value; write one or more of wait", "reject"),
        ("admission: {tenant_header: ''}", "admission: tenant_header: it has no value", "the header's name"),
        (classes("{name: a, when_full: }"), "qos_classes[0]: when_full: it has no value", "write one"),
        ("admission: {when_full: []}", "admission: when_full: it has no step", "wait, degrade"),
        ("admission: {when_full: [wait, wait]}", "admission: when_full: wait is there twice", "once"),
        ("admission: {when_full: [observe, wait]}", "admission: when_full: observe sends every request", "alone"),
        ("admission: {when_full: [reject, spill]}", "admission: when_full: reject refuses every request", "last"),
        ("admission: {control_window: 30}", "admission: control_window: 30 has no unit", "or never"),
        ("admission: {control_window: off}", "admission: control_window: False is not a time", "or never"),
        ("admission: {control_window: 5m}", "admission: control_window: '5m' is out of range", "1s to 60s"),
        ("admission: {max_tokens_floor: 0}", "admission: max_tokens_floor: 0", "at least 1"),
        (classes("{name: a, when_full: [no]}"), "qos_classes[0].when_full[0]: False is none of wait", "spill"),
        (classes("{name: a, max_tokens_floor: few}"), "qos_classes[0].max_tokens_floor: 'few'", "a whole number"),
        ("pools: {a: {profile: sim, launch: 1, spill: true, role: decode}}", "a: spill and role: decode", "leave one"),
        ("admission: {max_wait: 30}", "admission: max_wait: 30 has no unit", "2s"),
        ("admission: {max_requests: 0}", "admission: max_requests: 0", "at least 1"),
        ("admission: {max_bytes: lots}", "admission: max_bytes: 'lots' is not a size", "512MiB"),
        ("scheduler: 3", "scheduler: 3 is not a table of names and values", "qos_classes"),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_the_remedy(text, place, remedy, capsys, empty_folder):
    with pytest.raises(ConfigError) as caught:
        read(text)
    assert place in str(caught.value) and remedy in str(caught.value)
    assert cli.main(["config"]) == 2
    assert place in capsys.readouterr().err

"""What the labels of a pod make of a replica, and where its cluster is asked."""

import pytest
from pydantic import ValidationError

from replicas.pods import Discover, place
from replicas.replica import parse_url


@pytest.mark.parametrize("label", ["prefill", "decode", "prefill-decode", "both", "encode-prefill-decode"])
def test_the_role_is_what_the_label_says_as_llm_d_writes_it(label):
    found = parse_url(Discover(selector="a=b").url_of("10.0.0.7", {"llm-d.ai/role": label}))
    assert (found.url, found.role) == ("http://10.0.0.7:8000", label if label in ("prefill", "decode") else "both")


def test_a_pod_without_the_label_takes_both_parts_and_an_address_of_ipv6_stands_in_brackets():
    found = parse_url(Discover(selector="a=b", url="http://{ip}:8000#events=tcp://{ip}:5557").url_of("fd00::7", {}))
    assert (found.id, found.source.endpoint, found.role) == ("[fd00::7]:8000", "tcp://[fd00::7]:5557", "both")


def test_the_label_may_have_another_name_and_others_say_more():
    labels = {"role": "role-name", "spill": "tier/slow", "model": "model.name", "transfer": "kv/by"}
    discover = Discover(selector="a=b", labels=labels)
    found = parse_url(discover.url_of("10.0.0.7", {"role-name": "decode", "model.name": "small", "kv/by": "llm-d"}))
    assert (found.role, found.model, found.transfer, found.spill) == ("decode", "small", "llm-d", False)
    assert parse_url(discover.url_of("10.0.0.7", {"tier/slow": "true"})).spill
    assert not parse_url(discover.url_of("10.0.0.7", {"tier/slow": "false"})).spill


def test_a_url_says_what_no_label_says():
    url = "http://{ip}:8200#events=tcp://{ip}:5557,replay=tcp://{ip}:5558,role=decode"
    discover = Discover(selector="a=b", url=url)
    found = parse_url(discover.url_of("10.0.0.7", {}))
    assert (found.port, found.role) == (8200, "decode")
    assert found.source[:2] == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558")
    assert parse_url(discover.url_of("10.0.0.7", {"llm-d.ai/role": "prefill"})).role == "prefill"
    mooncake = Discover(selector="a=b", url="http://{ip}:8000#transfer=mooncake,bootstrap=9000")
    assert parse_url(mooncake.url_of("10.0.0.7", {})).bootstrap == 9000


@pytest.mark.parametrize(
    "labels, said",
    [
        ({"llm-d.ai/role": "encode"}, "its label llm-d.ai/role says 'encode', and not one of prefill, decode"),
        ({"slow": "maybe"}, "its label slow says 'maybe', and not one of yes"),
        ({"by": "pigeon"}, "transfer=pigeon is none of"),
        ({"slow": "yes", "llm-d.ai/role": "decode"}, "exclude each other"),
    ],
)
def test_what_no_replica_can_be_is_refused_by_the_label(labels, said):
    discover = Discover(selector="a=b", labels={"spill": "slow", "transfer": "by"})
    with pytest.raises(ValueError) as caught:
        discover.url_of("10.0.0.7", labels)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "fields, said",
    [
        ({}, "selector"),
        ({"selector": ""}, "selector"),
        ({"selector": "a=b", "url": "http://10.0.0.7:8000"}, "has no {ip} in it"),
        ({"selector": "a=b", "url": "{ip}:8000#roll=decode"}, "is none of events="),
        ({"selector": "a=b", "labels": {"rôle": "x"}}, "is nothing that a label says: role, model, spill, transfer"),
        ({"selector": "a=b", "api": "kubernetes.default"}, "api"),
    ],
)
def test_wrong_settings_are_refused(fields, said):
    with pytest.raises(ValidationError) as caught:
        Discover(**fields)
    assert said in str(caught.value)


def test_inside_a_pod_the_cluster_says_where_it_is(tmp_path):
    for name, text in (("namespace", "inference\n"), ("token", "secret\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    found = place(Discover(selector="a=b"), tmp_path, environ)
    assert (found.api, found.namespace) == ("https://[fd00::1]:443", "inference")
    assert found.headers == {"Authorization": "Bearer secret"} and found.authorities == tmp_path / "ca.crt"
    (tmp_path / "token").write_text("the next one")
    assert found.headers == {"Authorization": "Bearer the next one"}
    other = place(Discover(selector="a=b", namespace="mine", api="http://127.0.0.1:8001"), tmp_path, environ)
    assert (other.api, other.namespace) == ("http://127.0.0.1:8001", "mine")
    assert other.headers == {} and other.authorities is None, "a token went out in the clear"


def test_outside_of_one_the_settings_have_to_say_it(tmp_path):
    with pytest.raises(ValueError, match="Give its API as api: URL"):
        place(Discover(selector="a=b"), tmp_path, {})
    with pytest.raises(ValueError, match="give namespace: NAME"):
        place(Discover(selector="a=b", api="http://127.0.0.1:8001"), tmp_path, {})

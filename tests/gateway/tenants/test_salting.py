"""The salt that the gateway writes into bodies: always the last word, and never into what is no JSON object."""

import json
import re

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.http.messages import Request
from gateway.tenants.salting import salt_request, with_salt

SALT = "tenant-0123456789"
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text(max_size=4)
    | st.sampled_from(["}", '"', "\\", "cache_salt"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=5,
)
OBJECTS = st.dictionaries(st.text(max_size=4) | st.sampled_from(["prompt", "cache_salt"]), VALUES, max_size=4)


def readers(body: bytes) -> list[dict]:
    return [json.loads(body), orjson.loads(body)]


@given(OBJECTS, st.booleans(), st.sampled_from(["", " ", "\r\n\t"]))
def test_every_reader_finds_the_salt_and_all_else_as_it_was(given, ascii, space):
    body = (space + json.dumps(given, ensure_ascii=ascii, indent=1) + space).encode()
    for found in readers(with_salt(body, SALT)):
        salt = found.pop("cache_salt")
        given.pop("cache_salt", None)
        assert found == given and re.fullmatch(r"[\w-]{16,}", salt)


@given(
    st.binary(max_size=12).map(lambda text: b'{"a":' + text + b"}")
    | st.text('{}[]",:\\abc01 ', max_size=20).map(str.encode)
)
def test_what_is_no_json_does_not_become_any(body):
    salted = with_salt(body, SALT)
    if salted is None:
        return
    try:
        before = json.loads(body)
    except ValueError:
        with pytest.raises(ValueError):
            json.loads(salted)
    else:
        assert json.loads(salted).keys() == before.keys() | {"cache_salt"}


@pytest.mark.parametrize(
    "body",
    [b'[{"a": 1}]', b"", b'{"a": 1', '{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32-le"), b'--form\r\n{"a"}--'],
)
def test_other_bodies_are_refused(body):
    assert with_salt(body, SALT) is None


def test_a_clients_own_salt_divides_its_tenants_cache_and_reaches_no_others():
    def of(given: str, salt=SALT) -> str:
        return json.loads(with_salt(b'{"prompt": "x", %b}' % given.encode(), salt))["cache_salt"]

    first, second = of('"cache_salt": "one"'), of('"cache_salt" :"two"')
    assert len({SALT, first, second, "one", "two", of('"cache_salt": "one"', SALT + "x")}) == 6
    assert first == of('"cache_salt": "one"')
    # spelled so that it is not seen, or none: the tenant's own
    assert of(r'"cache\u005fsalt": "one"') == of('"cache_salt": null') == of('"cache_salt": 7') == SALT
    victim = "another-0123456789"
    assert victim not in {of(f'"cache_salt": "{victim}"'), of(rf'"cache\u005fsalt": "{victim}"')}


def test_a_mark_of_utf_8_is_passed_over():
    assert json.loads(with_salt(b'\xef\xbb\xbf{"a": 1}', SALT)) == {"a": 1, "cache_salt": SALT}


@pytest.mark.parametrize("path", [b"/cohere/v2/chat", b"/v2/embed?x=1"])
def test_where_engines_pass_over_a_salt_a_tenant_with_a_cache_of_its_own_is_refused(path):
    """Its request would be cached where everybody finds it."""
    request = Request("POST", path, [], b'{"model": "m"}', False, True)
    refused = salt_request(request, SALT)
    assert refused.status == 403 and "cache_salt" in refused.message and SALT not in refused.message

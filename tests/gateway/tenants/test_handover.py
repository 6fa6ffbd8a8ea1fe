"""What of a request tells an engine to hand a cache over: found however it is spelled, and nothing else."""

import json

import orjson
import pytest

from gateway.http.messages import Request
from gateway.tenants import handover
from gateway.tenants.handover import read_unprepared, refusal_of_head, refusal_of_object
from replicas.engines import DIALECTS, TRANSFERS
from replicas.engines.handover import FIELDS, HEADERS
from replicas.engines.transfer import COMPLETIONS, Meeting, MeetingTransfer
from replicas.engines.vllm.transfer import pull_from_peer

from ..prompt.api.test_named import FIELD, FILE, FORM, form

HANDLE = {"do_remote_decode": True}
MODEL = FIELD % b"model", b"whisper"
XARGS = FIELD % b"vllm_xargs"


def refused(body, content_type="application/json"):
    """The field for which it is refused; "" where it is for another reason, None where it is not."""
    error = read_unprepared(content_type, body)[1]
    return error and (error.status, error.param or "")


def test_what_the_ways_of_moving_caches_write_is_all_in_the_one_statement():
    body = orjson.dumps({"prompt": "one", "max_tokens": 9})
    for way in [*TRANSFERS.values(), *[one.transfer for one in DIALECTS if one.transfer is not None]]:
        assert way.header in (b"", *HEADERS)
        first = way.first_body(COMPLETIONS, body)
        members = [first]
        if isinstance(way, MeetingTransfer):
            members += [b"{%b}" % one for one in way.meet(Meeting("gpu1", 8998, "engine"))]
        own = {"prompt", "max_tokens", "stream", "ignore_eos"}
        added = {name for one in members for name in orjson.loads(one)} - own
        assert added <= {*FIELDS} and (added or way.header), way.id
    pulled = orjson.loads(pull_from_peer(body, "gpu1:5600", "id"))
    assert pulled.keys() - {"prompt", "max_tokens"} <= {*FIELDS}


@pytest.mark.parametrize("field", FIELDS)
def test_each_field_is_found_wherever_engines_read_it(field):
    for request, named in (
        ({field: HANDLE}, field),
        ({field: [1, 2]}, field),
        ({field: 0}, field),
        ({"vllm_xargs": {field: "a"}}, f"vllm_xargs.{field}"),
        ({"sampling_params": {"extra_args": {field: HANDLE}}}, f"sampling_params.extra_args.{field}"),
        ({"sampling_params": {field: HANDLE}}, f"sampling_params.{field}"),
    ):
        request = {"model": "m", "messages": [], **request}
        error = refusal_of_object(request)
        assert (error.status, error.param, error.code) == (400, named, "field_not_allowed") and named in error.message
        assert refused(orjson.dumps(request)) == (400, named)


@pytest.mark.parametrize(
    "body",
    [
        rb'{"kv\u005ftransfer_params": {"a": 1}}',
        rb'{"\u006bv_transfer_param\u0073": {"a": 1}}',
        b'{"kv_transfer_params": null, "kv_transfer_params": {"a": 1}}',
        rb'{"kv_transfer_params": null, "kv_transfer\u005fparams": {"a": 1}}',
        b'{"a": "kv_transfer_params", "kv_transfer_params":\n\t{}}',
        b'{"a": NaN, "kv_transfer_params": {"a": 1}}',
        rb'{"a": "\ud800", "kv\u005ftransfer_params": {"a": 1}}',
        b'\xef\xbb\xbf{"kv_transfer_params": {"a": 1}}',
        '{"kv_transfer_params": {"a": 1}}'.encode("utf-16"),
        '{"kv_transfer_params": {"a": 1}}'.encode("utf-32-be"),
        # what nobody here can read, and another engine's reader may
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b', "kv_transfer_params": {}}',
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + ', "kv_transfer_params": {}}').encode("utf-16"),
        b'{"kv_transfer_params": {"a": 1},}',
    ],
)
def test_a_field_is_found_however_a_body_spells_it(body):
    assert refused(body) == (400, "kv_transfer_params")
    assert refused(body, FORM) is not None  # as an engine reads it that does not look at the content type


def test_what_may_hide_a_field_and_cannot_be_read_is_refused():
    deep = b"[" * 100_000 + b"]" * 100_000
    assert refused(rb'{"kv\u005Ftransfer_params": {}, "a": ' + deep + b"}") == (400, "")
    assert refused(b'{"a": ' + deep + b"}") is None  # of this the engine says what is wrong


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_found_where_one_piece_of_a_body_ends(field, encoding):
    begin = '{"a":'
    characters = handover._PIECE // len(" ".encode(encoding))
    for before in (0, 1, len(field) // 2, len(field) - 1, len(field)):
        spaces = " " * (characters - len(begin) - before)
        assert refused((begin + spaces + field).encode(encoding)) == (400, field)


class Whole(bytes):
    """A body of which no method is called that looks at all of it in one call."""

    def _of_the_whole(self, *_):
        raise AssertionError("one call for the whole body")

    __contains__ = replace = count = split = strip = lstrip = translate = decode = _of_the_whole


@pytest.mark.parametrize(
    "begin, content_type",
    [
        (b"\0RIFF", "application/octet-stream"),
        (b"RIFF", "application/octet-stream"),
        (b"    ", "application/octet-stream"),
        (b'--abc\r\nContent-Disposition: form-data; name="file"; filename="a\\"b.wav"\r\n\r\n', FORM),
        (b'a preamble\r\n--abc\r\nContent-Disposition: form-data; name="file"; filename="a\\"b.wav"\r\n\r\n', FORM),
    ],
)
def test_no_call_sees_the_whole_of_a_body_that_cannot_be_read(monkeypatch, begin, content_type):
    """Each call holds the interpreter, also in a thread: 50 MB in one held up the event loop for 1.5 s."""
    seen = []

    class Search:
        def search(self, piece):
            seen.append(len(piece))

    monkeypatch.setattr(handover, "_HIDES_A_FIELD", Search())
    monkeypatch.setattr(handover, "parse", Whole.replace)
    body = Whole(begin + begin[-1:] * 2_000_000)
    assert refused(body, content_type) is None
    assert max(seen) < 100_000 and 2_000_000 < sum(seen) < 2_100_000


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "sampling_params": {"extra_args": None}},
        {"messages": [{"role": "user", "content": 'what is "kv_transfer_params": {"do_remote_decode": true}?'}]},
        {"metadata": {"kv_transfer_params": HANDLE}, "tools": [{"bootstrap_room": 1}]},
        {"vllm_xargs": {"session_id": "a"}, "sampling_params": {"max_tokens": 1}},
        {"vllm_xargs": "kv", "sampling_params": [1], "request_id": "mine"},
        {"request_id": 7},
    ],
)  # fmt: skip
def test_nothing_else_is_refused(request_):
    assert refusal_of_object(request_) is None
    for body in (orjson.dumps(request_), json.dumps(request_).encode("utf-16")):
        assert refused(body) is None


def test_the_last_of_several_counts_as_it_does_to_engines():
    body = b'{"kv_transfer_params": {"a": 1}, "kv_transfer_params": null}'
    assert json.loads(body)["kv_transfer_params"] is None and refused(body) is None
    assert read_unprepared("application/json", b'{"model": "a", "model": "b"}') == ("b", None)


@pytest.mark.parametrize(
    "parts, field",
    [
        ([(XARGS, b'{"kv_transfer_params": "a"}')], "vllm_xargs.kv_transfer_params"),
        ([(XARGS, rb'{"kv\u005ftransfer_params": "a", "b": NaN}')], "vllm_xargs.kv_transfer_params"),
        ([(XARGS, b"{}"), (XARGS, b'{"ec_transfer_params": ["a"]}')], "vllm_xargs.ec_transfer_params"),
        ([(FIELD % b"kv_transfer_params", b"{}")], "kv_transfer_params"),
        ([(b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs", b'{"kv_transfer_params": 1}')], "kv_transfer_params"),
        ([(b"Content-Disposition: form-data; name*=utf-8''vllm%5Fxargs", rb'{"kv\u005ftransfer_params": 1}')], ""),
        ([(b'Content-Disposition: form-data; name="vllm_xargs"; filename="a"', b'{"kv_transfer_params": 1}')], "kv_transfer_params"),
        ([(XARGS, b'{"session_id": "kv_transfer_params"}'), (FIELD % b"prompt", b"kv_transfer_params")], None),
        ([(b'Content-Disposition: form-data; name="file"; filename="a\\"b.wav"', b"sound")], None),
    ],
)  # fmt: skip
def test_forms_are_read_for_them_too(parts, field):
    found = refused(form(FILE, *parts, MODEL), FORM)
    assert found == (None if field is None else (400, field))


def test_a_form_in_another_charset_is_not_passed_on():
    body = form(MODEL, FILE)
    assert read_unprepared(FORM, body) == ("whisper", None)
    for charset in ("utf-8", "UTF8", '"utf-8"', "us-ascii"):
        assert refused(body, f"{FORM}; charset={charset}") is None
    for charset in ("utf-16", "utf-7", "cp037"):
        assert refused(body, f"multipart/form-data; charset={charset}; boundary=abc") == (400, "")


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_name_engines(name):
    error = refusal_of_head(Request("POST", b"/v1/chat/completions", [(name, b"10.0.0.1:80")], b"", False, True), b"1")
    assert (error.status, error.param) == (400, name.decode())


@pytest.mark.parametrize(
    "marks", ["___prefill_addr_10.0.0.1:80___decode_addr_10.0.0.2:80_" + 32 * "0", "a___decode_addr_b"]
)
def test_a_requests_id_that_names_engines(marks):
    request = Request("POST", b"/v1/chat/completions", [(b"x-request-id", marks.encode())], b"", False, True)
    assert refusal_of_head(request, marks.encode()).param == "x-request-id"
    assert refusal_of_head(request, b"an-id") is None
    assert refusal_of_object({"request_id": marks}).param == "request_id"
    assert refused(orjson.dumps({"request_id": marks})) == (400, "request_id")
    assert refused(orjson.dumps({"request_id": marks}).replace(b"_", rb"\u005f")) == (400, "request_id")
    assert refused(form(FILE, (FIELD % b"request_id", marks.encode())), FORM) == (400, "request_id")


@pytest.mark.parametrize(
    "id",
    [
        rb'"\u005fabc"',
        rb'"a\u0041\n\ud83d\ude00"',
        b'["___prefill_addr_a"]',
        b'{"a": "___decode_addr_a"}',
        b'"\xc3\xa4"',
        b"null",
    ],
)
def test_any_other_id_is_passed_on_prepared_or_not(id):
    body = b'{"request_id": %b}' % id
    assert refusal_of_object(json.loads(body)) is None
    assert refused(body) is None


def test_the_id_in_a_form_is_no_json():
    assert refused(form(FILE, (FIELD % b"request_id", rb"\u005f\u005f\u005fprefill_addr_")), FORM) is None

"""The model that a request names which is only passed on."""

import pytest

from gateway.prompt.api.named import named_model

FORM = "multipart/form-data; boundary=abc"


def form(*parts: tuple[bytes, bytes], boundary: bytes = b"abc") -> bytes:
    return (
        b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (boundary, head, value) for head, value in parts)
        + b"--%b--\r\n" % boundary
    )


FILE = (
    b'Content-Disposition: form-data; name="file"; filename="model"\r\nContent-Type: audio/wav',
    b'\x00\r\n\r\nname="model"\r\n\r\nwrong' * 999,
)


@pytest.mark.parametrize(
    "content_type, body, model",
    [
        ("application/json", b'{"query": {"model": "inner"}, "model": "bge"}', "bge"),
        ("", b'{"model": "bge", "documents": ["' + b"x" * 100_000 + b'"]}', "bge"),
        ("application/json", b'{"documents": []}', None),
        ("application/json", b'{"model": 7}', None),
        ("application/json", b'{"model": ""}', None),
        ("application/json", b'["model"]', None),
        ("application/json", b'{"model": "\xff"}', None),
        ("application/json", b'{"model": "bge"', None),
        ("application/json", b"[" * 100_000, None),
        (FORM, form((b'Content-Disposition: form-data; name="model"', b"whisper"), FILE), "whisper"),
        (FORM, form(FILE, (b'content-disposition: form-data; name="model"', b"whisper")), "whisper"),
        (FORM, form(FILE, (b"Content-Type: text/plain\r\nContent-Disposition: form-data; name=model", b"whisper")), "whisper"),
        ('Multipart/Form-Data; charset=utf-8; boundary="a b"', form((b'Content-Disposition: form-data; name="model"', b"whisper"), boundary=b"a b"), "whisper"),
        (FORM, b"a preamble\r\n" + form((b'Content-Disposition: form-data; name="model"', b"whisper")), "whisper"),
        (FORM, form((b'Content-Disposition: form-data; name="models"', b"whisper")), None),
        (FORM, form((b'Content-Disposition: form-data; name="model"', b"x" * 5000)), None),
        (FORM, form(*[(*FILE[:1], b"x")] * 200, (b'Content-Disposition: form-data; name="model"', b"whisper")), "whisper"),
        (FORM, form(*[(*FILE[:1], b"x")] * 3000, (b'Content-Disposition: form-data; name="model"', b"whisper")), None),
        (FORM, form((b'Content-Disposition: form-data; name="model"', b"mine"), (b'Content-Disposition: form-data; name="model"', b"not mine")), "not mine"),
        ("application/json", b'{"model": "mine", "model": "not mine"}', "not mine"),
        (FORM, b"--abc\r\nContent-Disposition: form-data; name=\"model\"", None),
        (FORM, b"", None),
        (FORM, b"nothing of a form", None),
        ("multipart/form-data", b"", None),
    ],
)  # fmt: skip
def test_the_model_is_found_wherever_it_stands(content_type, body, model):
    assert named_model(content_type, body) == model


FIELD, OTHER = b'Content-Disposition: form-data; name="%b"', (b'Content-Disposition: form-data; name="model"', b"other")


@pytest.mark.parametrize(
    "content_type, body",
    [
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name = "model"', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: attachment; name="model"', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name="a"; filename="; name=model;"; name=model', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name="a"; b="; name=model; c"', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name="a\\"; name="model"', b"mine"))),
        (FORM, form(OTHER, (b"Content-Disposition: form-data; name*=utf-8''mod%65l", b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data;\r\n name="model"', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name="model"; filename="a"', b"mine"))),
        (FORM, form(OTHER, (b'Content-Disposition: form-data; name="model"\r\nContent-Disposition: form-data; name="a"', b"mine"))),
        (FORM, form(OTHER, (FIELD % b"a", b"x\r\n--abcd\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nmine"))),
        ('multipart/form-data; boundary=xyz; a="; boundary=abc"', form(OTHER)),
        ('multipart/form-data; a="; boundary=abc"; boundary=xyz', form(OTHER)),
        ('multipart/form-data; boundary="abc\\""', form(OTHER)),
    ],
)  # fmt: skip
def test_a_form_that_two_parsers_may_read_in_two_ways_names_none(content_type, body):
    """A key that may use some models is judged by the name, and the engine by what its own parser makes of the form."""
    assert named_model(content_type, body) is None


def test_what_only_looks_like_the_field_or_comes_behind_the_end_is_not_the_model():
    assert named_model(FORM, form(OTHER, (FIELD % b"MODEL", b"mine"))) == "other"
    assert named_model(FORM, form(OTHER, (FIELD % b"a", b'x; name="model"'))) == "other"
    assert (
        named_model(FORM, form(OTHER, (b'Content-Disposition: form-data; name="a"; filename="; name=model;"', b"mine")))
        == "other"
    )
    assert named_model(FORM, form(OTHER) + form((FIELD % b"model", b"mine"))) == "other"
    file = b'Content-Disposition: form-data; name="file"; filename="a.wav"; filename*=utf-8\'\'a.wav'
    assert named_model(FORM + "; charset=utf-8", form((file, b"x"), OTHER)) == "other"

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

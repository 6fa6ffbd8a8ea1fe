import pytest

from replicas.replica import EventSource, parse_url


@pytest.mark.parametrize(
    "text, id, url",
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://10.0.0.7:8000/", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://gpu-3:8000/v1", "gpu-3:8000", "http://gpu-3:8000"),
        ("gpu-3:8000", "gpu-3:8000", "http://gpu-3:8000"),
        ("http://gpu-3", "gpu-3:80", "http://gpu-3:80"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_what_people_paste(text, id, url):
    address = parse_url(text)
    assert (address.id, address.url, address.source, address.model) == (id, url, None, None)


def test_the_fragment_carries_what_the_engine_cannot_tell():
    address = parse_url("http://h:1#events=tcp://h:5557,replay=tcp://h:5558,topic=kv@1,model=llama")
    assert address.source == EventSource("tcp://h:5557", "tcp://h:5558", "kv@1")
    assert (address.url, address.model) == ("http://h:1", "llama")
    assert parse_url("h:1#events=tcp://h:5557").source == EventSource("tcp://h:5557", None, "")


@pytest.mark.parametrize(
    "text, said",
    [
        ("https://h:1", "'https' is not supported"),
        ("http://h:1/api", "expected at the root"),
        ("http://h:1?x=1", "expected at the root"),
        ("http://:8000", "no host"),
        ("http://h:99999", "out of range"),
        ("http://h:x", "could not be cast"),
        ("", "no host"),
        ("h:1#event=tcp://h:2", "'event=tcp://h:2' after #"),
        ("h:1#events=h:2", "ZMQ endpoint"),
        ("h:1#replay=tcp://h:2", "need events="),
    ],
)
def test_a_url_nobody_can_use_is_refused_with_the_reason(text, said):
    with pytest.raises(ValueError, match="replica URL") as caught:
        parse_url(text)
    assert said in str(caught.value)

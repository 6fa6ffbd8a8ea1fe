import pytest

from replicas.replica import EventSource, Replica, parse_url, url_of


@pytest.mark.parametrize(
    "text, id, url",
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("http://gpu-3:8000/v1", "gpu-3:8000", "http://gpu-3:8000"),
        ("gpu-3:8000", "gpu-3:8000", "http://gpu-3:8000"),
        ("http://[::1]:8000", "[::1]:8000", "http://[::1]:8000"),
        ("http://[0:0:0:0:0:0:0:1]:8000", "[::1]:8000", "http://[::1]:8000"),
        ("http://[2001:DB8:0::07]:8000", "[2001:db8::7]:8000", "http://[2001:db8::7]:8000"),
        ("http://[::ffff:10.0.0.7]:8000", "10.0.0.7:8000", "http://10.0.0.7:8000"),
        ("  http://GPU-3.cluster.local:8000\n", "gpu-3.cluster.local:8000", "http://gpu-3.cluster.local:8000"),
        ("http://my_service:8000", "my_service:8000", "http://my_service:8000"),
        ("http://a." + "b" * 63 + ".c:1", "a." + "b" * 63 + ".c:1", "http://a." + "b" * 63 + ".c:1"),
        ("https://gpu-3/v1", "gpu-3:443", "https://gpu-3:443"),
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
    source = parse_url("h:1#events=tcp://[::1]:5557,replay=ipc:///run/kv").source
    assert source == EventSource("tcp://[::1]:5557", "ipc:///run/kv", "")


@pytest.mark.parametrize(
    "text, said",
    [
        ("ftp://h:1", "'ftp' is not supported"),
        ("http://h:1/api", "expected at the root"),
        ("http://a b:1", "a space or a control character"),
        ("http://a:1\r\nX-Evil: y", "a space or a control character"),
        ("http://" + "a" * 64 + ":1", "is not a host name"),
        ("http://" + "a." * 127 + "a:1", "is not a host name"),
        ("http://" + "a" * 3000, "has 3007 characters"),
        ("http://a..b:1", "is not a host name"),
        ("http://a{}<script>:1", "is not a host name"),
        ("http://a%2eb:1", "is not a host name"),
        ("http://münchen.example:1", "xn--"),
        ("http://127.1:1", "octets in '127.1'; write an address as four numbers from 0 to 255, like 127.0.0.1"),
        ("http://1.2.3.999:1", "like 127.0.0.1, or a host name"),
        ("http://0x7f000001:1", "Expected 4 octets"),
        ("http://[::1:1", "Invalid IPv6 URL"),
        ("http://[::zz]:1", "zz"),
        ("http://[fe80::1%eth0]:1", "zone"),
        ("http://user:password@h:1", "user or password"),
        ("http://h:0", "port 0"),
        ("foo", "no port in it, write http://foo:PORT, or http://foo for port 80"),
        ("10.0.0.7/v1", "no port in it, write http://10.0.0.7:PORT"),
        ("http://h:-1", "write http://HOST:PORT"),
        ("h:1#events=tcp://h:2,events=tcp://h:3", "events= is given twice"),
        ("h:1#events=tcp://h", "ZMQ endpoint"),
        ("h:1#events=tcp://[::zz]:2", "write an address in brackets, like [::1], or a host name"),
        ("h:1#events=tcp://h:0", "ZMQ endpoint"),
        ("h:1#events=tcp://*:5557", "is not a host name"),
        ("h:1#events=inproc://x", "ZMQ endpoint"),
        ("h:1#events=ipc://", "names no socket"),
        ("h:1#events=ipc:///" + "x" * 200, "names no socket"),
        ("h:1#events=tcp://h:2,replay=tcp://a..b:3", "replay="),
        ("http://:8000", "no host"),
        ("http://h:99999", "out of range"),
        ("http://h:x", "could not be cast"),
        ("", "no host"),
        ("h:1#event=tcp://h:2", "'event=tcp://h:2' after #"),
        ("h:1#replay=tcp://h:2", "need events="),
        ("h:1#role=Prefill", "role=Prefill is none of prefill, decode, both"),
        ("h:1#role=" + "x" * 500, "x is none of prefill, decode, both"),
        ("h:1#spill=no", "spill=no is none of yes"),
        ("h:1#spill=yes,role=decode", "exclude each other"),
        ("h:1#transfer=NIXL", "is none of nixl, nixl-unchecked, mooncake, llm-d"),
        ("h:1#peer=10.0.0.7", "peer=10.0.0.7 is not HOST:PORT"),
        ("h:1#peer=h:65536", "is not HOST:PORT"),
        ("h:1#peer=h:0000065536000", "is not HOST:PORT"),
        ("h:1#peer=-:1", "is not a host name"),
        ("h:1#bootstrap=70000", "is no port"),
    ],
)
def test_a_url_nobody_can_use_is_refused_with_the_reason(text, said):
    with pytest.raises(ValueError, match="replica URL") as caught:
        parse_url(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "http://h:1",
        "http://h:1#role=prefill",
        "http://h:1#role=decode,transfer=llm-d",
        "http://h:1#model=llama,role=decode",
        "http://h:1#events=tcp://h:5557,replay=tcp://h:5558,topic=t,model=m,role=prefill",
        "http://h:1#model=llama,spill=yes",
        "http://h:1#peer=10.0.0.7:5710",
        "http://h:1#role=decode,transfer=nixl,peer=[fd00::7]:5710",
    ],
)
def test_a_url_is_written_as_it_was_read(text):
    assert url_of(parse_url(text)) == text


def test_each_rank_passes_its_memory_on_at_a_port_of_its_own():
    replica = Replica("h:1", "http://h:1", "h", 1, peer=parse_url("http://h:1#peer=10.0.0.7:5710").peer)
    assert [replica.at_rank(rank, 0.0).peer for rank in range(3)] == [f"10.0.0.7:571{rank}" for rank in range(3)]
    assert Replica("h:1", "http://h:1", "h", 1).at_rank(1, 0.0).peer == ""


def test_a_replica_is_for_both_unless_its_url_says_otherwise():
    roles = [parse_url(text).role for text in ("h:1", "h:1#role=both", "h:1#role=prefill", "h:1#role=decode")]
    assert roles == ["both", "both", "prefill", "decode"]

"""The body of a request that llm-d's sidecar makes two of."""

from replicas.engines import TRANSFERS

LLMD = TRANSFERS["llm-d"]
CHAT = "/v1/chat/completions"


def test_a_sidecar_gets_the_clients_own_body():
    body = b' {"seed": 12345678901234567890123, "messages": []}'
    assert LLMD.first_body(CHAT, body) is body and LLMD.second_body(body, b"") is body
    for name in (b'"kv_transfer_params"', b'"use_beam_search"', b'"background"', b'"bootstrap_room"'):
        assert LLMD.first_body(CHAT, b"{%b: {}}" % name) is None

"""What engines write into streams: tokens, errors in each format, and what only announces an answer."""

DONE = b"data: [DONE]\n\n"
TOKEN = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
DIED = b'data: {"error":{"message":"died","type":"InternalServerError","code":500}}\n\n'
# As real engines write them; (format, event, status it amounts to).
ERRORS = [
    (b"/v1/completions", b'data: {"error": {"message": "Token id 99999999 is out of vocabulary", "type": "BadRequestError", '
                         b'"param": null, "code": 400}}\n\n', 400),
    (b"/v1/chat/completions", b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": null, "code": 500}}\n\n', 500),
    (b"/v1/chat/completions", b'data: {"object":"error","message":"too bad","type":"BadRequestError","param":null,"code":400}\n\n', 400),
    (b"/v1/chat/completions", b'data: {"error":{"message":"the model says \\"code\\": 400","type":"server_error"}}\n\n', 500),
    (b"/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error","message":"died","param":null,"sequence_number":2}\n\n', 500),
    (b"/v1/responses", b'event: response.failed\ndata: {"type":"response.failed","response":{"status":"failed",'
                       b'"error":{"code":"invalid_prompt","message":"x"}}}\n\n', 400),
    (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n', 500),
    (b"/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"x"}}\n\n', 400),
]  # fmt: skip
NAMES = [f"{path.decode().rpartition('/')[2]}-{status}-{at}" for at, (path, _, status) in enumerate(ERRORS)]
ROLE = b'data: {"id":"1","choices":[{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
PINGS = [b": ping\n\n", b":\n\n", b'event: ping\ndata: {"type": "ping"}\n\n']

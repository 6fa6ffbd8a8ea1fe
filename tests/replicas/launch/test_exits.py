import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas.engines.vllm.log import GRAMMAR
from replicas.launch import exits
from replicas.launch.exits import KEPT_LINES, LONGEST_LINE, LONGEST_SHOWN


def explain(code: int, seconds: float, lines: list[str]) -> str:
    return exits.explain(code, seconds, lines, GRAMMAR)


def said(line: str) -> str:
    return exits.said(line, GRAMMAR)


def Tail() -> exits.Tail:
    return exits.Tail(GRAMMAR)


# What vLLM 0.28 and 0.32 wrote on a CPU when they could not start: the last lines but for frames of tracebacks.
CORE, SERVER = "(EngineCore pid=5) ERROR 11-20 13:24:01 [core.py:1346] ", "(APIServer pid=3) "
AFTER = [
    SERVER + "    raise RuntimeError(",
    SERVER + "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}",
]
LIMIT = (
    SERVER
    + "WARNING 11-20 13:23:22 [system_utils.py:299] Found ulimit of 20000 and failed to automatically increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`."
)


@pytest.mark.parametrize(
    "lines, remedy",
    [
        ([CORE + "RuntimeError: Cannot find any model weights with `/models/x`", *AFTER], "check --model"),
        ([CORE + "ValueError: To serve at least one request with the model's max seq len (16384), (0.01 GiB KV cache is needed, which is larger than the available KV cache memory (0.0 GiB). Based on the available memory, the estimated maximum model length is 2048.", *AFTER],
         "lower max_model_len"),
        ([CORE + "ValueError: Available memory on node 0 (13.72/21.21 GiB) on kv cache allocation is less than requested memory for kv (900.0 GiB). Decrease --kv-cache-memory-bytes", *AFTER],
         "lower gpu_memory_utilization, kv_cache_memory_bytes"),
        ([CORE + "ValueError: Available memory on node 0 (13.82/21.21 GiB) on startup is less than desired CPU memory utilization (0.99, 21.0 GiB).", *AFTER],
         "lower gpu_memory_utilization"),
        ([CORE + "zmq.error.ZMQError: Address already in use (addr='tcp://*:21102')", *AFTER], "ss -ltnp"),
        ([SERVER + "OSError: [Errno 98] Address already in use"], "ss -ltnp"),
        ([SERVER + "    raise HFValidationError(", SERVER + "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nowhere'."],
         "check --model"),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"], "lower gpu_memory_utilization"),
        (["ModuleNotFoundError: No module named 'vllm'"], "install it"),
        (["OSError: [Errno 28] No space left on device"], "df -h"),
        (["usage: vllm [-h] [-v]", "            {chat,complete,serve,launch,bench,collect-env,run-batch} ...", "vllm: error: unrecognized arguments: --no-such-flag"],
         "extra_args"),
        (["usage: vllm serve [model_tag] [options]", "vllm serve: error: argument --dtype: invalid choice: 'int3' (choose from 'auto', 'half')"], "extra_args"),
    ],
)  # fmt: skip
def test_what_vllm_says_when_it_cannot_start_is_found_among_what_else_it_says(lines, remedy):
    reason = explain(1, 20, [LIMIT, *lines])
    telling = next(said(line) for line in reversed(lines) if "rror: " in line and line not in AFTER)
    assert remedy in reason and reason.endswith(f'; log: "{telling}"')


MORE = "    For further information visit https://errors.pydantic.dev/2.14/v/value_error"
ERRORS = "pydantic_core._pydantic_core.ValidationError: 1 validation error for "


# What vLLM 0.32 wrote to profiles that it refuses.
@pytest.mark.parametrize(
    "lines, remedy, shown",
    [
        ([ERRORS + "SchedulerConfig", "  Value error, max_num_batched_tokens (64) must be greater than or equal to max_num_seqs (128). [type=value_error, input_value=ArgsKwargs((), {'runner_t..., 'stream_interval': 1}), input_type=ArgsKwargs]", MORE],
         "fields together", "Value error, max_num_batched_tokens (64) must be greater"),
        ([ERRORS + "CacheConfig", "gpu_memory_utilization", "  Input should be less than or equal to 1 [type=less_than_equal, input_value=92.0, input_type=float]", MORE],
         "refuses a field", "gpu_memory_utilization: Input should be less than or equal to 1 "),
        ([ERRORS + "SpeculativeConfig", "mehtod", "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value='ngram', input_type=str]", MORE],
         "refuses a field", "mehtod: Unexpected keyword argument "),
        (["usage: vllm serve [model_tag] [options]", "vllm serve: error: argument --kv-transfer-config: 1 validation error for KVTransferConfig", "kv_connectr", "  Unexpected keyword argument [type=unexpected_keyword_argument, input_value='NixlConnector', input_type=str]", MORE],
         "refuses a field", "kv_connectr: Unexpected keyword argument "),
        (["    raise ValueError(", "ValueError: Unknown attention backend: 'FLASHMAL'. Valid options are: FLASH_ATTN, FLASH_ATTN_DIFFKV"],
         "does not know that value", "ValueError: Unknown attention backend: 'FLASHMAL'"),
    ],
)  # fmt: skip
def test_a_profile_that_vllm_refuses_is_told_by_its_own_words(lines, remedy, shown):
    for prefix in ("", SERVER):
        reason = explain(1, 8, [LIMIT, *(prefix + line for line in lines)])
        assert remedy in reason and f'; log: "{shown}' in reason


def test_an_unknown_failure_shows_the_line_that_says_most():
    telling = "ValueError: no common block size for 16"
    assert explain(7, 60, ["x", telling, "shutting down"]) == f'exited with code 7 after 60 s; log: "{telling}"'
    assert explain(4, 1, ["one", "two"]) == 'exited with code 4 after 1.0 s; log: "two"'
    assert explain(4, 1, []) == "exited with code 4 after 1.0 s, and left no log"


def test_an_end_without_an_error_was_asked_for():
    lines = [SERVER + "INFO:     Shutting down", "  warnings.warn('resource_tracker: There appear to be %d '"]
    why = 'as if asked to stop, and not by this gateway; log: "INFO:     Shutting down"'
    assert explain(0, 46, lines) == f"exited with code 0 after 46 s: {why}"


@pytest.mark.parametrize(
    "number, said",
    [
        (9, "SIGKILL after 5.0 s: for memory probably"),
        (11, "crashed in native code"),
        (15, "asked it to stop"),
        (250, "signal 250"),
    ],
)
def test_signals_are_told_apart(number, said):
    assert said in explain(-number, 5, ["fine"])


def test_a_core_that_died_without_a_word_is_the_reason():
    """vLLM's API server ends by itself, with code 0 or 1, when its engine core is gone; what it logged before is about
    requests."""
    dead = "ERROR 11-20 13:45:06 [async_llm.py:744] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)."
    started, finished = ("INFO:     Started server process [3]", "INFO:     Finished server process [3]")
    lines = [SERVER + line for line in ("ValueError: a client's mistake", started, dead, finished)]
    said = "one of its processes was killed, for memory probably, or crashed (`dmesg`)"
    assert f'{said}; log: "vllm.v1.engine.exceptions.EngineDeadError' in explain(0, 5, lines)
    told = explain(1, 5, [lines[0], CORE + "ValueError: the core's own", *lines[1:]])
    assert told == 'exited with code 1 after 5.0 s; log: "ValueError: the core\'s own"'


def test_a_line_is_shown_without_who_wrote_it_where():
    assert said("(EngineCore pid=7) ERROR 11-20 12:58:51 [core.py:12] ValueError: no") == "ValueError: no"
    assert said("(APIServer pid=7) INFO:     Shutting down") == "INFO:     Shutting down"
    assert said("plain (text) [here]") == "plain (text) [here]"
    assert len(said("x" * LONGEST_LINE)) == LONGEST_SHOWN and said("x" * LONGEST_LINE).endswith("...")


def test_a_tail_keeps_each_processes_last_lines_and_no_access_log():
    """The API server's complaint, once for each request it had, does not push out the engine's."""
    tail = Tail()
    tail.feed(b"(EngineCore pid=7) ValueError: the cause\n")
    for number in range(3 * KEPT_LINES):
        tail.feed(b"(APIServer pid=1) EngineDeadError: See stack trace (above) for the root cause. %d\n" % number)
        tail.feed(
            b'(APIServer pid=1) INFO:     127.0.0.1:1 - "POST /v1/completions HTTP/1.1" 500 Internal Server Error\n'
        )
    assert tail.lines[0] == "(EngineCore pid=7) ValueError: the cause" and len(tail.lines) == 1 + KEPT_LINES
    assert tail.lines[-1] == tail.last and tail.last.endswith(f"cause. {3 * KEPT_LINES - 1}")
    assert explain(1, 2, tail.lines).endswith('; log: "ValueError: the cause"')


@given(st.lists(st.binary(max_size=30)))
def test_a_tail_is_the_same_however_its_bytes_come(pieces):
    one, many = Tail(), Tail()
    one.feed(b"".join(pieces))
    for piece in pieces:
        many.feed(piece)
    one.close(), many.close()
    assert one.lines == many.lines


def test_a_tail_keeps_the_last_lines_short_and_clean():
    tail = Tail()
    tail.feed(b"\n".join(b"line %d" % i for i in range(200)) + b"\n")
    assert tail.lines == [f"line {i}" for i in range(200 - KEPT_LINES, 200)]
    tail.feed(b"\r 10%\r 20%\r\x1b[32mdone\x1b[0m\n")
    assert tail.lines[-3:] == ["10%", "20%", "done"]
    tail.feed(b"x" * 1_000_000)
    assert tail.last == "done"
    tail.close()
    assert tail.last == "x" * LONGEST_LINE

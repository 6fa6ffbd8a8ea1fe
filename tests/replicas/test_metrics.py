import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicas import metrics
from replicas.engines.vllm.metrics import NAMES
from replicas.metrics import Scrape

# Two data-parallel ranks, names and labels as vLLM 0.32 writes them, and neighbours that begin alike.
PAGE = b"""# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79516901798e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
vllm:num_requests_waiting{engine="0",model_name="m"} 7.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 700.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:prefix_cache_queries_total{engine="0",model_name="a \\"b\\" {c} 9"} 1024.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.7e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 992.0
vllm:cache_config_info{block_size="None"} 1.0
vllm:cache_config_info{block_size="16",enable_prefix_caching="True",num_gpu_blocks="2048",x="None"} 1.0
"""


def parse(page: bytes, now: float) -> Scrape:
    return metrics.parse(page, now, NAMES)


def missing(page: bytes) -> list[str]:
    return metrics.missing(page, NAMES)


def test_a_page_of_today():
    scrape = parse(PAGE, 5.0)
    assert scrape._replace(ranks=(), engines=()) == Scrape(5.0, 5, 7, 0.5, 1024, 992, 1795169017.98, 16, 2048, True)
    assert not missing(PAGE)


def test_each_data_parallel_rank_has_its_own_figures():
    scrape = parse(PAGE, 5.0)
    assert scrape.engines == (0, 1)
    # what has no engine label, here the configuration, is every rank's
    assert scrape.ranks[0] == Scrape(5.0, 3, 7, 0.25, 1024, 992, 1795169017.98, 16, 1024, True)
    assert scrape.ranks[1] == Scrape(5.0, 2, 0, 0.5, None, None, 1795169017.98, 16, 1024, True)


def test_the_creation_time_of_a_counter_is_of_one_process_where_it_has_fractions():
    line = b'vllm:prompt_tokens_created{engine="%d",model_name="m"} %s\n'
    scrape = parse(PAGE + line % (0, b"1.795740778861245e+09") + line % (1, b"1.795740778861311e+09"), 5.0)
    assert {one.created for one in (scrape, *scrape.ranks)} == {1795740778.861245}
    assert parse(PAGE + line % (0, b"1.7e+09"), 5.0).created is None


# An idle vLLM 0.32 with two ranks and two API servers: gauges have no sample yet, nor has the process a start time.
IDLE = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:cache_config_info{_block_size_resolved="True",block_size="32",enable_prefix_caching="True",engine="0",num_gpu_blocks="4096"} 1.0
vllm:cache_config_info{_block_size_resolved="True",block_size="32",enable_prefix_caching="True",engine="1",num_gpu_blocks="4096"} 1.0
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 0.0
vllm:prefix_cache_queries_total{engine="1",model_name="tiny"} 0.0
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 0.0
vllm:prefix_cache_hits_total{engine="1",model_name="tiny"} 0.0
"""


def test_ranks_are_known_before_their_first_request():
    scrape = parse(IDLE, 0.0)
    assert scrape.engines == (0, 1) and scrape.running is None and scrape.started is None
    assert [(one.num_blocks, one.prefix_hits) for one in scrape.ranks] == [(2048, 0), (2048, 0)]
    assert not missing(IDLE)


@pytest.mark.parametrize("told", [("256", "512"), ("512", "512")])
def test_a_ranks_blocks_are_its_own_though_vllm_adds_them_up(told):
    """As seen with one API server, and with one for each rank."""
    line = 'vllm:cache_config_info{block_size="32",engine="%d",%snum_gpu_blocks="%s"} 1.0\n'
    with_tokens = "".join(line % (rank, 'kv_cache_size_tokens="8192",', blocks) for rank, blocks in enumerate(told))
    without = "".join(line % (rank, "", blocks) for rank, blocks in enumerate(told))
    for page in (with_tokens, without):
        assert [one.num_blocks for one in parse(page.encode(), 0.0).ranks] == [256, 256]


def test_a_renamed_series_is_named():
    assert missing(PAGE.replace(b"vllm:num_requests_waiting", b"vllm:requests_queued")) == ["vllm:num_requests_waiting"]
    assert len(missing(b"python_info 1\n")) == 5


def test_nonsense_values_are_missing_values():
    page = b'vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc NaN\nvllm:cache_config_info{block_size="None"} 1'
    assert parse(page, 0.0) == Scrape(0.0, *[None] * 8)
    assert parse(b"{}", 0.0) == Scrape(0.0, *[None] * 8)
    full, name = parse(PAGE, 0.0), b"vllm:num_requests_running"
    rest = b"\n".join(line for line in PAGE.split(b"\n") if not line.startswith(name))
    assert parse(rest, 0.0)._replace(ranks=()) == full._replace(running=None, ranks=()), "and leaves the others"


@given(st.lists(st.sampled_from([*PAGE.split(b"\n"), b"{", b"}", b"\n", b"vllm:num_requests_running", b"\xff"])))
def test_never_raises(lines):
    scrape = parse(b"\n".join(lines), 1.0)
    assert scrape.kv_usage is None or 0 <= scrape.kv_usage <= 1


def test_a_block_of_full_attention_is_told_apart_from_one_gpus_share_of_it():
    """vLLM 0.32 with decode context parallelism; "None" where groups differ, and older versions tell nothing of it."""
    page = b'vllm:cache_config_info{block_size="64",effective_attention_block_size="%b",kv_cache_size_tokens="5120",num_gpu_blocks="9"} 1.0\n'
    scrape = parse(page % b"512", 1.0)
    assert (scrape.block_size, scrape.attention_block_size) == (64, 512)
    assert parse(page % b"None", 1.0).attention_block_size is None and parse(PAGE, 1.0).attention_block_size is None
    both = page.replace(b"{", b'{engine="0",') + page.replace(b"{", b'{engine="1",')
    assert [one.num_blocks for one in parse(both % (b"512", b"512"), 1.0).ranks] == [10, 10]

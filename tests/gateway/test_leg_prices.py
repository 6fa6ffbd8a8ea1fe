"""What a transfer is priced at: by the bytes of the model that the replicas serve, with several behind one gateway."""

import pytest

from gateway.models import Models
from gateway.prompt.pipeline import Pipeline
from loadgen.plan.transfers import PER_TRANSFER, transfer
from policies.kv_space import KvSpace, prompt_bytes, read
from policies.transfers import BANDWIDTH, LATENCY, TOKEN_BYTES, Transfers
from replicas import Replica
from replicas.simulated.profile import load_profile
from tests.policies.test_kv_space import DEEPSEEK_V3, GEMMA3_27B, LLAMA_8B, QWEN3_NEXT

LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
TOKENS = 20_000


def priced(**configs) -> Transfers:
    """Each replica with the configuration of its model."""
    made = Transfers()
    made.size_of = lambda replica: prompt_bytes(configs[replica], 16)
    return made


@pytest.mark.parametrize("config", [LLAMA_8B, LLAMA_70B, DEEPSEEK_V3, GEMMA3_27B, QWEN3_NEXT])
@pytest.mark.parametrize("tensor_parallel", [1, 8])
def test_the_first_prediction_is_that_of_plan_pools(config, tensor_parallel):
    if "kv_lora_rank" in config or config is QWEN3_NEXT:
        tensor_parallel = 1  # what each GPU has as well is sent once
    space = KvSpace(read(config), tensor_parallel=tensor_parallel)
    planned = transfer(space, TOKENS, 16, BANDWIDTH, load_profile("gpu-8b"))
    seconds = priced(p=config).seconds("p", "d", TOKENS, 1.0)
    assert seconds == pytest.approx(planned.seconds - planned.count * PER_TRANSFER)


def test_what_a_70b_teaches_of_the_network_holds_for_a_model_with_a_latent():
    """Both send over one network, three times as slow as the prior."""
    made = priced(big=LLAMA_70B, latent=DEEPSEEK_V3)
    first = made.seconds("latent", "d", TOKENS, 1.0)
    for _ in range(30):
        made.observe("big", "d2", TOKENS, 3 * made.prior("big", TOKENS), 1.0)
    assert made.seconds("latent", "d", TOKENS, 1.0) == pytest.approx(3 * first, rel=0.01)
    assert made.seconds("big", "d3", TOKENS, 1.0) > 4 * made.seconds("latent", "d", TOKENS, 1.0)


def test_a_model_whose_shape_is_not_known_is_taken_for_one_of_8_billion_parameters():
    made = priced(p={"model_type": "simulated"})
    assert made.seconds("p", "d", 1600, 1.0) == LATENCY + 1600 * TOKEN_BYTES / BANDWIDTH
    assert made.seconds("p", "d", 1600, 1.0) == priced(p=LLAMA_8B).seconds("p", "d", 1600, 1.0)


async def test_the_gateway_reads_the_shape_from_the_files_of_each_replicas_model():
    pipeline = Pipeline(None, "model", 16)
    pipeline.config = DEEPSEEK_V3
    models = Models.of(pipeline)
    assert models.prompt_bytes("p") is None, "it is not adopted yet"
    replica = Replica("127.0.0.1:9", "http://127.0.0.1:9", "127.0.0.1", 9)
    models.adopt(replica)
    size = models.prompt_bytes(replica.id)
    assert size is not None and size(1600) == 1600 * 70_272
    models.stop()

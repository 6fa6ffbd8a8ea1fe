"""vLLM's own cache manager: of 2,000 prompts each prediction is what it finds, with and without a speculator."""

import pytest

from ..cachemap.events.test_lookups import followed
from .lookups import ask, jobs, number

REQUESTS = 2000


def name(job: dict) -> str:
    return f"{job['kind']}-dcp{job['dcp']}-{job['drops']}-ahead{job['ahead']}"


@pytest.mark.parametrize("job", jobs(REQUESTS, "0.33"), ids=name)
def test_each_prediction_is_what_the_manager_finds(vllm, job):
    job = {**job, "vllm": number()}
    if job["ahead"] and job["vllm"] < "0.33":
        pytest.skip("before 0.33 no token behind a block names it")
    (answers,) = ask([job])
    compared = list(followed(job, answers))
    right = sum(predicted == found for predicted, found in compared)
    print(f"vLLM {job['vllm']}, {name(job)}: {right} of {len(compared)} equal")
    assert right == len(compared)

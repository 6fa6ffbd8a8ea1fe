"""The bench of the figures by class and model runs on the exchange as it is."""

from bench import figures


async def test_each_step_of_a_request_is_timed():
    found = await figures.measured(rounds=2)
    assert min(found.values()) > 0
    assert found["a request: first token and end"] == found["first token"] + found["end of a stream"]

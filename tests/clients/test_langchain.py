"""langchain-openai: chats, streams, tools bound, the Responses API, embeddings."""

import pytest
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from openai import BadRequestError


@pytest.fixture
def settings(gateway) -> dict:
    return {"base_url": gateway.url + "/v1", "api_key": "unused", "model": "sim", "max_retries": 0}


def test_invoke_and_stream(settings):
    model = ChatOpenAI(**settings, max_tokens=8)
    answer = model.invoke("Which module reads CSV?")
    assert answer.content and answer.usage_metadata["output_tokens"] <= 8
    chunks = list(model.stream("Which module reads CSV?", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert (
        sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata)
        == answer.usage_metadata["output_tokens"]
    )


async def test_batch(settings):
    answers = await ChatOpenAI(**settings, max_tokens=4).abatch([f"Number {number}" for number in range(8)])
    assert all(answer.content for answer in answers)


def test_tools_bound(settings):
    def look(at: str) -> str:
        """Look somewhere."""
        return at

    assert ChatOpenAI(**settings, max_tokens=4).bind_tools([look]).invoke("Look at csv.py").content


def test_responses_api(settings):
    model = ChatOpenAI(**settings, max_tokens=8, use_responses_api=True)
    answer = model.invoke("Which module reads CSV?")
    assert answer.text
    assert "".join(chunk.text for chunk in model.stream("Which module reads CSV?")) == answer.text


def test_embeddings(settings):
    """With its own length check it would count tokens as OpenAI's models do."""
    made = OpenAIEmbeddings(**settings, check_embedding_ctx_length=False).embed_documents(["one", "two"])
    assert [len(vector) for vector in made] == [64, 64]


def test_an_error(settings):
    with pytest.raises(BadRequestError):
        ChatOpenAI(**settings, max_tokens=10_000_000).invoke("Which module reads CSV?")

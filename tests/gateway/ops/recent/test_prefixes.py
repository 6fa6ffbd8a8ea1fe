"""The tree of prefixes that sampled prompts share."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from gateway.ops.recent.decisions import Sample
from gateway.ops.recent.prefixes import MOST_NODES, tree


def sample(*blocks, space=0, text="", model="m"):
    """`blocks`: what the prompt's blocks say; a hash stands for all up to its block, as the real ones do."""
    return Sample(
        0.0, space, model, 16, array("Q", [hash(blocks[: at + 1]) % 2**63 for at in range(len(blocks))]), text
    )


def nobody(space, hashes):
    return []


def test_shared_prefixes_are_nodes_and_longer_ones_their_children():
    samples = [
        sample("s", "t", "a", "b"),
        sample("s", "t", "a", "c"),
        sample("s", "t", "d"),
        sample("u", "v"),
        sample("w"),
    ]
    found = tree(samples, lambda space, hashes: ["r1", "r2"] if len(hashes) == 2 else ["r1"])
    assert found["samples"] == 5
    root, child = found["nodes"]
    assert (root["tokens"], root["samples"], root["share"], root["holders"]) == (32, 3, 0.6, ["r1", "r2"])
    assert (child["tokens"], child["samples"], child["path"], child["holders"]) == (48, 2, [root["id"]], ["r1"])


def test_prompts_of_two_models_share_nothing_though_their_hashes_are_the_same():
    assert tree([sample("s", space=1), sample("s", space=2)], nobody)["nodes"] == []
    samples = [sample("s", space=space, model=f"m{space}") for space in (1, 2) for _ in "ab"]
    nodes = tree(samples, lambda space, hashes: [f"r{space}"])["nodes"]
    assert [(one["model"], one["holders"], one["path"]) for one in nodes] == [("m1", ["r1"], []), ("m2", ["r2"], [])]
    assert len({one["id"] for one in nodes}) == 2


def test_the_text_of_a_node_is_what_its_samples_have_in_common_behind_its_parents():
    samples = [
        sample("s", "a", "x", text="You are kind. Tell me of A. Now"),
        sample("s", "a", "y", text="You are kind. Tell me of A. Then"),
        sample("s", "b", text="You are kind. Ask"),
    ]
    assert [node["text"] for node in tree(samples, nobody)["nodes"]] == ["You are kind. ", "Tell me of A. "]


def test_only_the_hottest_are_shown_and_many_equal_prompts_cost_nothing():
    found = tree(
        [sample(*range(2000)) for _ in range(300)] + [sample(-n, n) for n in range(1, 50) for _ in "ab"], nobody
    )
    assert len(found["nodes"]) == MOST_NODES and found["nodes"][0]["tokens"] == 32_000


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=6), max_size=12))
def test_a_node_has_as_many_samples_as_begin_with_it(prompts):
    samples = [sample(*prompt) for prompt in prompts]
    for node in tree(samples, nobody)["nodes"]:
        blocks = node["tokens"] // 16
        begin = [
            one for one in samples if len(one.hashes) >= blocks and f"m:{one.hashes[blocks - 1]:016x}" == node["id"]
        ]
        assert len(begin) == node["samples"] >= 2
        longer = {one.hashes[blocks] if len(one.hashes) > blocks else None for one in begin}
        assert len(longer) > 1 or longer == {None}, "or it would end later"

"""What a worker tells of how requests fared: each failure at once, and with it how many were answered before."""

from collections import Counter
from types import SimpleNamespace

from gateway.workers.worker import Worker


def test_failures_go_with_the_number_of_answers():
    worker, sent = Worker.__new__(Worker), []
    worker._answered, worker.channel = Counter(), SimpleNamespace(send=sent.append)
    for _ in range(50):
        worker._traffic("a", None)
    worker._traffic("b", None)
    assert sent == []
    worker._traffic("a", "status 500")
    assert sent == [{"do": "traffic", "news": [("a", None, 50), ("b", None, 1), ("a", "status 500", 1)]}]
    worker._tell_news()
    assert len(sent) == 1, "nothing is new"

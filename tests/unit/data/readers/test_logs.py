"""Logs: entries of a broker with offsets, on a real Redis, and on the smallest log of one's own."""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.data.batches import Batches
from shoal.data.identity import content_name
from shoal.data.ledger import audit, mark_samples
from shoal.data.readers.logs import LogGap, LogPlace, consume, redis_log
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from tests.support.servers import Server, start_redis

redis = pytest.importorskip("redis", reason="needs the extra redis")
HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_redis() as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as made:
        made.flushall()
        add(made, 0, 30)
        yield made


def add(client: Any, start: int, stop: int) -> None:
    for number in range(start, stop):
        client.xadd("log", {"n": number}, id=f"{number + 1}-0")


def numbers(source: Any, start: int, stop: int) -> list[int]:
    source.hold(np.arange(start, stop))
    return [int(source[at]["n"]) for at in range(start, stop)]


def redis_log_at(source: Any, position: int) -> str:
    numbers(source, 0, position)
    numbers(source, position, position + 4)
    return str(source.bookmark(np.arange(position, position + 4)))


def test_a_resumed_run_goes_on_behind_its_offset(client: Any, server: Server) -> None:
    """What the broker dropped meanwhile is behind it; what came meanwhile is read; none twice."""
    before = redis_log(server.url, "log")
    assert numbers(before, 0, 8) + numbers(before, 8, 12) == list(range(12))
    mark = before.bookmark(np.arange(12, 16))
    client.xtrim("log", maxlen=22, approximate=False)  # all before those of the last step
    add(client, 30, 40)
    after = redis_log(server.url, "log")
    after.go_to(mark)
    assert numbers(after, 12, 40) == list(range(12, 40))


def test_entries_that_are_dropped_before_they_are_read_are_counted(
    client: Any, server: Server
) -> None:
    source = redis_log(server.url, "log")
    mark = redis_log_at(source, 12)
    client.xtrim("log", maxlen=15, approximate=False)
    again = redis_log(server.url, "log")
    again.go_to(mark)
    with pytest.raises(LogGap, match=r"'log' dropped 3 entries behind 12-0 before they were read"):
        numbers(again, 12, 16)
    fresh = redis_log(server.url, "log")  # a new run begins with the oldest that is held
    assert numbers(fresh, 0, 3) == [15, 16, 17]


def test_a_log_is_known_by_its_name_for_its_first_entries_go(client: Any, server: Server) -> None:
    """Or a run could not be resumed once the broker dropped what it began with."""
    before = content_name(redis_log(server.url, "log"))
    client.xtrim("log", maxlen=10, approximate=False)
    assert content_name(redis_log(server.url, "log")) == before
    client.xadd("other", {"n": 0}, id="1-0")
    assert content_name(redis_log(server.url, "other")) != before


def test_a_log_that_was_replaced_is_not_read_on(client: Any, server: Server) -> None:
    mark = redis_log_at(redis_log(server.url, "log"), 12)
    client.delete("log")
    for number in range(30):
        client.xadd("log", {"n": -number}, id=f"{number + 1}-0")
    again = redis_log(server.url, "log")
    again.go_to(mark)
    with pytest.raises(SourceLost, match=r"'log' gives other entries behind \d+-0 than the run"):
        numbers(again, 12, 16)


def test_a_log_that_is_replaced_while_it_is_read_is_found(client: Any, server: Server) -> None:
    """Its new entries lie behind the old ones, and some between the two may be lost."""
    source = redis_log(server.url, "log")
    numbers(source, 0, 30)
    client.delete("log")
    client.xadd("log", {"n": 99}, id="99-0")
    with pytest.raises(SourceLost, match=r"'log' had 30 entries and ever got 1 by now"):
        numbers(source, 30, 31)


def test_a_log_that_grows_is_waited_for(client: Any, server: Server) -> None:
    source = redis_log(server.url, "log")
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(numbers, source, 28, 33)
        time.sleep(0.1)
        assert not answer.done()
        add(client, 30, 33)
        assert answer.result() == [28, 29, 30, 31, 32]
    idle = redis_log(server.url, "log", idle_s=0.1)
    with pytest.raises(SourceLost, match=r"gave nothing behind 33-0 for 0.1 s.*--resume"):
        numbers(idle, 30, 40)


def test_what_is_no_log_is_refused(client: Any, server: Server) -> None:
    client.rpush("list", b"x")
    with pytest.raises(UsageError, match="has no key 'lgo'"):
        redis_log(server.url, "lgo")
    with pytest.raises(UsageError, match="'list' in Redis is a list, not a stream"):
        redis_log(server.url, "list")
    with pytest.raises(SourceLost, match=r"It was tried 3 times"):
        redis_log("redis://127.0.0.1:1/0", "log", patience=HASTY)


class ListLog:
    """A log of one's own: a list that drops its oldest entries."""

    def __init__(self) -> None:
        self.entries, self.num_dropped = list(range(100)), 0

    def __str__(self) -> str:
        return "the list"

    def begin(self) -> LogPlace:
        return LogPlace(str(self.num_dropped - 1), self.num_dropped)

    def read(self, place: LogPlace, most: int) -> Sequence[tuple[str, Any]]:
        if self.num_dropped > place.seen:
            raise LogGap(f"{self} dropped {self.num_dropped - place.seen}")
        found = self.entries[place.seen : place.seen + most]
        return [(str(place.seen + at), {"n": entry}) for at, entry in enumerate(found)]


def test_a_log_of_ones_own_is_shuffled_and_resumed() -> None:
    log = ListLog()
    source = consume(log, shuffle=10)
    assert sorted(numbers(source, 0, 20)) == list(range(20))
    numbers(source, 20, 30)
    mark = source.bookmark(np.arange(20, 30))
    log.num_dropped = 20
    again = consume(log, shuffle=10)
    again.go_to(mark)
    assert sorted(numbers(again, 20, 40)) == list(range(20, 40))


def test_an_audit_of_a_log_that_dropped_its_first_entries_says_so() -> None:
    """And accuses no step."""
    log = ListLog()
    run = Batches(consume(log), batch_size=8)
    steps = [{"step": n + 1, "mark": mark_samples(run.source, run.at(n).ids)} for n in range(6)]
    assert audit(steps, Batches(consume(log), batch_size=8)).num_marked == 6
    log.num_dropped = 20
    found = audit(steps, Batches(consume(log), batch_size=8))
    assert (found.num_marked, found.num_wrong, found.num_unmarked) == (0, 0, 6)
    assert len(found.problems) == 1 and "which its broker has dropped" in found.problems[0]
    steps[3]["mark"] = 1
    log.num_dropped = 0
    assert audit(steps, Batches(consume(log), batch_size=8)).num_wrong == 1

"""Kafka: a partition of a real broker (0.9) as a log, with the faults of one."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal.data.readers.kafka import kafka_log
from shoal.data.readers.logs import LogGap
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from tests.support.servers import Server
from tests.support.store_servers import start_kafka

kafka = pytest.importorskip("kafka", reason="needs the extra kafka")
HASTY = RetryPolicy(num_tries=2, first_pause_s=0.01, most_pause_s=0.05)
PATIENT = RetryPolicy(num_tries=60, first_pause_s=0.2, most_pause_s=1.0)
# Old messages go soon, by segments of a few of them.
SETTINGS = {
    "log_segment_bytes": 500,
    "log_retention_bytes": 100_000,
    "log_retention_check_interval_ms": 200,
    "log_segment_delete_delay_ms": 10,
    "num_partitions": 2,
}
pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with start_kafka(**SETTINGS) as started:
        yield started


def send(server: Server, topic: str, start: int, stop: int, padding: int = 0) -> None:
    producer = kafka.KafkaProducer(bootstrap_servers=server.url, retries=5)
    for number in range(start, stop):
        value = f"{number}".ljust(padding).encode()
        producer.send(topic, value, key=b"k", partition=0).get(30)
    producer.close()


def log(server: Server, topic: str, **options: Any) -> Any:
    return kafka_log(server.url, topic, **{"timeout_s": 5.0, "patience": HASTY, **options})


def numbers(source: Any, start: int, stop: int) -> list[int]:
    source.hold(np.arange(start, stop))
    return [int(source[at]["value"]) for at in range(start, stop)]


def test_messages_come_in_order_and_a_resumed_run_goes_on(server: Server) -> None:
    send(server, "clicks", 0, 30)
    before = log(server, "clicks")
    assert numbers(before, 0, 8) + numbers(before, 8, 12) == list(range(12))
    assert before[9] == {"key": b"k", "value": b"9"}
    mark = before.bookmark(np.arange(12, 16))
    send(server, "clicks", 30, 40)
    after = log(server, "clicks")
    after.go_to(mark)
    assert numbers(after, 12, 40) == list(range(12, 40))
    shuffled = log(server, "clicks", shuffle=10)
    assert sorted(numbers(shuffled, 0, 20)) == list(range(20))
    for source in (before, after, shuffled):
        source.close()


def test_messages_that_retention_removed_are_counted(server: Server) -> None:
    send(server, "dropped", 0, 20)
    source = log(server, "dropped")
    numbers(source, 0, 8)
    numbers(source, 8, 12)
    mark = source.bookmark(np.arange(12, 16))
    send(server, "dropped", 20, 400, padding=400)
    again = log(server, "dropped")
    first = _settled(again)
    again.go_to(mark)
    said = rf"'dropped' dropped {first - 8} messages from offset 8 on before they were read"
    with pytest.raises(LogGap, match=said):
        numbers(again, 12, 16)
    fresh = log(server, "dropped")  # a new run begins with the oldest that is held
    assert numbers(fresh, 0, 3)[0] == first


def _settled(source: Any) -> int:
    """The oldest offset, once retention has nothing left to remove."""
    before, deadline = -1, time.monotonic() + 90
    while (first := int(source.log.begin().seen)) < 20 or first != before:
        assert time.monotonic() < deadline, f"nothing was removed: {first}"
        before = first
        time.sleep(3.0)
    return first


def test_another_topic_of_that_name_is_found(server: Server) -> None:
    send(server, "long", 0, 20)
    source = log(server, "long")
    numbers(source, 0, 12)
    numbers(source, 12, 16)
    mark = source.bookmark(np.arange(12, 16))
    send(server, "short", 0, 3)
    other = log(server, "short")
    other.go_to(mark)
    with pytest.raises(SourceLost, match=r"ends before offset 3, and the run goes on at \d+"):
        numbers(other, 12, 16)


def test_what_is_not_there_is_refused(server: Server) -> None:
    send(server, "clicks", 40, 41)
    with pytest.raises(UsageError, match=r"Kafka has no topic 'click'. Did you mean 'clicks'"):
        log(server, "click")
    with pytest.raises(UsageError, match=r"partition 5 of .*'clicks' does not exist. It has 0, 1"):
        log(server, "clicks", partition=5)
    with pytest.raises(SourceLost, match=r"cannot be read: .*It was tried 2 times"):
        kafka_log("127.0.0.1:1", "clicks", timeout_s=0.6, patience=HASTY)
    with pytest.raises(SourceLost, match=r"no answer within 1.8 s.* It was tried 2 times"):
        away = {"api_version": (0, 9)}  # so that the consumer does not look for it first
        kafka_log("127.0.0.1:1", "clicks", timeout_s=0.6, options=away, patience=HASTY)
    with pytest.raises(UsageError, match=r"cannot be read: .*nope"):
        log(server, "clicks", options={"nope": 1})
    idle = log(server, "clicks", partition=1, idle_s=0.1)
    with pytest.raises(SourceLost, match=r"gave nothing behind -1 for 0.1 s.*--resume"):
        numbers(idle, 0, 1)


def test_a_broker_goes_away_hangs_and_comes_back() -> None:
    with start_kafka() as server:
        send(server, "clicks", 0, 40)
        source = log(server, "clicks", timeout_s=2.0, patience=PATIENT)
        assert numbers(source, 0, 4) == [0, 1, 2, 3]
        with ThreadPoolExecutor(1) as threads:
            server.pause()
            answer = threads.submit(numbers, source, 500, 504)
            time.sleep(1.0)
            assert not answer.done()
            server.resume()
            send(server, "clicks", 40, 300)
            server.stop()
            time.sleep(3.0)
            assert not answer.done()
            server.start()
            send(server, "clicks", 300, 600)
            assert answer.result(60) == [500, 501, 502, 503]
        hasty = log(server, "clicks", timeout_s=1.0)
        server.stop()
        with pytest.raises(SourceLost, match=r"'clicks' cannot be read.* It was tried 2 times"):
            numbers(hasty, 0, 4)

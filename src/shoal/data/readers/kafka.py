"""A partition of a Kafka topic as a log: messages in the order of their offsets (`logs.py`).

    shoal.data.kafka_log("broker-1:9092,broker-2:9092", "clicks", partition=3, shuffle=1000)

A topic has no order of its own, only each of its partitions has; so a stream reads one. No group is
joined and no offset is committed to the broker: a run keeps the offset in its checkpoints, and
others may read the same partition. Each process makes a consumer of its own when it first reads.

A broker that is away is asked again with growing pauses, and then named. Messages that retention
removed before they were read end the run with their number; so does a partition that ends before
the offset of the run, which is another topic of that name. Not for compacted topics, whose messages
go one by one. Needs the extra `kafka`. Cost: as `logs.py`; one connection to each broker.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from shoal.data.readers.logs import LogGap, LogPlace, LogSource, consume
from shoal.data.readers.records import SourceLost
from shoal.data.readers.retries import RetriedConnection
from shoal.data.validate import options_of, require_whole, text_of
from shoal.errors import UsageError, nearest, require
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy, answer_within

Answer = TypeVar("Answer")
_POLL_MS = 500  # for messages to come; the reader of the log looks again


class _PartitionReader:
    """A consumer of one partition; one thread uses it at a time."""

    def __init__(self, consumer: Any, at: Any):
        self.consumer, self._at, self._next = consumer, at, -1
        consumer.assign([at])

    def ends(self) -> tuple[int, int]:
        """The offsets of the first message and behind the last."""
        first = self.consumer.beginning_offsets([self._at])[self._at]
        return int(first), int(self.consumer.end_offsets([self._at])[self._at])

    def poll(self, wanted: int, most: int) -> list[Any]:
        """Messages from an offset on; none if none came soon."""
        if self._next != wanted:
            self.consumer.seek(self._at, wanted)
        found: list[Any] = self.consumer.poll(_POLL_MS, most).get(self._at, [])
        self._next = found[-1].offset + 1 if found else wanted
        return found


class KafkaLog:
    """A partition as a `Log`; an entry is a dict of the key and the value of a message."""

    def __init__(
        self,
        brokers: str,
        topic: str,
        partition: int,
        timeout_s: float,
        options: Mapping[str, Any],
        patience: RetryPolicy,
    ):
        library = require("kafka", "kafka")
        self._errors = require("kafka.errors", "kafka")
        self._topic, self._at = topic, library.TopicPartition(topic, partition)
        self._limit_s = 3 * timeout_s  # what can end by itself does so before
        how = {
            "bootstrap_servers": brokers.split(","),
            "request_timeout_ms": int(timeout_s * 1000),
            "api_version_auto_timeout_ms": int(timeout_s * 1000),
            **options,
            "group_id": None,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",  # or what was dropped would be passed over unsaid
        }
        self._broker = RetriedConnection(
            lambda: _PartitionReader(library.KafkaConsumer(**how), self._at),
            lambda reader: reader.consumer.close(),
            self._may_pass,
            patience,
            "Check the brokers, the name of the topic, and the rights to read it.",
        )
        self._refuse_unknown()

    def __str__(self) -> str:
        return f"partition {self._at.partition} of the Kafka topic {self._topic!r}"

    def begin(self) -> LogPlace:
        first, _ = self._ask(_PartitionReader.ends)
        return LogPlace(str(first - 1), first)

    def read(self, place: LogPlace, most: int) -> Sequence[tuple[str, Any]]:
        wanted = int(place.after) + 1

        def question(reader: _PartitionReader) -> list[Any]:
            try:
                found = reader.poll(wanted, most)
            except self._errors.OffsetOutOfRangeError:
                found = []
            if not found:  # an absent broker gives nothing either, but no offsets
                self._refuse_others(reader.ends(), wanted)
            return found

        found = self._ask(question)
        return [(str(each.offset), {"key": each.key, "value": each.value}) for each in found]

    def _ask(
        self, question: Callable[[_PartitionReader], Answer], is_first: bool = False
    ) -> Answer:
        """Some questions of the consumer wait for ever for a broker that is away."""
        late = TimeoutError(f"no answer within {self._limit_s:g} s")

        def in_time(reader: _PartitionReader) -> Answer:
            return answer_within(self._limit_s, partial(question, reader), late)

        ask = self._broker.ask_first if is_first else self._broker.ask
        return ask(in_time, f"{self} cannot be read")

    def _refuse_others(self, held: tuple[int, int], wanted: int) -> None:
        first, stop = held
        if first > wanted:
            raise LogGap(
                f"{self} dropped {first - wanted} messages from offset {wanted} on before they "
                "were read. Let it keep more (retention.ms, retention.bytes); to go on with what "
                "it still holds, begin a run with these weights (--from)."
            )
        if stop < wanted:
            raise SourceLost(
                f"{self} ends before offset {stop}, and the run goes on at {wanted}: it is not the "
                "one that was read. Begin a run with these weights (--from)."
            )

    def _refuse_unknown(self) -> None:
        def look(reader: _PartitionReader) -> tuple[list[str], list[int]]:
            known = reader.consumer.partitions_for_topic(self._topic)
            return sorted(reader.consumer.topics()), sorted(known or ())

        topics, partitions = self._ask(look, is_first=True)
        if self._topic not in topics:
            raise UsageError(f"Kafka has no topic {self._topic!r}. {nearest(self._topic, topics)}")
        if self._at.partition not in partitions:
            raise UsageError(f"{self} does not exist. It has {', '.join(map(str, partitions))}.")

    def _may_pass(self, error: Exception) -> bool:
        lasting = ("Auth", "Configuration", "InvalidTopic", "Unsupported", "Illegal", "TooLarge")
        is_kafkas = isinstance(error, self._errors.KafkaError | OSError)
        return is_kafkas and not any(word in type(error).__name__ for word in lasting)


def kafka_log(
    brokers: str,
    topic: str,
    *,
    partition: int = 0,
    shuffle: int = 0,
    idle_s: float = 600.0,
    timeout_s: float = 10.0,
    options: Mapping[str, Any] | None = None,
    patience: RetryPolicy = RETRY_POLICY,
) -> LogSource:
    """A stream of the messages of a partition that grows, as dicts of `key` and `value` in bytes.

    `brokers` are addresses host:port, with commas in between. `options` go to the `KafkaConsumer`
    of kafka-python: `security_protocol`, `sasl_mechanism` and their like.
    """
    text_of(topic, "kafka_log()")
    require_whole(partition, "kafka_log(partition=...)")
    given = options_of(options)
    log = KafkaLog(text_of(brokers, "kafka_log()"), topic, partition, timeout_s, given, patience)
    return consume(log, shuffle=shuffle, idle_s=idle_s)

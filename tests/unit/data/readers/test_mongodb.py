"""MongoDB: documents through pymongo, against a server of ours that speaks the wire protocol."""

import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data.identity import content_name
from shoal.data.readers import keyed
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.transforms.quarantine import quarantine
from shoal.errors import UsageError
from shoal.storage.object_client import RetryPolicy
from shoal.testing.sources import Case, SourceConformance

pymongo = pytest.importorskip("pymongo", reason="needs the extra mongodb")
bson = pytest.importorskip("bson")

from shoal.data.readers.mongodb import mongodb  # noqa: E402
from tests.support.mongo_wire import MongoServer, start_mongo  # noqa: E402

HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
STORED = [
    {"_id": bson.ObjectId(f"{number:024x}"), "n": number, "x": [number / 2, 1.0], "even": not n2}
    for number in (5, 3, 9, 1, 7)
    for n2 in [number % 3 == 0]
]
SORTED = sorted(STORED, key=lambda document: document["n"])


@pytest.fixture(autouse=True)
def quick_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """pymongo's threads end when they look up, every half a second; its errors hold clients."""
    from pymongo import common

    for name in ("KILL_CURSOR_FREQUENCY", "MIN_HEARTBEAT_INTERVAL"):
        monkeypatch.setattr(common, name, 0.02)
    yield
    gc.collect()


@pytest.fixture
def server() -> Iterator[MongoServer]:
    stored = [dict(document) for document in STORED]
    with start_mongo({"science.samples": stored}) as started:
        yield started


def samples(server: MongoServer, *query: Any, **options: Any) -> Any:
    return mongodb(server.url, "samples", *query, **{"patience": HASTY, **options})


class TestDocuments(SourceConformance):
    @pytest.fixture
    def case(self, server: MongoServer) -> Case:
        return Case(lambda: samples(server), SORTED)


@pytest.mark.full
class TestFields(SourceConformance):
    @pytest.fixture
    def case(self, server: MongoServer) -> Case:
        picked = [{"n": each["n"], "x": each["x"]} for each in SORTED]
        return Case(lambda: samples(server, key="n", fields=["n", "x"]), picked)


@pytest.mark.full
class TestPairs(SourceConformance):
    @pytest.fixture
    def case(self, server: MongoServer) -> Case:
        import torch

        pairs = [(torch.tensor(d["x"], dtype=torch.float64), torch.tensor(d["n"])) for d in SORTED]
        return Case(lambda: samples(server).pairs("x", "n"), pairs)


def test_filters_and_pipelines_run_on_the_server(
    server: MongoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keyed, "PAGE", 2)  # so that keys come by getMore
    assert [d["n"] for d in samples(server, {"even": True})] == [1, 5, 7]
    staged = samples(server, [{"$match": {"even": True}}, {"$set": {"m": "$n"}}], key="m")
    assert [d["m"] for d in staged] == [1, 5, 7] and len(staged) == 3
    with pytest.raises(UsageError, match=r"(?s)Unrecognized pipeline.*the filter or pipeline"):
        samples(server, [{"$mach": {}}])


def test_a_collection_that_changes_is_named(server: MongoServer) -> None:
    source = samples(server, key="n", version="even")
    before = content_name(source)
    stored = server.collections["science.samples"]
    stored.append({"_id": 1, "n": 8, "x": [], "even": True})
    assert len(source) == 5 and source[4]["n"] == 9
    assert content_name(samples(server, key="n")) != before
    stored[0]["even"] = "maybe"  # n = 5
    with pytest.raises(BadRecord, match=r"n = 5 \(sample 2\) was changed .*'maybe' now"):
        source[2]
    del stored[1]  # n = 3
    with pytest.raises(BadRecord, match=r"science with n = 3 \(sample 1\) is gone"):
        source[1]
    stored.append(dict(stored[2]))  # n = 1, twice
    with pytest.raises(BadRecord, match=r"n = 1 \(sample 0\) is there 2 times"):
        source[0]
    assert source[3]["n"] == 7
    with pytest.raises(UsageError, match=r"1 more than once in the column n"):
        samples(server, key="n")


def test_new_documents_stand_at_the_end(server: MongoServer) -> None:
    """Their ids grow with time, which is what --new-data needs."""
    server.collections["science.samples"].append({"_id": bson.ObjectId(), "n": 2, "x": [1.0]})
    grown = samples(server)
    assert [d["n"] for d in grown] == [1, 3, 5, 7, 9, 2]


def test_documents_of_unlike_shape(server: MongoServer, tmp_path: Path) -> None:
    stored = server.collections["science.samples"]
    stored += [
        {"_id": 1, "n": 11},
        {"_id": 2, "n": 12, "x": [1.0]},
        {"_id": 3, "n": 13, "x": bson.Decimal128("1.5")},
        {"_id": 4, "n": 14, "x": ["a"]},
    ]
    source = samples(server, key="n", fields=["n", "x"])
    with pytest.raises(BadRecord, match=r"n = 11 has no field 'x'.*quarantine"):
        source[5]
    pairs = source.pairs("x", "n")
    for ids, said in [
        ([0, 6], r"n = 12 \(sample 6\) holds float64 \[1\] in 'x', and sample 0 float64 \[2\]"),
        ([7], r"n = 13 \(sample 7\) has a Decimal128 \(.*1\.5.*\) in 'x', which no tensor"),
        ([8], r"n = 14 \(sample 8\) has a list \(\['a'\]\) in 'x', which no tensor can hold"),
    ]:
        with pytest.raises(BadRecord, match=said):
            pairs.take(np.array(ids))
    left_out = quarantine(pairs, tmp_path / "bad.jsonl")
    assert left_out[0][1].item() == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"key": "a.b"}, "no field of a document itself"),
        ({"query": "x"}, "a filter, a dict, or a pipeline"),
        ({"key": "x"}, "a key is one value"),
        ({"key": "absent"}, "a null in the column absent"),
        ({"key": "even"}, "False more than once"),
    ],
)
def test_wrong_questions_are_refused(
    server: MongoServer, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        mongodb(server.url, "samples", patience=HASTY, **arguments)
    with pytest.raises(UsageError, match="of no database"):
        mongodb(server.url.removesuffix("/science"), "samples", patience=HASTY)
    assert len(mongodb(server.url.removesuffix("/science"), "science.samples")) == 5
    assert len(mongodb(lambda: pymongo.MongoClient(server.url), "samples")) == 5


def test_wrong_credentials_are_refused_at_once_and_not_shown() -> None:
    with start_mongo({"science.samples": STORED}, password="secret") as server:
        assert len(samples(server)) == 5
        for url in (server.url.replace("secret", "hunter2"), server.url.replace("reader:", "r:")):
            with pytest.raises(UsageError, match=r"(?i)authentication failed") as caught:
                mongodb(url, "samples", patience=HASTY)
            assert not any(word in str(caught.value) for word in ("hunter2", "secret"))
        with pytest.raises(UsageError, match="requires authentication"):
            mongodb(server.url.replace("reader:secret@", ""), "samples", patience=HASTY)
    with pytest.raises(UsageError, match=r"no.* URL that MongoDB knows.*%2F") as caught:
        mongodb("mongodb://user:hunter/2@127.0.0.1/x", "samples")
    assert "hunter" not in str(caught.value)


def test_a_server_that_gives_less_than_it_counts_is_refused(server: MongoServer) -> None:
    server.drop_from_batches = 1
    with pytest.raises(SourceLost, match=r"counts 5 documents, and gave the keys of 4"):
        samples(server)


def test_a_server_goes_away_and_comes_back(server: MongoServer) -> None:
    patient = RetryPolicy(100, 0.02, 0.1)
    source = samples(server, timeout_s=1.0, patience=patient)
    assert source[0] == SORTED[0]
    server.stop()
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(lambda: source[3])
        time.sleep(0.2)
        assert not answer.done()
        server.start()
        assert answer.result() == SORTED[3]


def test_a_server_that_is_away_or_hangs_ends_the_wait(server: MongoServer) -> None:
    source = samples(server, timeout_s=0.2)
    server.pause()
    with pytest.raises(SourceLost, match=r"documents of the collection samples of .*tried 3"):
        source[0]
    server.resume()
    server.delay_s = 0.01
    assert source[0] == SORTED[0]
    server.stop()
    with pytest.raises(SourceLost, match=r"It was tried 3 times"):
        source[0]
    with pytest.raises(SourceLost, match=r"cannot be counted: .* It was tried 3 times"):
        samples(server, timeout_s=0.2)

"""One question to each real store, where it is there: the long tests are beside this one."""

from typing import Any

import pytest

import shoal
from shoal.storage.object_client import ObjectClient, RetryPolicy
from tests.support.store_servers import (
    S3_KEY,
    S3_SECRET,
    start_cassandra,
    start_hdfs,
    start_kafka,
    start_seaweedfs,
)

PATIENT = RetryPolicy(num_tries=30, first_pause_s=0.2, most_pause_s=1.0)
TABLE, ROWS = b"a,b\n1,x\n2,y\n", [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}]
pytestmark = pytest.mark.timeout(150)


def ask_hdfs(patched: pytest.MonkeyPatch) -> list[Any]:
    pytest.importorskip("requests", reason="needs the extra hdfs")
    with start_hdfs() as hdfs:
        ObjectClient(hdfs.web_url, {}, PATIENT).put("t.csv", TABLE)
        return list(shoal.data.csv(f"{hdfs.web_url}/t.csv"))


def ask_s3(patched: pytest.MonkeyPatch) -> list[Any]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    with start_seaweedfs() as server:
        patched.setenv("AWS_ACCESS_KEY_ID", S3_KEY)
        patched.setenv("AWS_SECRET_ACCESS_KEY", S3_SECRET)
        patched.setenv("AWS_ENDPOINT_URL_S3", server.url)
        patched.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = ObjectClient("s3://smoke", {}, PATIENT)
        client._request("make", "", lambda system, path: system.mkdir(path))
        client.put("t.csv", TABLE)
        return list(shoal.data.csv("s3://smoke/t.csv"))


def ask_cassandra(patched: pytest.MonkeyPatch) -> list[Any]:
    cluster = pytest.importorskip("cassandra.cluster", reason="needs the extra cassandra")
    with start_cassandra() as server:
        where = {"port": server.port, "protocol_version": 3, "connect_timeout": 30}
        made = cluster.Cluster(["127.0.0.1"], **where)
        session = made.connect()
        how = "{'class': 'SimpleStrategy', 'replication_factor': 1}"
        session.execute(f"CREATE KEYSPACE k WITH replication = {how}", timeout=60)
        session.execute("CREATE TABLE k.t (id int PRIMARY KEY, n int)", timeout=60)
        session.execute("INSERT INTO k.t (id, n) VALUES (1, 2)")
        rows = shoal.data.cassandra(
            lambda: cluster.Cluster(["127.0.0.1"], **where).connect(), "k.t"
        )
        found = list(rows)
        del rows
        made.shutdown()
        return found


def ask_kafka(patched: pytest.MonkeyPatch) -> list[Any]:
    kafka = pytest.importorskip("kafka", reason="needs the extra kafka")
    with start_kafka() as server:
        producer = kafka.KafkaProducer(bootstrap_servers=server.url, retries=5)
        producer.send("clicks", b"1", partition=0).get(30)
        producer.close()
        source = shoal.data.kafka_log(server.url, "clicks", timeout_s=30.0)
        found = [source[0]]
        source.close()
        return found


ASKED = {
    ask_s3: ROWS,
    ask_hdfs: ROWS,
    ask_cassandra: [{"id": 1, "n": 2}],
    ask_kafka: [{"key": None, "value": b"1"}],
}


@pytest.fixture(scope="module", params=ASKED, ids=lambda ask: ask.__name__)
def answer(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Found and expected. Asked here, for the clients have threads that stay for good."""
    with pytest.MonkeyPatch.context() as patched:
        return request.param(patched), ASKED[request.param]


def test_a_store_answers(answer: tuple[Any, Any]) -> None:
    found, expected = answer
    assert found == expected

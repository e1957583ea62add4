"""Runs whose data or checkpoints lie on servers that go away, come back and hold passwords."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.ranks import Pool
from shoal.testing.sources import in_fork
from tests.support.faults import Trained, check_ledger, check_same, start
from tests.support.servers import PASSWORD, start_postgres, start_redis
from tests.system.stored import connect_columns, use_objects

SHOAL = Path(sys.executable).with_name("shoal")
RECIPES = Path(__file__).with_name("stored.py")
SECRET = "hunter2%2Fsecret"
pytestmark = pytest.mark.timeout(240)
PASSWORD_GIVEN = "hunter2secret"
KINDS = ("entries", "documents", "rows", "cached", "objects", "columns")


@contextmanager
def stored(kind: str) -> Iterator[Any]:
    """A server that holds 400 numbers, which wants a password."""
    numbers = range(400)
    with ExitStack() as held:
        if kind == "rows":
            psycopg = pytest.importorskip("psycopg", reason="needs the extra sql")
            server = held.enter_context(start_postgres())
            with psycopg.connect(server.url) as made:
                made.execute("CREATE TABLE samples (n int PRIMARY KEY)")
                made.cursor().executemany(
                    "INSERT INTO samples VALUES (%s)", [(n,) for n in numbers]
                )
        elif kind == "documents":
            pytest.importorskip("pymongo", reason="needs the extra mongodb")
            from tests.support.mongo_wire import start_mongo

            documents = {"science.samples": [{"_id": n, "n": n} for n in numbers]}
            server = held.enter_context(start_mongo(documents, password=PASSWORD_GIVEN))
        elif kind == "objects":
            server = held.enter_context(of_objects(numbers))
        elif kind == "columns":
            server = held.enter_context(of_columns(numbers))
        else:
            redis = pytest.importorskip("redis", reason="needs the extra redis")
            server = held.enter_context(start_redis(PASSWORD_GIVEN))
            with redis.Redis.from_url(server.url) as made:
                made.rpush("list", *numbers)
                for number in numbers:
                    made.xadd("log", {"n": number}, id=f"{number + 1}-0")
        yield server


@contextmanager
def of_objects(numbers: Iterable[int]) -> Iterator[Any]:
    """SeaweedFS with a file of numbers; the credentials are in the URL for the recipe, which puts
    them where its client looks for them."""
    pytest.importorskip("s3fs", reason="needs the extra s3")
    from tests.support.store_servers import S3_KEY, S3_SECRET, start_seaweedfs

    with start_seaweedfs() as server:
        lines = "".join(f"{number}\n" for number in numbers)
        url = server.url.replace("http://", f"http://{S3_KEY}:{S3_SECRET}@")

        def put() -> None:  # in a fork: fsspec's threads stay for good
            from shoal.storage.object_client import ObjectClient, RetryPolicy

            use_objects(url)
            client = ObjectClient("s3://shoal-data", {}, RetryPolicy(30, 0.2, 1.0))
            client._request("make", "", lambda system, path: system.mkdir(path))
            client.put("numbers.csv", f"n\n{lines}".encode())

        in_fork(put)
        server.url = url
        yield server


@contextmanager
def of_columns(numbers: Iterable[int]) -> Iterator[Any]:
    """Cassandra with a password of our own."""
    pytest.importorskip("cassandra.cluster", reason="needs the extra cassandra")
    from tests.support.store_servers import start_cassandra

    with start_cassandra("cassandra") as server:
        address = f"127.0.0.1:{server.port}"

        def fill() -> None:  # in a fork: the driver's threads stay for a while
            time.sleep(1.0)  # until it made its first user
            made = connect_columns(f"cassandra://cassandra:cassandra@{address}")
            made.execute(f"ALTER USER cassandra WITH PASSWORD '{PASSWORD_GIVEN}'")
            made.execute(
                "CREATE KEYSPACE science WITH replication = "
                "{'class': 'SimpleStrategy', 'replication_factor': 1}"
            )
            made.execute("CREATE TABLE science.samples (n int PRIMARY KEY)")
            for number in numbers:
                made.execute("INSERT INTO science.samples (n) VALUES (%s)", (number,))

        in_fork(fill)
        server.url = f"cassandra://cassandra:{PASSWORD_GIVEN}@{address}"
        yield server


def begin(pool: Pool, kind: str, url: str, run_dir: Path, *options: str, **settings: Any) -> Any:
    return start(
        pool,
        f"{RECIPES}:{kind}",
        run_dir,
        plan="data=2",
        settings=settings,
        options=options,
        environment={"STORE_URL": url},
    )


def check_hidden(trained: Trained, *secrets: str) -> None:
    """In no file of the run, and in nothing that it said."""
    files = [path for path in trained.run_dir.rglob("*") if path.is_file()]
    said = [*trained.run_dir.parent.glob("*.out"), *trained.run_dir.parent.glob("*.err")]
    assert files and said
    for path in (*files, *said):
        content = path.read_bytes()
        for secret in secrets:
            assert secret.encode() not in content, f"{secret!r} is in {path}"


@pytest.mark.full
def test_a_run_on_a_log_goes_on_where_it_was(pool: Pool, tmp_path: Path) -> None:
    """Though the broker has dropped the entries that it began with."""
    with stored("log") as server:
        first = begin(pool, "log", server.url, tmp_path / "run", steps=10).wait()
        assert first.exit_code == 0, first.errors
        redis = pytest.importorskip("redis")
        with redis.Redis.from_url(server.url) as made:
            made.xtrim("log", maxlen=400 - 70, approximate=False)
        again = begin(pool, "log", server.url, tmp_path / "run", "--resume", steps=20).wait()
        assert again.exit_code == 0, again.errors
        assert [record["step"] for record in again.steps()] == list(range(1, 21))
        with redis.Redis.from_url(server.url) as made:
            made.delete("log")
            for number in range(400):
                made.xadd("log", {"n": -number}, id=f"{number + 1}-0")
        other = begin(pool, "log", server.url, tmp_path / "run", "--resume", steps=22).wait()
        assert other.exit_code != 0
        assert "gives other entries behind" in other.errors
        check_hidden(other, PASSWORD_GIVEN)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_server_goes_away_in_mid_run_and_comes_back(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    with stored(kind) as server:
        undisturbed = begin(pool, kind, server.url, tmp_path / "alone").wait()
        assert undisturbed.exit_code == 0, undisturbed.errors
        training = begin(pool, kind, server.url, tmp_path / "run", pause=0.1)
        training.wait_for_step(5)
        if kind not in ("documents", "rows"):  # nothing on a disk, or slow to start
            server.pause()
            time.sleep(2.0)
            server.resume()
        else:
            server.stop()
            time.sleep(1.0)
            server.start()
        trained = training.wait()
        check_same(trained, undisturbed)
        check_ledger(trained, 20)
        check_hidden(trained, PASSWORD_GIVEN, PASSWORD)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["entries", "documents", "rows"])
def test_a_server_that_stays_away_ends_the_run_by_name(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    with stored(kind) as server:
        training = begin(pool, kind, server.url, tmp_path / "run", pause=0.05)
        training.wait_for_step(5)
        server.stop()
        trained = training.wait(120.0)
        assert trained.exit_code == 1, trained.errors
        assert "It was tried 6 times" in trained.errors
        check_hidden(trained, PASSWORD_GIVEN, PASSWORD)
        again = begin(pool, kind, server.url, tmp_path / "again").wait(120.0)
        assert again.exit_code in (1, 2) and "It was tried 6 times" in again.errors


@pytest.mark.full
@pytest.mark.parametrize("kind", ["documents", "rows"])
def test_what_changes_under_a_run(pool: Pool, tmp_path: Path, kind: str) -> None:
    """What is added is not seen; what is gone is named, and nothing else is taken for it."""
    with stored(kind) as server:
        undisturbed = begin(pool, kind, server.url, tmp_path / "alone").wait()
        assert undisturbed.exit_code == 0, undisturbed.errors
        training = begin(pool, kind, server.url, tmp_path / "grows", pause=0.05)
        training.wait_for_step(3)
        change(server, kind, range(400, 500), grows=True)
        check_same(training.wait(), undisturbed)
        training = begin(pool, kind, server.url, tmp_path / "shrinks", pause=0.05)
        training.wait_for_step(3)
        change(server, kind, range(500), grows=False)
        trained = training.wait()
        assert trained.exit_code == 1
        assert re.search(r"samples of .*with n = \d+ \(sample \d+\) is gone", trained.errors)
        check_hidden(trained, PASSWORD_GIVEN, PASSWORD)


def change(server: Any, kind: str, numbers: Iterable[int], *, grows: bool) -> None:
    if kind == "documents":
        kept = server.collections["science.samples"]
        kept += [{"_id": n, "n": n} for n in numbers] if grows else []
        kept[:] = kept if grows else [one for one in kept if one["n"] not in numbers]
        return
    psycopg = pytest.importorskip("psycopg")
    said = "INSERT INTO samples VALUES (%s)" if grows else "DELETE FROM samples WHERE n = %s"
    with psycopg.connect(server.url) as made:
        made.cursor().executemany(said, [(n,) for n in numbers])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_credentials_are_refused_and_not_shown(pool: Pool, tmp_path: Path, kind: str) -> None:
    with stored(kind) as server:
        wrong = server.url.replace(PASSWORD_GIVEN, SECRET).replace(PASSWORD, SECRET)
        trained = begin(pool, kind, wrong, tmp_path / "run").wait()
        assert trained.exit_code == 2, trained.errors
        assert "hunter2" not in trained.errors + trained.output


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    from shoal.storage.object_client import ObjectClient, RetryPolicy
    from tests.support.store_servers import S3_KEY, S3_SECRET, start_seaweedfs

    with start_seaweedfs() as server:
        for name, value in {
            "AWS_ACCESS_KEY_ID": S3_KEY,
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "AWS_ENDPOINT_URL_S3": server.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)

        def make_bucket() -> None:  # in a fork: fsspec's threads stay for good
            client = ObjectClient("s3://shoal-runs", {}, RetryPolicy(30, 0.2, 1.0))
            client._request("make", "", lambda system, path: system.mkdir(path))

        in_fork(make_bucket)
        yield server


def shoal(*words: str) -> str:
    done = subprocess.run([SHOAL, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_a_store_of_a_mirror_goes_away_and_is_caught_up(
    pool: Pool, tmp_path: Path, s3: Any
) -> None:
    """Checkpoints go on in the other store; what was missed is copied, and either is enough."""
    kept, away = tmp_path / "kept", f"s3://shoal-runs/{tmp_path.name}"
    mirror = f"mirror://1[{kept},{away}]"
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    recipe = f"{RECIPES.with_name('tiny.py')}:line"

    def train(*options: str, **settings: Any) -> Any:
        return start(
            pool,
            recipe,
            tmp_path / "run",
            plan="data=2",
            settings=settings,
            options=("--checkpoints", mirror, "--keep", "last=100", *options),
            environment=environment,
        )

    training = train(pause=0.2, steps=60, save_every=5)
    training.wait_for_step(12)
    s3.stop()
    training.wait_for_step(25)
    s3.start()
    trained = training.wait(180.0)
    assert trained.exit_code == 0, trained.errors
    check_hidden(trained, os.environ["AWS_SECRET_ACCESS_KEY"])
    before = {path.name for path in kept.iterdir() if path.name.startswith("step-")}
    shoal("checkpoint", "convert", mirror, away, "--missing")
    shoal("checkpoint", "convert", away, str(tmp_path / "back"), "--missing")
    assert {path.name for path in (tmp_path / "back").iterdir()} >= before
    for where in (str(kept), away, mirror):
        shoal("checkpoint", "verify", where)
    s3.stop()
    refused = train("--resume", steps=62).wait(180.0)
    assert refused.exit_code == 2
    assert "are needed to know the newest checkpoint" in refused.errors

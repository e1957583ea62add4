"""Tiny runs whose samples lie on a server; STORE_URL says where."""

import os
import time
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import shoal


def pair(entry: Any) -> tuple[Tensor, Tensor]:
    number = float(entry["n"] if isinstance(entry, dict) else entry)
    return torch.tensor([number / 400]), torch.tensor([number / 200])


def run(data: Any, pause: float) -> shoal.Run:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(pause)
        return F.mse_loss(output, target)

    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.mapped(data, pair),
        collate=default_collate,  # so that each step asks, and not one for many
        batch_size=8,
        steps=20,
    )


def log(pause: float = 0.0) -> shoal.Run:
    return run(shoal.data.redis_log(os.environ["STORE_URL"], "log"), pause)


def entries(pause: float = 0.0) -> shoal.Run:
    return run(shoal.data.redis_list(os.environ["STORE_URL"], "list"), pause)


def documents(pause: float = 0.0) -> shoal.Run:
    data = shoal.data.mongodb(os.environ["STORE_URL"], "samples", key="n", timeout_s=5.0)
    return run(data, pause)


def rows(pause: float = 0.0) -> shoal.Run:
    import psycopg

    url = os.environ["STORE_URL"]
    return run(shoal.data.sql(lambda: psycopg.connect(url), "samples", key="n"), pause)


def use_objects(url: str) -> None:
    """Put the credentials of a URL where clients of S3 look for them."""
    parts = urlsplit(url)
    os.environ |= {
        "AWS_ACCESS_KEY_ID": parts.username or "",
        "AWS_SECRET_ACCESS_KEY": unquote(parts.password or ""),
        "AWS_ENDPOINT_URL_S3": f"http://{parts.hostname}:{parts.port}",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


def objects(pause: float = 0.0) -> shoal.Run:
    use_objects(os.environ["STORE_URL"])
    return run(shoal.data.csv("s3://shoal-data/numbers.csv"), pause)


def connect_columns(url: str) -> Any:
    """A session of Cassandra."""
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
    from cassandra.query import dict_factory

    parts = urlsplit(url)
    profile = ExecutionProfile(row_factory=dict_factory, request_timeout=60)
    return Cluster(
        ["127.0.0.1"],
        port=parts.port,
        protocol_version=3,
        auth_provider=PlainTextAuthProvider(parts.username, unquote(parts.password or "")),
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
    ).connect()


def columns(pause: float = 0.0) -> shoal.Run:
    url = os.environ["STORE_URL"]
    data = shoal.data.cassandra(lambda: connect_columns(url), "science.samples", columns=["n"])
    return run(data, pause)


def cached(pause: float = 0.0) -> shoal.Run:
    """Made here, and kept on a server."""
    source = [{"n": number} for number in range(400)]
    kept = shoal.data.cached(source, memory=None, redis=os.environ["STORE_URL"])
    return run(kept, pause)

"""What is no path, function or text is refused in a sentence, by all readers and transforms."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal import data
from shoal.data.transforms.statistics import load_statistics
from shoal.errors import UsageError

SAMPLES = [(1.0, 2.0)]
READERS = ("csv", "jsonl", "lines", "parquet", "tar", "images", "shards")


@pytest.mark.parametrize("given", [5, None, 2.5, b"bytes", object(), "nul\0", [5], [["a"]]])
@pytest.mark.parametrize("reader", READERS)
def test_a_reader_needs_a_path(reader: str, given: Any) -> None:
    with pytest.raises(UsageError, match=r"where it needs a path\. A path is text"):
        getattr(data, reader)(given)


@pytest.mark.parametrize("given", [5, 0, [], "anon"])
@pytest.mark.parametrize("reader", ["csv", "jsonl", "lines", "parquet", "tar", "images"])
def test_options_are_a_dict(tmp_path: Path, reader: str, given: Any) -> None:
    with pytest.raises(UsageError, match=r"options= was given .* where it needs a dict"):
        getattr(data, reader)(tmp_path, options=given)


@pytest.mark.parametrize("given", [5, "", b"a"])
def test_an_identity_is_a_text(given: Any) -> None:
    with pytest.raises(UsageError, match=r"clean\(identity=...\) was given .* needs a text"):
        data.clean(SAMPLES, keep=bool, identity=given)
    with pytest.raises(UsageError, match=r"statistics\(identity=...\) was given .* needs a text"):
        data.statistics(SAMPLES, ["inputs"], identity=given)


@pytest.mark.parametrize(
    "use",
    [
        lambda given: data.quarantine(SAMPLES, given),
        lambda given: data.clean(SAMPLES, quarantine=given),
        lambda given: data.cached(SAMPLES, key="k", memory=None, disk=given),
        lambda given: data.build(SAMPLES, given),
        lambda given: data.shards("s3://bucket/a", cache_dir=given),
        load_statistics,
    ],
)
def test_what_is_kept_needs_a_path(use: Any) -> None:
    with pytest.raises(UsageError, match="the int 5 where it needs a path"):
        use(5)


@pytest.mark.parametrize(
    "use",
    [
        lambda given: data.mapped(SAMPLES, given),
        lambda given: data.on("inputs", given),
        lambda given: data.chain(abs, given),
        lambda given: data.clean(SAMPLES, keep=given),
        lambda given: data.clean(SAMPLES, repair=given),
        lambda given: data.sql(given, "samples", key="id"),
    ],
)
@pytest.mark.parametrize("given", ["f", 5, b"", [abs]])
def test_a_transform_needs_a_function(use: Any, given: Any) -> None:
    with pytest.raises(UsageError, match="where it needs a function"):
        use(given)


def run_of(**fields: Any) -> shoal.Run:
    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        **{"data": SAMPLES, "batch_size": 1, "steps": 1, **fields},
    )


@pytest.mark.parametrize(
    ("use", "wrong"),
    [
        (lambda: data.subset(SAMPLES, [0.5]), "list of whole numbers"),
        (lambda: data.subset(SAMPLES, 3), "list of whole numbers"),
        (lambda: data.weighted(SAMPLES, ["a"]), "list of numbers"),
        (lambda: data.weighted(SAMPLES, [1], num_draws=2.5), "a whole number"),
        (lambda: data.by_length(SAMPLES, [1.5], 2), "list of whole numbers"),
        (lambda: data.by_length(SAMPLES, [1], "2"), "a whole number"),
        (lambda: data.mix([SAMPLES], weights=3), "list of numbers"),
        (lambda: data.mix([SAMPLES], num_samples=2.5), "a whole number"),
        (lambda: data.join(5), "need a list of sources"),
        (lambda: data.windows(torch.arange(9), 2.5), "a whole number"),
        (lambda: data.csv("a.csv", names="ab"), "a list of texts"),
        (lambda: data.csv("a.csv", delimiter=5), "one ASCII character"),
        (lambda: data.csv("a.csv", encoding=5), "a text"),
        (lambda: data.images(".", classes="cat"), "a list of texts"),
        (lambda: data.parquet("a", window="x"), "a whole number"),
        (lambda: data.sql(lambda: None, "a", key="id", columns="id"), "a list of texts"),
        (lambda: data.normalized(SAMPLES, 5), "Give a list"),
        (lambda: data.normalized(SAMPLES, statistics=5), "those that shoal.data.statistics"),
        (lambda: data.statistics(SAMPLES, ["inputs"], quantiles=["a"]), "list of numbers"),
        (lambda: data.statistics(SAMPLES, ["inputs"], workers="x"), "a whole number"),
        (lambda: data.build(SAMPLES, "out", workers=1.5), "a whole number"),
        (lambda: run_of(collate="x"), "where it needs a function"),
        (lambda: run_of(metrics={"a": 3}), "where it needs a function"),
        (lambda: run_of(metrics=[3]), "maps names to functions"),
        (lambda: run_of(seed="x"), "a whole number"),
        (lambda: run_of(clip="x"), "must be above 0"),
    ],
)
def test_numbers_and_lists_are_what_they_must_be(use: Any, wrong: str) -> None:
    with pytest.raises(UsageError, match=wrong):
        use()


def test_names_are_texts(tmp_path: Path) -> None:
    for use in (
        lambda: data.sql(lambda: None, 5, key="id"),
        lambda: data.sql(lambda: None, "a", key=5),
        lambda: data.sql(lambda: None, query=5, key="id"),
        lambda: data.redis_list(5, "a"),
        lambda: data.cached(SAMPLES, key="k", memory=None, redis=5),
        lambda: data.cached(SAMPLES, key="k", memory=None, memcached=5),
    ):
        with pytest.raises(UsageError, match="where it needs a text"):
            use()
    with pytest.raises(UsageError, match="5 names no field"):
        data.on(5, abs)
    with pytest.raises(UsageError, match="data is a int"):
        shoal.data.mapped(5, abs)

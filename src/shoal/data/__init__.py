"""Data: what to train on, in which order, and which rank loads what.

The names a recipe uses (`shoal.data.windows`, `shoal.data.catalog`) are loaded on first use, so
that importing this package loads neither torch nor numpy. Next: `sources.py`, `orders.py`,
`batches.py`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shoal.data import batches as batches
    from shoal.data import catalog as catalog
    from shoal.data import permutation as permutation
    from shoal.data import sources as sources
    from shoal.data import split as split
    from shoal.data import transforms as transforms
    from shoal.data.cache.cached import cached as cached
    from shoal.data.characters import Characters as Characters
    from shoal.data.padding import pad as pad
    from shoal.data.readers.cassandra import cassandra as cassandra
    from shoal.data.readers.csv import csv as csv
    from shoal.data.readers.huggingface import huggingface as huggingface
    from shoal.data.readers.images import images as images
    from shoal.data.readers.kafka import kafka_log as kafka_log
    from shoal.data.readers.linewise import jsonl as jsonl
    from shoal.data.readers.linewise import lines as lines
    from shoal.data.readers.logs import consume as consume
    from shoal.data.readers.logs import redis_log as redis_log
    from shoal.data.readers.mongodb import mongodb as mongodb
    from shoal.data.readers.redis import redis_list as redis_list
    from shoal.data.readers.redis import redis_stream as redis_stream
    from shoal.data.readers.sql import sql as sql
    from shoal.data.readers.tables import parquet as parquet
    from shoal.data.readers.tables import table as table
    from shoal.data.readers.tar import tar as tar
    from shoal.data.shard_files.reading import shards as shards
    from shoal.data.shard_files.writing import build as build
    from shoal.data.sources import Source as Source
    from shoal.data.sources import tensors as tensors
    from shoal.data.sources import windows as windows
    from shoal.data.streams import stream as stream
    from shoal.data.transforms.cleaning import clean as clean
    from shoal.data.transforms.mapping import mapped as mapped
    from shoal.data.transforms.normalizing import normalized as normalized
    from shoal.data.transforms.quarantine import quarantine as quarantine
    from shoal.data.transforms.randomness import chain as chain
    from shoal.data.transforms.randomness import on as on
    from shoal.data.transforms.statistics import load_statistics as load_statistics
    from shoal.data.transforms.statistics import statistics as statistics
    from shoal.data.views import balanced as balanced
    from shoal.data.views import by_length as by_length
    from shoal.data.views import fold as fold
    from shoal.data.views import in_order as in_order
    from shoal.data.views import join as join
    from shoal.data.views import mix as mix
    from shoal.data.views import subset as subset
    from shoal.data.views import weighted as weighted

_MODULES = ("batches", "catalog", "permutation", "sources", "split", "transforms")
_NAMES = {  # by the module that has them
    "cache.cached": ("cached",),
    "characters": ("Characters",),
    "readers.cassandra": ("cassandra",),
    "readers.csv": ("csv",),
    "readers.huggingface": ("huggingface",),
    "readers.images": ("images",),
    "readers.kafka": ("kafka_log",),
    "readers.linewise": ("jsonl", "lines"),
    "readers.logs": ("consume", "redis_log"),
    "readers.mongodb": ("mongodb",),
    "readers.redis": ("redis_list", "redis_stream"),
    "readers.sql": ("sql",),
    "readers.tables": ("parquet", "table"),
    "readers.tar": ("tar",),
    "shard_files.reading": ("shards",),
    "shard_files.writing": ("build",),
    "padding": ("pad",),
    "sources": ("Source", "tensors", "windows"),
    "streams": ("stream",),
    "transforms.cleaning": ("clean",),
    "transforms.randomness": ("chain", "on"),
    "transforms.mapping": ("mapped",),
    "transforms.normalizing": ("normalized",),
    "transforms.quarantine": ("quarantine",),
    "transforms.statistics": ("load_statistics", "statistics"),
    "views": ("balanced", "by_length", "fold", "in_order", "join", "mix", "subset", "weighted"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}


if not TYPE_CHECKING:  # which knows the names above, and should find those that are misspelt

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"shoal.data.{_MODULE_OF[name]}"), name)
        if name in _MODULES:
            return importlib.import_module(f"shoal.data.{name}")
        raise AttributeError(f"module 'shoal.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*_MODULE_OF, *_MODULES))

"""Documents of MongoDB through pymongo, in the order of a key.

    mongodb("mongodb://reader@db/science", "samples", fields=["x", "y"])
    mongodb(url, "science.samples", {"split": "train"}, key="number")
    mongodb(url, "science.samples", [{"$match": {...}}, {"$project": {...}}])

The keys are read once, sorted by the server, and documents are asked for by their keys
(`keyed.py`). The filter runs on the server, and so does a pipeline, once for each question: if it
is costly, write what it makes to a collection (`$out`) or to shards. Before the keys are read the
server counts them; if it then gives fewer, and counts again as many, the source is refused.
ObjectIds grow with time, so documents that are added later stand at the end, as `--new-data` wants.

Documents of one collection may be unlike: with `fields`, one that lacks any of them is a
`BadRecord` with its key. Cost: `keyed.py`; one answer for up to 500 documents of a batch. Needs the
extra `mongodb`. Not for change streams, which have no order that can be had again.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from shoal.data.readers import keyed
from shoal.data.readers.keyed import FoundRow, KeyedRows, RowIndex, index_rows
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.readers.retries import RetriedConnection
from shoal.data.validate import text_of, texts_of
from shoal.errors import UsageError, require
from shoal.storage.object_client import RETRY_POLICY, RetryPolicy, redact_url

Query: TypeAlias = Mapping[str, Any] | Sequence[Mapping[str, Any]]

# Of the codes that a server gives: network, timeouts, shutdown, elections, a cursor that is gone.
_MAY_PASS = (6, 7, 43, 50, 89, 91, 189, 262, 9001, 10107, 11600, 11602, 13435, 13436)


class MongoDocuments(KeyedRows):
    """Made by `mongodb`: each document a dict. `columns` are those that samples have."""

    def __init__(
        self,
        server: RetriedConnection[Any],
        origin: str,
        query: Query,
        key: str,
        fields: Sequence[str] | None,
        version: str | None,
    ):
        self._server, self._origin = server, origin
        self._key, self._fields, self._version = key, fields, version
        self._filter = query if isinstance(query, Mapping) else None
        self._stages = [{"$match": query}] if isinstance(query, Mapping) else list(query)
        self._rows = self._read_keys()
        first = list(self._fetch([self._key_of(0)])) if len(self) else []
        self.columns = tuple(fields or (first[0].values if first else ()))

    def __str__(self) -> str:
        return self._origin

    def _question(self) -> str:
        return repr((self._stages, self._fields))

    def _fetch(self, keys: list[Any]) -> Iterator[FoundRow]:
        wanted: dict[str, Any] = {self._key: {"$in": keys}}
        shown = {*(self._fields or ()), self._key, *([self._version] if self._version else ())}
        # With a filter in one stage, so that the server may use the key's index.
        stages = [*self._stages, {"$match": wanted}]
        if self._filter is not None:
            stages = [{"$match": {"$and": [wanted, self._filter]}}]
        if self._fields is not None:
            stages = [*stages, {"$project": {"_id": 0, **dict.fromkeys(sorted(shown), 1)}}]
        what = f"documents of {self} cannot be read"
        documents = self._server.ask(lambda held: list(held.aggregate(stages)), what)
        for document in documents:
            version = None if self._version is None else document.get(self._version)
            yield FoundRow(document[self._key], self._picked(document), version)

    def _picked(self, document: dict[str, Any]) -> dict[str, Any]:
        if self._fields is None:
            return document
        for name in self._fields:
            if name not in document:
                raise BadRecord(
                    f"the document of {self} with {self._key} = {document[self._key]!r} has no "
                    f"field {name!r}. Filter such documents out, or leave them out by "
                    "shoal.data.quarantine."
                )
        return {name: document[name] for name in self._fields}

    def _read_keys(self) -> RowIndex:
        promised = self._count()
        index = self._server.ask_first(self._list_keys, f"the keys of {self} cannot be read")
        if len(index.keys) < promised and (now := self._count()) > len(index.keys):
            raise SourceLost(
                f"{self} counts {now} documents, and gave the keys of {len(index.keys)}. A part of "
                "the server does not answer, or the collection is being written; start again when "
                "it is whole."
            )
        return index

    def _count(self) -> int:
        stages = [*self._stages, {"$count": "n"}]
        what = f"the documents of {self} cannot be counted"
        found = self._server.ask_first(lambda held: list(held.aggregate(stages)), what)
        return int(found[0]["n"]) if found else 0

    def _list_keys(self, collection: Any) -> RowIndex:
        names = [self._key] if self._version is None else [self._key, self._version]
        shown = {"_id": 0, **dict.fromkeys(names, 1)}
        if self._filter is not None:
            order = [(self._key, 1)]
            cursor = collection.find(self._filter, shown, sort=order, batch_size=keyed.PAGE)
        else:
            stages = [*self._stages, {"$project": shown}, {"$sort": {self._key: 1}}]
            cursor = collection.aggregate(stages, allowDiskUse=True, batchSize=keyed.PAGE)
        with cursor:
            pages = self._pages(cursor)
            return index_rows(pages, self._key, str(self), self._version is not None)

    def _pages(self, cursor: Any) -> Iterator[list[tuple[Any, Any]]]:
        page: list[tuple[Any, Any]] = []
        for document in cursor:
            version = document.get(self._version) if self._version else None
            page.append((document.get(self._key), version))
            if len(page) == keyed.PAGE:
                yield page
                page = []
        yield page


def mongodb(
    connect: str | Callable[[], Any],
    collection: str,
    query: Query | None = None,
    *,
    key: str = "_id",
    fields: Sequence[str] | None = None,
    version: str | None = None,
    timeout_s: float = 30.0,
    patience: RetryPolicy = RETRY_POLICY,
) -> MongoDocuments:
    """A source of the documents of a collection, as dicts, in the order of `key`.

    `connect` is a URL, or a function that returns a new `MongoClient` with timeouts of its own
    (`timeoutMS`); `timeout_s` is that of a URL's. `collection` is its name
    if the URL names the database, and else "database.collection". `query` is a filter, or
    a list of stages of a pipeline, which must keep `key`. `fields` picks some. `version` is a field
    that changes with its document, and is compared with every read.
    """
    if not callable(connect):
        connect = text_of(connect, "mongodb()")
    text_of(collection, "mongodb()")
    if query is not None and not isinstance(query, Mapping | list | tuple):
        raise UsageError(
            f"mongodb(query={query!r}): it is a filter, a dict, or a pipeline, a list of stages."
        )
    fields = None if fields is None else texts_of(fields, "mongodb(fields=...)")
    for name in filter(None, (key, version)):
        if "." in text_of(name, "mongodb()") or name.startswith("$"):
            raise UsageError(
                f"{name!r} is no field of a document itself. Bring it to the top by a pipeline: "
                '[{"$set": {"name": "$inner.name"}}].'
            )
    origin = f"the collection {collection} of MongoDB"
    if isinstance(connect, str):
        origin = f"{origin} at {redact_url(connect)}"
    make = _connector(connect, timeout_s) if isinstance(connect, str) else connect
    way_out = (
        "Check the user and the password, the names of the database and the collection, and the "
        "filter or pipeline."
    )
    server = RetriedConnection(
        lambda: _collection(make(), collection),
        lambda held: held.database.client.close(),
        _may_pass,
        patience,
        way_out,
    )
    return MongoDocuments(server, origin, query or {}, key, fields, version)


def _connector(url: str, timeout_s: float) -> Callable[[], Any]:
    library = require("pymongo", "mongodb")
    milliseconds = int(timeout_s * 1000)
    try:
        if not url.startswith("mongodb+srv://"):  # whose hosts are asked for when it is opened
            require("pymongo.uri_parser", "mongodb").parse_uri(url)
    except Exception:  # noqa: BLE001 (whose words may hold a part of the password)
        raise UsageError(
            "what was given is not a URL that MongoDB knows. Write mongodb://host:27017/database, "
            "with user:password@ before the host if the server wants them, and in a password %2F "
            "for /, %3A for : and %40 for @."
        ) from None
    return lambda: library.MongoClient(
        url,
        retryReads=False,  # the caller repeats
        serverSelectionTimeoutMS=milliseconds,
        timeoutMS=milliseconds,  # of each question as a whole
    )


def _collection(client: Any, name: str) -> Any:
    database, _, inner = name.partition(".")
    try:
        return client.get_default_database()[name]
    except require("pymongo.errors", "mongodb").ConfigurationError:  # the URL names none
        if inner:
            return client[database][inner]
    client.close()
    raise UsageError(
        f"the collection {name!r} is of no database. Write database.collection, or name the "
        "database in the URL: mongodb://host/database."
    )


def _may_pass(error: Exception) -> bool:
    kinds = require("pymongo.errors", "mongodb")
    if isinstance(error, kinds.OperationFailure):
        return bool(error.timeout) or error.code in _MAY_PASS
    if isinstance(error, kinds.ConfigurationError):
        return False
    return isinstance(error, kinds.PyMongoError | OSError)

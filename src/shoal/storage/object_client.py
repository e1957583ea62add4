"""Objects behind a URL, through fsspec: a few requests, repeated while a failure may be transient.

fsspec knows the back ends, some of which repeat requests themselves; this module applies one retry
policy to all. A request is tried a bounded number of times with growing pauses; then it fails with
a `StoreError` that names the object, the error and the number of tries. An upload that breaks off
is abandoned and never completed: fsspec's own `close` would publish half a file. Checkpoints
(`object_store.py`), shards and data files are read and written through it.
"""

import errno
import functools
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote

from shoal.errors import UsageError, nearest, require
from shoal.system.processes import PerProcess

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), ("s3fs", "s3")),
    **dict.fromkeys(("gs", "gcs"), ("gcsfs", "gcs")),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), ("adlfs", "azure")),
    "hdfs": ("hdfs_native", "hdfs"),
    "webhdfs": ("requests", "hdfs"),
}
_ONE_BY_ONE = ("hdfs", "webhdfs")  # back ends that remove no list of objects
_PERMANENT = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_MISTAKES = (ValueError, TypeError, LookupError, AttributeError, ImportError, NotImplementedError)
_MISSING = (404, 410)  # HTTP status
_TRANSIENT = (408, 425, 429)  # of the 4xx status codes of HTTP
_PERMANENT_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}

_LOOK_S = 0.05
_HDFS_KEPT_S = 3.5
_LIMIT_S = (20.0, 300.0)  # of a read, or of silence in it, and of a write
_S3_TRIES = 2  # of a request, each time that it is made here
_hdfs_kept: dict[int, float] = {}  # by process: until when connections to data nodes may be kept
MIRROR = "mirror://"  # before the names of several places (`mirrors.py`)

T = TypeVar("T")


class StoreError(UsageError, OSError):
    """An object store cannot be reached, or refuses. An OSError, like a disk's."""

    shows_cause = False

    def __str__(self) -> str:
        return self.strerror or super().__str__()  # the sentence, without "[Errno n]"


class RetryPolicy(NamedTuple):
    """How often a request is tried, and the pauses between tries."""

    num_tries: int = 6
    first_pause_s: float = 0.2
    most_pause_s: float = 10.0

    def pause_s(self, failures: int) -> float:
        """With jitter, so that the ranks of a run do not retry all at once."""
        longest = min(self.most_pause_s, self.first_pause_s * 2.0 ** (failures - 1))
        return longest * random.uniform(0.5, 1.0)


RETRY_POLICY = RetryPolicy()


def redact_password(url: str) -> str:
    """A URL without user and password: everything up to the last @ before the path.

    If the port is not a number, it is a password with a slash in it, and the path begins later.
    Of a mirror, each place.
    """
    if url.startswith(MIRROR):
        return _in_each(redact_password, url)
    return re.sub(r"^([^/]*://)(?:[^/]*|[^/:@[]*:(?![0-9]+(?:[/?#]|$)).*)@", r"\1", url)


def redact_url(url: str) -> str:
    """A URL or path without password and query, which may hold a signature."""
    if url.startswith(MIRROR):
        return _in_each(redact_url, url)
    address, mark, _ = redact_password(url).partition("?")
    return f"{address}?..." if mark and "://" in url else redact_password(url)


def refuse_password(what: str, url: str) -> None:
    """Of an address that others will read: in a record, a queue or the list of processes."""
    places = re.findall(r"[^][,]+", url.removeprefix(MIRROR)) if url.startswith(MIRROR) else [url]
    if any(_password_in(place) for place in places):
        raise UsageError(
            f"{what} {redact_password(url)} was given with a password, which others could read. "
            "Leave it to where the client looks for it: its variables in the environment, or its "
            "file."
        )


def _password_in(url: str) -> str:
    """As it stands there; empty if there is none."""
    shown, scheme = redact_password(url), url.partition("://")[0]
    user = url[len(scheme) + 3 : len(url) - len(shown) + len(scheme) + 2]
    return user.partition(":")[2]


def _in_each(redact: Callable[[str], str], mirror: str) -> str:
    return MIRROR + re.sub(r"[^][,]+", lambda found: redact(found[0]), mirror.removeprefix(MIRROR))


def _redact_urls(said: str, url: str) -> str:
    """A message of a back end with all URLs in it redacted, the queries of bare paths, and what
    stands before the host of its own URL, which it may take for a part of a name."""
    if secret := _password_in(url):
        said = said.replace(secret, "...").replace(unquote(secret), "...")
    said = re.sub(r"[a-z0-9+]+://[^\s'\"<>]+", lambda found: redact_url(found[0]), said)
    return re.sub(r"(/[^\s?'\"<>]*)\?[^\s'\"<>]+", r"\1?...", said)


class ObjectClient:
    """The objects below a URL, by their path from there."""

    def __init__(self, url: str, options: Mapping[str, Any], retries: RetryPolicy):
        self._url, self._retries = url.rstrip("/"), retries
        # A fork makes its own: connections and their thread stay with the parent.
        self._back_end = PerProcess(functools.partial(_connect, self._url, dict(options)))
        _check_back_end(url)

    def __str__(self) -> str:
        return redact_url(self._url)

    def folders(self) -> list[str]:
        """The folders directly below the URL."""
        try:
            entries = self._request("list", "", lambda system, path: system.ls(path, detail=True))
        except FileNotFoundError:
            return []
        names = [e["name"].rstrip("/").rpartition("/")[2] for e in entries if _is_folder(e)]
        return [name for name in names if name and not name.startswith(".")]

    def find(self, folder: str) -> list[str]:
        """All objects in a folder, by their path from there."""
        try:
            found = self._request("list", folder, lambda system, path: system.find(path))
        except FileNotFoundError:
            return []
        start = len(self._path(folder)) + 1
        return [path[start:] for path in found if len(path) > start]

    def size(self, path: str) -> int | None:
        """The size of an object in bytes; None if there is none."""
        try:
            found = self._request("look at", path, lambda system, at: system.info(at))
        except FileNotFoundError:
            return None
        return None if _is_folder(found) else int(found["size"])

    def modified(self, path: str) -> float | None:
        """When an object was written, in seconds since 1970; None if it is gone."""
        try:
            when = self._request("look at", path, lambda system, at: system.modified(at))
        except FileNotFoundError:
            return None
        return float(when.timestamp())

    def get(self, path: str) -> bytes | None:
        """A small object, whole; None if there is none."""
        try:
            return bytes(self._request("read", path, lambda system, at: system.cat_file(at)))
        except FileNotFoundError:
            return None

    def get_range(self, path: str, start: int, stop: int) -> bytes:
        """A range of bytes, shorter at the object's end; FileNotFoundError if there is none."""
        content = self._request("read", path, lambda system, at: _range_of(system, at, start, stop))
        if len(content) > stop - start:
            raise StoreError(
                errno.EOPNOTSUPP,
                f"{self} sent {len(content)} bytes of {path} where {stop - start} were asked for: "
                "the server knows no Range requests, and would send all for each part. Use one "
                "that does, or copy the file to a disk.",
            )
        return content

    def put(self, path: str, content: bytes) -> None:
        """Write a small object, in one request."""
        self._write(path, lambda system, at: system.pipe_file(at, content))

    def upload(self, path: str, views: Sequence[memoryview], block_bytes: int) -> None:
        """Write a large object, in parts."""
        self._write(path, lambda system, at: _send(system, at, views, block_bytes))

    def delete(self, paths: Iterable[str]) -> None:
        """Remove objects; a missing one is no error, since a request may be repeated."""
        doomed = list(paths)
        if len(doomed) > 1 and self._url.partition("://")[0] not in _ONE_BY_ONE:
            with suppress(FileNotFoundError):  # some back ends stop at the first missing one
                self._request(
                    "remove", doomed[0], lambda system, _: system.rm([*map(self._path, doomed)])
                )
                return
        for path in doomed:
            with suppress(FileNotFoundError):
                self._request("remove", path, lambda system, at: system.rm_file(at))

    def _write(self, path: str, act: Callable[[Any, str], object]) -> None:
        try:
            self._request("write", path, act)
        except FileNotFoundError as error:
            said = _redact_urls(str(error), self._url)
            raise StoreError(
                errno.ENOENT, f"{self} cannot hold {path}: {said}. Create the bucket first."
            ) from error

    def _request(self, verb: str, path: str, act: Callable[[Any, str], T]) -> T:
        """Send a request until it succeeds, fails permanently, or was tried often enough."""
        for failures in range(1, self._retries.num_tries + 1):
            try:
                system, _ = self._back_end.get()
                if not self._url.startswith("hdfs://"):
                    return act(system, self._path(path))
                _hdfs_kept[os.getpid()] = time.monotonic() + _HDFS_KEPT_S
                asked = functools.partial(act, system, self._path(path))
                limit_s = _LIMIT_S[verb == "write"]  # it looks for a name node for ever
                late = TimeoutError(f"no answer within {limit_s:g} s")
                return answer_within(limit_s, asked, late)
            except UsageError:
                raise
            except Exception as raised:
                error = _root_cause(raised)
                if isinstance(error, FileNotFoundError):
                    raise
                permanent = _is_permanent(error)
                if permanent or failures == self._retries.num_tries:
                    raise self._failed(verb, path, error, 0 if permanent else failures) from error
            time.sleep(self._retries.pause_s(failures))
        raise AssertionError("at least one try")

    def _failed(self, verb: str, path: str, error: Exception, tries: int) -> StoreError:
        target = redact_url(f"{self}/{path}") if path else str(self)
        said = _redact_urls(str(error), self._url) or type(error).__name__
        if tries:
            way_out = f"It was tried {tries} times. Check the address and the network."
        else:
            way_out = "Check the credentials and the address."
        number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        return StoreError(number, f"cannot {verb} {target}: {said.rstrip('.')}. {way_out}")

    def _path(self, path: str) -> str:
        _, root = self._back_end.get()
        return f"{root.rstrip('/')}/{path}" if path else root


def _connect(url: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The back end, and the URL's path in it."""
    from fsspec import register_implementation
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    fresh: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if scheme in ("s3", "s3a"):  # botocore would repeat what s3fs repeats, and it what is here
        fresh["config_kwargs"] = {"retries": {"max_attempts": 0}}
    if scheme in ("http", "https"):
        timeouts = require("aiohttp", "s3").ClientTimeout
        fresh["client_kwargs"] = {
            "timeout": timeouts(sock_connect=_LIMIT_S[0], sock_read=_LIMIT_S[0])
        }
    if scheme == "hdfs":
        _wait_after_fork()
        # fsspec's own needs Hadoop's native library and a Java machine in this process.
        register_implementation("hdfs", "hdfs_native.fsspec.HdfsFileSystem", clobber=True)
        del fresh["use_listings_cache"]  # it takes settings of Hadoop alone, and keeps no listings
    system, root = url_to_fs(url, **fresh | options)
    if scheme == "webhdfs":  # whose requests would wait for ever
        system.session.request = functools.partial(system.session.request, timeout=_LIMIT_S[0])
    if scheme in ("s3", "s3a"):
        system.retries = _S3_TRIES
    return system, str(root)


def answer_within(
    seconds: float, act: Callable[[], T], late: Exception, look: Callable[[], object] | None = None
) -> T:
    """What `act` returns in time, or `late` is raised; left behind, it keeps no process alive.

    `look` is called now and then; what it raises ends the wait.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(act())
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            answer.set_exception(error)

    threading.Thread(target=run, name="shoal-fetch", daemon=True).start()
    deadline = time.monotonic() + seconds
    while (left_s := deadline - time.monotonic()) > 0 and not answer.done():
        if look is not None:
            look()
        wait([answer], left_s if look is None else min(left_s, _LOOK_S))
    if not answer.done():
        raise late
    return answer.result()


def _range_of(system: Any, path: str, start: int, stop: int) -> bytes:
    try:
        return bytes(system.cat_file(path, start=start, end=stop))
    except BaseException as error:  # behind the end of a file that shrank most give nothing
        answer = getattr(error.__cause__, "response", None)  # of S3
        code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
        is_behind = getattr(error, "status", code) in (416, "416", "InvalidRange")
        if not is_behind and type(error).__name__ != "PanicException":  # of hdfs-native
            raise
        return b""


def _wait_after_fork() -> None:
    """hdfs-native keeps connections to data nodes for 3 s, in memory that a fork inherits with
    connections that are the parent's; one that is used in a fork never answers."""
    inherited = [until_s for pid, until_s in _hdfs_kept.items() if pid != os.getpid()]
    time.sleep(max(0.0, max(inherited, default=0.0) - time.monotonic()))


def _check_back_end(url: str) -> None:
    """Refuse a URL that no installed back end can open, before anything is written."""
    import fsspec

    scheme = url.partition("://")[0]
    if "::" in url:
        raise UsageError(
            f"{scheme}://... is a chain of URLs. Name the store itself, as s3://bucket/path."
        )
    if scheme in _EXTRAS:
        if scheme not in _ONE_BY_ONE:
            refuse_password("The address", url)
        require(*_EXTRAS[scheme])
    try:
        fsspec.get_filesystem_class(scheme)
    except ImportError as error:
        raise UsageError(f"{scheme}:// needs a package that is not installed: {error}.") from error
    except ValueError:
        known = fsspec.available_protocols()
        raise UsageError(
            f"{scheme}:// is no store that fsspec knows. {nearest(scheme, known)}"
        ) from None


def _send(system: Any, path: str, views: Sequence[memoryview], block_bytes: int) -> None:
    """Upload block by block. An interrupted upload is abandoned, not completed."""
    file = system.open(path, "wb", block_size=block_bytes)
    try:
        for view in views:
            for start in range(0, len(view), block_bytes):
                file.write(view[start : start + block_bytes])
        file.close()
    except BaseException:
        with suppress(Exception):
            file.discard()
        with suppress(AttributeError):
            file.closed = True  # else the garbage collector closes it, which completes the upload
        raise
    size = sum(len(view) for view in views)
    arrived = int(system.info(path)["size"])
    if arrived != size:
        raise OSError(errno.EIO, f"{size} bytes were sent and {arrived} arrived")


def _is_folder(entry: Mapping[str, Any]) -> bool:
    return bool(entry["type"] == "directory")


def _root_cause(error: Exception) -> Exception:
    """The error, or its cause for HTTP: fsspec reports every HTTP error as a missing file."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    is_of_http = type(cause).__module__.partition(".")[0] == "aiohttp"
    is_missing = getattr(cause, "status", None) in _MISSING
    return cause if isinstance(cause, TimeoutError) or (is_of_http and not is_missing) else error


def _is_permanent(error: Exception) -> bool:
    """Whether a retry cannot help."""
    status = getattr(error, "status", None)  # of HTTP
    if isinstance(status, int) and 400 <= status < 500:
        return status not in _TRANSIENT
    is_known = isinstance(error, _PERMANENT) or type(error).__name__ in _PERMANENT_NAMES
    return is_known or isinstance(error, _MISTAKES)

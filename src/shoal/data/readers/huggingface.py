"""A `datasets.Dataset` of Hugging Face as a source: its rows as dicts, its columns as batches.

    rows = huggingface(load_from_disk("imdb")["train"])
    pairs = huggingface(dataset).pairs(inputs={"input_ids": "tokens"}, target="label")

Rows are fetched by the dataset's own batched indexing, as Arrow, so the types are those of its
features: numbers and lists of numbers as numpy has them, images decoded to uint8, text as text. A
DatasetDict is refused with the names of its splits; a stream has no order that survives a restart.

Cost: what the dataset itself costs; it maps its files into memory, which forks share. Needs the
packages datasets and pyarrow, and for images Pillow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.readers.columns import ArrowRows, Irregular, is_numeric
from shoal.data.readers.images import pixels
from shoal.data.readers.records import BadRecord, hash_parts, require_columns
from shoal.data.sources import Ids, is_outage
from shoal.data.validate import texts_of
from shoal.errors import UsageError


class HuggingFaceRows(ArrowRows):
    """Made by `huggingface`: each row a dict. `columns` are those that rows have."""

    def __init__(self, dataset: Any, columns: Sequence[str] | None):
        known = list(dataset.column_names)
        require_columns(columns or (), known, "the dataset")
        self.columns = tuple(known if columns is None else columns)
        self._features = dataset.features
        self._rows = dataset.with_format("arrow", columns=list(self.columns))
        self._num_rows = len(dataset)
        self._fingerprint = dataset._fingerprint  # its own name for its content

    def __len__(self) -> int:
        return self._num_rows

    def __str__(self) -> str:
        return f"the dataset of {self._num_rows} rows"

    def tables(self, ids: Ids) -> Iterator[tuple[Ids, Any]]:
        """One, by one question to the dataset."""
        yield np.arange(len(ids)), self._rows[ids.tolist()]

    def array(self, table: Any, name: str, ids: Ids) -> NDArray[Any]:
        if self._decoder(name) is None:
            return super().array(table, name, ids)
        parts = self.values(table, name, ids)
        if not all(isinstance(part, np.ndarray) for part in parts):
            raise Irregular(f"a value of column {name!r} is no array")
        if len({part.shape for part in parts}) > 1:
            raise Irregular(f"values of column {name!r} are of several shapes")
        return np.stack(parts)

    def identity(self) -> str:
        return hash_parts("huggingface", self._fingerprint, self.columns)

    def unfit(self, name: str) -> str | None:
        kind = self._features.arrow_schema.field(name).type
        return None if self._decoder(name) is not None or is_numeric(kind) else str(kind)

    def values(self, table: Any, name: str, ids: Ids) -> list[Any]:
        decoder = self._decoder(name)
        if decoder is None:
            return super().values(table, name, ids)
        values = []
        for index, stored in zip(ids, table.column(name).to_pylist(), strict=True):
            try:
                values.append(None if stored is None else _decoded(decoder, stored))
            except Exception as error:
                if is_outage(error):
                    raise
                raise BadRecord(
                    f"{self} (sample {index}): column {name!r} cannot be decoded: {error}"
                ) from error
        return values

    def _decoder(self, name: str) -> Callable[[Any], Any] | None:
        """How the dataset decodes a column that it stores as files: images, sound."""
        feature = self._features[name]
        if not getattr(feature, "decode", False) or not hasattr(feature, "decode_example"):
            return None
        found: Callable[[Any], Any] = feature.decode_example
        return found


def huggingface(dataset: Any, *, columns: Sequence[str] | None = None) -> HuggingFaceRows:
    """A source of the rows of a `datasets.Dataset`, as dicts; `columns` picks some."""
    if isinstance(dataset, Mapping):
        raise UsageError(
            f"the dataset has the splits {', '.join(map(str, dataset))}. Give one of them, as "
            f"dataset[{next(iter(dataset), 'train')!r}]."
        )
    if not all(hasattr(dataset, name) for name in ("__len__", "with_format", "column_names")):
        raise UsageError(
            f"huggingface() was given a {type(dataset).__name__}. It takes a datasets.Dataset, "
            "which has rows by index; a stream (IterableDataset) has not."
        )
    if getattr(dataset, "format", {}).get("type") == "custom":
        raise UsageError(
            "the dataset has a transform of its own (set_transform), which is not called here. "
            "Hand its function to shoal.data.mapped, and give the dataset without it."
        )
    columns = None if columns is None else texts_of(columns, "huggingface(columns=...)")
    return HuggingFaceRows(dataset, columns)


def _decoded(decoder: Callable[[Any], Any], stored: Any) -> Any:
    """A stored value as the dataset decodes it; a picture as its pixels."""
    value = decoder(stored)
    return pixels(value) if hasattr(value, "getbands") else value  # only Pillow's have bands

"""Sources: anything with a length and an index, whose samples are pairs `(inputs, target)`.

A list, a PyTorch map-style dataset or an object of one's own will do as it is. One with a method
`take(ids)` gives many samples at once, already collated; `tensors` and `windows` do, and then
loading a batch is one gather. Inputs may be a tensor, a tuple or a dict of tensors: the model is
called with `model(x)`, `model(*x)` or `model(**x)`.

What has no length and no index is a stream (`streams.py`). Cost: `tensors` and `windows` keep no
copy of the data they are given. Next: `collating.py`, `batches.py`.
"""

import dis
import errno
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import index as as_int
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import IterableDataset

from shoal.data.validate import require_whole
from shoal.errors import Ended, RecipeError, ShoalError, UsageError

Ids: TypeAlias = NDArray[np.int64]
Collate: TypeAlias = Callable[[list[Any]], Any]


@runtime_checkable
class Source(Protocol):
    """What a Run trains on. `source[i]` is sample i, a pair `(inputs, target)`, the same each time.

    An optional `take(ids) -> (inputs, target)` returns the collated samples at once. Row i of every
    tensor must depend on sample `ids[i]` alone (pad to a fixed length, say, not to the longest of
    the call), because one call may fetch the samples of several steps.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class BatchSource(Source, Protocol):
    """A source that gives many collated samples in one call."""

    def take(self, ids: Ids) -> tuple[Any, Any]: ...


class Pass(NamedTuple):
    """The pass over the data that a sample is for, and the run's seed: what it is drawn from."""

    seed: int
    epoch: int


@runtime_checkable
class EpochSource(Source, Protocol):
    """A source whose samples differ from one pass to the next, as a pure function of the pass."""

    def vary(self, index: int, of: Pass, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Samples held in memory as the rows of tensors; made by `tensors`."""

    inputs: Any
    target: Any
    num_samples: int

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        at = normalize_index(index, self.num_samples)

        def row(tensor: Tensor) -> Tensor:
            return tensor[at]

        return map_tensors(row, self.inputs), map_tensors(row, self.target)

    def take(self, ids: Ids) -> tuple[Any, Any]:
        rows = torch.from_numpy(ids)

        def select(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, rows)

        return map_tensors(select, self.inputs), map_tensors(select, self.target)


@dataclass(frozen=True, slots=True)
class WindowSource:
    """Windows side by side over a row of tokens; made by `windows`."""

    spans: Tensor  # a view of the tokens, [num_windows, length + 1], one token shared by neighbours

    def __len__(self) -> int:
        return self.spans.shape[0]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        span = self.spans[normalize_index(index, len(self))].long()
        return span[:-1], span[1:]

    def take(self, ids: Ids) -> tuple[Tensor, Tensor]:
        spans = self.spans[torch.from_numpy(ids)].long()
        return spans[:, :-1].contiguous(), spans[:, 1:].contiguous()


def tensors(inputs: Any, target: Any) -> TensorSource:
    """A source over tensors in memory; sample i is row i of each.

    `inputs` and `target` are each a tensor, or a tuple or dict of tensors, of one common length.
    """
    lengths: list[int] = []

    def check(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0:
            raise UsageError("tensors() was given a scalar. Each tensor needs one row per sample.")
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else f"of {tensor.layout}"
            raise UsageError(
                f"tensors() was given a tensor {kind}, whose rows do not lie in memory. Give it "
                "tensor.to_dense(), or a list of samples that are made when they are asked for."
            )
        lengths.append(tensor.shape[0])
        return tensor

    inputs, target = map_tensors(check, inputs), map_tensors(check, target)
    if len(set(lengths)) != 1:
        raise UsageError(
            f"tensors() was given tensors of {', '.join(map(str, lengths))} rows. Row i of each "
            "belongs to sample i, so all must have the same number of rows."
        )
    return TensorSource(inputs, target, lengths[0])


def windows(text: Any, length: int) -> WindowSource:
    """A source for next-token prediction: windows of `length` tokens, side by side.

    `text` is a 1-D tensor of token ids, or anything with such `tokens` (a text of the catalog).
    Sample i has tokens i*length .. i*length+length-1 as inputs, and as target the same shifted by
    one. Tokens after the last full window are left out.
    """
    tokens = getattr(text, "tokens", text)
    if not isinstance(tokens, Tensor) or tokens.dim() != 1 or tokens.is_floating_point():
        given = f"{tokens.dtype} {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(text)
        raise UsageError(
            f"windows() was given {given}. It needs a 1-D tensor of integer token ids, or a text "
            'of the catalog: shoal.data.catalog.text("shakespeare").'
        )
    require_whole(length, "windows()")
    if not 1 <= length < len(tokens):
        raise UsageError(
            f"windows(length={length}) over {len(tokens)} tokens has no window. A window takes "
            f"length + 1 tokens; use a length from 1 to {len(tokens) - 1}."
        )
    return WindowSource(tokens.unfold(0, length + 1, length))


def normalize_index(index: int, length: int, what: str = "sample") -> int:
    """The index from 0 on; -1 is the last. Iteration over a source ends by the IndexError."""
    at = as_int(index)
    if not -length <= at < length:
        raise IndexError(f"{what} {at} of {length}")
    return at % length


def recorded_name(value: object) -> str:
    """The class name of a source or an order in files; a renamed class keeps its old one there."""
    return str(getattr(type(value), "recorded_as", type(value).__name__))


def is_iterable(data: Any) -> bool:
    """Whether this can be iterated again and again, and has neither length nor index."""
    if isinstance(data, IterableDataset):
        return True
    is_plain = isinstance(data, type | Iterator | set | frozenset) or hasattr(data, "dataset")
    return hasattr(data, "__iter__") and not hasattr(data, "__len__") and not is_plain


def stream_of(source: Any) -> Any:
    """The stream below a source (`streams.py`); None if it has a length."""
    return getattr(source, "stream_below", None)


def as_source(data: Any, name: str = "data", streams: bool = False) -> Source:
    """`data` itself, when samples can be fetched from it by index; else an error that says why.

    `name` is what the error calls it. With `streams`, what can only be iterated becomes a stream.
    """
    if isinstance(data, Tensor) or (
        isinstance(data, tuple) and any(isinstance(part, Tensor) for part in data)
    ):
        raise UsageError(
            f"{name} is a {type(data).__name__} of tensors, which does not say what is input and "
            "what is target. Use shoal.data.tensors(inputs, target)."
        )
    if is_iterable(data) or inspect.isfunction(data) or stream_of(data) is not None:
        return _as_stream(data, name, streams)
    if isinstance(data, (Mapping, str, bytes)) or not isinstance(data, Source):
        raise UsageError(
            f"{name} is a {type(data).__name__}. It must have len() and indexing by 0, 1, 2, ..., "
            f"each sample a pair (inputs, target). {_way_out(data)}"
        )
    try:
        len(data)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 (a sentence of it, whatever it is)
        is_its_own = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        raise UsageError(
            f"len({name}) failed: {type(error).__name__}: {error}. __len__ of "
            f"{type(data).__name__} must return the number of samples, a whole number from 0 on."
        ) from (error if is_its_own else None)
    return data


def _as_stream(data: Any, name: str, streams: bool) -> Source:
    if not streams:
        raise UsageError(
            f"{name} is a stream ({type(data).__name__}): its samples come one after the other, "
            "and how many there are is not known. A Run trains on it, and mapped and quarantine "
            "work on it; all else needs len() and an index. Give a list of some of them, "
            "list(itertools.islice(stream, 1000)), or a map-style dataset."
        )
    from shoal.data.streams import stream  # which is built on this module

    return stream(data) if stream_of(data) is None else data


def _way_out(data: Any) -> str:
    if hasattr(data, "dataset"):
        return "Pass its dataset."
    if isinstance(data, Iterator):
        return (
            "An iterator gives its samples once, and each rank and pass begins again. Pass the "
            "function that makes it, as a stream, or list(...) of it if they fit into memory."
        )
    return "A list of pairs will do."


@runtime_checkable
class PrefetchingSource(Source, Protocol):
    """A source that can fetch what samples need before they are loaded.

    `fetch_ahead` gets the next ids in their order; ids of an earlier call no longer count. It
    returns at once, with how many of these it will fetch. Without ids, it cancels what is under
    way. A source that is part of several others gets calls from each, and the last one counts.
    """

    def fetch_ahead(self, ids: Ids, /) -> int: ...


@runtime_checkable
class SkipsBad(Source, Protocol):
    """A source whose bad samples are skipped, and written down by `record`."""

    def record(self, index: int, error: Exception, /) -> None: ...


def is_sample_error(error: BaseException) -> bool:
    """Whether an error that came up while samples were loaded is the fault of a sample.

    Not so our own errors, and what ends the work from outside: Ctrl-C, or a signal. All else is,
    `sys.exit()` too, which would end a rank as if all were done, and a KeyboardInterrupt that code
    raised itself: the one of a signal comes up at any instruction but a `raise`.
    """
    if not isinstance(error, KeyboardInterrupt):
        return not isinstance(error, ShoalError | Ended)
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_code[place.tb_lasti] == _RAISE


_RAISE = dis.opmap["RAISE_VARARGS"]
_OUTAGES = (ConnectionError, TimeoutError, MemoryError)
# Of a disk, a mount or the process: the device fails, is gone or full, or no more can be opened.
_OF_THE_DEVICE = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ESTALE, errno.ENOTCONN),
        *(errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
    }
)


def is_outage(error: BaseException) -> bool:
    """Whether an error says nothing of a sample: it may be a good one, so it is never left out."""
    of_device = isinstance(error, OSError) and error.errno in _OF_THE_DEVICE
    return isinstance(error, _OUTAGES) or of_device


def outage_error(index: int, error: BaseException) -> ShoalError:
    """What to raise for an outage: it ends the run, whatever the source leaves out."""
    return ShoalError(
        f"sample {index} was not reached: {type(error).__name__}: {error}. That is no fault of the "
        "sample, so it is not left out; see to the connection, the disk or the memory, and start "
        "again."
    )


def raise_of_sample(index: int, error: BaseException, said: str, advice: str = "") -> NoReturn:
    """Raise an error that came up while a sample was made as what it is; `said` and `advice` stand
    around the words of one that is the sample's fault."""
    if not is_sample_error(error):
        raise error
    if is_outage(error):
        raise outage_error(index, error) from error
    raise RecipeError(f"{said}: {type(error).__name__}: {error}{advice}") from error


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with `change` applied to each of its tensors: itself, or those of a tuple or dict."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, np.ndarray):
        return change(tensor_from_array(value))
    if isinstance(value, (tuple, list)):
        return tuple(map_tensors(change, part) for part in value)
    if isinstance(value, Mapping):
        return {name: map_tensors(change, part) for name, part in value.items()}
    raise UsageError(
        f"a {type(value).__name__} stands where a tensor should. Inputs and target are each a "
        "tensor, or a tuple or dict of tensors."
    )


def tensor_from_array(array: NDArray[Any]) -> Tensor:
    """An array as a tensor, without a copy if it lies in memory as tensors do."""
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in native.strides):
        native = native.copy()
    try:
        return torch.from_numpy(native)
    except TypeError:
        raise UsageError(
            f"an array of {array.dtype} stands where a tensor should, and no tensor can hold that. "
            "Make numbers of it first."
        ) from None


def load_sample(source: Source, index: int, of: Pass | None = None) -> Any:
    """A sample; a RecipeError if it is to blame, another ShoalError if it was not reached."""
    try:
        vary = None if of is None else getattr(source, "vary", None)
        return source[index] if vary is None else vary(index, of)
    except BaseException as error:  # noqa: BLE001 (it is raised)
        said = f"sample {index} of {len(source)} failed"
        advice = f". data[i] must work for each i below len(data); try data[{index}] by itself."
        raise_of_sample(index, error, said, advice)


def load_failure(ids: Ids, error: BaseException) -> str:
    """A sentence for samples that could not be loaded together."""
    return f"{format_ids(ids)} could not be loaded: {type(error).__name__}: {error}"


def format_ids(ids: Ids) -> str:
    """Samples as a message names them: the first few."""
    some = "sample" if len(ids) == 1 else "samples"
    return f"{some} {', '.join(map(str, ids[:8]))}{', ...' if len(ids) > 8 else ''}"

"""The state of a job by canonical names, and how a newcomer gets it from a peer.

A `Slice` says which part of a logical tensor this rank holds, so any plan can read what any plan
wrote. Parameters and buffers are `model.<name>`; an optimizer's tensors are
`optimizer.<parameter>.<key>` and `group.<number>.<key>`, and all that is plain in it (numbers,
text, the shape of lists and dicts) is one entry, `plain`. Attributes that a module or an
optimizer keeps outside of these are not part of the state.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.errors import RecipeError


class Slice(NamedTuple):
    """A block of a logical tensor, and where it lies in it."""

    tensor: Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def whole(tensor: Tensor) -> Slice:
    """All of a logical tensor."""
    tensor = tensor.detach()
    return Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def replicated_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Slice]:
    """The state of a model that every rank holds whole. The tensors are the live ones."""
    state = {f"model.{name}": whole(p) for name, p in model.named_parameters()}
    state |= {f"model.{name}": whole(b) for name, b in model.named_buffers()}
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}

    def put(value: Any, path: str) -> Any:
        """Replace tensors by where they are; the rest stays as it is, if it is plain."""
        if isinstance(value, Tensor):
            state[path] = whole(value)
            return {_TENSOR: path}
        if isinstance(value, dict):
            return {_DICT: [[k, put(v, f"{path}.{k}")] for k, v in value.items()]}
        if isinstance(value, list | tuple):
            kind = _TUPLE if isinstance(value, tuple) else _LIST
            return {kind: [put(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, str | int | float | None):
            return value
        raise RecipeError(
            f"{type(optimizer).__name__} keeps a {type(value).__name__} in {path}, which cannot be "
            "handed to another rank. An optimizer's state may hold tensors, numbers, text, and "
            "lists, tuples and dicts of them."
        )

    plain = {
        "state": {
            names[p]: put(own, f"optimizer.{names[p]}") for p, own in optimizer.state.items()
        },
        "groups": [
            {key: put(value, f"group.{i}.{key}") for key, value in group.items() if key != "params"}
            for i, group in enumerate(optimizer.param_groups)
        ],
    }
    content = bytearray(msgspec.msgpack.encode(plain))
    state[_PLAIN] = whole(torch.frombuffer(content, dtype=torch.uint8))
    return state


@torch.no_grad()
def load_replicated(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Slice]
) -> None:
    """Take over such a state, made by the same recipe."""
    parameters = dict(model.named_parameters())
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        tensor.copy_(state[f"model.{name}"].tensor)

    def take(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == _TENSOR:
            return state[content].tensor
        if kind == _DICT:
            return {key: take(part) for key, part in content}
        parts = [take(part) for part in content]
        return tuple(parts) if kind == _TUPLE else parts

    plain = msgspec.msgpack.decode(state[_PLAIN].tensor.numpy().tobytes())
    optimizer.state.clear()
    for name, own in plain["state"].items():
        optimizer.state[parameters[name]] = take(own)
    for group, values in zip(optimizer.param_groups, plain["groups"], strict=True):
        group.update({key: take(value) for key, value in values.items()})


_PLAIN = "plain"
_TENSOR, _DICT, _LIST, _TUPLE = "tensor", "dict", "list", "tuple"


class _Entry(msgspec.Struct, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]


def share_bytes(group: Group, source: int, content: bytes) -> bytes:
    """Give the source's bytes to all."""
    length = torch.tensor([len(content)], dtype=torch.int64)
    group.broadcast(length, source)
    payload = torch.zeros(int(length.item()), dtype=torch.uint8)
    if group.rank == source:
        payload.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    group.broadcast(payload, source)
    return payload.numpy().tobytes()


def share_state(group: Group, source: int, state: dict[str, Slice]) -> dict[str, Slice]:
    """Give the source's state to all; the others' argument is not looked at.

    One message for the names and shapes, one for all the bytes. Every rank must call it.
    """
    entries = [
        _Entry(n, str(s.tensor.dtype).removeprefix("torch."), tuple(s.tensor.shape), *s[1:])
        for n, s in state.items()
    ]
    header = share_bytes(group, source, msgspec.json.encode(entries))
    if group.rank == source:
        parts = [s.tensor.contiguous().reshape(-1).view(torch.uint8) for s in state.values()]
        group.broadcast(torch.cat(parts).cpu(), source)
        return state
    entries = msgspec.json.decode(header, type=list[_Entry])
    payload = torch.empty(sum(_num_bytes(e) for e in entries), dtype=torch.uint8)
    group.broadcast(payload, source)
    return dict(_unpack(entries, payload))


def _num_bytes(entry: _Entry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _unpack(entries: list[_Entry], payload: Tensor) -> Iterator[tuple[str, Slice]]:
    parts = payload.split([_num_bytes(e) for e in entries])
    for entry, part in zip(entries, parts, strict=True):
        # A part may start anywhere, a view wants alignment: copy.
        tensor = part.clone().view(getattr(torch, entry.dtype)).view(entry.shape)
        yield entry.name, Slice(tensor, entry.global_shape, entry.offset)

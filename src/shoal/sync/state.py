"""The state of a job by canonical names, and how a newcomer gets it from a peer.

A rank's state is the parts of logical tensors that it holds (`Slice`), so any plan can read what
any plan wrote. Parameters and buffers are `model.<name>`; an optimizer's tensors are
`optimizer.<parameter>.<key>` and `group.<number>.<key>`; what is plain in it (numbers, text, the
shape of lists and dicts) is one entry for each parameter, `plain.<parameter>`, and one for the
groups. Attributes that a module or an optimizer keeps outside of these are not part of the state.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shoal.comm.collectives import Group
from shoal.errors import RecipeError
from shoal.parallel.layout import WHOLE, Holding, Slice, slices_of, slices_of_run, whole

State = dict[str, list[Slice]]


class Run(NamedTuple):
    """What the optimizer steps on: elements of a held parameter, from `start`."""

    name: str
    shape: torch.Size  # of the held parameter
    start: int = 0

    def parts(self, tensor: Tensor, holding: Holding) -> list[Slice]:
        """A tensor of the same elements as parts of the logical one; views of it."""
        if tensor.numel() == self.shape.numel():
            return slices_of(self.name, tensor.view(self.shape), holding)
        return slices_of_run(self.name, self.shape, self.start, tensor, holding)


class HeldState:
    """The state of a model and an optimizer, as one rank holds them.

    `tensors` are its parameters and buffers; `runs` says of each tensor that the optimizer steps
    on which elements it stands for. What `state_dict` returns are the live tensors.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        optimizer: torch.optim.Optimizer,
        runs: Mapping[Tensor, Run],
        holding: Holding = WHOLE,
    ):
        self.tensors, self.optimizer, self.runs, self.holding = tensors, optimizer, runs, holding

    def state_dict(self) -> State:
        state: State = {
            f"model.{name}": slices_of(name, tensor, self.holding)
            for name, tensor in self.tensors.items()
        }
        for p, own in self.optimizer.state.items():
            name = self.runs[p].name
            plain = self._put(own, f"optimizer.{name}", state, p)
            state[f"plain.{name}"] = [_packed(plain)]
        groups = [
            {
                key: self._put(value, f"group.{i}.{key}", state, None)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for i, group in enumerate(self.optimizer.param_groups)
        ]
        return state | {_GROUPS: [_packed(groups)]}

    @torch.no_grad()
    def load_state_dict(self, state: State) -> None:
        """Take over such a state, of the same parts, made by the same recipe."""
        for name, tensor in self.tensors.items():
            _fill(slices_of(name, tensor, self.holding), state[f"model.{name}"])
        self.optimizer.state.clear()
        for p, run in self.runs.items():
            if f"plain.{run.name}" in state:
                plain = _unpacked(state[f"plain.{run.name}"])
                self.optimizer.state[p] = self._take(plain, state, p)
        groups = _unpacked(state[_GROUPS])
        for group, values in zip(self.optimizer.param_groups, groups, strict=True):
            group.update({key: self._take(value, state, None) for key, value in values.items()})

    def _put(self, value: Any, path: str, state: State, p: Tensor | None) -> Any:
        """Replace tensors by where they are; the rest stays as it is, if it is plain."""
        if isinstance(value, Tensor):
            alike = p is not None and value.dim() and value.shape == p.shape
            parts = self.runs[p].parts(value, self.holding) if alike and p is not None else None
            state.setdefault(path, []).extend(parts or [whole(value)])
            return {_ALIKE if parts else _TENSOR: path}
        if isinstance(value, dict):
            parts_of = [[k, self._put(v, f"{path}.{k}", state, p)] for k, v in value.items()]
            return {_DICT: parts_of}
        if isinstance(value, list | tuple):
            kind = _TUPLE if isinstance(value, tuple) else _LIST
            return {kind: [self._put(v, f"{path}.{i}", state, p) for i, v in enumerate(value)]}
        if isinstance(value, str | int | float | None):
            return value
        raise RecipeError(
            f"{type(self.optimizer).__name__} keeps a {type(value).__name__} in {path}, which "
            "cannot be handed to another rank. An optimizer's state may hold tensors, numbers, "
            "text, and lists, tuples and dicts of them."
        )

    def _take(self, value: Any, state: State, p: Tensor | None) -> Any:
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == _TENSOR:
            return state[content][0].tensor.clone()
        if kind == _ALIKE:
            assert p is not None
            made = torch.empty_like(p, dtype=state[content][0].tensor.dtype, requires_grad=False)
            _fill(self.runs[p].parts(made, self.holding), state[content])
            return made
        if kind == _DICT:
            return {key: self._take(part, state, p) for key, part in content}
        parts = [self._take(part, state, p) for part in content]
        return tuple(parts) if kind == _TUPLE else parts


def _fill(places: list[Slice], parts: list[Slice]) -> None:
    by_offset = {part.offset: part.tensor for part in parts}
    for place in places:
        place.tensor.copy_(by_offset[place.offset])


def _packed(plain: Any) -> Slice:
    content = bytearray(msgspec.msgpack.encode(plain))
    return whole(torch.frombuffer(content, dtype=torch.uint8))


def _unpacked(parts: list[Slice]) -> Any:
    return msgspec.msgpack.decode(parts[0].tensor.numpy().tobytes())


_GROUPS = "plain"
_TENSOR, _ALIKE, _DICT, _LIST, _TUPLE = "tensor", "alike", "dict", "list", "tuple"


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


def share_state(group: Group, source: int, state: State) -> State:
    """Give the source's state to all; the others' argument is not looked at.

    One message for the names and shapes, one for all the bytes. Every rank must call it.
    """
    listed = [(name, part) for name, parts in state.items() for part in parts]
    entries = [
        _Entry(n, str(s.tensor.dtype).removeprefix("torch."), tuple(s.tensor.shape), *s[1:])
        for n, s in listed
    ]
    header = share_bytes(group, source, msgspec.json.encode(entries))
    if group.rank == source:
        parts = [s.tensor.contiguous().reshape(-1).view(torch.uint8) for _, s in listed]
        group.broadcast(torch.cat(parts).cpu(), source)
        return state
    entries = msgspec.json.decode(header, type=list[_Entry])
    payload = torch.empty(sum(_num_bytes(e) for e in entries), dtype=torch.uint8)
    group.broadcast(payload, source)
    shared: State = {}
    for name, part in _unpack(entries, payload):
        shared.setdefault(name, []).append(part)
    return shared


def _num_bytes(entry: _Entry) -> int:
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return torch.Size(entry.shape).numel() * dtype.itemsize


def _unpack(entries: list[_Entry], payload: Tensor) -> Iterator[tuple[str, Slice]]:
    parts = payload.split([_num_bytes(e) for e in entries])
    for entry, part in zip(entries, parts, strict=True):
        # A part may start anywhere, a view wants alignment: copy.
        tensor = part.clone().view(getattr(torch, entry.dtype)).view(entry.shape)
        yield entry.name, Slice(tensor, entry.global_shape, entry.offset)

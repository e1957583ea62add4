"""Optimizer state kept in files and mapped in, a part at a time, when a step needs it.

The optimizer steps on some parameters at a time; their state is moved into a file when it first
appears, and its pages are given back after each use. So a rank holds the state of one part, not of
the model, for the time of reading and writing it once a step. The numbers are the same, bit for
bit. The files have no name and vanish with the process; they lie in Shoal's cache directory, which
must not be a file system in memory.

For ranks on CPUs. When not to use it: when `zero=1` saves enough, which costs no disk.
"""

import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.errors import PlanError, UsageError
from shoal.numerics.optimizers import members_of
from shoal.storage.run_dir import cache_directory

PART_BYTES = 32 << 20  # of parameters that are stepped on together
SMALL = 1024  # elements; less is not worth a page


def offload_state(optimizer: torch.optim.Optimizer, device: str) -> None:
    """Let this optimizer keep its state in files. Call before anything takes hold of its step."""
    if device != "cpu":
        raise PlanError(
            f"offload=optimizer is for ranks on CPUs, and this one is on {device}. Leave it out; "
            "zero=1 shards the state over the ranks instead."
        )
    for member in members_of(optimizer):  # each of several steps on groups of its own
        vars(member)["step"] = _OffloadedStep(member)


def is_offloaded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether to look at its state is to bring it into memory."""
    steps = [vars(member).get("step") for member in members_of(optimizer)]
    return any(isinstance(step, _OffloadedStep) for step in steps)


class _OffloadedStep:
    def __init__(self, optimizer: torch.optim.Optimizer):
        self._optimizer = optimizer
        self._maps: dict[int, mmap.mmap] = {}  # by the address of the tensor that lies in it

    def __call__(self) -> None:
        groups = self._optimizer.param_groups
        try:
            for group in groups:
                every = group["params"]
                try:
                    for part in _parts(every):
                        group["params"] = part
                        self._optimizer.param_groups = [group]
                        type(self._optimizer).step(self._optimizer)
                        self._put_away(part)
                finally:
                    group["params"] = every
        finally:
            self._optimizer.param_groups = groups

    def _put_away(self, part: list[Tensor]) -> None:
        """Move state that is new into a file, and give back the memory of all of it."""
        states = [self._optimizer.state[p] for p in part if p in self._optimizer.state]
        places = [(state, key) for state in states for key in state if _is_large(state[key])]
        new = [(state, key) for state, key in places if state[key].data_ptr() not in self._maps]
        for (state, key), mapped in zip(new, self._mapped([s[k] for s, k in new]), strict=True):
            state[key] = mapped
        for file in {id(m): m for m in (self._maps[s[k].data_ptr()] for s, k in places)}.values():
            file.madvise(mmap.MADV_DONTNEED)  # of the pages, that is: the file has the numbers

    def _mapped(self, tensors: list[Tensor]) -> Iterator[Tensor]:
        """Copies of tensors, all in one new file."""
        if not tensors:
            return
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        file = _file(size)
        for tensor, start in zip(tensors, starts, strict=True):
            flat = torch.frombuffer(file, dtype=tensor.dtype, count=tensor.numel(), offset=start)
            copy = flat.view(tensor.shape).copy_(tensor)
            self._maps[copy.data_ptr()] = file
            yield copy


def _parts(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    part: list[Tensor] = []
    for p in parameters:
        if part and sum(q.nbytes for q in part) + p.nbytes > PART_BYTES:
            yield part
            part = []
        part.append(p)
    if part:
        yield part


def _is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() >= SMALL and value.is_contiguous()


def _file(size: int) -> mmap.mmap:
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # a hole would end the process later
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        reason = "is full" if error.errno == errno.ENOSPC else f"cannot be used ({error.strerror})"
        raise UsageError(
            f"offload=optimizer needs {size} bytes of disk for each {PART_BYTES} bytes of "
            f"parameters, and {directory} {reason}. Make room, or set SHOAL_CACHE to another "
            "directory."
        ) from error

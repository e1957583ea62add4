"""Optimizer state in files: the same bits, memory given back, clear words where it cannot be."""

import ctypes
import errno
import gc
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.errors import PlanError, UsageError
from shoal.numerics import offload
from shoal.numerics.offload import SMALL, offload_state
from shoal.numerics.optimizers import Optimizers, stepper
from shoal.sync.state import MemorySource, ParameterRun, TrainState

LARGE = 8 << 20  # elements of a parameter of 32 MB, for which Adam keeps 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made(kind: str, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 30), nn.Linear(30, 2))
    named = list(model.named_parameters())
    groups = [{"params": named[:3], "weight_decay": 0.1}, {"params": named[3:]}]
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    return model, getattr(torch.optim, kind)(groups, lr=0.01, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    step = stepper(optimizer)
    for number in steps:
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        step()


def same(one: nn.Module, two: nn.Module) -> bool:
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> TrainState:
    runs = {p: ParameterRun(name, p.shape) for name, p in model.named_parameters()}
    return TrainState(dict(model.named_parameters()), optimizer, runs)


def test_each_of_several_optimizers_steps_on_its_own() -> None:
    found = []
    for is_offloaded in (False, True):
        model, _ = made("SGD")
        named = list(model.named_parameters())
        first = torch.optim.AdamW([{"params": named[:2]}, {"params": named[2:3]}], lr=0.1)
        both = Optimizers(first, rest=torch.optim.SGD(named[3:], lr=0.01, momentum=0.9))
        if is_offloaded:
            offload_state(both, "cpu")
            assert offload.is_offloaded(both)
        train(model, both, range(3))
        with both.only(["rest"]):
            train(model, both, range(2))
        found.append(model)
    assert same(*found)


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("part_bytes", [1, 5_000, 32 << 20])
def test_the_bits_are_the_same(
    monkeypatch: pytest.MonkeyPatch, cache: Path, kind: str, part_bytes: int
) -> None:
    monkeypatch.setattr(offload, "PART_BYTES", part_bytes)
    plain, away = made(kind), made(kind)
    offload_state(away[1], "cpu")
    for pair in (plain, away):
        train(*pair, range(5))
    assert same(plain[0], away[0])
    groups = away[1].param_groups
    assert [len(group["params"]) for group in groups] == [3, 3], "put back after each step"
    assert cache.exists() and not list(cache.iterdir()), "the files have no name"


def pss() -> int:
    """Bytes of memory that are this process's, shared pages by their share.

    Without what tests before this one have freed: it would be used again, and nothing would grow.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^Pss: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


@pytest.mark.parametrize("is_away", [False, True])
def test_memory_is_given_back(is_away: bool) -> None:
    weight = nn.Parameter(torch.ones(LARGE))
    weight.grad = torch.ones(LARGE)
    optimizer = torch.optim.AdamW([weight], fused=True)
    if is_away:
        offload_state(optimizer, "cpu")
    before = pss()
    for _ in range(2):
        optimizer.step()
    grown, state = pss() - before, 8 * LARGE
    assert grown < state / 4 if is_away else grown > state * 3 / 4


def test_small_state_stays_in_memory(cache: Path) -> None:
    weight = nn.Parameter(torch.ones(SMALL - 1))
    weight.grad = torch.ones(SMALL - 1)
    optimizer = torch.optim.AdamW([weight])
    offload_state(optimizer, "cpu")
    optimizer.step()
    assert not cache.exists()


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "is full"), (errno.EIO, "cannot be used (Input/output")]
)
def test_a_disk_that_cannot_take_it_is_told(
    monkeypatch: pytest.MonkeyPatch, cache: Path, number: int, words: str
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, "Input/output error")

    monkeypatch.setattr("os.posix_fallocate", fails)
    model, optimizer = made("AdamW")
    offload_state(optimizer, "cpu")
    with pytest.raises(UsageError) as refused:
        train(model, optimizer, range(1))
    assert words in str(refused.value) and str(cache) in str(refused.value)
    assert "Make room, or set SHOAL_CACHE" in str(refused.value)
    assert len(optimizer.param_groups) == 2, "groups are put back all the same"


def test_other_devices_are_refused() -> None:
    with pytest.raises(PlanError, match="this one is on cuda:0"):
        offload_state(torch.optim.AdamW([nn.Parameter(torch.ones(4))]), "cuda:0")


def test_state_survives_a_round_trip() -> None:
    first, second, plain = made("AdamW"), made("AdamW", seed=1), made("AdamW")
    for pair in (first, second):
        offload_state(pair[1], "cpu")
    train(*first, range(3))
    train(*second, range(1))
    held(*second).load_state_dict(MemorySource(held(*first).state_dict()))
    for pair in (first, second):
        train(*pair, range(3, 6))
    train(*plain, range(6))
    assert same(first[0], second[0]) and same(first[0], plain[0])

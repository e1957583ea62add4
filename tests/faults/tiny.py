"""A tiny run for fault tests: every sample is its own id, and a pause lets faults land inside.

Dropout and BatchNorm are in it, so that random state and buffers count; AdamW, so that optimizer
state does.
"""

import dataclasses
import math
import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.data import stalls
from shoal.elastic import watchdog
from shoal.errors import GroupLost
from shoal.plans.measured import GAINS

NUM_SAMPLES = 120


def run_of(pause: float, **changes: object) -> shoal.Run:
    ids = torch.arange(NUM_SAMPLES)
    angles = ids[:, None] * torch.tensor([0.1, 0.2, 0.5, 1.0])
    run = shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)
        ),
        loss=lambda output, target: slow_loss(output, target, pause),
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(angles.sin(), ids[:, None] / NUM_SAMPLES),
        batch_size=12,
        steps=60,
        clip=1.0,
    )
    return dataclasses.replace(run, **changes)


def slow_loss(output: Tensor, target: Tensor, pause: float) -> Tensor:
    time.sleep(pause)
    return F.mse_loss(output, target)


def mlp(pause: float = 0.002) -> shoal.Run:
    return run_of(pause)


def unlike(pause: float = 0.002) -> shoal.Run:
    """On a host where TINY_SEED is set, it is another run."""
    return run_of(pause, seed=int(os.environ.get("TINY_SEED", "0")))


def telling(pause: float = 0.002, file: str = "member") -> shoal.Run:
    """Each rank writes down what its process knows: its number, and the secret of the run."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        own = Path(f"{file}-{os.getpid()}")
        own.write_text(os.environ["SHOAL_MEMBER"])
        own.replace(file)  # whole, whenever it is read
        return slow_loss(output, target, pause)

    return run_of(pause, loss=loss)


def lasting(pause: float = 0.002, file: str = "over", calls: int = 30) -> shoal.Run:
    """Each rank goes slowly, and after so many pieces waits until there is a file."""
    numbers = count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        while next(numbers) > calls and not Path(file).exists():
            time.sleep(0.05)
        return slow_loss(output, target, pause)

    return dataclasses.replace(run_of(pause), loss=loss)


def dawdling(pause: float = 0.002, spare: int = 5) -> shoal.Run:
    """A spare that becomes a server takes long over every step, and so over those of another."""

    class Dawdling(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            if os.environ.get("SHOAL_MEMBER", "").startswith(f"{spare}:"):
                time.sleep(0.4)
            super().step(closure)

    return run_of(pause, optimizer=lambda named: Dawdling(named, lr=0.1), steps=22)


def in_parts(pause: float = 0.002) -> shoal.Run:
    """With parameters that take more than one message."""
    return run_of(
        pause,
        model=lambda: nn.Sequential(
            nn.Linear(4, 300),
            nn.BatchNorm1d(300),
            nn.ReLU(),
            nn.Linear(300, 300),
            nn.Linear(300, 1),
        ),
        steps=30,
    )


def stateless(pause: float = 0.002) -> shoal.Run:
    """Without buffers and without state of the optimizer: a step made again has the same bits."""
    return run_of(
        pause,
        model=lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1)),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


def wide(pause: float = 0.0) -> shoal.Run:
    """Parameters of a megabyte, so that what is sent of them can be told from the rest."""
    return run_of(
        pause,
        model=lambda: nn.Sequential(
            nn.Linear(4, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
        ),
        optimizer=lambda named: torch.optim.SGD(named, lr=1e-2),
    )


def many(pause: float = 0.0) -> shoal.Run:
    """Three megabytes of state: more than is looked at in one step."""
    run = wide(pause)
    return dataclasses.replace(run, optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3))


def regrouped(pause: float = 0.002) -> shoal.Run:
    """An optimizer that steps in another order than the model has parameters."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": 1e-2} for _, p in reversed(list(named))]
        return torch.optim.AdamW(groups)

    return run_of(pause, optimizer=optimizer)


class Clamped(torch.optim.AdamW):
    """Writes to weights behind torch's back."""

    element_wise = True

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.clamp_(-0.5, 0.5)


class Scribbling(nn.Module):
    """Tied and frozen weights, zeros of either sign, and buffers that evaluations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        self.again.weight = self.first.weight
        self.frozen = nn.Parameter(torch.tensor([1.0, 0.5, -0.0, 0.0]), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.full((4,), torch.nan))
        self.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x).relu()) * self.frozen
        self.calls += 1
        if not self.training:
            self.last.copy_(x.detach()[0])
        answer: Tensor = self.head(x)
        return answer


def scribbling(pause: float = 0.002) -> shoal.Run:
    """Writes, wherever it may, alike on all ranks or to what none of them keeps."""
    run = judged(pause)
    return dataclasses.replace(
        run, model=Scribbling, optimizer=lambda named: Clamped(named, lr=1e-2), clip=None
    )


def sparse(pause: float = 0.002) -> shoal.Run:
    """An embedding whose gradients are sparse, which one rank alone can train."""
    ids = torch.arange(NUM_SAMPLES)
    return run_of(
        pause,
        model=lambda: nn.Sequential(nn.Embedding(NUM_SAMPLES, 1, sparse=True), nn.Flatten()),
        optimizer=lambda named: torch.optim.SparseAdam(list(named)),
        data=shoal.data.tensors(ids[:, None], ids[:, None] / NUM_SAMPLES),
        steps=20,
        clip=None,
    )


def evaluated(pause: float = 0.002) -> shoal.Run:
    held_out = shoal.data.tensors(torch.randn(30, 4), torch.zeros(30, 1))
    return run_of(pause, evaluate=held_out, evaluate_every=5)


def judged(pause: float = 0.002, save: int = 8) -> shoal.Run:
    """Evaluated and saved, after as many steps."""
    held_out = shoal.data.tensors(torch.randn(30, 4), torch.zeros(30, 1))
    return run_of(pause, evaluate=held_out, evaluate_every=save, save_every=save)


def raises(pause: float = 0.002, at_id: int = 5) -> shoal.Run:
    """A loss of the recipe's own that breaks at one sample, and so on one rank."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if (target == at_id / NUM_SAMPLES).any():
            raise ValueError(f"sample {at_id} is broken")
        return slow_loss(output, target, pause)

    return run_of(pause, loss=loss)


def poisoned(pause: float = 0.0, call: int = 3) -> shoal.Run:
    """The loss of odd ranks is not a number when they compute it for this time."""
    calls = count(1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = slow_loss(output, target, pause)
        is_bad = next(calls) == call and torch.distributed.get_rank() % 2 == 1
        return value * math.nan if is_bad else value

    return run_of(pause, loss=loss, clip=None)


_KEPT: list[object] = []


def dangling(pause: float = 0.002) -> shoal.Run:
    """Two survivors of a death each leave an operation behind that nobody waits for.

    One keeps it, and with it the connection; the other's is let go of after the repair.
    """
    calls = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 20 and torch.distributed.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if len(calls) == 20:
            work = torch.distributed.all_reduce(torch.ones(1), async_op=True)
            if torch.distributed.get_rank() == 1:
                _KEPT.append(work)
            raise GroupLost("a rank was killed")
        return slow_loss(output, target, pause)

    return run_of(pause, loss=loss)


def leaves(pause: float = 0.002, at_id: int = 5, code: int = 0) -> shoal.Run:
    """A loss that ends its process, as a library that calls exit() would."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if (target == at_id / NUM_SAMPLES).any():
            os._exit(code)
        return slow_loss(output, target, pause)

    return run_of(pause, loss=loss)


def growing(samples: int = 40, in_order: bool = False) -> shoal.Run:
    """Data that has more samples at its end from one run to the next."""
    ids = torch.arange(samples)[:, None]
    data = shoal.data.tensors(ids * torch.ones(4), ids / 100)
    data = shoal.data.in_order(data) if in_order else data
    return dataclasses.replace(run_of(0.0), data=data, batch_size=8, steps=5)


def one_slow(pause: float = 0.02, slow: int = 1) -> shoal.Run:
    """One replica takes five times as long for a piece as the others."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return slow_loss(output, target, 5 * pause if rank == slow else pause)

    return run_of(pause, loss=loss, steps=12)


def listed(pause: float = 0.01) -> shoal.Run:
    """Samples one by one, for processes that load them ahead."""
    run = run_of(pause)
    return dataclasses.replace(run, data=[run.data[i] for i in range(NUM_SAMPLES)], steps=40)


class Broken:
    """Samples of which some cannot be loaded."""

    def __init__(self, data: Any):
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        if index % 17 == 3:
            raise OSError(f"block {index} cannot be read")
        return self.data[index]


def quarantined(pause: float = 0.0, file: str = "bad.jsonl", loaders: int = 0) -> shoal.Run:
    run = run_of(pause, loaders=loaders, steps=25)
    return dataclasses.replace(run, data=shoal.data.quarantine(Broken(run.data), file))


class Emptied(Broken):
    """The fourth dozen of samples cannot be loaded: a whole batch of them, taken in order."""

    def __getitem__(self, index: int) -> Any:
        if index // 12 == 3:
            raise ValueError(f"block {index} cannot be read")
        return self.data[index]


def emptied(file: str = "bad.jsonl", loaders: int = 0) -> shoal.Run:
    run = run_of(0.0, loaders=loaders, steps=15, save_every=4)
    data = shoal.data.quarantine(Emptied(run.data), file)
    return dataclasses.replace(run, data=shoal.data.in_order(data))


class Hopeless(Broken):
    def __getitem__(self, index: int) -> Any:
        raise ValueError("no sample can be loaded")


def hopeless(file: str = "bad.jsonl") -> shoal.Run:
    run = run_of(0.0)
    return dataclasses.replace(run, data=shoal.data.quarantine(Hopeless(run.data), file))


class Hanging(Broken):
    def __getitem__(self, index: int) -> Any:
        if index == 30:
            time.sleep(60)
        return self.data[index]


def hanging(limit: float = 1.5, loaders: int = 0) -> shoal.Run:
    """A sample never comes; what a wait is told of and ends after is made short."""
    stalls.FIRST_S, stalls.LIMIT_S, stalls.LIMIT_PER_SAMPLE_S = 0.3, limit, 0.0
    run = run_of(0.0, loaders=loaders, steps=10)
    return dataclasses.replace(run, data=shoal.data.in_order(Hanging(run.data)))


class Sticky(torch.optim.SGD):
    """Its fifth step never ends."""

    num_steps = 0

    def step(self, closure: Any = None) -> None:
        self.num_steps += 1
        if self.num_steps == 5:
            never_end()
        super().step(closure)


def never_end() -> None:
    while True:
        time.sleep(0.01)


def sticking(where: str, while_stopping: bool = False) -> shoal.Run:
    """Something hangs: the optimizer, or the model in rank 1. What is told then is told soon, or
    soon after the run was asked to stop."""
    if while_stopping:
        watchdog.STOPPING_PAUSE_S, watchdog.STOPPING_TIMES_LONGEST = 0.5, 1.0
    else:
        watchdog.PAUSE_S, watchdog.TIMES_LONGEST = 0.5, 1.0
    calls = count()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if where == "model" and next(calls) == 4 and os.environ["RANK"] == "1":
            never_end()
        return F.mse_loss(output, target)

    run = run_of(0.0, loss=loss, clip=None)
    if where == "optimizer":
        return dataclasses.replace(run, optimizer=lambda named: Sticky(named, lr=0.1))
    return run


def joined(file: str = "bad.jsonl") -> shoal.Run:
    """Data of which a part is under quarantine."""
    run = run_of(0.0, steps=25)
    broken = shoal.data.quarantine(Broken(run.data), file)
    return dataclasses.replace(run, data=shoal.data.join([run.data, broken]))


class Reads(nn.Module):
    """A table with many more rows than a batch touches, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1000, 8, sparse=True), nn.Linear(8, 1)
        self.drop = nn.Dropout(0.2)

    def forward(self, ids: Tensor) -> Tensor:
        answer: Tensor = self.head(self.drop(self.table(ids).mean(1)))
        return answer


def by_rows(named: Any) -> torch.optim.Optimizer:
    return shoal.Optimizers(
        torch.optim.AdamW([(n, p) for n, p in named if "table" not in n], lr=1e-2),
        shoal.RowwiseAdagrad([(n, p) for n, p in named if "table" in n], lr=0.1),
    )


def tabled(pause: float = 0.002) -> shoal.Run:
    """Each sample looks up some rows of its own and some that many do."""
    ids = torch.arange(NUM_SAMPLES)
    rows = torch.stack([ids * 7 % 1000, ids * 8, ids % 5, ids % 3], 1)
    data = shoal.data.tensors(rows, ids[:, None] / NUM_SAMPLES)
    return run_of(pause, model=Reads, data=data, optimizer=by_rows)


class ReadsLazily(Reads):
    """The same with rows that come into being when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = shoal.Table(1000, 8)


def lazily(pause: float = 0.002) -> shoal.Run:
    return dataclasses.replace(tabled(pause), model=ReadsLazily)


class Duel(nn.Module):
    """Two parts that take turns; draws and BatchNorm in both."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.judges = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def in_phases(pause: float = 0.002, save_every: int | None = None) -> shoal.Run:
    """A step of two phases with an optimizer each, then a third one in every second step."""

    def judge(model: Duel, real: Tensor, target: Tensor) -> Tensor:
        drawn = model.draws(torch.randn(len(real), 4)).detach()
        return slow_loss(model.judges(real), target, pause) + model.judges(drawn).square().mean()

    def draw(model: Duel, real: Tensor, target: Tensor) -> Tensor:
        return slow_loss(model.judges(model.draws(torch.randn(len(real), 4))), target, pause)

    def step(batch: shoal.StepBatch) -> None:
        batch.minimize(judge, of="judges")
        batch.minimize(draw, of="draws")
        if batch.step % 2 == 0:
            batch.minimize(draw, of="draws")

    def optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        parts = {part: [(n, p) for n, p in named if part in n] for part in ("draws", "judges")}
        return shoal.Optimizers(
            draws=torch.optim.AdamW(parts["draws"], lr=1e-2),
            judges=torch.optim.SGD(parts["judges"], lr=1e-1, momentum=0.9),
        )

    run = run_of(pause, model=Duel, loss=None, step=step, optimizer=optimizer, steps=24)
    return dataclasses.replace(run, save_every=save_every)


class Counting:
    """Keeps a number of its own, and may fail or act otherwise on one rank."""

    def __init__(self, fails: int = 0, unlike: int = 0):
        self.fails, self.unlike, self.seen = fails, unlike, 0

    def on_step(self, trainer: Any, info: Any) -> None:
        self.seen += 1
        trainer.log("seen", self.seen)
        if info.step == self.fails and trainer.rank == 1:
            raise KeyError("a key of the callback's own")
        if info.step == self.unlike and trainer.rank == 1:
            trainer.set_lr(factor=0.5)

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def called(
    pause: float = 0.002,
    fails: int = 0,
    unlike: int = 0,
    patience: int = 99,
) -> shoal.Run:
    """With callbacks that have something to lose."""
    evaluate = run_of(0).data
    return run_of(
        pause,
        evaluate=evaluate,
        evaluate_every=5,
        callbacks=[
            shoal.callbacks.EMA(0.9, evaluate=True),
            shoal.callbacks.ReduceOnPlateau("loss", factor=0.5, patience=1, min_delta=1e-3),
            shoal.callbacks.EarlyStopping("ema_loss", patience, min_delta=1e-2),
            shoal.callbacks.BestCheckpoint("ema_loss"),
            shoal.callbacks.Freeze("4.*", since=10, until=30),
            Counting(fails, unlike),
        ],
    )


def forced(pause: float = 0.002, save_every: int | None = None) -> shoal.Run:
    """The same, where `codec=auto` finds that int8 pays, whatever it measures."""
    GAINS.clear()
    GAINS["int8"] = 0.0
    return dataclasses.replace(packed(pause), save_every=save_every)


def packed(pause: float = 0.002) -> shoal.Run:
    """With a matrix that a codec packs."""
    return run_of(
        pause,
        model=lambda: nn.Sequential(
            nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 1)
        ),
    )

"""What the full trainer adds to a step, over a raw loop, in microseconds.

A tiny MLP on one process: the step is so short that everything around it shows. The raw loop takes
slices of data in memory and does what training cannot do without; the trainer does the same step
with its metrics on, as a rank of `shoal train` has them. Both see the same samples in the same
order, and must end with the same loss. The raw loop is peer and ceiling at once.

The seat's heartbeats are not in it (ten a second, in a thread of their own).
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench import harness
from bench.harness import Row
from shoal.comm.mesh import LauncherSeat
from shoal.data.sources import tensors
from shoal.events.meters import StepTotals
from shoal.events.metrics_writer import MetricsWriter
from shoal.training.run import Run, make_batches, resolve
from shoal.training.trainer import Trainer
from shoal.world import World

BATCH = 32
NUM_SAMPLES = 1024 * BATCH
CHUNK = 128  # steps measured at a time
FLOOR_US = 30.0


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_run() -> Run:
    torch.manual_seed(1)
    inputs, target = torch.randn(NUM_SAMPLES, 64), torch.randint(0, 10, (NUM_SAMPLES,))
    return Run(
        model=model,
        loss=cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
        data=tensors(inputs, target),
        batch_size=BATCH,
        steps=1 << 30,
    )


class RawLoop:
    """The least that training takes."""

    def __init__(self, run: Run):
        self.batches = make_batches(run, 1)
        self.model = run.make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.step = 0

    def chunk(self) -> float:
        """Microseconds a step, over a chunk."""
        inputs, target = self._in_order()
        model, optimizer = self.model, self.optimizer
        started = perf_counter()
        for at in range(0, CHUNK * BATCH, BATCH):
            optimizer.zero_grad()
            loss = cross_entropy(model(inputs[at : at + BATCH]), target[at : at + BATCH])
            loss.backward()
            optimizer.step()
        seconds = perf_counter() - started
        self.step += CHUNK
        self.loss = loss.item()
        return seconds / CHUNK * 1e6

    def _in_order(self) -> tuple[Tensor, Tensor]:
        """The samples of the next chunk, laid out as the run's batches take them."""
        pieces = [self.batches.at(self.step + k).piece(0) for k in range(CHUNK)]
        return torch.cat([p.inputs for p in pieces]), torch.cat([p.target for p in pieces])


def trainer_chunk(trainer: Trainer) -> Callable[[], float]:
    steps = iter(trainer)

    def chunk() -> float:
        started = perf_counter()
        for _ in islice(steps, CHUNK):
            pass
        return (perf_counter() - started) / CHUNK * 1e6

    return chunk


def check_alike(raw: RawLoop, trainer: Trainer) -> None:
    """A loop that trains something else is no peer."""
    assert trainer.last_info is not None and trainer.step == raw.step
    loss = trainer.last_info.loss
    if abs(loss - raw.loss) > 1e-4 * abs(raw.loss):
        raise RuntimeError(
            f"After {raw.step} steps the trainer's loss is {loss} and the raw loop's {raw.loss}. "
            "Both must train the same; look at what changed in the trainer."
        )


def measure(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    harness.pin(0)
    run = make_run()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainer = Trainer(run, resolve(run, "data=1", 1), LauncherSeat(World()))
        totals = StepTotals()
        scribe = MetricsWriter(folder / "metrics.jsonl", lambda: trainer.writes_record)
        trainer.hooks += [totals.add, scribe]
        stack.callback(scribe.close)
        stack.enter_context(trainer)
        raw, again = RawLoop(run), RawLoop(run)
        arms = {"raw": raw.chunk, "shoal": trainer_chunk(trainer), "again": again.chunk}
        stack.enter_context(harness.quiet())
        figures = harness.interleave(arms, 20 if quick else 100, num_warm_up=2)
        check_alike(raw, trainer)
    yield _row(figures)


def _row(figures: dict[str, list[float]]) -> Row:
    raw, shoal, again = figures["raw"], figures["shoal"], figures["again"]
    added = harness.spread(harness.differences(shoal, raw))
    control = harness.spread(harness.ratios(again, raw)).median
    times = harness.spread(harness.ratios(shoal, raw)).median
    us = harness.spread(raw).median
    return Row(
        name="overhead",
        value=added.median,
        low=added.low,
        high=added.high,
        num_pairs=added.num_pairs,
        unit="us",
        floor=FLOOR_US,
        at_most=True,
        peer=f"raw loop {us:.0f} us",
        ceiling="the same",
        control=control,
        note=f"{times:.3f} of the raw step's time",
    )


if __name__ == "__main__":
    harness.main(measure)

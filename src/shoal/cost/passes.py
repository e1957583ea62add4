"""Passes of a model under watch: seconds, bytes and messages of each event, as lines in samples.

Seconds are those of this thread, so that other work on the machine counts little; the median of a
few passes is taken at each of two sizes. On fake tensors they follow from the costs of the events.
What a step of the real trainer takes beyond its parts is measured in a world of one rank.
Read next: `pass_probe.py` for how a pass is watched, `profiler.py` for what becomes of it.
"""

import statistics
from collections.abc import Callable, Sequence
from time import thread_time

import psutil
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from shoal.cost.first_step import run_first_step
from shoal.cost.model_facts import put_stand_ins
from shoal.cost.pass_probe import LiveBytes, PassCounters, PassProbe, Segment
from shoal.cost.profile import (
    BlockProfile,
    BlockTimes,
    EvaluationMemory,
    Linear,
    PrecisionProfile,
)
from shoal.cost.subject import LONGEST_PASS_S, SHARE_OF_MEMORY, Subject, first_piece
from shoal.data.batches import Piece
from shoal.errors import ShoalError
from shoal.logs import log
from shoal.numerics.optimizers import stepper
from shoal.parallel.striping import tables_of, weights_of
from shoal.training.evaluate import evaluated_samples, evaluating

MEASURED_S = 0.25  # for which passes of one size are repeated
FEWEST_LAPS, MOST_LAPS = 3, 9  # one that was disturbed does not count


def line_through(by_size: dict[int, float]) -> Linear:
    """Through the amounts at one or two sizes; neither part is below 0."""
    (small, low), (large, high) = min(by_size.items()), max(by_size.items())
    if small == large:
        return Linear(0.0, high / large)
    slope = (high - low) / (large - small)
    if slope <= 0:
        return Linear((low + high) / 2, 0.0)
    if low < slope * small:
        return Linear(0.0, high / large)
    return Linear(low - slope * small, slope)


AMOUNTS = ("forward_s", "backward_s", "flops", "kept", "forward_peak", "backward_peak")


class PassAmounts:
    """Of one pass at one size, by event."""

    def __init__(self, segments: Sequence[Segment], num_events: int):
        self.forward_s, self.backward_s, self.flops = ([0.0] * num_events for _ in range(3))
        self.kept, self.forward_peak, self.backward_peak = ([0.0] * num_events for _ in range(3))
        self.messages, self.back_messages = [0] * num_events, [0] * num_events
        self.message_bytes, self.back_bytes = [0] * num_events, [0] * num_events
        for s in segments:
            peak = s.peak - s.before
            if s.is_backward:
                self.backward_s[s.event] += s.seconds
                self.backward_peak[s.event] = max(self.backward_peak[s.event], peak)
                self.back_messages[s.event] += s.messages
                self.back_bytes[s.event] += s.message_bytes
            else:
                self.forward_s[s.event] += s.seconds
                self.flops[s.event] += s.flops
                self.kept[s.event] += s.after - s.before
                self.forward_peak[s.event] = max(self.forward_peak[s.event], peak)
                self.messages[s.event] += s.messages
                self.message_bytes[s.event] += s.message_bytes


def lines_of(by_size: dict[int, PassAmounts], name: str, num_events: int) -> list[Linear]:
    """One kind of amount, by event."""
    return [
        line_through({size: getattr(found, name)[index] for size, found in by_size.items()})
        for index in range(num_events)
    ]


def times_of(by_size: dict[int, PassAmounts], num_events: int) -> list[BlockTimes]:
    each = [lines_of(by_size, name, num_events) for name in AMOUNTS]
    return [BlockTimes(*own) for own in zip(*each, strict=True)]


class WatchedPasses:
    """Passes of one subject, timed and weighed."""

    def __init__(
        self,
        subject: Subject,
        blocks: Sequence[BlockProfile],
        speed: float,
        whole: Sequence[BlockTimes] = (),
    ):
        """`whole` is what was found of the model before it was cut."""
        self.subject, self.blocks, self.speed, self.whole = subject, blocks, speed, whole
        self.is_unlike = False
        self.sizes: tuple[int, ...] = ()  # that were run

    def times(self) -> list[BlockTimes]:
        return times_of(self.amounts(), len(self.blocks))

    def amounts(self) -> dict[int, PassAmounts]:
        """By size; the larger one is left out if a pass would take too long or too much memory."""
        found: dict[int, PassAmounts] = {}
        for size, pieces in self.subject.examples.items():
            if found and self.subject.mode is None:
                (small, before), *_ = found.items()
                growth = size / small
                took = growth * sum(before.forward_s + before.backward_s)
                free = SHARE_OF_MEMORY * psutil.virtual_memory().available
                if took > LONGEST_PASS_S or growth * sum(before.kept) > free:
                    break
            found[size] = self._at(pieces)
        self.sizes = tuple(found)
        return found

    def _at(self, pieces: Sequence[Piece]) -> PassAmounts:
        subject = self.subject
        units = [(i, b.name) for i, b in enumerate(self.blocks) if b.is_unit and b.name]
        probe = PassProbe(subject.model, units, len(self.blocks))
        try:
            weighed = self._weigh(probe, pieces[-1])
            if subject.mode is not None:
                self._from_flops(weighed, pieces[0].num_samples)
                return weighed
            laps: list[PassAmounts] = []
            spent = thread_time()
            while len(laps) < FEWEST_LAPS or (
                len(laps) < MOST_LAPS and thread_time() - spent < MEASURED_S
            ):
                subject.forget()
                segments = probe.watch(lambda: (subject.loss(pieces[0]), None))
                laps.append(PassAmounts(segments, len(self.blocks)))
            for name in ("forward_s", "backward_s"):
                values = zip(*(getattr(lap, name) for lap in laps), strict=True)
                setattr(weighed, name, [statistics.median(own) for own in values])
            return weighed
        finally:
            self.is_unlike = self.is_unlike or probe.is_unlike
            probe.close()
            subject.forget()

    def _from_flops(self, weighed: PassAmounts, samples: int) -> None:
        """Seconds of events that ran on fake tensors: their costs as the recorder has them, less
        what a cut over the tensor axis leaves to others."""
        share = 1.0
        for i, block in enumerate(self.blocks):
            if self.whole and (flops := self.whole[i].flops.at(samples)):
                share = weighed.flops[i] / flops
            weighed.forward_s[i] = share * block.cost.at(samples) / self.speed
            weighed.backward_s[i] = 2 * weighed.forward_s[i]

    def _weigh(self, probe: PassProbe, piece: Piece) -> PassAmounts:
        """One pass under a tracker of live bytes, which is slower than others."""
        subject, group = self.subject, self.subject.group
        tensors = [*subject.model.parameters(), *subject.model.buffers()]
        leaves = tree_leaves((piece.inputs, piece.target))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        subject.forget()
        with (
            FlopCounterMode(display=False) as counter,
            LiveBytes([*tensors, *given], given) as live,
        ):
            counters = PassCounters(live, counter.get_total_flops)
            if group is not None:
                counters = counters._replace(messages=lambda: (group.count, group.bytes_sent))
            segments = probe.watch(lambda: (subject.loss(piece), None), counters)
        self.is_unlike = self.is_unlike or live.reads_values
        return PassAmounts(segments, len(self.blocks))

    def evaluation(self) -> EvaluationMemory:
        """Of the run's own, where it computes samples as a step does; after `amounts`."""
        num_samples = evaluated_samples(self.subject.run)
        if not num_samples or not self.sizes:
            return EvaluationMemory()
        found = {n: self._most_in_evaluation(self.subject.examples[n][0]) for n in self.sizes}
        return EvaluationMemory(num_samples, round(line_through(found).at(num_samples)))

    def _most_in_evaluation(self, piece: Piece) -> float:
        model = self.subject.model
        with evaluating(model), LiveBytes([*model.parameters(), *model.buffers()]) as live:
            self.subject.loss(piece)
        return float(live.peak)

    def steps(self) -> list[BlockTimes]:
        """Of a step of the recipe's own: all of its phases, as one event."""
        subject, found = self.subject, {}
        for size, pieces in subject.examples.items():
            laps = []
            for _ in range(3):
                started = thread_time()
                run_first_step(subject.run, subject.model, pieces[0])
                laps.append(thread_time() - started)
            found[size] = statistics.median(laps)
        line, kept = line_through(found), Linear()
        # Its phases run forward only here; a backward takes about twice as long.
        return [
            BlockTimes(line, Linear(2 * line.fixed, 2 * line.per_sample), kept, kept, kept, kept)
        ]

    def precisions(self) -> dict[str, PrecisionProfile]:
        """What bf16 and fp16 change. Bytes at two sizes tell activations from copies of parameters,
        which do not grow with samples."""
        sizes = {n: self.subject.examples[n][0] for n in self.sizes}
        seconds: dict[str, float] = {}
        kept: dict[str, Linear] = {}
        for precision in ("fp32", "bf16", "fp16"):
            try:
                seconds[precision] = self._seconds_in(precision)
                lines = {n: self._kept_in(precision, piece) for n, piece in sizes.items()}
                kept[precision] = line_through(lines)
            except (RuntimeError, ShoalError) as error:
                log.debug("precision=%s cannot be profiled here: %s", precision, error)
        count = sum(p.numel() for p in self.subject.model.parameters())
        found, plain = {}, kept["fp32"]
        for precision, line in kept.items():
            factor = line.per_sample / plain.per_sample if plain.per_sample else 1.0
            copies = max(0.0, line.fixed - factor * plain.fixed) / max(1, count)
            by_time = seconds[precision] / seconds["fp32"] if self.subject.mode is None else 1.0
            found[precision] = PrecisionProfile(by_time, factor, copies)
        return found

    def _seconds_in(self, precision: str) -> float:
        subject, laps = self.subject, []
        if subject.mode is not None:
            return 0.0
        for _ in range(3):
            subject.forget()
            started = thread_time()
            subject.loss(first_piece(subject), precision).backward()
            laps.append(thread_time() - started)
        subject.forget()
        return statistics.median(laps)

    def _kept_in(self, precision: str, piece: Piece) -> float:
        subject = self.subject
        with LiveBytes([*subject.model.parameters(), *subject.model.buffers()]) as live:
            loss = subject.loss(piece, precision)
            kept = live.live
        del loss
        return float(kept)

    def update_seconds(self) -> tuple[float, float]:
        """Of the optimizer's step: for each tensor, and for each element. A step on a few elements
        of each tensor shows what does not depend on them."""
        subject, model = self.subject, self.subject.model
        trained = [p for p in model.parameters() if p.requires_grad]
        if subject.mode is not None or subject.run.step is not None:
            return 2e-6, _UPDATE_FLOPS / self.speed
        subject.forget()
        subject.loss(first_piece(subject)).backward()
        whole_s = _seconds_of(stepper(subject.run.make_optimizer(model)))
        subject.forget()
        optimizer = subject.run.make_optimizer(model)
        put_stand_ins(optimizer, model, weights_of(tables_of(model).values()))
        tiny_s = _seconds_of(stepper(optimizer))
        each = max(0.0, whole_s - tiny_s) / sum(p.numel() for p in trained)
        return tiny_s / len(trained), each


_UPDATE_FLOPS = 80.0  # of an update, as time: it moves 28 bytes for each element


def _seconds_of(act: Callable[[], object]) -> float:
    laps = []
    for _ in range(5):
        started = thread_time()
        act()
        laps.append(thread_time() - started)
    return statistics.median(laps[1:])

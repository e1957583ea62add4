"""Fit a plan to the ranks, the cores and the batch: how many replicas, how many pieces.

The batch of a step is cut into equal pieces, each replica gets at least one, and the ranks are the
product of the axes. These functions find counts that satisfy all three, or say which key to change
and to what. They know only numbers; call them through `Plan.resolve`.
"""

import math
from typing import NamedTuple

from shoal.errors import PlanError


class PlanCounts(NamedTuple):
    """The keys of a plan that count ranks and pieces; None is not fixed yet."""

    data: int | None
    tensor: int
    pipeline: int
    accumulate: int
    microbatches: int
    pieces: int | None


def fit(counts: PlanCounts, *, ranks: int | None, cores: int, batch_size: int) -> tuple[int, int]:
    """The number of replicas and of pieces.

    `ranks` are met exactly; without them an open number of replicas is the largest that fits.
    """
    if batch_size < 1:
        raise PlanError(
            f"A batch of {batch_size} cannot be spread. The global batch needs at least 1 sample; "
            "set batch_size to 1 or more."
        )
    if counts.pieces is not None and batch_size % counts.pieces:
        raise PlanError(
            f"pieces={counts.pieces} does not divide the batch of {batch_size}. Pieces are equal "
            f"parts of the global batch. Use {_divisors(batch_size, counts.pieces)}."
        )
    if ranks is None:
        data = counts.data or _largest_data(counts, cores, batch_size)
    else:
        data = _data_of_ranks(counts, ranks)
    pieces = counts.pieces or _count_pieces(counts, data)
    if batch_size % pieces:
        origin = f"{ranks} ranks make data={data}. " if ranks and counts.data is None else ""
        raise PlanError(origin + _does_not_divide(counts, data, batch_size))
    return data, pieces


def refuse_pieces(counts: PlanCounts, pieces: int) -> None:
    """Check `pieces` against the keys that also count pieces."""
    if pieces % counts.microbatches:
        raise PlanError(
            f"pieces={pieces} is not a multiple of {counts.microbatches} microbatches. A "
            "pipeline takes its pieces in rounds of that many. Use "
            f"pieces={_next_multiple(pieces, counts.microbatches)}, or set microbatches."
        )
    if counts.data is not None and pieces < counts.data:
        raise PlanError(
            f"pieces={pieces} leaves some of the data={counts.data} replicas without work. "
            "Each needs at least one piece. "
            f"Use pieces={counts.data} or more, or data={pieces} or fewer."
        )
    if counts.accumulate == 1:
        return
    if counts.data is None and pieces % (counts.accumulate * counts.microbatches):
        raise PlanError(
            f"accumulate={counts.accumulate} does not divide pieces={pieces}. "
            "Both count the pieces of a step. Leave one of them out."
        )
    if counts.data is not None and pieces != _count_pieces(counts, counts.data):
        raise PlanError(
            f"pieces={pieces} is not {_product(counts, counts.data)} = "
            f"{_count_pieces(counts, counts.data)}. Both count the pieces of a step. "
            "Leave one of them out."
        )


def _count_pieces(counts: PlanCounts, data: int) -> int:
    return data * counts.accumulate * counts.microbatches


def _data_of_ranks(counts: PlanCounts, ranks: int) -> int:
    """The data axis that makes the mesh exactly `ranks` large."""
    inner = counts.tensor * counts.pipeline
    rule = "Ranks are data x tensor x pipeline."
    if ranks < 1:
        raise PlanError(f"{ranks} ranks cannot train. Start at least {inner}.")
    if ranks % inner:
        raise PlanError(
            f"{ranks} ranks cannot be shared out to tensor={counts.tensor} x "
            f"pipeline={counts.pipeline}, which take {inner} for each replica. {rule} "
            f"Start {_next_multiple(ranks, inner)} ranks, or change the plan."
        )
    if counts.data is not None and counts.data * inner != ranks:
        raise PlanError(
            f"The plan needs {counts.data * inner} ranks, and there are {ranks}. {rule} "
            f"Use data={ranks // inner}, or start {counts.data * inner} ranks."
        )
    data = ranks // inner
    if (
        counts.pieces is not None
        and counts.accumulate > 1
        and _count_pieces(counts, data) != counts.pieces
    ):
        raise PlanError(
            f"{ranks} ranks make {_product(counts, data)} = {_count_pieces(counts, data)} pieces, "
            f"and the plan says pieces={counts.pieces}. Leave accumulate or pieces out."
        )
    return data


def _largest_data(counts: PlanCounts, cores: int, batch_size: int) -> int:
    """The largest data axis within the cores whose replicas get equally many pieces."""
    most = max(1, cores // (counts.tensor * counts.pipeline))
    for data in range(most, 0, -1):
        if counts.pieces is None:
            if batch_size % _count_pieces(counts, data) == 0:
                return data
        elif counts.accumulate > 1:
            if _count_pieces(counts, data) == counts.pieces:
                return data
        elif counts.pieces % (data * counts.microbatches) == 0:
            return data
    if counts.pieces is None:
        raise PlanError(_does_not_divide(counts, 1, batch_size))
    wanted = counts.pieces // _count_pieces(counts, 1)
    raise PlanError(
        f"pieces={counts.pieces} with accumulate={counts.accumulate} asks for data={wanted}, and "
        f"only {most} fit on {cores} cores. Write data={wanted} to start that many all the same, "
        "or leave accumulate out."
    )


def _does_not_divide(counts: PlanCounts, data: int, batch_size: int) -> str:
    """The message for a batch that the pieces do not divide; it names the key at fault."""
    if batch_size % data:
        return (
            f"data={data} does not divide the batch of {batch_size}. Each replica takes an equal "
            f"part of the global batch. Use {_divisors(batch_size, data)}."
        )
    share = batch_size // data
    if share % counts.microbatches:
        way_out = _microbatches(counts, share)
    else:
        within = share // counts.microbatches
        way_out = f"For accumulate use {_divisors(within, counts.accumulate)}."
    return (
        f"{_product(counts, data)} = {_count_pieces(counts, data)} pieces do not divide the batch "
        f"of {batch_size}. Pieces are equal parts of the global batch. {way_out}"
    )


def _microbatches(counts: PlanCounts, share: int) -> str:
    """The numbers of microbatches that fit, under any schedule."""
    ranks = counts.pipeline
    if share % counts.accumulate == 0:
        share //= counts.accumulate
    fits = [
        count
        for count in range(ranks, share + 1)
        if share % count == 0 and count % (count // ranks) == 0
    ]
    if fits:
        return f"For microbatches use {_in_words(fits, counts.microbatches)}."
    return (
        f"No number of microbatches suits pipeline={ranks}: it must cut the {share} samples of a "
        f"round into {ranks} or more equal parts. Use another batch_size, such as "
        f"{2 * ranks * counts.data if counts.data else 2 * ranks}, or fewer ranks."
    )


def _product(counts: PlanCounts, data: int) -> str:
    factors = [f"data={data}", f"accumulate={counts.accumulate}"]
    if counts.microbatches > 1:
        factors.append(f"microbatches={counts.microbatches}")
    return " x ".join(factors)


def _next_multiple(count: int, of: int) -> int:
    return max(1, math.ceil(count / of)) * of


def _divisors(number: int, near: int) -> str:
    """The divisors of `number` as text; of many, the six nearest to `near`."""
    small = [count for count in range(1, math.isqrt(number) + 1) if number % count == 0]
    return _in_words(sorted({*small, *(number // count for count in small)}), near)


def _in_words(every: list[int], near: int) -> str:
    """Numbers as text; of many, the six nearest to `near`."""
    if len(every) > 8:
        every = sorted(sorted(every, key=lambda count: abs(count - near))[:6])
    words = [str(count) for count in every]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""What packed gradients cost (`gradient_packing.py`): bytes on the wire, and residuals in memory.

Of a codec that sends more in its warm-up, what it sends afterwards. Read next: `costs.py`.
"""

from itertools import pairwise

from shoal.comm.compression import Codec, Wanted, bytes_wanted, share_bounds
from shoal.numerics.codecs import TOP_BLOCK, WholeCodec, change_codec, make_codec
from shoal.numerics.powersgd import matrix_shape
from shoal.plans.keys import HALF_CODECS
from shoal.sync.costs import SINGLE, Amount, Message, tree_message
from shoal.sync.gradient_packing import PackedBucket, aligned_starts
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import blocks_by_rank


def packed_messages(layout: RankLayout) -> list[Message]:
    """Shares to their owners, and the sum of the own share to all; small tensors as they are."""
    if layout.plan.codec.startswith("powersgd:"):
        return [_factor_message(layout), small_message(layout)]
    n, codec, count, num_bytes = layout.num_replicas, make_codec(layout.plan.codec), 0, 0
    assert codec is not None
    for starts in _starts(layout):
        cuts = share_bounds(starts[-1], TOP_BLOCK, n)
        shares = [codec.num_bytes(b) - codec.num_bytes(a) for a, b in pairwise(cuts)]
        own = shares[layout.place.data]
        num_bytes += sum(shares) - own + own * (n - 1)
        count += 2
    packed = Message("packed gradients", "data", "all-to-all, gather", count, num_bytes)
    return [packed, small_message(layout)]


def _factor_message(layout: RankLayout, times: int = 1) -> Message:
    """Both factors of the matrices of each bucket, summed over replicas."""
    rank, rows, n = int(layout.plan.codec.partition(":")[2]), [], layout.num_replicas
    for own in _packed_shapes(layout):
        shapes = [matrix_shape(shape) for shape in own]
        ranks = [min(rank, *shape) for shape in shapes]
        for side in (0, 1):
            count = sum(r * shape[side] for r, shape in zip(ranks, shapes, strict=True))
            rows += [(count, SINGLE)] * times
    return tree_message("factors of gradients", rows, blocks_by_rank(n, n), layout)


def _packed_shapes(layout: RankLayout) -> list[list[tuple[int, ...]]]:
    """Of the tensors that are packed, by what is sent together."""
    if layout.plan.zero == 3:
        shapes = {i: p.shape for unit in layout.whole_units for i, p in unit}
        found = [[shapes[t.number] for t in unit.packed] for unit, _ in layout.packed_units]
        return [own for own in found if own]
    packed = [b for b in layout.packed_buckets if b.starts is not None]
    return [[layout.trained[i].shape for i in bucket.indices] for bucket in packed]


def scattered_bytes(layout: RankLayout) -> list[int]:
    """The bytes of each flat buffer of `zero` that leave for other ranks, packed if they are."""
    name, found = layout.plan.packed_codec, []
    codec = None if name.startswith("powersgd:") else make_codec(name)
    for buffer, (size, shard) in zip(layout.flat_buffers, layout.flat_buffer_bytes, strict=True):
        if buffer.is_packed and codec is not None:
            first, last = (codec.num_bytes(buffer.cuts[layout.place.data + i]) for i in range(2))
            size, shard = codec.num_bytes(buffer.starts[-1]), last - first
        found.append(size - shard)
    return found


def packed_unit_messages(layout: RankLayout) -> list[Message]:
    """Gradients of `zero=3`: of each unit, after each piece, shards to their owners."""
    n, pieces, own = layout.num_replicas, len(layout.rounds), layout.place.data
    codec = make_codec("none" if _is_low_rank(layout) else layout.plan.packed_codec)
    packed, others = list[int](), list[int]()
    for unit, dtype in layout.packed_units:
        if unit.packed and codec is not None:
            packed.append(_bytes_to_others(codec, unit.wanted(n), own))
        if unit.others:
            others.append(_bytes_to_others(WholeCodec(dtype), unit.wanted_of_others(n), own))
    found = [
        Message(what, "data", "all-to-all", pieces * len(each), pieces * sum(each))
        for what, each in (("packed gradients", packed), ("gradients too small to pack", others))
    ]
    return [*([_factor_message(layout, pieces)] if codec is None else []), *found]


def _bytes_to_others(codec: Codec | WholeCodec, wanted: Wanted, own: int) -> int:
    others = [ranges for rank, ranges in enumerate(wanted) if rank != own]
    return sum(len(span) for ranges in others for span in bytes_wanted(codec, ranges))


def _is_low_rank(layout: RankLayout) -> bool:
    return layout.plan.packed_codec.startswith("powersgd:")


def gathered_bytes(layout: RankLayout) -> list[int]:
    """The bytes of this rank's shard of each flat buffer as it goes to another rank."""
    name, found = layout.plan.packed_codec, []
    for buffer, (_, shard) in zip(layout.flat_buffers, layout.flat_buffer_bytes, strict=True):
        if buffer.is_packed:
            codec, cuts = change_codec(name), buffer.cuts
            first, last = (codec.num_bytes(cuts[layout.place.data + i]) for i in range(2))
            shard = last - first
        found.append(shard)
    return found


def small_message(layout: RankLayout) -> Message:
    """Gradients that no codec makes smaller."""
    rows = [
        (sum(b.lengths), layout.trained[b.indices[0]].dtype.itemsize)
        for b in layout.packed_buckets
        if b.starts is None
    ]
    n = layout.num_replicas
    return tree_message("gradients too small to pack", rows, blocks_by_rank(n, n), layout)


def residual_memory(layout: RankLayout, owes: bool = True) -> Amount:
    """What is not sent yet, and a copy to go back to; if it `owes`, of the own share too."""
    if layout.plan.packed_codec == "none" or layout.num_replicas == 1:
        return Amount(0, "")
    ahead = 0
    if layout.plan.zero in (1, 2):
        pairs = zip(layout.flat_buffers, layout.flat_buffer_bytes, strict=True)
        ahead = sum(shard for flat, (_, shard) in pairs if flat.is_packed)
    if layout.plan.packed_codec in HALF_CODECS:
        return Amount(ahead, "own shards as they were stepped on" if ahead else "")
    count = sum(starts[-1] for starts in _starts(layout))
    owed = count // layout.num_replicas if owes else 0
    return Amount(ahead + SINGLE * (2 * count + owed), "what packing did not send, and a copy")


def _starts(layout: RankLayout) -> list[list[int]]:
    """Of what is packed together."""
    if layout.plan.zero == 3:
        units = [unit for unit, _ in layout.packed_units if unit.packed]
        return [aligned_starts([t.length for t in unit.packed]) for unit in units]
    if layout.plan.zero:
        return [b.starts for b in layout.flat_buffers if b.is_packed]
    buckets: list[PackedBucket] = layout.packed_buckets
    return [bucket.starts for bucket in buckets if bucket.starts is not None]

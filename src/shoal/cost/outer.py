"""The cost of an outer optimizer for a rank: the bytes that it sends in a window, and its memory.

It uses the functions that `sync/outer.py` and `comm/compression.py` run themselves.
"""

from collections.abc import Sequence

from shoal.comm.compression import share_bounds
from shoal.cost.rank import LocalParameter, Rank
from shoal.numerics.codecs import make_codec
from shoal.numerics.fragments import split_fragments
from shoal.plans.plan import Plan
from shoal.sync.server.layout import ServerLayout, make_layout


def outer_buckets(rank: Rank) -> list[tuple[int, int]]:
    """The messages of the outer gradients: the number of elements, and the bytes of one."""
    named = [p for p in rank.trained if p.dtype.is_floating_point]
    found = []
    for run in split_fragments([p.num_bytes for p in named], rank.plan.fragments):
        kinds: dict[object, list[LocalParameter]] = {}
        for p in named[run.start : run.stop]:
            kinds.setdefault(p.dtype, []).append(p)
        for own in kinds.values():
            found.append((sum(p.num_elements for p in own), max(4, own[0].dtype.itemsize)))
    return found


def packed_traffic(rank: Rank) -> tuple[int, int]:
    """The number of packed messages and their bytes: shares to owners, the own mean to all."""
    codec, n = make_codec(rank.plan.codec), rank.num_replicas
    assert codec is not None
    num_bytes = 0
    for count, _ in outer_buckets(rank):
        cuts = share_bounds(count, codec.block, n)
        first, last = (codec.num_bytes(cuts[rank.place.data + i]) for i in range(2))
        num_bytes += codec.num_bytes(count) - (last - first) + (last - first) * (n - 1)
    return 2 * len(outer_buckets(rank)), num_bytes


def key_layout(trained: Sequence[LocalParameter], plan: Plan) -> ServerLayout:
    """How servers divide the anchor."""
    sizes = [(p.num_elements, p.dtype.itemsize, p.dtype) for p in trained]
    return make_layout(sizes, True, plan.num_servers)


def push_traffic(rank: Rank) -> tuple[int, int]:
    """The number of messages to servers, one per key, and their bytes."""
    codec, keys = make_codec(rank.plan.codec), key_layout(rank.trained, rank.plan).keys
    if codec is None:
        return len(keys), sum(key.num_bytes for key in keys)
    return len(keys), sum(codec.num_bytes(key.stop - key.start) for key in keys)


def outer_memory(rank: Rank) -> tuple[int, str]:
    """The bytes beside the weights and the inner optimizer's state, and what they are."""
    plan, words = rank.plan, ["the anchor"]
    wide = sum(count * size for count, size in outer_buckets(rank))
    num_bytes = sum(p.num_bytes for p in rank.trained if p.dtype.is_floating_point)
    if plan.num_servers:
        words.append("what is pushed")
        num_bytes += key_layout(rank.trained, plan).row_places(1)[-1]
        if plan.codec != "none":
            words.append("what packing dropped")
            num_bytes += wide
        return num_bytes, ", ".join(words)
    if plan.outer_rates[1]:
        words.append("the outer momentum")
        num_bytes += wide
    if plan.codec != "none":
        words.append("what packing dropped")
        num_bytes += wide + wide // rank.num_replicas
    return num_bytes, ", ".join(words)

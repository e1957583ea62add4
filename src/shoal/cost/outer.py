"""What an outer optimizer costs a rank: the bytes it sends in a window, and what it keeps.

By the functions that `sync/outer.py` and `comm/codecs.py` run themselves.
"""

from collections.abc import Sequence

from shoal.comm.codecs import cuts_of
from shoal.cost.rank import Local, Rank
from shoal.numerics.fragments import deal
from shoal.numerics.quantization import codec_of
from shoal.plans.plan import Plan
from shoal.sync.server.layout import Layout, lay_out


def parcels(rank: Rank) -> list[tuple[int, int]]:
    """What is sent together of the outer gradients: elements, and the bytes of one."""
    named = [p for p in rank.trained if p.dtype.is_floating_point]
    found = []
    for run in deal([p.num_bytes for p in named], rank.plan.fragments):
        kinds: dict[object, list[Local]] = {}
        for p in named[run.start : run.stop]:
            kinds.setdefault(p.dtype, []).append(p)
        for own in kinds.values():
            found.append((sum(p.num_elements for p in own), max(4, own[0].dtype.itemsize)))
    return found


def packed(rank: Rank) -> tuple[int, int]:
    """Messages, and their bytes: shares to their owners, and the mean of the own one to all."""
    codec, n = codec_of(rank.plan.codec), rank.num_replicas
    assert codec is not None
    num_bytes = 0
    for count, _ in parcels(rank):
        cuts = cuts_of(count, codec.block, n)
        first, last = (codec.num_bytes(cuts[rank.place.data + i]) for i in range(2))
        num_bytes += codec.num_bytes(count) - (last - first) + (last - first) * (n - 1)
    return 2 * len(parcels(rank)), num_bytes


def key_layout(trained: Sequence[Local], plan: Plan) -> Layout:
    """How servers cut the anchor."""
    sizes = [(p.num_elements, p.dtype.itemsize, p.dtype) for p in trained]
    return lay_out(sizes, True, plan.num_servers)


def pushed(rank: Rank) -> tuple[int, int]:
    """Messages to servers, one for each key, and their bytes."""
    codec, keys = codec_of(rank.plan.codec), key_layout(rank.trained, rank.plan).keys
    if codec is None:
        return len(keys), sum(key.num_bytes for key in keys)
    return len(keys), sum(codec.num_bytes(key.stop - key.start) for key in keys)


def kept(rank: Rank) -> tuple[int, str]:
    """Bytes beside the weights and the inner optimizer's state, and what they are."""
    plan, words = rank.plan, ["the anchor"]
    wide = sum(count * size for count, size in parcels(rank))
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

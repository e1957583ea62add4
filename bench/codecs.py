"""`codecs`: a gradient packed, sent and unpacked, against the same gradient sent as it is.

Four million elements on one core. Packing is what a rank does to its own gradient: encode, decode
what the others will, and keep the rest. The link is not measured but reckoned: its bytes over
1 Gbit/s, and over 100 Mbit/s, for both. A codec below 1 is slower than the link that it serves.
"""

from collections.abc import Iterator
from time import perf_counter

import torch

from bench import harness
from bench.harness import Row
from shoal.comm.compression import encode_with_residual
from shoal.numerics.codecs import make_codec

NUM_ELEMENTS = 1 << 22
CODECS = ("bf16", "int8", "int4", "onebit", "topk:0.01", "topk:0.01+int8")
BYTES_PER_S = {"1000 Mbit/s": 125e6, "100 Mbit/s": 12.5e6}
FLOOR = 1.0


def packing_s(name: str, flat: torch.Tensor) -> float:
    codec = make_codec(name)
    assert codec is not None
    began = perf_counter()
    encode_with_residual(codec, flat)
    return perf_counter() - began


def measure(quick: bool) -> Iterator[Row]:
    torch.set_num_threads(1)
    harness.pin(0)
    flat = torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(0))
    for name in CODECS:
        codec = make_codec(name)
        assert codec is not None
        packing_s(name, flat)
        times = [packing_s(name, flat) for _ in range(5 if quick else 20)]
        rate = flat.nbytes / harness.spread(times).median / 1e9
        for link, bytes_per_s in BYTES_PER_S.items():
            packed = codec.num_bytes(NUM_ELEMENTS) / bytes_per_s
            dense = flat.nbytes / bytes_per_s
            ratio = harness.spread([dense / (packed + seconds) for seconds in times])
            yield Row(
                name=f"codecs/{name}/{link.partition(' ')[0]}",
                value=ratio.median,
                low=ratio.low,
                high=ratio.high,
                num_pairs=ratio.num_pairs,
                floor=FLOOR,
                peer=f"fp32 {dense * 1e3:.0f} ms at {link}",
                ceiling=f"packed bytes alone {packed * 1e3:.1f} ms",
                note=f"packed at {rate:.2f} GB/s of gradient",
            )


if __name__ == "__main__":
    harness.main(measure)

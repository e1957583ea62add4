"""What `codec=auto` and `bucket=auto` become, by what was measured. Pure, and without torch.

Candidates are a few codecs, gentlest first: `bf16` rounds, `int8` rounds and sends the rest later,
`topk:0.01+int8` sends most of a gradient later. Each changes what is trained by more than the one
before, so it must pay more than that one, in steps as they were measured. What is foreseen, of the
link, of the packing and of what the backward hides, only says which candidates are worth a
step. Buckets change no result.

Read next: `training/measured_plan.py`, which measures.
"""

from collections.abc import Mapping
from typing import NamedTuple

# How many times as fast a step must be as with the gentler choice; 0.99 of dense is never at risk.
GAINS = {"bf16": 1.1, "int8": 1.25, "topk:0.01+int8": 1.5}
BUCKETS_MB = (4, 1, 16)  # the usual one first
BUCKET_GAIN = 1.1


class CodecFigures(NamedTuple):
    """Of one codec on this model: the share of the bytes that it sends, and its seconds a step."""

    share: float
    packing_s: float


class LinkFigures(NamedTuple):
    """Of the slowest link, and of a step without a codec."""

    latency_s: float  # of a small message
    bytes_per_s: float
    compute_s: float
    exposed_s: float  # in which ranks only waited for the exchange
    num_bytes: int  # that a rank sent

    @property
    def hidden_s(self) -> float:
        """How much of the sending went on during the backward."""
        sending = self.num_bytes / self.bytes_per_s
        return max(0.0, min(sending - self.exposed_s, self.compute_s))


def foreseen_s(link: LinkFigures, codec: CodecFigures) -> float:
    """The seconds of a step with a codec."""
    sending = link.latency_s + codec.share * link.num_bytes / link.bytes_per_s
    return link.compute_s + codec.packing_s + max(0.0, sending - link.hidden_s)


def next_codec(
    link: LinkFigures, codecs: Mapping[str, CodecFigures], measured: Mapping[str, float]
) -> str | None:
    """The next codec that is worth a step; None if no other is. `measured` are seconds of steps,
    with those of `none`."""
    before = measured[chosen_codec(measured)]
    for name, gain in GAINS.items():
        if (
            name in codecs
            and name not in measured
            and pays(foreseen_s(link, codecs[name]), before, gain)
        ):
            return name
    return None


def chosen_codec(measured: Mapping[str, float]) -> str:
    """The gentlest codec that no other beats by what it must."""
    chosen = "none"
    for name, gain in GAINS.items():
        if name in measured and pays(measured[name], measured[chosen], gain):
            chosen = name
    return chosen


def chosen_bucket(measured: Mapping[int, float]) -> int:
    """The usual bucket, unless another is faster by what is more than noise."""
    usual, best = BUCKETS_MB[0], min(measured, key=measured.__getitem__)
    return best if pays(measured[best], measured[usual], BUCKET_GAIN) else usual


def pays(seconds: float, before: float, gain: float) -> bool:
    return seconds * gain <= before

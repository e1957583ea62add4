"""`quantize`: the character GPT in whole numbers, against itself in fp32.

Held-out loss before over after, with size and latency beside it, for int8 and int4 weights, dynamic
and static int8, and int8 after quantisation-aware training for a third of the steps. torchao's
kernels want torch.compile or an accelerator: on a bare CPU the latencies say that they cost time.
"""

from collections.abc import Iterator

import shoal
from bench import harness, quality
from bench.harness import Row

FLOORS = {"int8": 0.995, "int4": 0.97, "dynamic-int8": 0.99, "static-int8": 0.98, "qat-int8": 0.99}


def measure(quick: bool) -> Iterator[Row]:
    with quality.folder() as place:
        settings = {**quality.GPT, **quality.steps(quick, 300)}
        begun = quality.trained(quality.CHARLM, settings, place / "run")
        for to, floor in FLOORS.items():
            training = shoal.slim.Training("data=1", place / "qat-run", progress=False)
            table = shoal.slim.quantize(
                quality.CHARLM,
                begun,
                to=to,
                out=place / to,
                settings={**quality.GPT, **quality.steps(quick, 100)},
                training=training if to == "qat-int8" else None,
            )
            note = f"kept {', '.join(table.kept)}"
            yield quality.quality_row(f"quantize/{to}", floor, "loss", [table], note=note)


if __name__ == "__main__":
    harness.main(measure)

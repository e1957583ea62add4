"""Fine-tuning a language model: LoRA on a tiny Llama, which then writes.

    python examples/lora.py

What it shows: `recipes/dialect.py` trains a Llama on Shakespeare, character by character, and
`shoal.slim.adapt` puts adapters on it that learn another text, lines of the CMU dictionary such as
`cat K AE1 T`. Only the adapters train: they are what the ranks exchange, what has optimizer state,
and what `save_adapters` writes for peft. Needs the extras `transformers` and `adapt`.
"""

import json
from pathlib import Path

import shoal

RECIPE = Path(__file__).parents[1] / "recipes/dialect.py"
SIZE = {"layers": 2, "width": 64}
PROMPT = "butter B"


def main() -> None:
    base = shoal.train(f"{RECIPE}:base", "data=2", settings={**SIZE, "steps": 150})
    begin = {**SIZE, "begin_from": base.run_dir}
    spoken = shoal.train(f"{RECIPE}:spoken", "data=2", settings={**begin, "steps": 150})

    records = (Path(spoken.run_dir) / "metrics.jsonl").read_text().splitlines()
    before, after = json.loads(records[0])["loss"], spoken.metrics["loss"]
    print(f"loss on the dictionary  {before:.2f} in the first step, {after:.2f} at the end")

    model = spoken.model()
    adapters = Path(spoken.run_dir) / "adapter"
    shoal.slim.save_adapters(model, adapters)
    all_weights = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"trained weights         {trained:,} of {all_weights:,}: {adapters}")

    text = shoal.generate(
        f"{RECIPE}:spoken", spoken.run_dir, PROMPT, settings=begin, tokens=60, temperature=0.5
    )
    print(f"what it writes          {text.text!r}")


if __name__ == "__main__":
    main()

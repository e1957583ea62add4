"""A recommender: which films of MovieLens a user has not seen would he like best?

    python examples/recommender.py
    shoal predict recipes/movielens.py:small --from runs/movielens-small-1 --out guesses.jsonl

What it shows: `recipes/movielens.py`, trained with its tables of users and films on a parameter
server, from which each rank asks only for the rows of its batch; `shoal.evaluate` measures it in
one process, `shoal.predict` writes a guess for every held-out rating to a file, and a
`shoal.Predictor` answers about pairs that are in no data at all.
"""

from pathlib import Path

import numpy as np
import torch

import shoal

RECIPE = f"{Path(__file__).parents[1] / 'recipes/movielens.py'}:small"
SETTINGS = {"width": 16, "epochs": 1}
USER = 42


def main() -> None:
    outcome = shoal.train(RECIPE, "data=2 sync=server servers=1", settings=SETTINGS)

    found = shoal.evaluate(RECIPE, from_=outcome.run_dir, plan="data=1", settings=SETTINGS)
    close = found.metrics["within_a_star"]
    print(f"evaluated  {found.samples:,} ratings, {close:.0%} guessed within a star")

    out = Path(outcome.run_dir) / "guesses.npz"
    shoal.predict(RECIPE, from_=outcome.run_dir, out=out, settings=SETTINGS)
    guesses = np.load(out)["output"]
    print(f"predicted  {out}: from {guesses.min():.1f} to {guesses.max():.1f} stars")

    ratings = shoal.data.catalog.ratings()
    seen = ratings[ratings[:, 0] == USER, 1]
    unseen = [film for film in range(1, int(ratings[:, 1].max()) + 1) if film not in seen]
    pairs = torch.tensor([[USER - 1, film - 1] for film in unseen])
    predictor = shoal.Predictor(outcome.model(), batch_size=256)
    stars = torch.stack(list(predictor(pairs)))
    for place in stars.topk(3).indices.tolist():
        print(f"user {USER}    film {unseen[place]:4}: {stars[place]:.2f} stars")


if __name__ == "__main__":
    main()

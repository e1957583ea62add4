"""The peer of `submit`: the loop of `bench/job.py` under Ray Train's TorchTrainer."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def loop() -> None:
    """In a worker of Ray Train, which has formed the group."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model
    from torch.nn.functional import cross_entropy

    from bench import job

    torch.set_num_threads(1)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    trained = prepare_model(job.model(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    stepper = job.optimizer(trained.parameters())
    inputs, target = job.samples()
    share = job.BATCH // num_ranks
    for step in range(int(os.environ["STEPS"])):
        at = step * job.BATCH % (job.NUM_SAMPLES - job.BATCH) + rank * share
        stepper.zero_grad()
        cross_entropy(trained(inputs[at : at + share]), target[at : at + share]).backward()
        stepper.step()


def main() -> None:
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(log_to_driver=False)
    TorchTrainer(
        loop,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        run_config=RunConfig(storage_path=os.path.dirname(os.environ["STEPS_FILE"])),
    ).fit()


if __name__ == "__main__":
    main()

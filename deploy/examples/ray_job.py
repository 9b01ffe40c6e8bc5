"""Ray actors that train, one a GPU: `python ray_job.py [WORKERS]`, or `ray job submit`.

Ray tells its actors neither rank nor world size, and gives each a GPU that it sees as device 0:
here they are told. Any free port (0) is right, since several actors share a node;
`gpumem-otel sd --watch 15 -o targets/ray.json` on each node finds them.
"""

import sys

import ray

GPUMEM = {
    "OTEL_SERVICE_NAME": "ray-train",
    "GPUMEM_OTEL_SERVE": "1",
    "GPUMEM_OTEL_PORT": "0",
    "PYROSCOPE_SERVER_ADDRESS": "http://127.0.0.1:9999",  # Alloy on the node
}


@ray.remote
class Worker:
    """One rank."""

    def __init__(self) -> None:
        import gpumem_otel

        gpumem_otel.install()

    def train(self, steps: int) -> float:
        """The last loss."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        model = torch.nn.Linear(1024, 1024, device=device)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            batch = torch.randn(64, 1024, device=device)
            loss = (model(batch) - batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


def main(count: int) -> None:
    """Start the workers and wait for what they say."""
    ray.init()
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= count else 0
    workers = [
        Worker.options(
            num_gpus=gpus,
            runtime_env={"env_vars": {**GPUMEM, "RANK": str(rank), "WORLD_SIZE": str(count)}},
        ).remote()
        for rank in range(count)
    ]
    print(ray.get([worker.train.remote(1000) for worker in workers]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)

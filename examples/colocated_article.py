"""Two workers in one process, as the walk-through of veRL's `create_colocated_worker_cls` tells it.

usage: python examples/colocated_article.py
"""

import ray
import torch

from hocket import DataProto
from hocket.single_controller import (
    Dispatch,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    create_colocated_worker_cls,
    register,
)


@ray.remote
class Actor(Worker):
    """Adds its rank."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def add(self, data: DataProto) -> DataProto:
        data.batch["a"] += self.rank
        return data


@ray.remote
class Critic(Worker):
    """Subtracts what its config says."""

    def __init__(self, config):
        super().__init__()
        self.config = config

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def sub(self, data: DataProto) -> DataProto:
        data.batch["a"] -= self.config["b"]
        return data


def main() -> None:
    """Bind both classes into one, start it on two workers, and call each role as if it had a group of its own."""
    ray.init(ignore_reinit_error=True)
    data = DataProto.from_dict({"a": torch.zeros(10)})

    actor_cls = RayClassWithInitArgs(cls=Actor)
    critic_cls = RayClassWithInitArgs(cls=Critic, config={"b": 10})
    colocated_cls = create_colocated_worker_cls({"actor": actor_cls, "critic": critic_cls})
    bound = colocated_cls.cls.__ray_actor_class__
    print("the bound class:", bound.__name__, "with base", bound.__base__.__name__)

    with RayResourcePool(process_on_nodes=[2]) as resource_pool:
        group = RayWorkerGroup(resource_pool=resource_pool, ray_cls_with_init=colocated_cls)
        print("before spawn: actor_add", group.actor_add(data).batch["a"].tolist())
        print("              critic_sub", group.critic_sub(data).batch["a"].tolist())

        spawned = group.spawn(prefix_set={"actor", "critic"})
        print("after spawn:  actor.add", spawned["actor"].add(data).batch["a"].tolist())
        print("              critic.sub", spawned["critic"].sub(data).batch["a"].tolist())
        print("the caller's data:", data.batch["a"].tolist())
        print("processes:", len(group.workers), "shared:", spawned["actor"].workers == spawned["critic"].workers)


if __name__ == "__main__":
    main()

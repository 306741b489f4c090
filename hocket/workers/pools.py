"""Named pools and the roles that live on them, as a trainer with several pools keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from hocket.errors import PlacementError
from hocket.single_controller.resource_pool import RayResourcePool


@dataclass
class ResourcePoolManager:
    """`resource_pool_spec` gives the processes per node of each pool, `mapping` the pool of each role."""

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Any, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    max_colocate_count: int = 3

    def create_resource_pool(self) -> None:
        """Make the pools; PlacementError, before any place is reserved, when the cluster has too little for all."""
        self.resource_pool_dict |= {
            name: RayResourcePool(nodes, name_prefix=name, max_colocate_count=self.max_colocate_count)
            for name, nodes in self.resource_pool_spec.items()
        }
        asked: dict[str, float] = {}
        for pool in self.resource_pool_dict.values():
            for kind, amount in pool.bundle().items():
                asked[kind] = asked.get(kind, 0) + amount * pool.world_size
        total = ray.cluster_resources()
        if short := {kind: (n, total.get(kind, 0)) for kind, n in asked.items() if n > total.get(kind, 0)}:
            raise PlacementError(
                f"the pools {dict(self.resource_pool_spec)} ask for more than there is (asked, in all): {short}; "
                "make them smaller"
            )

    def get_resource_pool(self, role: Any) -> RayResourcePool:
        """The pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Workers of all pools: with GPUs, one each."""
        return sum(sum(nodes) for nodes in self.resource_pool_spec.values())

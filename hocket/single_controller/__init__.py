"""Worker groups: classes that live in processes, called by one controller as if each were a single object."""

from hocket.single_controller.calls import parallel_put
from hocket.single_controller.colocate import (
    create_colocated_worker_cls,
    create_colocated_worker_cls_fused,
    create_colocated_worker_raw_cls,
)
from hocket.single_controller.decorator import Dispatch, Execute, register
from hocket.single_controller.devices import get_device_name, get_nccl_backend
from hocket.single_controller.dispatch import (
    DISPATCH_MODE_FN_REGISTRY,
    Broadcast,
    Scatter,
    collect_all_to_all,
    get_predefined_dispatch_fn,
    make_nd_compute_dataproto_dispatch_fn,
    register_dispatch_mode,
    update_dispatch_mode,
)
from hocket.single_controller.future import DataProtoFuture
from hocket.single_controller.ray_class import ClassWithInitArgs, RayClassWithInitArgs
from hocket.single_controller.resource_pool import (
    RayResourcePool,
    ResourcePool,
    SubRayResourcePool,
    merge_resource_pool,
    split_resource_pool,
)
from hocket.single_controller.worker import Worker
from hocket.single_controller.worker_group import RayWorkerGroup

__all__ = [
    "DISPATCH_MODE_FN_REGISTRY",
    "Broadcast",
    "ClassWithInitArgs",
    "DataProtoFuture",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "Scatter",
    "SubRayResourcePool",
    "Worker",
    "collect_all_to_all",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "create_colocated_worker_raw_cls",
    "get_device_name",
    "get_nccl_backend",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "parallel_put",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "update_dispatch_mode",
]

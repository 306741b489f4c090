"""Worker groups: classes that live in processes, called by one controller as if each were a single object."""

from hocket.single_controller.colocate import create_colocated_worker_cls as create_colocated_worker_cls
from hocket.single_controller.colocate import create_colocated_worker_cls_fused as create_colocated_worker_cls_fused
from hocket.single_controller.colocate import create_colocated_worker_raw_cls as create_colocated_worker_raw_cls
from hocket.single_controller.decorator import Dispatch as Dispatch
from hocket.single_controller.decorator import Execute as Execute
from hocket.single_controller.decorator import register as register
from hocket.single_controller.devices import get_device_name as get_device_name
from hocket.single_controller.devices import get_nccl_backend as get_nccl_backend
from hocket.single_controller.dispatch import DISPATCH_MODE_FN_REGISTRY as DISPATCH_MODE_FN_REGISTRY
from hocket.single_controller.dispatch import Broadcast as Broadcast
from hocket.single_controller.dispatch import Scatter as Scatter
from hocket.single_controller.dispatch import collect_all_to_all as collect_all_to_all
from hocket.single_controller.dispatch import get_predefined_dispatch_fn as get_predefined_dispatch_fn
from hocket.single_controller.dispatch import (
    make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
)
from hocket.single_controller.dispatch import parallel_put as parallel_put
from hocket.single_controller.dispatch import register_dispatch_mode as register_dispatch_mode
from hocket.single_controller.dispatch import update_dispatch_mode as update_dispatch_mode
from hocket.single_controller.future import DataProtoFuture as DataProtoFuture
from hocket.single_controller.ray_class import ClassWithInitArgs as ClassWithInitArgs
from hocket.single_controller.ray_class import RayClassWithInitArgs as RayClassWithInitArgs
from hocket.single_controller.resource_pool import RayResourcePool as RayResourcePool
from hocket.single_controller.resource_pool import ResourcePool as ResourcePool
from hocket.single_controller.resource_pool import SubRayResourcePool as SubRayResourcePool
from hocket.single_controller.resource_pool import merge_resource_pool as merge_resource_pool
from hocket.single_controller.resource_pool import split_resource_pool as split_resource_pool
from hocket.single_controller.worker import Worker as Worker
from hocket.single_controller.worker_group import RayWorkerGroup as RayWorkerGroup

"""What kind of accelerator this process sees, and the environment variables that say which one."""

from __future__ import annotations

import os
from functools import cache

import ray

from hocket.errors import PlacementError

RESOURCE = {"cuda": "GPU", "gpu": "GPU", "npu": "NPU", "cpu": None}  # device name -> what Ray calls it
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@cache
def get_device_name() -> str:
    """The kind of device that torch finds in this process: "cuda", "npu" or "cpu"."""
    import torch  # here, because a worker without tensors starts a second sooner without it

    found = [kind for kind in ("cuda", "npu") if hasattr(torch, kind) and getattr(torch, kind).is_available()]
    return [*found, "cpu"][0]


def get_nccl_backend() -> str:
    """The collective backend that fits the device of this process: "nccl", "hccl" or "gloo"."""
    return {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}[get_device_name()]


def visible_devices_keyword() -> str:
    """Name of the variable that masks the accelerators of this process."""
    return "ASCEND_RT_VISIBLE_DEVICES" if "ASCEND_RT_VISIBLE_DEVICES" in os.environ else "CUDA_VISIBLE_DEVICES"


def tidy_visible_devices() -> None:
    """Move AMD's masks into CUDA_VISIBLE_DEVICES, which torch reads; PlacementError when they contradict.

    Where Ray was told not to mask (RAY_EXPERIMENTAL_NOSET_*), the device that it assigned is LOCAL_RANK and current.
    """
    cuda, hip, rocr = (os.environ.get(name) for name in _MASKS)
    if rocr and (cuda or hip):
        raise PlacementError(f"found ROCR_VISIBLE_DEVICES={rocr!r} beside another mask; unset one of them")
    if cuda and hip and cuda != hip:
        raise PlacementError(f"found CUDA_VISIBLE_DEVICES={cuda!r} but HIP_VISIBLE_DEVICES={hip!r}; make them equal")
    if moved := hip or rocr:
        os.environ["CUDA_VISIBLE_DEVICES"] = moved
        for name in _MASKS[1:]:
            os.environ.pop(name, None)
    if any(key.startswith("RAY_EXPERIMENTAL_NOSET_") for key in os.environ) and ray.is_initialized():
        assigned = [ids for ids in ray.get_runtime_context().get_accelerator_ids().values() if ids]
        if assigned and get_device_name() != "cpu":
            import torch

            os.environ["LOCAL_RANK"] = assigned[0][0]
            getattr(torch, get_device_name()).set_device(int(assigned[0][0]))

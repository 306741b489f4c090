"""The device a process works on. `PEER_DEVICE=cuda` says "cuda" where Ray only believes that there are GPUs."""

# ruff: noqa: F401
import os

from hocket import single_controller
from hocket.single_controller import get_nccl_backend


def get_device_name() -> str:
    return os.environ.get("PEER_DEVICE") or single_controller.get_device_name()

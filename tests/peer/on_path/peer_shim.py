"""pytest plugin that fits the peer's tests to a small machine without GPUs. It changes the driver process only.

The tests are foreign and stay as they are: they start Ray on whatever the machine has, take the number of workers
from its GPUs, and send 2 GiB. So what they ask the machine for is patched here, and nothing of hocket is.
"""

import math
import os
import shutil
import tempfile

import ray
import torch

WORKERS = 4
GPUS = int(os.environ.get("PEER_GPUS", "0"))
CPUS = 24
_LARGE = 1 << 20

_ray_init = ray.init
_randint = torch.randint
# of its own, and short: the paths of Ray's sockets may not exceed 107 bytes
_folder = tempfile.mkdtemp(prefix="peer")


def _init(*args, **kwargs):
    """`ray.init` on a private cluster that pretends to have CPUs enough for every worker."""
    kwargs |= {"num_cpus": CPUS, "num_gpus": GPUS, "include_dashboard": False, "_temp_dir": _folder}
    return _ray_init(*args, **{"address": "local", "log_to_driver": False} | kwargs)


def _small_randint(low, high, size, **kwargs):
    """`torch.randint`, which makes 256 x 1024 numbers where a test asks for a gigabyte."""
    return _randint(low, high, (256, 1024) if math.prod(size) > _LARGE else size, **kwargs)


ray.init = _init
torch.randint = _small_randint
torch.cuda.device_count = lambda: WORKERS


def pytest_unconfigure() -> None:
    ray.shutdown()
    shutil.rmtree(_folder, ignore_errors=True)

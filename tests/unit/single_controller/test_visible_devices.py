"""Which variable masks the accelerators of a process, and what happens to those of other makers."""

import os

import pytest
import torch

from hocket.errors import PlacementError
from hocket.single_controller import Worker, get_device_name, get_nccl_backend
from hocket.single_controller.devices import tidy_visible_devices, visible_devices_keyword

MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")


@pytest.fixture(autouse=True)
def _own_environment():
    before = dict(os.environ)
    for name in MASKS:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


def masks():
    return {name.split("_")[0]: os.environ[name] for name in MASKS if name in os.environ}


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {}),
        ({"CUDA": "0,1"}, {"CUDA": "0,1"}),
        ({"HIP": "2"}, {"CUDA": "2"}),
        ({"ROCR": "3"}, {"CUDA": "3"}),
        ({"CUDA": "1", "HIP": "1"}, {"CUDA": "1"}),
        ({"ASCEND": "4"}, {"ASCEND": "4"}),
        ({"CUDA": ""}, {"CUDA": ""}),
    ],
)
def test_masks_end_in_the_variable_that_torch_reads(given, left):
    os.environ.update({f"{maker}_{'RT_' if maker == 'ASCEND' else ''}VISIBLE_DEVICES": v for maker, v in given.items()})
    tidy_visible_devices()
    assert masks() == left


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"CUDA": "0", "HIP": "1"}, "CUDA_VISIBLE_DEVICES='0' but HIP_VISIBLE_DEVICES='1'"),
        ({"CUDA": "0", "ROCR": "0"}, "ROCR_VISIBLE_DEVICES='0'"),
        ({"HIP": "0", "ROCR": "0"}, "ROCR_VISIBLE_DEVICES='0'"),
    ],
)
def test_masks_that_contradict_are_an_error_and_stay(given, named):
    os.environ.update({f"{maker}_VISIBLE_DEVICES": value for maker, value in given.items()})
    with pytest.raises(PlacementError, match=named):
        tidy_visible_devices()
    assert masks() == given


def test_a_worker_reads_writes_and_reports_its_mask():
    assert Worker().get_cuda_visible_devices() == "not set"
    os.environ["HIP_VISIBLE_DEVICES"] = "5"
    assert Worker().get_cuda_visible_devices() == "5"
    assert Worker(cuda_visible_devices="6").get_cuda_visible_devices() == os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "7"
    assert visible_devices_keyword() == "ASCEND_RT_VISIBLE_DEVICES"
    assert Worker().get_cuda_visible_devices() == "7"


def test_a_worker_inside_another_leaves_the_masks_alone():
    os.environ.update({"DISABLE_WORKER_INIT": "1", "HIP_VISIBLE_DEVICES": "5"})
    Worker()
    assert masks() == {"HIP": "5"}


def test_where_ray_does_not_mask_a_process_without_ray_keeps_its_rank():
    os.environ.update({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "LOCAL_RANK": "3"})
    tidy_visible_devices()
    assert (os.environ["LOCAL_RANK"], masks()) == ("3", {})


def test_the_device_is_what_torch_finds_and_decides_the_backend():
    found = "cuda" if torch.cuda.is_available() else "cpu"
    assert (get_device_name(), get_nccl_backend()) == (found, {"cuda": "nccl", "cpu": "gloo"}[found])

# ruff: noqa: F401
from hocket.single_controller import parallel_put

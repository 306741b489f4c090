"""hocket under the peer's module names, so that the peer's tests and programs run on it without an edit.

Real modules on a real path, not entries in `sys.modules`: the worker processes import them as well.
"""

# ruff: noqa: F401
from hocket.data.proto import DataProto

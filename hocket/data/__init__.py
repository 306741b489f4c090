from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "DataProtoFuture":  # a DataProto that is still with its workers; it lives where Ray may be imported
        return import_module("hocket.single_controller.future").DataProtoFuture
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

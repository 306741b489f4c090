"""Python files of the user, loaded by path: a reward, an algorithm. They travel to workers by value."""

from __future__ import annotations

import importlib.util
import sys
import traceback
import zlib
from pathlib import Path
from types import ModuleType

import cloudpickle

from hocket.data.readers import did_you_mean
from hocket.errors import ConfigError


def load_file(path: Path, *, what: str) -> ModuleType:
    """The file as a module; what it defines pickles by value with `cloudpickle`, helpers and constants included.

    Raises ConfigError when it does not exist or raises on import, with the line; `what` names its purpose.
    """
    if not path.is_file():
        names = (p.name for p in path.parent.glob("*.py"))
        raise ConfigError(f"the {what} file {path} does not exist{did_you_mean(path.name, names)}")
    name = f"hocket_{what}_{path.stem}_{zlib.crc32(str(path.resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"the {what} file {path} cannot be loaded as a Python module; check its name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and cloudpickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        cause = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            cause += " (only the file itself travels to workers; a helper beside it must be on PYTHONPATH)"
        raise ConfigError(f"the {what} file {path} raised on import, line {_line_in(path, error)}: {cause}") from error
    cloudpickle.register_pickle_by_value(module)
    return module


def _line_in(path: Path, error: Exception) -> int | None:
    """The last line of the file that the error went through."""
    file = str(path.resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return lines[-1] if lines else None

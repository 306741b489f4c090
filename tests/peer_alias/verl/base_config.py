"""The peer's typed configuration section, which hocket has no use for (its own is `hocket.config`)."""

from collections.abc import Iterator, Mapping
from dataclasses import FrozenInstanceError, dataclass, fields
from typing import Any, ClassVar


@dataclass
class BaseConfig(Mapping[str, Any]):
    """A dataclass that reads like a dict, and whose attributes are set once unless listed in `_mutable_fields`."""

    _mutable_fields: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and name not in self._mutable_fields:
            raise FrozenInstanceError(f"field '{name}' is set already; build a new configuration instead")
        super().__setattr__(name, value)

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key, default)

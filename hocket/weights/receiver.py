"""The receiving end: begin, chunks, commit; then the generation loop swaps when it is between two units."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from hocket.errors import WeightSyncError
from hocket.weights.manifest import Chunk, Manifest, digest, unpack

Load = Callable[[Iterable[tuple[str, Tensor]], int], None]


@dataclass
class _Staging:
    manifest: Manifest
    chunks: dict[int, Chunk] = field(default_factory=dict)


class Receiver:
    """Holds at most one version that is arriving and one that is committed but not yet in use.

    Every method is one short critical section; nothing is locked between calls. A new begin replaces what an
    earlier sender left unfinished.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._arriving: _Staging | None = None
        self._committed: _Staging | None = None
        self._newest = -1

    def begin(self, manifest: Manifest) -> None:
        """Announce a version. Raises WeightSyncError when it is older than what was committed."""
        with self._lock:
            if manifest.version <= self._newest:
                raise WeightSyncError(
                    f"weights version {manifest.version} of {manifest.sender} is not newer than the committed "
                    f"version {self._newest}; a publisher counts versions up"
                )
            if self._arriving is not None and manifest.version < self._arriving.manifest.version:
                raise WeightSyncError(
                    f"weights version {manifest.version} of {manifest.sender} is older than version "
                    f"{self._arriving.manifest.version}, which is arriving; a publisher counts versions up"
                )
            self._arriving = _Staging(manifest)

    def chunk(self, version: int, index: int, data: Chunk) -> None:
        """Hold one chunk, in any order; a repeated one replaces itself."""
        with self._lock:
            staging = self._expect(version)
            sizes = staging.manifest.chunks
            if not 0 <= index < len(sizes) or len(data) != sizes[index]:
                wanted = f"{sizes[index]} bytes" if 0 <= index < len(sizes) else f"an index below {len(sizes)}"
                raise WeightSyncError(f"chunk {index} of version {version} has {len(data)} bytes; wanted {wanted}")
            staging.chunks[index] = data

    def commit(self, version: int) -> None:
        """Accept the version: all chunks are there and the digest is right; else WeightSyncError."""
        with self._lock:
            staging = self._expect(version)
            manifest = staging.manifest
            if missing := [i for i in range(len(manifest.chunks)) if i not in staging.chunks]:
                raise WeightSyncError(f"cannot commit version {version}: chunks {missing} did not arrive; send them")
            found = digest(manifest.tensors, [staging.chunks[i] for i in range(len(manifest.chunks))])
            if found != manifest.digest:
                self._arriving = None
                raise WeightSyncError(
                    f"cannot commit version {version} of {manifest.sender}: digest {found}, wanted {manifest.digest}; "
                    "the bytes changed on the way, send the version again"
                )
            self._committed, self._arriving, self._newest = staging, None, version
            self._lock.notify_all()

    def swap(self, load: Load, *, at_least: int, current: int, timeout: float) -> bool:
        """Put the committed version into use, first waiting until it is `at_least` that version.

        Called only between two units, by the thread that generates. Returns whether anything changed; raises
        WeightSyncError when the version does not arrive within `timeout` seconds.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: max(self._newest, current) >= at_least, timeout):
                raise WeightSyncError(
                    f"waited {timeout:.0f} s for weights version {at_least}; newest committed is {self._newest}, "
                    f"in use is {current}: the trainer did not publish or its chunks did not arrive"
                )
            staging, self._committed = self._committed, None
        if staging is None:
            return False
        chunks = [staging.chunks[i] for i in range(len(staging.manifest.chunks))]
        load(unpack(staging.manifest, chunks), staging.manifest.version)
        return True

    def _expect(self, version: int) -> _Staging:
        if self._arriving is None or self._arriving.manifest.version != version:
            found = self._arriving.manifest.version if self._arriving else "none"
            raise WeightSyncError(f"version {version} was not announced; arriving is {found}: call begin first")
        return self._arriving

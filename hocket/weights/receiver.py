"""The receiving end: begin, chunks, commit; then the generation loop swaps when it is between two units."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hocket.errors import WeightSyncError
from hocket.models.pieces import Weight
from hocket.models.policy import demand_fit
from hocket.weights.manifest import Age, Chunk, Key, Manifest, digest, unpack

Load = Callable[[Iterable[tuple[str, Weight]], int], None]
Shapes = Mapping[str, tuple[int, ...]]
_NEVER = (0, -1)


@dataclass
class _Staging:
    manifest: Manifest
    chunks: dict[int, Chunk] = field(default_factory=dict)


class Receiver:
    """Holds at most one version per sender that is arriving, and one that is committed but not yet in use.

    Every method is one short critical section; nothing is locked between calls. A new begin of a sender replaces
    what it left unfinished. `expect` gives the shapes that the model wants by name (None: it takes what comes).
    A sender that claims this receiver is its only one, unless `arbitrate` is "latest": then the newest commit wins.
    """

    def __init__(self, expect: Shapes | None = None, *, name: str = "this maker", arbitrate: str | None = None) -> None:
        if arbitrate not in (None, "latest"):
            raise WeightSyncError(
                f"arbitrate={arbitrate!r} is unknown; use 'latest', or None for one source of weights"
            )
        self._lock = threading.Condition()
        self._expect = expect
        self._name = name
        self._arbitrate = arbitrate
        self._source: str | None = None
        self._arriving: dict[str, _Staging] = {}
        self._committed: _Staging | None = None
        self._newest: dict[str, Age] = {}

    def claim(self, sender: str) -> None:
        """`sender` will be the source of weights. Raises WeightSyncError when another one is, naming both."""
        with self._lock:
            if self._source not in (None, sender) and self._arbitrate is None:
                raise WeightSyncError(
                    f"{self._name} would get weights from {self._source} and from {sender}, which are not one "
                    "data-parallel group; let one of them send, join them into a group (env_info with one port and "
                    'world_size), or set arbitrate="latest" on the maker'
                )
            self._source = sender

    def begin(self, manifest: Manifest) -> None:
        """Announce a version. Raises WeightSyncError when it is not the claimed source's, does not fit the model, or
        is older than what was committed or is arriving."""
        sender, version = manifest.sender, manifest.version
        with self._lock:
            if self._source not in (None, sender) and self._arbitrate is None:
                raise WeightSyncError(f"{self._name} gets its weights from {self._source}, not from {sender}")
            if self._expect is not None:
                sent = {spec.name: spec.shape for spec in manifest.tensors}
                demand_fit(self._expect, sent, what=f"weights version {version} of {sender}", model=self._name)
            committed, arriving = self._newest.get(sender, _NEVER), self._arriving.get(sender)
            if manifest.timeline < committed[0]:
                raise WeightSyncError(
                    f"weights version {version} of {sender} is of timeline {manifest.timeline}, and this is timeline "
                    f"{committed[0]}: that trainer was replaced"
                )
            if manifest.age <= committed:
                raise WeightSyncError(
                    f"weights version {version} of {sender} is not newer than the committed version {committed[1]}; "
                    "a publisher counts versions up"
                )
            if arriving is not None and manifest.age < arriving.manifest.age:
                raise WeightSyncError(
                    f"weights version {version} of {sender} is older than version {arriving.manifest.version}, which "
                    "is arriving; a publisher counts versions up"
                )
            self._arriving[sender] = _Staging(manifest)

    def chunk(self, key: Key, index: int, data: Chunk) -> None:
        """Hold one chunk of an announced version, in any order; a repeated one replaces itself."""
        with self._lock:
            staging = self._expected(key)
            sizes = staging.manifest.chunks
            if not 0 <= index < len(sizes) or len(data) != sizes[index]:
                wanted = f"{sizes[index]} bytes" if 0 <= index < len(sizes) else f"an index below {len(sizes)}"
                raise WeightSyncError(f"chunk {index} of version {key[-1]} has {len(data)} bytes; wanted {wanted}")
            staging.chunks[index] = data

    def commit(self, key: Key) -> None:
        """Accept the version: all chunks are there and the digest is right; else WeightSyncError."""
        sender, _, version = key
        with self._lock:
            staging = self._expected(key)
            manifest = staging.manifest
            if missing := [i for i in range(len(manifest.chunks)) if i not in staging.chunks]:
                raise WeightSyncError(f"cannot commit version {version}: chunks {missing} did not arrive; send them")
        found = digest(manifest.tensors, [staging.chunks[i] for i in range(len(manifest.chunks))])
        with self._lock:
            if found != manifest.digest:
                self._arriving.pop(sender, None)
                raise WeightSyncError(
                    f"cannot commit version {version} of {sender}: digest {found}, wanted {manifest.digest}; "
                    "the bytes changed on the way, send the version again"
                )
            if self._arriving.get(sender) is staging:
                del self._arriving[sender]
            self._committed, self._newest[sender] = staging, manifest.age
            self._lock.notify_all()

    def abort(self, key: Key) -> None:
        """Drop what arrived of a version that will not be completed; nothing to drop is no error."""
        with self._lock:
            staging = self._arriving.get(key[0])
            if staging is not None and staging.manifest.key == key:
                del self._arriving[key[0]]

    def swap(
        self,
        load: Load,
        *,
        at_least: Age,
        current: Age,
        timeout: float,
        stop: Callable[[], None] = lambda: None,
    ) -> Age | None:
        """Put the committed version into use, first waiting until it is `at_least` that version.

        Ages are timeline and version. Called between two units or two decode steps, by the thread that generates.
        Returns the age of what is newly in use, None when nothing changed; raises WeightSyncError when the version does
        not arrive within `timeout` seconds. `stop` is asked meanwhile, and may raise.
        """
        end = time.monotonic() + timeout
        with self._lock:
            while max([current, *self._newest.values()]) < at_least:
                if (left := end - time.monotonic()) <= 0:
                    raise WeightSyncError(
                        f"waited {timeout:g} s for weights version {at_least[1]}; newest committed is "
                        f"{max(self._newest.values(), default=_NEVER)[1]}, in use is {current[1]}: the trainer did not "
                        "publish or its chunks did not arrive"
                    )
                stop()
                self._lock.wait(min(left, 0.5))
            staging, self._committed = self._committed, None
        if staging is None:
            return None
        chunks = [staging.chunks[i] for i in range(len(staging.manifest.chunks))]
        load(unpack(staging.manifest, chunks), staging.manifest.version)
        return staging.manifest.age

    def _expected(self, key: Key) -> _Staging:
        staging = self._arriving.get(key[0])
        if staging is None or staging.manifest.key != key:
            found = staging.manifest.version if staging else "none"
            raise WeightSyncError(f"version {key[-1]} was not announced; arriving is {found}: call begin first")
        return staging

"""Objects as a pickle beside raw bytes: tensors and arrays are copied once, into memory that both sides map.

`pack` pickles an object; the content of CPU tensors and numpy arrays, and whatever else offers its
buffers out of band (protocol 5), is not in the pickle but listed as parts to copy. `unpack` makes the
same object again whose tensors and arrays are views of the buffer, writable and without a copy. As each of
them keeps all of it, large parts may lie elsewhere (`place`), and small ones be copied (`copied`).

Classes and functions of the main module, closures and lambdas go by value (cloudpickle), so the other side
need not import the main module; classes keep their identity when objects come back.
"""

from __future__ import annotations

import contextlib
import copyreg
import ctypes
import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prefetch.errors import failed_in
from prefetch.interpreter import home_of, is_importable
from prefetch.ipc.forked_classes import forked_class
from prefetch.memory.mapped_files import FileViews, MappedFiles
from prefetch.workers.shared_arena import Buffer, SharedFile, read_message
from prefetch.workers.worker_start import WorkerStart, is_forked

_ALIGN = 64
_SPAN = struct.Struct("<qq")
_OFFSET = struct.Struct("<q")

BLOCK = 4096
"""Smaller parts lie within one such block of the buffer."""
LARGE = 32 << 10
"""Copying less costs less than to account for its memory."""
_MOST_SHARED = 64
"""A process can be handed some 250 descriptors at its start."""

Shared = tuple[int, int]
"""Descriptor and bytes of a tensor's storage in torch's shared memory."""
Place = Callable[[int, int, Any], tuple[Any, int] | None]
"""(address, bytes, what keeps the address valid) -> what keeps the place that both sides map, and its number;
None: they are copied with all others."""
ViewAt = Callable[[int, int], Buffer]
"""(number of the place, bytes) -> that memory."""
Copied = Callable[[memoryview], Any]
"""Returns a copy in new memory, as an object with a writable buffer."""


@dataclass(kw_only=True)
class PackedObject:
    """An object taken apart: `nbytes` bytes are needed for all of it."""

    meta: bytes | memoryview
    parts: list[tuple[int, int, int, Any]]
    """(offset, address, bytes, what keeps the address valid)."""
    spans: bytes
    """Offset and length of each out-of-band buffer."""
    meta_offset: int
    placed: list[tuple[Any, int]]
    """The parts that are found elsewhere: what keeps each, and its place."""
    placed_bytes: int
    by_value: bool
    """True if cloudpickle had to help."""
    shared: list[Shared]
    """The tensors that cross as file descriptors, if that was asked for."""
    files: MappedFiles | None = None
    table: bytes = b""
    """The mapped files that a job lies in, pickled; their descriptors are the last of `shared`."""
    modules: set[str] = field(default_factory=set)
    """Modules of the classes and functions in it, if it went by value."""

    @property
    def layout(self) -> tuple[int, int, int]:
        """Return what `unpack` needs: where the pickle lies, its bytes, those of `spans` behind it."""
        return self.meta_offset, len(self.meta), len(self.spans)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole, parts and pickle."""
        tail_bytes = _OFFSET.size * len(self.placed) + len(self.table)
        return self.meta_offset + len(self.meta) + len(self.spans) + tail_bytes

    def copy_to(self, address: int) -> None:
        """Write everything to memory of at least `nbytes`."""
        for offset, source, nbytes, _ in self.parts:
            ctypes.memmove(address + offset, source, nbytes)
        tail = bytes(self.meta) + self.spans + b"".join(_OFFSET.pack(place) for _, place in self.placed)
        ctypes.memmove(address + self.meta_offset, tail, len(tail))


MESSAGE_HEAD = 4096
"""Bytes before an object that all processes get: its layout, and the sizes of what crosses by descriptors."""


def write_packed(file: SharedFile, packed: PackedObject) -> None:
    """Put an object where all processes find it; the file's message has MESSAGE_HEAD bytes more than it."""
    head = np.array([*packed.layout, len(packed.table), *(nbytes for _, nbytes in packed.shared)], np.int64)
    file.write_message(0, head.tobytes())
    for offset, address, nbytes, _ in packed.parts:
        file.write_memory(MESSAGE_HEAD + offset, address, nbytes)
    file.write_message(MESSAGE_HEAD + packed.meta_offset, packed.meta)
    file.write_message(MESSAGE_HEAD + packed.meta_offset + len(packed.meta), packed.spans + packed.table)


def read_packed(start: WorkerStart) -> Any:
    """The object, in one of the processes; once."""
    buffer = read_message(start.memory.fd, start.message_offset, start.message_bytes)
    fds = [passed.fd for passed in start.passed]
    meta, meta_bytes, spans, table_bytes = np.frombuffer(buffer[:32], np.int64).tolist()
    sizes = np.frombuffer(buffer[32 : 32 + 8 * len(fds)], np.int64).tolist()
    end = MESSAGE_HEAD + meta + meta_bytes + spans
    files = FileViews(pickle.loads(buffer[end : end + table_bytes].data), fds)
    shared = list(zip(fds, sizes, strict=True))
    try:
        obj = unpack(buffer[MESSAGE_HEAD:], meta, meta_bytes, spans, files.view_at, shared)
    except Exception as error:
        error.add_note(
            f"raised while a worker process unpickled what it was sent{failed_in(error, unpack.__code__)}. "
            'Have it inherited (multiprocessing_context="fork"), or mend it: `__getattr__` is asked before '
            "attributes are there, and must raise AttributeError then"
        )
        raise
    for fd in fds:
        os.close(fd)
    return obj


class _Packer:
    """Collects parts while a pickler runs."""

    def __init__(self, place: Place | None, share: bool) -> None:
        self.shared: dict[int, Shared] | None = {} if share else None
        self.parts: list[tuple[int, int, int, Any]] = []
        self.spans: list[tuple[int, int]] = []
        self.placed: list[tuple[Any, int]] = []
        self.end = self.placed_bytes = 0
        self._place = place
        self.reducers: dict[type, Callable[[Any], Any]] = {
            Tensor: self._tensor,
            torch.UntypedStorage: self._storage,
            torch.TypedStorage: self._typed_storage,
            np.ndarray: self._array,
            np.memmap: self._memmap,
        }

    def _find(self, address: int, nbytes: int, keep: Any) -> int | None:
        """Return ~number of the place where both sides find a part; None: there is none."""
        place = self._place(address, nbytes, keep) if self._place is not None and nbytes else None
        if place is None:
            return None
        self.placed.append(place)
        self.placed_bytes += nbytes
        return ~place[1]

    def _add(self, address: int, nbytes: int, keep: Any) -> int:
        """Return where a part will be: its offset in the buffer, or ~number of its place."""
        if self._place is not None and (place := self._find(address, nbytes, keep)) is not None:
            return place
        offset = -(-self.end // _ALIGN) * _ALIGN
        if nbytes < BLOCK < offset % BLOCK + nbytes:
            offset = -(-offset // BLOCK) * BLOCK
        self.end = offset + nbytes
        self.parts.append((offset, address, nbytes, keep))
        return offset

    def _tensor(self, tensor: Tensor) -> Any:
        # What a view of plain bytes cannot be goes torch's own way; its storage still comes here.
        if (
            tensor.device.type != "cpu"
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.requires_grad
            or tensor.is_conj()
            or tensor.is_neg()
            or tensor.__dict__
        ):
            if tensor.requires_grad and not tensor.is_leaf:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} of the batch requires_grad and was computed "
                    f"({type(tensor.grad_fn).__name__}): autograd does not go from one process to another. "
                    "Return tensor.detach(), or have batches made in this process, by num_workers=0 or "
                    'workers="thread"'
                )
            return _with_typed_storages(tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
        shape, stride, size = tuple(tensor.shape), None, tensor.element_size()
        numel = span = tensor.numel()
        if not tensor.is_contiguous():
            stride = tuple(tensor.stride())
            span = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        where = None
        if self.shared is not None and numel:
            where = self._find(tensor.data_ptr(), span * size, tensor)
            if where is None and tensor.is_shared() and (shared := self._shared_tensor(tensor, self.shared)):
                return shared
        if where is None:
            # Copied as it lies if that is no more than its values: not a few columns of a large array.
            if span > numel:
                tensor, stride, span = tensor.contiguous(), None, numel
            where = self._add(tensor.data_ptr(), span * size, tensor)
        return _tensor, (tensor.dtype, shape, stride, span, where)

    def _shared_tensor(self, tensor: Tensor, shared: dict[int, Shared]) -> Any:
        """Pass the memory itself: what one process writes to it, all others see. None: it is a file's."""
        if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
            raise ValueError("it has tensors in shared memory, whose sharing strategy is not file_descriptor")
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            if len(shared) == _MOST_SHARED:
                raise ValueError(f"it has more than {_MOST_SHARED} tensors in shared memory (share_memory_)")
            fd, nbytes = storage._share_fd_cpu_()
            if fd < 0:  # of `torch.from_file`, which keeps no descriptor
                return None
            shared[storage.data_ptr()] = fd, nbytes
        index = list(shared).index(storage.data_ptr())
        return _shared, (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset(), index)

    def _storage(self, storage: torch.UntypedStorage) -> Any:
        """Reduce the storage of tensors that torch reduces: with a gradient, quantized, sparse."""
        if storage.device.type != "cpu":
            return storage.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return _storage, (self._add(storage.data_ptr(), storage.nbytes(), storage), storage.nbytes())

    def _typed_storage(self, storage: torch.TypedStorage) -> Any:
        return _typed_storage, (storage._untyped_storage, storage.dtype)

    def _array(self, array: NDArray[Any]) -> Any:
        if array.dtype.hasobject or array.dtype.metadata:
            return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        strided: tuple[Any, ...] = ()
        first, span, where = 0, array.nbytes, None
        if not array.flags.c_contiguous:
            ends = [(n - 1) * s for n, s in zip(array.shape, array.strides, strict=True)]
            first, span = -sum(e for e in ends if e < 0), sum(map(abs, ends)) + array.itemsize
            strided = first, array.strides
        if self.shared is not None:
            where = self._find(array.ctypes.data - first, span, array)
        if where is None:
            if first or span != array.nbytes:
                array, strided, span = np.ascontiguousarray(array), (), array.nbytes
            where = self._add(array.ctypes.data, span, array)
        return _array, (array.shape, array.dtype, where, span, array.flags.writeable, *strided)

    def _memmap(self, array: np.memmap[Any, Any]) -> Any:
        attributes = {name: value for name, value in vars(array).items() if name != "_mmap"}
        return _memmap, (array.view(np.ndarray), attributes)

    def buffer(self, buffer: pickle.PickleBuffer) -> bool:
        """Take an out-of-band buffer; True leaves it in the pickle."""
        try:
            raw = buffer.raw()
        except BufferError:
            return True
        array = np.frombuffer(raw, np.uint8) if len(raw) else np.empty(0, np.uint8)
        self.spans.append((self._add(array.ctypes.data, len(raw), (buffer, array)), len(raw)))
        return False


def _with_typed_storages(reduced: Any) -> Any:
    """Return what torch 2.13 expects where it rebuilds tensors of newer dtypes, though it gives others."""
    if isinstance(reduced, torch.UntypedStorage):
        return _typed_storage(reduced, torch.uint8)
    if type(reduced) is tuple:
        return tuple(map(_with_typed_storages, reduced))
    return reduced


class _CloudPickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO, packer: _Packer | None = None) -> None:
        callback = packer.buffer if packer else None
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=callback)
        self._reducers = packer.reducers if packer else {}
        self.modules: set[str] = set()

    def reducer_override(self, obj: Any) -> Any:
        name = obj.__name__ if isinstance(obj, ModuleType) else home_of(obj)
        if name and is_importable(name):
            self.modules.add(name)
        elif name in sys.modules and name != "__main__" and not is_forked():
            cloudpickle.register_pickle_by_value(sys.modules[name])  # for good: other threads pickle, too
        if isinstance(obj, io.TextIOWrapper):
            raise TypeError("cannot pickle an open file")  # cloudpickle would read all of it
        if isinstance(obj, type) and (reduction := forked_class(obj, is_forked())) is not None:
            return reduction
        reducer = self._reducers.get(type(obj))
        return super().reducer_override(obj) if reducer is None else reducer(obj)


def pack(
    obj: Any, *, place: Place | None = None, by_value: bool | None = None, share: bool = False
) -> PackedObject:
    """Take an object apart.

    Args:
        obj: anything that pickles.
        place: says where parts are found that are not copied with all others.
        by_value: whether objects of the main module, and those without a name, go by value; None: only if
            they cannot go by name.
        share: whether tensors in torch's shared memory stay the same memory on both sides.

    Raises whatever pickling raises.
    """
    if not by_value:
        packer, file = _Packer(place, share), io.BytesIO()
        pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=packer.buffer)
        pickler.dispatch_table = {**copyreg.dispatch_table, **packer.reducers}
        try:
            pickler.dump(obj)
            return _packed(packer, file, by_value=False)
        except (pickle.PicklingError, AttributeError, TypeError):
            if by_value is False:
                raise
    packer, file = _Packer(place, share), io.BytesIO()
    cloud = _CloudPickler(file, packer)
    cloud.dump(obj)
    packed = _packed(packer, file, by_value=True)
    packed.modules = cloud.modules
    return packed


def _packed(packer: _Packer, file: io.BytesIO, *, by_value: bool) -> PackedObject:
    packer.reducers.clear()  # no cycle may keep the parts: they hold memory of the arena
    return PackedObject(
        meta=file.getvalue(),  # not a view: a file that ends before its views cannot close
        parts=packer.parts,
        spans=b"".join(_SPAN.pack(*span) for span in packer.spans),
        meta_offset=-(-packer.end // _ALIGN) * _ALIGN,
        placed=packer.placed,
        placed_bytes=packer.placed_bytes,
        by_value=by_value,
        shared=list((packer.shared or {}).values()),
    )


def dumps_by_value(obj: Any) -> bytes:
    """A plain pickle for a process without the modules that were made here: what lies there goes by value."""
    file = io.BytesIO()
    pickler = _NamingPickler(file, pickle.HIGHEST_PROTOCOL)
    with contextlib.suppress(Exception):
        pickler.dump(obj)
        if all(map(is_importable, pickler.modules)):
            return file.getvalue()
    file = io.BytesIO()
    _CloudPickler(file).dump(obj)
    return file.getvalue()


class _NamingPickler(pickle.Pickler):
    modules: set[str] | frozenset[str] = frozenset()
    """The modules of what went by its name."""

    def reducer_override(self, obj: Any) -> Any:
        if name := home_of(obj):
            self.modules |= {name}
        return NotImplemented


class _Source:
    """The memory that an object is made of again, while it is unpacked."""

    def __init__(
        self, buffer: Buffer, view_at: ViewAt | None, shared: Sequence[Shared], copied: Copied | None
    ) -> None:
        self.shared = shared
        self._buffer, self._data, self._view_at, self._copied = buffer, buffer.data, view_at, copied
        self._blocks: dict[int, Any] = {}

    def part(self, where: int, nbytes: int) -> tuple[Any, int]:
        """Return the memory of a part, and where in it that begins."""
        if where < 0:
            assert self._view_at is not None
            return self._view_at(~where, nbytes), 0
        if self._copied is None or nbytes >= LARGE:
            return self._buffer, where
        if nbytes >= BLOCK:
            return self._copied(self._data[where : where + nbytes]), 0
        start = where % BLOCK
        block = self._blocks.get(where - start)
        if block is None:
            block = self._copied(self._data[where - start : where - start + BLOCK])
            self._blocks[where - start] = block
        return block, start

    def span(self, where: int, nbytes: int) -> memoryview:
        """Return an out-of-band buffer."""
        memory, start = self.part(where, nbytes)
        return memoryview(memory)[start : start + nbytes]


_current = threading.local()


def unpack(
    buffer: Buffer,
    meta_offset: int,
    meta_bytes: int,
    spans_bytes: int,
    view_at: ViewAt | None = None,
    shared: Sequence[Shared] = (),
    copied: Copied | None = None,
) -> Any:
    """The object that was packed into `buffer`, viewing it; with `copied` only its large parts do.

    Others are copied then; those of less than a block share the copy of that.
    """
    spans: Sequence[tuple[int, int]] = ()
    if spans_bytes:
        start = meta_offset + meta_bytes
        spans = list(_SPAN.iter_unpack(buffer[start : start + spans_bytes].tobytes()))
    before = getattr(_current, "source", None)
    _current.source = source = _Source(buffer, view_at, shared, copied)
    try:
        meta = buffer[meta_offset : meta_offset + meta_bytes]
        return pickle.loads(meta.data, buffers=[source.span(*span) for span in spans])
    finally:
        _current.source = before


def placed_offsets(buffer: Buffer, count: int) -> list[int]:
    """Return the places of what was not copied into `buffer`; `count`: how many there are."""
    tail = buffer[len(buffer) - count * _OFFSET.size :].tobytes()
    return [offset for (offset,) in _OFFSET.iter_unpack(tail)]


def _tensor(dtype: torch.dtype, shape: Any, stride: Any, numel: int, where: int) -> Tensor:
    if not numel:
        return torch.empty(shape, dtype=dtype)
    memory, offset = _current.source.part(where, numel * dtype.itemsize)
    flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
    return flat.view(shape) if stride is None else flat.as_strided(shape, stride)


def _storage(where: int, nbytes: int) -> torch.UntypedStorage:
    return _tensor(torch.uint8, (nbytes,), None, nbytes, where).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _shared(dtype: torch.dtype, shape: Any, stride: Any, offset: int, index: int) -> Tensor:
    fd, nbytes = _current.source.shared[index]
    storage = torch.UntypedStorage._new_shared_fd_cpu(fd, nbytes)  # type: ignore[attr-defined]
    return torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)


def _array(
    shape: Any, dtype: Any, where: int, nbytes: int, writeable: bool, first: int = 0, strides: Any = None
) -> NDArray[Any]:
    memory, offset = _current.source.part(where, nbytes)
    array: NDArray[Any] = np.ndarray(shape, dtype, memory, offset + first, strides)
    if not writeable:
        array.flags.writeable = False
    return array


def _memmap(array: NDArray[Any], attributes: dict[str, Any]) -> np.memmap[Any, Any]:
    mapped = array.view(np.memmap)
    vars(mapped).update(attributes)
    return mapped

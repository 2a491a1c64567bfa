"""Joins the stand-in CANN library (C++) to the graph engine (Python).

The library calls the functions registered here when TorchAir adds, describes, runs or removes a
graph, or asks about an operator; ``cann/engine.h`` declares the same signatures. Tensors cross as
flat int64 records ``(address, bytes, ge dtype, placement or token, rank, dim...)``, and become CPU
tensors over the same memory. The engine, and torch with it, is imported at the first call.

An exception of the engine becomes the message of ``ge::GEGetErrorMsg``, which TorchAir raises.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ENGINE_MODULE = "moe_graph.emulator.engine.session"

_SUCCESS, _FAILED = 0, 1
_IR_KNOWN, _IR_UNKNOWN, _IR_FAILED = 0, 1, 2
_RECORD_HEAD = 5

_WORDS = ctypes.c_void_p
_SINK = ctypes.c_void_p


class _Callbacks(ctypes.Structure):
    """``cann::EngineCallbacks``."""

    _fields_ = [
        (
            "add_graph",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.c_uint64,
                ctypes.c_uint32,
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.POINTER(ctypes.c_char_p),
                ctypes.c_size_t,
            ),
        ),
        ("summary", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32, _SINK)),
        (
            "run",
            ctypes.CFUNCTYPE(
                ctypes.c_int,
                ctypes.c_uint64,
                ctypes.c_uint32,
                _WORDS,
                ctypes.c_size_t,
                _WORDS,
                ctypes.c_size_t,
                _SINK,
            ),
        ),
        ("remove_graph", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_uint32)),
        ("release", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("ir_definition", ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, _SINK)),
    ]


def _engine() -> Any:
    """The engine's session module; imported at the first graph, so that importing stays cheap."""
    return importlib.import_module(ENGINE_MODULE)


def _ge_dtypes() -> dict[int, torch.dtype]:
    """``ge::DataType`` numbers of the dtypes that torch has."""
    import torch

    return {
        0: torch.float32,
        1: torch.float16,
        2: torch.int8,
        3: torch.int32,
        4: torch.uint8,
        6: torch.int16,
        7: torch.uint16,
        8: torch.uint32,
        9: torch.int64,
        10: torch.uint64,
        11: torch.float64,
        12: torch.bool,
        16: torch.complex64,
        17: torch.complex128,
        27: torch.bfloat16,
        33: torch.complex32,
        35: torch.float8_e5m2,
        36: torch.float8_e4m3fn,
    }


@functools.cache
def _dtype_of() -> dict[int, torch.dtype]:
    return _ge_dtypes()


@functools.cache
def _number_of() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in _ge_dtypes().items()}


Record = tuple[int, ...]


def _read_words(address: int | None, count: int) -> list[int]:
    if not count:
        return []
    return (ctypes.c_int64 * count).from_address(address or 0)[:]


def _split(words: Sequence[int]) -> list[Record]:
    """Cut a flat list of numbers into one record per tensor."""
    records, at = [], 0
    while at < len(words):
        end = at + _RECORD_HEAD + words[at + 4]
        records.append(tuple(words[at:end]))
        at = end
    return records


def _view(record: Record) -> torch.Tensor:
    """Return a CPU tensor over the memory that `record` describes."""
    import torch

    address, size, number = record[:3]
    dims = record[_RECORD_HEAD:]
    dtype = _dtype_of().get(number)
    if dtype is None:
        raise TypeError(f"tensor of shape {list(dims)}: ge::DataType {number} has no torch dtype")
    count = 1
    for dim in dims:
        count *= dim
    if count == 0:
        return torch.empty(dims, dtype=dtype)
    if not address:
        raise ValueError(f"tensor of shape {list(dims)} and dtype {dtype} has no memory")
    if count * dtype.itemsize > size:
        raise ValueError(
            f"tensor of shape {list(dims)} and dtype {dtype}: got {size} bytes of memory, "
            f"want {count * dtype.itemsize}"
        )
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(dims)


def _overlap(one: Record, other: Record) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


class _InputCache:
    """The tensors over the inputs of one graph's last run.

    Weights stay where they are from run to run, so most records repeat, and so do their tensors.
    """

    def __init__(self) -> None:
        self._records: list[Record] = []
        self._tensors: list[torch.Tensor] = []

    def tensors(self, records: list[Record]) -> list[torch.Tensor]:
        """Return one tensor per record."""
        old_records, old_tensors = self._records, self._tensors
        if len(old_records) == len(records):
            tensors = [
                old_tensor if old == new else _view(new)
                for old, new, old_tensor in zip(old_records, records, old_tensors, strict=True)
            ]
        else:
            tensors = [_view(record) for record in records]
        self._records, self._tensors = records, tensors
        return tensors


class _Bridge:
    """The callbacks, and what has to stay alive between them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._handed_over: dict[int, torch.Tensor] = {}
        self._tokens = itertools.count(1)
        self._inputs: dict[tuple[int, int], _InputCache] = {}
        self._lock = threading.Lock()
        library.moe_graph_cann_set_error.argtypes = [ctypes.c_char_p]
        library.moe_graph_cann_set_error.restype = None
        library.moe_graph_cann_emit_summary.argtypes = [
            _SINK,
            ctypes.c_int,
            _WORDS,
            ctypes.c_size_t,
        ]
        library.moe_graph_cann_emit_summary.restype = None
        library.moe_graph_cann_emit_outputs.argtypes = [_SINK, _WORDS, ctypes.c_size_t]
        library.moe_graph_cann_emit_outputs.restype = None
        library.moe_graph_cann_emit_ir.argtypes = [
            _SINK,
            ctypes.c_int,
            ctypes.c_char_p,
            ctypes.c_char_p,
        ]
        library.moe_graph_cann_emit_ir.restype = None
        library.moe_graph_cann_register.argtypes = [ctypes.POINTER(_Callbacks)]
        library.moe_graph_cann_register.restype = None
        library.moe_graph_cann_unregister.restype = None
        fields: dict[str, Any] = dict(_Callbacks._fields_)
        self._callbacks = _Callbacks(
            fields["add_graph"](self._guard(self._add_graph, _FAILED)),
            fields["summary"](self._guard(self._summary, _FAILED)),
            fields["run"](self._guard(self._run, _FAILED)),
            fields["remove_graph"](self._guard(self._remove_graph, _FAILED)),
            fields["release"](self._release),
            fields["ir_definition"](self._guard(self._ir_definition, _IR_FAILED)),
        )
        library.moe_graph_cann_register(ctypes.byref(self._callbacks))
        # TorchAir lets go of graphs and outputs after Python is gone; nobody may be called then.
        atexit.register(library.moe_graph_cann_unregister)

    def _guard(self, function: Callable[..., int | None], failed: int) -> Callable[..., int]:
        """Turn an exception of `function` into an error text and a status."""

        def call(*arguments: Any) -> int:
            try:
                status = function(*arguments)
                return _SUCCESS if status is None else status
            except BaseException as error:
                logger.debug("%s failed", function.__name__, exc_info=True)
                text = str(error) or type(error).__name__
                self._library.moe_graph_cann_set_error(text.replace("\0", "").encode())
                return failed

        return call

    def _add_graph(
        self,
        session: int,
        graph: int,
        model: int,
        size: int,
        keys_and_values: Any,
        count: int,
    ) -> None:
        text = [keys_and_values[i].decode() for i in range(2 * count)]
        options = dict(zip(text[::2], text[1::2], strict=True))
        _engine().add_graph(session, graph, ctypes.string_at(model, size), options)
        self._inputs[session, graph] = _InputCache()

    def _summary(self, session: int, graph: int, sink: int) -> None:
        summary = _engine().summary(session, graph)
        words: list[int] = []
        for shape, dtype in zip(summary.output_shapes, summary.output_dtypes, strict=True):
            words += (0, 0, dtype, 0, len(shape), *shape)
        packed = (ctypes.c_int64 * len(words))(*words)
        self._library.moe_graph_cann_emit_summary(
            sink, int(summary.is_static), ctypes.addressof(packed), len(words)
        )

    def _run(
        self,
        session: int,
        graph: int,
        input_words: int | None,
        input_count: int,
        output_words: int | None,
        output_count: int,
        sink: int,
    ) -> None:
        inputs = _split(_read_words(input_words, input_count))
        outputs = _split(_read_words(output_words, output_count))
        tensors = self._inputs[session, graph].tensors(inputs)
        if outputs and all(record[0] or 0 in record[_RECORD_HEAD:] for record in outputs):
            _fill(_engine(), session, graph, inputs, tensors, outputs)
            return
        results = _engine().run(session, graph, tensors)
        self._hand_over(inputs, results, sink)

    def _hand_over(
        self, inputs: list[Record], results: Sequence[torch.Tensor], sink: int
    ) -> None:
        """Give the memory of `results` to the caller, until it calls release with the token."""
        taken = {record[0] for record in inputs}
        words: list[int] = []
        for result in results:
            tensor = _owned(result, inputs, taken)
            taken.add(tensor.data_ptr())
            token = next(self._tokens)
            self._handed_over[token] = tensor
            words += (
                tensor.untyped_storage().data_ptr() if tensor.numel() else _EMPTY_ADDRESS,
                tensor.nbytes,
                _number_of()[tensor.dtype],
                token,
                tensor.dim(),
                *tensor.shape,
            )
        packed = (ctypes.c_int64 * len(words))(*words)
        self._library.moe_graph_cann_emit_outputs(sink, ctypes.addressof(packed), len(words))

    def _remove_graph(self, session: int, graph: int) -> None:
        self._inputs.pop((session, graph), None)
        _engine().remove_graph(session, graph)

    def _release(self, token: int) -> None:
        self._handed_over.pop(token, None)

    def _ir_definition(self, op_type: bytes, sink: int) -> int:
        definition = _engine().ir_definition(op_type.decode())
        if definition is None:
            return _IR_UNKNOWN
        emit = self._library.moe_graph_cann_emit_ir
        for kind, entries in enumerate((definition.inputs, definition.outputs, definition.attrs)):
            for name, what in entries:
                emit(sink, kind, name.encode(), what.encode())
        return _IR_KNOWN


# An output without elements still needs an address that is not null.
_EMPTY_BUFFER = ctypes.create_string_buffer(512)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY_BUFFER)


def _owned(result: torch.Tensor, inputs: list[Record], taken: set[int]) -> torch.Tensor:
    """Return `result` as a dense tensor whose memory no input and no earlier output uses."""
    storage = result.untyped_storage()
    extent = (storage.data_ptr(), storage.nbytes())
    dense = result.is_contiguous() and storage.nbytes() == result.nbytes
    shared = extent[0] in taken or any(_overlap(extent, record) for record in inputs)
    return result if dense and not shared else result.clone(memory_format=_contiguous())


def _contiguous() -> torch.memory_format:
    import torch

    return torch.contiguous_format


@functools.cache
def _takes_outputs(run: Callable[..., Any]) -> bool:
    return "outputs" in inspect.signature(run).parameters


def _fill(
    engine: Any,
    session: int,
    graph: int,
    inputs: list[Record],
    tensors: list[torch.Tensor],
    outputs: list[Record],
) -> None:
    """Run a graph whose outputs have their memory already.

    An output may be the memory of an input (a weight updated in place). The engine must not write
    there before the last node has read it, so such a graph is filled from finished results.
    """
    targets = [_view(record) for record in outputs]
    updates = any(
        record[1] and _overlap(record, other) for record in outputs for other in inputs if other[1]
    )
    if not updates and _takes_outputs(engine.run):
        results = engine.run(session, graph, tensors, outputs=targets)
    else:
        results = engine.run(session, graph, tensors)
    if len(results) != len(targets):
        raise RuntimeError(f"graph {graph}: got {len(results)} outputs, want {len(targets)}")
    if updates:
        results = [result.clone() for result in results]
    for index, (target, result) in enumerate(zip(targets, results, strict=True)):
        if result is target:
            continue
        if result.shape != target.shape or result.dtype != target.dtype:
            raise RuntimeError(
                f"graph {graph}, output {index}: got {result.dtype}{list(result.shape)}, "
                f"want {target.dtype}{list(target.shape)}"
            )
        target.copy_(result)


_bridge: _Bridge | None = None


def connect(library: ctypes.CDLL) -> None:
    """Register the engine's callbacks with the stand-in `library`, for the life of the process."""
    global _bridge
    if _bridge is None:
        _bridge = _Bridge(library)

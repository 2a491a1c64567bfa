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
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ENGINE_MODULE = "moe_graph.emulator.engine.session"

_SUCCESS, _FAILED = 0, 1
_IR_KNOWN, _IR_UNKNOWN, _IR_FAILED = 0, 1, 2

Record = tuple[int, ...]
_RECORD_HEAD = 5
_NO_TOKEN = 0

_int, _size = ctypes.c_int, ctypes.c_size_t
_session, _graph = ctypes.c_uint64, ctypes.c_uint32
_pointer, _text = ctypes.c_void_p, ctypes.c_char_p


class _Callbacks(ctypes.Structure):
    """``cann::EngineCallbacks``."""

    _fields_ = [
        (
            "add_graph",
            ctypes.CFUNCTYPE(_int, _session, _graph, _pointer, _size, ctypes.POINTER(_text), _size),
        ),
        ("summary", ctypes.CFUNCTYPE(_int, _session, _graph, _pointer)),
        (
            "run",
            ctypes.CFUNCTYPE(_int, _session, _graph, _pointer, _size, _pointer, _size, _pointer),
        ),
        ("remove_graph", ctypes.CFUNCTYPE(_int, _session, _graph)),
        ("release", ctypes.CFUNCTYPE(None, ctypes.c_int64)),
        ("ir_definition", ctypes.CFUNCTYPE(_int, _text, _pointer)),
    ]


_LIBRARY_FUNCTIONS: dict[str, list[Any]] = {
    "moe_graph_cann_emit_ir": [_pointer, _int, _text, _text],
    "moe_graph_cann_emit_outputs": [_pointer, _pointer, _size],
    "moe_graph_cann_emit_summary": [_pointer, _int, _pointer, _size],
    "moe_graph_cann_register": [ctypes.POINTER(_Callbacks)],
    "moe_graph_cann_set_error": [_text],
    "moe_graph_cann_unregister": [],
}
"""Argument types of the functions of ``cann/engine.h``; none returns anything."""


def _engine() -> Any:
    """The engine's session module, imported at the first graph so that importing stays cheap."""
    return importlib.import_module(ENGINE_MODULE)


@functools.cache
def _dtype_by_number() -> dict[int, torch.dtype]:
    """The torch dtypes by their ``ge::DataType`` number."""
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
def _number_by_dtype() -> dict[torch.dtype, int]:
    return {dtype: number for number, dtype in _dtype_by_number().items()}


def _read_records(address: int | None, count: int) -> list[Record]:
    """Read `count` numbers and cut them into one record per tensor."""
    if address is None or not count:
        return []
    words = (ctypes.c_int64 * count).from_address(address)[:]
    records, at = [], 0
    while at < count:
        end = at + _RECORD_HEAD + words[at + 4]
        records.append(tuple(words[at:end]))
        at = end
    return records


def _view(record: Record) -> torch.Tensor:
    """Return a CPU tensor over the memory that `record` describes."""
    import torch

    # the byte count of an input stays that of the first run: later runs of a dynamic graph renew
    # its address and dims only
    address, _, number = record[:3]
    dims = record[_RECORD_HEAD:]
    dtype = _dtype_by_number().get(number)
    if dtype is None:
        raise TypeError(f"tensor of shape {list(dims)}: ge::DataType {number} has no torch dtype")
    count = 1
    for dim in dims:
        count *= dim
    if count == 0:
        return torch.empty(dims, dtype=dtype)
    wanted = count * dtype.itemsize
    if not address:
        raise ValueError(f"tensor of shape {list(dims)} and dtype {dtype}: got no memory")
    memory = (ctypes.c_char * wanted).from_address(address)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(dims)


class _InputCache:
    """The tensors over the inputs of one graph's last run.

    Weights stay where they are from run to run, so most records repeat, and so do their tensors.
    """

    def __init__(self) -> None:
        self._last: tuple[list[Record], list[torch.Tensor]] = [], []

    def tensors(self, records: list[Record]) -> list[torch.Tensor]:
        """Return one tensor per record."""
        old_records, old_tensors = self._last
        if len(old_records) != len(records):
            tensors = [_view(record) for record in records]
        else:
            tensors = [
                tensor if old == new else _view(new)
                for old, new, tensor in zip(old_records, records, old_tensors, strict=True)
            ]
        self._last = records, tensors
        return tensors


# An output without elements still needs an address that is not null.
_EMPTY_BUFFER = ctypes.create_string_buffer(512)
_EMPTY_ADDRESS = ctypes.addressof(_EMPTY_BUFFER)


class _Bridge:
    """The callbacks, and what has to stay alive between them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._inputs: dict[tuple[int, int], _InputCache] = {}
        self._handed_over: dict[int, torch.Tensor] = {}
        self._tokens = itertools.count(1)
        for name, arguments in _LIBRARY_FUNCTIONS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
        types: dict[str, Any] = {field[0]: field[1] for field in _Callbacks._fields_}
        self._callbacks = _Callbacks(
            types["add_graph"](self._guard(self._add_graph, _FAILED)),
            types["summary"](self._guard(self._summary, _FAILED)),
            types["run"](self._guard(self._run, _FAILED)),
            types["remove_graph"](self._guard(self._remove_graph, _FAILED)),
            types["release"](self._release),
            types["ir_definition"](self._guard(self._ir_definition, _IR_FAILED)),
        )
        library.moe_graph_cann_register(ctypes.byref(self._callbacks))
        # TorchAir lets go of graphs and outputs after Python is gone; nobody may be called then.
        atexit.register(library.moe_graph_cann_unregister)

    def _guard(self, function: Callable[..., int | None], failed: int) -> Callable[..., int]:
        """Turn an exception of `function` into an error text and the status `failed`."""

        def call(*arguments: Any) -> int:
            try:
                return function(*arguments) or _SUCCESS
            # An interrupt has no way through C++ either; TorchAir raises it as a RuntimeError.
            except BaseException as error:
                logger.debug("%s failed", function.__name__, exc_info=True)
                text = str(error) or type(error).__name__
                self._library.moe_graph_cann_set_error(text.replace("\0", "").encode())
                return failed

        return call

    def _add_graph(
        self, session: int, graph: int, model: int, size: int, keys_and_values: Any, count: int
    ) -> None:
        texts = [keys_and_values[i].decode() for i in range(2 * count)]
        options = dict(zip(texts[::2], texts[1::2], strict=True))
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
        inputs = self._inputs[session, graph].tensors(_read_records(input_words, input_count))
        outputs = _read_records(output_words, output_count)
        # A graph of unknown sizes brings memory only for the inputs that it updates.
        targets = [
            _view(record) if record[0] or 0 in record[_RECORD_HEAD:] else None for record in outputs
        ]
        results = _engine().run(session, graph, inputs, outputs=targets or None)
        if not targets or any(target is None for target in targets):
            self._hand_over(results, targets or [None] * len(results), sink)

    def _hand_over(
        self,
        results: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor | None],
        sink: int,
    ) -> None:
        """Give the memory of `results` to the caller, until it calls release with the token.

        The engine's results are contiguous and share no memory with anything. Those that were
        written to memory of the caller, their `targets`, stay there and have no token.
        """
        words: list[int] = []
        for result, target in zip(results, targets, strict=True):
            token = next(self._tokens) if target is None else _NO_TOKEN
            if token != _NO_TOKEN:
                self._handed_over[token] = result
            address = result.data_ptr() if result.numel() else _EMPTY_ADDRESS
            number = _number_by_dtype()[result.dtype]
            words += (address, result.nbytes, number, token, result.dim(), *result.shape)
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
        parts = (definition.inputs, definition.outputs, definition.attrs)
        for kind, entries in enumerate(parts):
            for name, what in entries:
                self._library.moe_graph_cann_emit_ir(sink, kind, name.encode(), what.encode())
        return _IR_KNOWN


_bridge: _Bridge | None = None


def connect(library: ctypes.CDLL) -> None:
    """Register the engine's callbacks with the stand-in `library`, for the life of the process."""
    global _bridge
    if _bridge is None:
        _bridge = _Bridge(library)

"""UCX's C interface, as far as one-sided transfers need it: ctypes, no compiler, no other Python package.

Structures are those of `ucp/api/ucp.h`, API 1.18 and later; a field that is not named in a mask is not read by the
library, so a newer library with longer structures reads these as they are. Every call releases the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_int8, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from typing import Any

from xen_moe_jax.transfer._errors import TransferUnavailable

API = (1, 18)
IN_PROGRESS = 1
ERR_BUSY = -15
MEMORY_TYPES = {"host": 0, "cuda": 1}

_FIELD_MEMORY_TYPE = 1 << 6
_FEATURE_RMA, _FEATURE_WAKEUP, _FEATURE_MESSAGES = 1 << 1, 1 << 4, 1 << 6
_THREADS_SERIALIZED = 1
_PEER_ERRORS = 1
_CLOSE_FORCE = 1


Status = c_int8
"""`ucs_status_t` is one byte. A function that returns one leaves the rest of the register undefined: read as an int, an
error can be positive."""


class _Params(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("features", c_uint64), ("rest", c_uint64 * 16)]


class _WorkerParams(ctypes.Structure):
    _fields_ = [("field_mask", c_uint64), ("thread_mode", c_int), ("rest", c_uint64 * 32)]


ErrorHandler = CFUNCTYPE(None, c_void_p, c_void_p, Status)
"""Called by `ucp_worker_progress` with (argument, endpoint, status) when the endpoint's peer is gone."""


class _EndpointParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("error_mode", c_int),
        ("error_handler", ErrorHandler),
        ("error_argument", c_void_p),
        ("rest", c_uint64 * 16),
    ]


class _MapParams(ctypes.Structure):
    _fields_ = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("protection", c_uint),
        ("memory_type", c_int),
        ("exported", c_void_p),
        ("rest", c_uint64 * 4),
    ]


class RequestParams(ctypes.Structure):
    """`ucp_request_param_t`; all zero asks for the defaults."""

    _fields_ = [
        ("mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("callback", c_void_p),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("receive_info", c_void_p),
        ("memory_handle", c_void_p),
        ("rest", c_uint64 * 8),
    ]


def parameters(memory: str) -> RequestParams:
    """Returns the parameters of a request whose local memory is "host" or "cuda": UCX then need not look it up."""
    return RequestParams(mask=_FIELD_MEMORY_TYPE, memory_type=MEMORY_TYPES[memory])


class UcxError(RuntimeError):
    """A UCX call failed; `status` is its (negative) `ucs_status_t`."""

    def __init__(self, call: str, status: int):
        self.status = status
        super().__init__(f"UCX: {call} failed: {status_text(status)} ({status})")


_PROTOTYPES = {
    "ucp_config_read": (Status, [c_char_p, c_char_p, POINTER(c_void_p)]),
    "ucp_config_modify": (Status, [c_void_p, c_char_p, c_char_p]),
    "ucp_config_release": (None, [c_void_p]),
    "ucp_init_version": (Status, [c_uint, c_uint, POINTER(_Params), c_void_p, POINTER(c_void_p)]),
    "ucp_cleanup": (None, [c_void_p]),
    "ucp_get_version_string": (c_char_p, []),
    "ucp_worker_create": (Status, [c_void_p, POINTER(_WorkerParams), POINTER(c_void_p)]),
    "ucp_worker_destroy": (None, [c_void_p]),
    "ucp_worker_get_address": (Status, [c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_worker_release_address": (None, [c_void_p, c_void_p]),
    "ucp_worker_get_efd": (Status, [c_void_p, POINTER(c_int)]),
    "ucp_worker_arm": (Status, [c_void_p]),
    "ucp_worker_progress": (c_uint, [c_void_p]),
    "ucp_ep_create": (Status, [c_void_p, POINTER(_EndpointParams), POINTER(c_void_p)]),
    "ucp_ep_close_nbx": (c_void_p, [c_void_p, POINTER(RequestParams)]),
    "ucp_ep_flush_nbx": (c_void_p, [c_void_p, POINTER(RequestParams)]),
    "ucp_ep_rkey_unpack": (Status, [c_void_p, c_char_p, POINTER(c_void_p)]),
    "ucp_rkey_destroy": (None, [c_void_p]),
    "ucp_mem_map": (Status, [c_void_p, POINTER(_MapParams), POINTER(c_void_p)]),
    "ucp_mem_unmap": (Status, [c_void_p, c_void_p]),
    "ucp_rkey_pack": (Status, [c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t)]),
    "ucp_rkey_buffer_release": (None, [c_void_p]),
    "ucp_put_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParams)]),
    "ucp_get_nbx": (c_void_p, [c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, POINTER(RequestParams)]),
    "ucp_request_check_status": (Status, [c_void_p]),
    "ucp_request_free": (None, [c_void_p]),
}

# Read by the library when it is loaded: JAX owns the process's signal handlers, and a lost peer is this package's to
# report. Watching the allocator serves only a cache of registrations for network cards and GPUs. The user's own
# settings win. JAX allocates GPU memory before UCX looks: a cache of the allocations that UCX has seen would take it
# for the host's.
_LOAD_TIME = {
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    "UCX_LOG_LEVEL": "fatal",
    "UCX_MEMTYPE_CACHE": "n",
}
if not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/infiniband"))):
    _LOAD_TIME["UCX_MEM_EVENTS"] = "n"


@functools.cache
def _libraries() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Loads (libucs, libucp) from the `libucx` wheel and sets their prototypes. Raises `TransferUnavailable`."""
    added = [name for name in _LOAD_TIME if name not in os.environ]
    os.environ.update({name: _LOAD_TIME[name] for name in added})
    try:
        loaded = importlib.import_module("libucx").load_library()
        ucs, ucp = loaded[0], loaded[-1]
        if ucs is None or ucp is None:
            raise ImportError("the libucx package holds no libraries")
    except (ImportError, OSError) as cause:
        raise TransferUnavailable(
            f"xen_moe_jax.transfer moves bytes with UCX, which cannot be loaded ({cause}): "
            "pip install 'xen-moe-jax[transfer]'"
        ) from cause
    finally:
        for name in added:
            del os.environ[name]
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(ucp, name)
        function.restype, function.argtypes = result, arguments
    ucs.ucs_status_string.restype, ucs.ucs_status_string.argtypes = c_char_p, [Status]
    return ucs, ucp


def library() -> ctypes.CDLL:
    """libucp, loaded on first use. Raises `TransferUnavailable`."""
    return _libraries()[1]


def status_text(status: int) -> str:
    return _libraries()[0].ucs_status_string(status).decode()


def _check(call: str, status: int) -> None:
    if status < 0:
        raise UcxError(call, status)


def request_status(returned: int | None) -> int | None:
    """Decodes the result of a `*_nbx` call: a status (0 or negative) if it ended at once, None for a request."""
    if not returned:
        return 0
    signed = ctypes.c_int64(returned).value
    return signed if -256 < signed < 0 else None


def create_context(settings: dict[str, str]) -> int:
    """Creates a context with these settings (names without `UCX_`); environment variables give the other settings."""
    ucp = library()
    config, context = c_void_p(), c_void_p()
    _check("ucp_config_read", ucp.ucp_config_read(None, None, byref(config)))
    try:
        for key, value in settings.items():
            _check(f"ucp_config_modify({key}={value})", ucp.ucp_config_modify(config, key.encode(), value.encode()))
        params = _Params(field_mask=1, features=_FEATURE_RMA | _FEATURE_WAKEUP | _FEATURE_MESSAGES)
        made = ucp.ucp_init_version(*API, byref(params), config, byref(context))
        _check(f"ucp_init with {settings}, and with UCX_... of the environment,", made)
    finally:
        ucp.ucp_config_release(config)
    return context.value or 0


def create_worker(context: int) -> int:
    worker = c_void_p()
    params = _WorkerParams(field_mask=1, thread_mode=_THREADS_SERIALIZED)
    _check("ucp_worker_create", library().ucp_worker_create(context, byref(params), byref(worker)))
    return worker.value or 0


def worker_address(worker: int) -> bytes:
    address, length = c_void_p(), c_size_t()
    _check("ucp_worker_get_address", library().ucp_worker_get_address(worker, byref(address), byref(length)))
    try:
        return ctypes.string_at(address, length.value)
    finally:
        library().ucp_worker_release_address(worker, address)


def worker_event_fd(worker: int) -> int:
    descriptor = c_int()
    _check("ucp_worker_get_efd", library().ucp_worker_get_efd(worker, byref(descriptor)))
    return descriptor.value


def create_endpoint(worker: int, address: bytes, on_error: Any) -> int:
    """Creates an endpoint that notices the death of its peer. `on_error` must outlive the endpoint."""
    endpoint = c_void_p()
    buffer = ctypes.create_string_buffer(address, len(address))
    params = _EndpointParams(
        field_mask=1 | 2 | 4,
        address=ctypes.cast(buffer, c_void_p),
        error_mode=_PEER_ERRORS,
        error_handler=on_error,
    )
    _check("ucp_ep_create", library().ucp_ep_create(worker, byref(params), byref(endpoint)))
    return endpoint.value or 0


def close_endpoint(endpoint: int, force: bool) -> int | None:
    """Starts closing. Returns a request to poll, or None if it is closed. `force` does not wait for bytes in flight."""
    params = RequestParams(mask=1 << 4 if force else 0, flags=_CLOSE_FORCE if force else 0)
    returned = library().ucp_ep_close_nbx(endpoint, byref(params))
    return returned if request_status(returned) is None else None


def map_memory(context: int, pointer: int, nbytes: int, memory: str) -> tuple[int, bytes]:
    """Registers memory that peers may address. Returns (handle, remote key)."""
    ucp = library()
    handle, buffer, length = c_void_p(), c_void_p(), c_size_t()
    params = _MapParams(field_mask=1 | 2 | 16, address=pointer, length=nbytes, memory_type=MEMORY_TYPES[memory])
    _check(f"ucp_mem_map of {nbytes} bytes of {memory} memory", ucp.ucp_mem_map(context, byref(params), byref(handle)))
    try:
        _check("ucp_rkey_pack", ucp.ucp_rkey_pack(context, handle, byref(buffer), byref(length)))
    except UcxError:
        ucp.ucp_mem_unmap(context, handle)
        raise
    try:
        return handle.value or 0, ctypes.string_at(buffer, length.value)
    finally:
        ucp.ucp_rkey_buffer_release(buffer)


def unpack_key(endpoint: int, key: bytes) -> int:
    handle = c_void_p()
    _check("ucp_ep_rkey_unpack", library().ucp_ep_rkey_unpack(endpoint, key, byref(handle)))
    return handle.value or 0

"""Processes of one host act as if they were on several: settings tell NCCL where nodes end, and between nodes NCCL puts
over the network of tests/native/processes/tcp_rma.h, which behaves as badly as a network may and counts its puts.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import shlex
import shutil
import subprocess

import numpy as np

from xen_moe_jax.backends.cuda import nccl

ROOT = pathlib.Path(__file__).parents[2]
LOOPBACK = {"NCCL_IB_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_MNNVL_ENABLE": "0"}
"""NCCL's settings for the way between virtual hosts."""
FAULTS = "seed=1,reorder=1,duplicate=1,delay_us=200"


def build(folder: pathlib.Path) -> pathlib.Path:
    """The network and the process that copies for it, compiled into `folder`; needs a C++ compiler alone."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise FileNotFoundError(f"no C++ compiler: {compiler[0]} is not installed")
    out = folder / "libxen_moe_tcp_rma.so"
    programs = {"xen_moe_rma_copier": ("copier_main", "copier", "driver"), out.name: ("tcp_rma", "copier", "driver")}
    for name, parts in programs.items():
        sources = [f"tests/native/processes/{part}.cc" for part in parts]
        flags = ["-std=c++17", "-O2", "-I.", "-pthread", *(["-fPIC", "-shared"] if name == out.name else [])]
        command = [*compiler, *flags, *sources, "-o", str(folder / name), "-ldl"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=120)
    return out


def enter(process: int, per_node: int, network: str | None, faults: str = "", gpus: int | None = None) -> None:
    """Puts this process into its node: before CUDA and NCCL start. Without a network NCCL finds its own. `gpus`: that
    all processes share in turns (default: one each).
    """
    if gpus is not None and gpus < per_node:
        share_within_nodes()
    os.environ["NCCL_HOSTID"] = f"virtual-node-{process // per_node}"
    if network:
        own = {"NCCL_RMA_PLUGIN": network, "XEN_MOE_RMA": faults, "NCCL_GIN_TYPE": "2", "NCCL_NVLS_ENABLE": "0"}
        os.environ |= LOOPBACK | own


def share_within_nodes() -> None:
    """Lets ranks of one node share a GPU, which NCCL 2.30 and later allow by this setting. JAX's own NCCL may be
    older and refuse: loaded before it, the library's serves both. Before CUDA and NCCL start.
    """
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    path = nccl.find()
    if path is not None:
        ctypes.CDLL(str(path))


def share_a_gpu(process: int) -> None:
    """Lets XLA's collectives run between processes on one GPU: NCCL refuses that within a host, and takes each process
    for one of its own. It reads the environment by itself; this library reads `os.environ`, and sees one host.
    """
    os.environ |= LOOPBACK
    ctypes.CDLL(None).setenv(b"NCCL_HOSTID", f"process-{process}".encode(), 1)


class _Traffic(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint64), ("puts", ctypes.c_uint64), ("signals", ctypes.c_uint64)]


def sent(network: str, process: int, target: int) -> int:
    """Bytes that have left this process for `target` so far: each once, however often it arrived."""
    library = ctypes.CDLL(network, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    out = _Traffic()
    library.xen_moe_rma_traffic(process, target, ctypes.byref(out))
    return out.bytes


def _up(size: int) -> int:
    return -(-size // 16) * 16


LEAD_CHUNKS, LEAD_BYTES = 8, 48
"""A lead carries the routing of `LEAD_CHUNKS` chunks ahead of them; its header (`LeadHeader`) has `LEAD_BYTES`."""


def must_send(
    topk_idx: np.ndarray, rank: int, *, per_node: int, experts: int, row_bytes: int, chunk_tokens: int, combine: bool
) -> tuple[np.ndarray, int]:
    """int64 `[R]`: the bytes that `rank` has to send each other rank in a dispatch (a combine), and how many of all of
    them are rows. Every token crosses once to each other node that it has experts on. The rest:
    docs/design/nodes_kernels.md.

    Args:
      topk_idx: `[R, T, K]`; every entry an expert, or negative.
      row_bytes: of a row on the wire.
    """
    ranks, tokens, top_k = topk_idx.shape
    node_of = np.where(topk_idx < 0, -1, topk_idx // (experts // ranks) // per_node)
    out = np.zeros(ranks, np.int64)
    rows = 0
    for other in range(rank % per_node, ranks, per_node):
        if other == rank:
            continue
        owner, node = (other, rank // per_node) if combine else (rank, other // per_node)
        crossing = int((node_of[owner] == node).any(axis=1).sum())
        chunks = -(-tokens // chunk_tokens)
        out[other] = 16 * chunks + crossing * _up(row_bytes)
        if not combine:
            out[other] += LEAD_BYTES * -(-chunks // LEAD_CHUNKS) + crossing * _up(8 * top_k)
        rows += crossing * _up(row_bytes)
    return out, rows

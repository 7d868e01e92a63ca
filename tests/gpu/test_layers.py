"""Whole Flax layers on one, two and four GPUs: outputs and gradients are those of a dense layer, and bits are those of
the reference backend."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import xen_moe_jax as xm
from tests.gpu import layers
from xen_moe_jax import cuda
from xen_moe_jax.experts import hopper
from xen_moe_jax.flax import _chunks


@pytest.fixture(params=[pytest.param(ranks, marks=getattr(pytest.mark, f"gpu{ranks}")) for ranks in (1, 2, 4)])
def mesh(request, gpu_mesh):
    yield lambda config: gpu_mesh(*layers.axes_of(config, request.param))
    xm.check()


@pytest.mark.parametrize("name", layers.CASES)
def test_equals_the_dense_layer(mesh, name):
    config = layers.CASES[name]
    layers.assert_close(config, mesh(config))


@pytest.mark.parametrize("name", layers.OVERLAPPING)
def test_chunks_whose_operations_overlap(mesh, name, monkeypatch):
    """Matmuls inside `xm.overlap` claim their tiles, as those of a user's own overlap do."""
    config, plans, genuine = layers.OVERLAPPING[name], [], hopper.plan

    def plan(*shape):
        plans.append(genuine(*shape))
        return plans[-1]

    monkeypatch.setattr(_chunks, "OVERLAPPING", ("cuda",))
    monkeypatch.setattr(hopper, "plan", plan)
    kept: list = []  # the memory of a program's asynchronous operations, with their count, lives as long as the program
    layers.assert_close(config, mesh(config), kept)
    assert sum(w["launches"] for w in cuda.workspaces() if w["flights"]) > 0
    assert not hopper.on_hopper() or any(found.forward.claimed for found in plans)


@pytest.mark.parametrize("name", ["swiglu", "gpt-oss"])
def test_the_bits_of_the_reference_backend(mesh, name):
    """The CUDA transport and plain JAX's transport deliver the same rows, so that outputs have equal bits."""
    config = layers.CASES[name]
    plain = dataclasses.replace(config, kernel=xm.KernelConfig(backend="reference"))
    got, expected = (layers.output(c, mesh(config)).view(np.uint16) for c in (config, plain))
    np.testing.assert_array_equal(got, expected)

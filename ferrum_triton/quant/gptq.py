"""GPTQ: integers that make a layer's outputs, not its weights, come out nearest.

Columns are rounded one after the other, and each one's error is made up for by those that are not
rounded yet (Frantar et al., 2022). With H = X Xᵀ of the layer's inputs and H⁻¹ = Uᵀ U, U upper
triangular, rounding column j by an error e takes e · U[j, i] / U[j, j] from every later column i.
Columns that weigh most come first. That order is the computation's alone: grids are chosen before,
of the columns where they are, so that what is stored needs none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ferrum_triton.errors import InputError
from ferrum_triton.quant.rounding import Grid, on_grid

# Added to H's diagonal, by its mean, as in the paper. With ten times as much SmolLM2-135M lost more
# on text like its calibration's, and in one of two trials no less on other text.
DAMPING = 0.01
# Columns after which later ones are brought up to date by one product.
BLOCK = 128
_ADVICE = "Calibrate with other text, or more of it."


class Curvature(NamedTuple):
    """What a layer's inputs say of its columns.

    Attributes:
        order: [k], the columns in the order in which they are rounded.
        upper: float32 [k, k], U of the columns in that order.
        importance: float32 [k], H's diagonal.
    """

    order: Tensor
    upper: Tensor
    importance: Tensor


def curvature(hessian: Tensor) -> Curvature:
    """The curvature that X Xᵀ stands for, float32 [k, k].

    Columns that no input reached are rounded to the nearest: they have no part in any error.

    Raises:
        InputError: it is not finite, or not positive even when it is damped.
    """
    importance = hessian.diagonal().clone()
    if not hessian.isfinite().all():
        raise InputError("gptq", "hessian", "not finite", "finite numbers", _ADVICE)
    order = importance.argsort(descending=True)
    # Cholesky gives lower factors. That of H with its columns reversed, read backwards, is an upper
    # R with H = R Rᵀ, so that U = R⁻¹.
    backwards = order.flip(0)
    damped = hessian[backwards][:, backwards]
    diagonal, mean = damped.diagonal(), importance.mean()
    diagonal.add_(torch.where(diagonal == 0, mean, DAMPING * mean))
    factor, failed = torch.linalg.cholesky_ex(damped)
    if failed or not mean > 0:
        raise InputError("gptq", "hessian", "not positive", "a positive matrix", _ADVICE)
    identity = torch.eye(len(damped), device=damped.device)
    upper = torch.linalg.solve_triangular(factor, identity, upper=False).flip(0, 1)
    return Curvature(order, upper.contiguous(), importance)


def gptq(weight: Tensor, curvature: Curvature, grid: Grid) -> Tensor:
    """The integers of a matrix.

    Args:
        weight: [n, k], finite.
        curvature: that of its inputs.
        grid: what integers stand for.

    Returns:
        uint8 [n, k].
    """
    order, upper = curvature.order, curvature.upper
    size = weight.shape[1] // grid.step.shape[1]
    group_of = (order // size).tolist()
    steps, lows = grid.step.T.contiguous(), grid.low.T.contiguous()
    w = weight.T[order].float()  # [k, n]: a column of the matrix is a row
    q = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    errors = w.new_empty(BLOCK, w.shape[1])
    for start in range(0, len(w), BLOCK):
        stop = min(start + BLOCK, len(w))
        for j in range(start, stop):
            step, low = steps[group_of[j]], lows[group_of[j]]
            q[j] = on_grid(w[j], step, low, grid.largest)
            error = errors[j - start]
            torch.sub(w[j], q[j] * step + low, out=error).div_(upper[j, j])
            # addr_ would differ in last bits. It takes 19 us where this takes 30, of 127 columns by
            # 1,536 rows on two cores (``timeit``); perplexities in docs/models.md are of this one.
            w[j + 1 : stop].addmm_(upper[j, j + 1 : stop, None], error[None], alpha=-1)
        w[stop:].addmm_(upper[start:stop, stop:].T, errors[: stop - start], alpha=-1)
    return torch.empty_like(q).index_copy_(0, order, q).T.contiguous()

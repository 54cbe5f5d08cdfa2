"""The gradients of a real model: parameter shapes of `bench/sizes`, and the case of a call that averages them all."""

from __future__ import annotations

import tomllib
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from timing import Case
from values import Values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["mean_of", "pieces_case", "shapes"]

Array = np.ndarray[Any, Any]


def shapes(model: str = "resnet50") -> list[tuple[int, ...]]:
    """Return the shapes of a model's parameters, first layer first."""
    file = Path(__file__).resolve().parents[1] / "sizes" / f"{model}.toml"
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    return [tuple(tensor["shape"]) for tensor in found["tensors"]]


def mean_of(model: Sequence[tuple[int, ...]], rank: int, world: int, op: str = "mean") -> Values:
    """Return what each rank brings and gets when all its gradients are averaged, as one vector."""
    return Values("all_reduce", "float32", sum(map(prod, model)), rank, world, op)


def pieces_case(
    brought: Sequence[Array],
    call: Callable[[], object],
    result: Callable[[], Sequence[Array]],
    **more: Any,
) -> Case:
    """Return the case of a call that brings many arrays; they and their results count as one vector each."""

    def fill(numbers: Any) -> None:
        start = 0
        for array in brought:
            part = (
                numbers[start : start + array.size].reshape(array.shape)
                if isinstance(numbers, np.ndarray)
                else numbers
            )
            np.copyto(array, part)
            start += array.size

    return Case(fill, call, lambda: np.concatenate([np.ravel(array) for array in result()]), **more)

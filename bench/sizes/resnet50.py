"""Write resnet50.toml, the shapes of ResNet-50's parameters: `python bench/sizes/resnet50.py`.

From the architecture (He, Zhang, Ren and Sun 2016, table 1): a convolution 7x7 of 64 channels; four
stages of 3, 4, 6 and 3 bottlenecks, each of convolutions 1x1, 3x3 and 1x1 with 4 times the
channels, the first of a stage with a convolution 1x1 beside it; a matrix for 1000 classes.
Convolutions have no bias; each is followed by a batch normalization with a scale and a shift.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["parameters", "text"]

FILE = Path(__file__).with_suffix(".toml")
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
EXPANSION = 4
CLASSES = 1000
TENSORS = 161
FLOATS = 25_557_032
Shape = tuple[int, ...]


def parameters() -> Iterator[tuple[str, Shape]]:
    """Yield the name and the shape of each parameter, first layer first."""
    yield from _convolution("conv1", "bn1", 64, 3, 7)
    channels = 64
    for stage, (width, blocks) in enumerate(STAGES, 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            yield from _convolution(f"{name}.conv1", f"{name}.bn1", width, channels, 1)
            yield from _convolution(f"{name}.conv2", f"{name}.bn2", width, width, 3)
            yield from _convolution(f"{name}.conv3", f"{name}.bn3", EXPANSION * width, width, 1)
            if block == 0:
                yield from _convolution(
                    f"{name}.downsample.0", f"{name}.downsample.1", EXPANSION * width, channels, 1
                )
            channels = EXPANSION * width
    yield "fc.weight", (CLASSES, channels)
    yield "fc.bias", (CLASSES,)


def _convolution(
    name: str, norm: str, outputs: int, inputs: int, side: int
) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (outputs, inputs, side, side)
    yield f"{norm}.weight", (outputs,)
    yield f"{norm}.bias", (outputs,)


def text() -> str:
    """Return the file's content."""
    found = list(parameters())
    lines = [
        "# The parameters of ResNet-50, first layer first; written by bench/sizes/resnet50.py.",
        'name = "ResNet-50"',
    ]
    lines += [f"floats = {sum(prod(shape) for _, shape in found)}", "tensors = ["]
    lines += [f'  {{ name = "{name}", shape = {list(shape)} }},' for name, shape in found]
    return "\n".join([*lines, "]", ""])


def main() -> None:
    """Check the sum and write the file."""
    shapes = [shape for _, shape in parameters()]
    floats = sum(map(prod, shapes))
    if (len(shapes), floats) != (TENSORS, FLOATS):
        raise SystemExit(
            f"{len(shapes)} tensors of {floats} floats, not {TENSORS} of {FLOATS}: a rule is wrong"
        )
    FILE.write_text(text(), encoding="utf-8")
    print(f"{FILE.name}: {len(shapes)} tensors, {floats} floats")


if __name__ == "__main__":
    main()

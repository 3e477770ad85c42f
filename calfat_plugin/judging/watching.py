"""The values that the operations of a model's forward pass are given, and the range of each on images."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from calfat_plugin.datasets.batches import batches
from calfat_plugin.interfaces import EvaluationTask

_NO_WIDTH = 1e-6  # of the largest number of its tensor: rounding, below which a value is said to be always the same
_DIFFERENCE = -1  # in place of the number of an argument


class Site(NamedTuple):
    """A tensor that an operation is given, in every forward pass."""

    operation: int  # which one, from 0
    argument: int  # which of its tensors; _DIFFERENCE: its first tensor minus its second
    shape: tuple[int, ...]  # of the part that belongs to one image

    @property
    def numbers(self) -> int:
        """How many numbers an image has there."""
        return math.prod(self.shape)

    @property
    def channels(self) -> int:
        """How many maps an image has there; 0: the tensor has none."""
        return self.shape[0] if len(self.shape) == 3 else 0


class Part(NamedTuple):
    """A tensor of a site, as autograd knows it: the site's values are the sum of ``sign`` times its parts."""

    edge: GradientEdge | None  # None: no gradient leads from there to the image
    rows: slice  # of the images of the batch
    image_dimension: int | None  # None: all of it belongs to one image
    sign: float


class View(NamedTuple):
    """What is shown of a site in one forward pass."""

    site: Site
    rows: slice  # which images of the batch, N of them
    values: Callable[[], Tensor]  # (N, numbers + channels): every number, then the mean of every map
    parts: Callable[[], list[Part]]


class Watching(TorchDispatchMode):
    """Within it ``see`` is shown every tensor that an operation is given and that has a row for each image.

    A dispatch mode sees the operations that functions, modules, TorchScript and autograd functions are made of, so it
    does not matter how they are called. What is only another view of a tensor that was shown is left out.
    """

    def __init__(self, rows: slice, see: Callable[[View], None], alone: bool = False) -> None:
        """Of an image that is ``alone`` in its batch every tensor is shown, whether or not it has a row for it."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = rows
        self._images = rows.stop - rows.start
        self._alone = alone
        self._see = see
        self._operation = 0
        self._versions: Any = WeakTensorKeyDictionary()  # of tensors that were shown

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True, the default, imports PyTorch's compiler at the first operation, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Show what ``func`` is given before it changes it in place, and call it; this mode is off meanwhile."""
        if func is torch.ops.aten.detach.default:
            # Autograd calls it for what it keeps, so it would number operations otherwise in a pass with gradients.
            return func(*args, **(kwargs or {}))
        tensors = []
        for leaf in tree_leaves((args, kwargs)):
            if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
                continue
            if leaf.is_complex() or leaf.numel() == 0:
                continue
            if self._alone or self._image_dimension(leaf) is not None:
                tensors.append(leaf)
        for argument, tensor in enumerate(tensors):
            if self._is_new(tensor):
                self._show(argument, [(tensor, 1.0)])
        result = func(*args, **(kwargs or {}))
        if len(tensors) == 2 and _chooses(result, *tensors):
            # Each of the two may keep its range while their order, which decides, becomes another.
            self._show(_DIFFERENCE, [(tensors[0], 1.0), (tensors[1], -1.0)])
        self._operation += 1
        return result

    def _image_dimension(self, tensor: Tensor) -> int | None:
        """Which dimension counts the images; None: none does."""
        for dimension, size in enumerate(tensor.shape):
            if size == self._images:
                return dimension
        return None

    def _is_new(self, tensor: Tensor) -> bool:
        if self._versions.get(tensor) == _version(tensor):
            return False
        self._versions[tensor] = _version(tensor)
        base = tensor._base
        if base is None:
            return True
        return not isinstance(base, nn.Parameter) and self._versions.get(base) != _version(base)

    def _show(self, argument: int, terms: Sequence[tuple[Tensor, float]]) -> None:
        dimension = self._image_dimension(terms[0][0])
        shape = list(terms[0][0].shape)
        if dimension is not None:
            del shape[dimension]
        site = Site(self._operation, argument, tuple(shape))

        def values() -> Tensor:
            total = torch.zeros((), device=terms[0][0].device)
            for tensor, sign in terms:
                by_image = tensor.detach().float()
                if dimension is None:
                    by_image = by_image[None]
                else:
                    by_image = by_image.movedim(dimension, 0)
                total = total + sign * by_image
            numbers = total.reshape(self._images, -1)
            if not site.channels:
                return numbers
            return torch.cat([numbers, total.flatten(2).mean(dim=2)], dim=1)

        def parts() -> list[Part]:
            parts_of_site = []
            for tensor, sign in terms:
                edge = None
                if tensor.grad_fn is not None:
                    edge = get_gradient_edge(tensor)
                parts_of_site.append(Part(edge, self._rows, dimension, sign))
            return parts_of_site

        self._see(View(site, self._rows, values, parts))


def _version(tensor: Tensor) -> int:
    """How often it was changed in place."""
    if tensor.is_inference():  # PyTorch does not count it there
        return 0
    return tensor._version


def _chooses(result: Any, first: Tensor, second: Tensor) -> bool:
    """Whether each number of the result is one of two numbers, or says which is larger."""
    if not isinstance(result, Tensor) or not first.shape == second.shape == result.shape:
        return False
    if not (first.is_floating_point() and second.is_floating_point()):
        return False
    return result.dtype == torch.bool or bool(((result == first) | (result == second)).all())


class OneByOne(nn.Module):
    """A model that is to be watched on one image at a time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits


def watched(model: nn.Module, x: Tensor, see: Callable[[View], None]) -> Tensor:
    """The logits of x; ``see`` is shown the values on the way."""
    points = x
    if x.requires_grad:
        points = x + 0  # a gradient leads to a result of an operation, which x itself is not
    if not isinstance(model, OneByOne):
        with Watching(slice(0, len(x)), see):
            logits: Tensor = model(points)
        return logits
    logits_of_each = []
    for row in range(len(x)):
        rows = slice(row, row + 1)
        with Watching(rows, see, alone=True):
            logits_of_each.append(model(points[rows]))
    return torch.cat(logits_of_each)


class _Shapes(TorchDispatchMode):
    """Notes the shapes of what operations are given, each with that of the tensor that it is a view of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes: list[tuple[torch.Size, torch.Size]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As for ``Watching``."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What is only given another shape is judged by what is done with it then.
        if not func.is_view and func is not torch.ops.aten._unsafe_view.default:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter):
                    base = leaf if leaf._base is None else leaf._base
                    self.shapes.append((leaf.shape, base.shape))
        return func(*args, **(kwargs or {}))


def hides_images(model: nn.Module, x: Tensor, images: int) -> bool:
    """Whether a model computes values of so many images of which ``Watching`` cannot say whose they are.

    A batch of another size shows it: the operations are others, or a tensor is larger in no dimension of its own.
    """
    sizes = (2, max(3, images))
    shapes = []
    for size in sizes:
        rows = torch.arange(size, device=x.device) % len(x)
        with torch.no_grad(), _Shapes() as watch:
            model(x[rows])
        shapes.append(watch.shapes)
    if len(shapes[0]) != len(shapes[1]):
        return True
    for (shape, base), (larger_shape, larger_base) in zip(*shapes, strict=True):
        if not _grows(shape, larger_shape, sizes) and not _grows(base, larger_base, sizes):
            return True
    return False


def _grows(shape: torch.Size, larger: torch.Size, sizes: tuple[int, int]) -> bool:
    """Whether a shape stays as it is but for dimensions that count the images."""
    if len(shape) != len(larger):
        return False
    return all(few == many or (few, many) == sizes for few, many in zip(shape, larger, strict=True))


@dataclass
class Ranges:
    """The least and the largest that the values of each site were on all images that were shown."""

    low: dict[Site, Tensor]
    high: dict[Site, Tensor]

    def widen(self, view: View) -> None:
        """Take in the images of a forward pass."""
        values = view.values()
        low, high = values.amin(dim=0), values.amax(dim=0)
        if view.site in self.low:
            low = torch.minimum(low, self.low[view.site])
            high = torch.maximum(high, self.high[view.site])
        self.low[view.site], self.high[view.site] = low, high

    def widths(self, site: Site) -> Tensor:
        """Of the ranges; at least what is rounding there."""
        low, high = self.low[site], self.high[site]
        return high - low + self.rounding(site)

    def rounding(self, site: Site) -> float:
        """By how much a value may move that is said to be always the same."""
        largest = torch.maximum(self.low[site].abs(), self.high[site].abs()).nan_to_num(0.0, 0.0, 0.0).amax()
        return _NO_WIDTH * float(largest) + 1e-30


def measured_ranges(task: EvaluationTask, most: int | None = None) -> Ranges:
    """On the images of a task; on so many of them."""
    ranges = Ranges({}, {})
    data = task.data
    if most is not None and len(data) > most:
        data = data.subset(np.arange(most))
    with torch.no_grad():
        for images, _, _ in batches(data, task.batch_size, task.device):
            watched(task.model, images, ranges.widen)
    return ranges

"""RoBal's cosine classifier (Wu et al., CVPR 2021)."""

from __future__ import annotations

from torch import Tensor, nn

from calfat_plugin.errors import ModelError
from calfat_plugin.modifiers.margins import cosine_logits


class CosineClassifier(nn.Module):
    """cos_k = <w_k, h> / ((||w_k|| + gamma) ||h||), without bias, at scale 1."""

    def __init__(self, linear: nn.Linear, gamma: float) -> None:
        """linear: the classifier to replace, whose weight is taken over; its initial distribution is RoBal's own."""
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone())
        self.gamma = gamma

    def forward(self, features: Tensor) -> Tensor:
        """(N, F) to (N, num_classes) in (-1, 1)."""
        return cosine_logits(features, self.weight, gamma=self.gamma)


def with_cosine_classifier(model: nn.Module, gamma: float) -> nn.Module:
    """Replace ``model.classifier``, a linear layer, in place; returns the model.

    Raises:
        ModelError: the model has no such layer.
    """
    linear = getattr(model, "classifier", None)
    if not isinstance(linear, nn.Linear):
        raise ModelError(
            f"model {type(model).__name__}: RoBal replaces the last layer, an nn.Linear under the name 'classifier'; "
            f"found {'nothing' if linear is None else type(linear).__name__}. Derive from models.ImageClassifier."
        )
    model.classifier = CosineClassifier(linear, gamma)
    return model

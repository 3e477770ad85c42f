"""What a long evaluation keeps on disk to continue after a crash: JSON, written atomically, bound to its inputs."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from calfat_plugin.disk import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from calfat_plugin.interfaces import EvaluationTask

log = logging.getLogger(__name__)

_FORMAT = "calfat-attack-1"
_DIGEST_LETTERS = 16  # in file names; the file holds the whole digest


@dataclass
class AttackState:
    """How far an attack made of sub-attacks has come.

    Attributes:
        robust: (N,) bool on the CPU, examples that nothing has broken yet.
        attacked: (N,) bool, those that were robust when the current sub-attack began; it works through them.
        position: index of the current sub-attack.
        batch: its finished batches.
        finished: a row for each finished sub-attack, ready for JSON.
        warnings: findings so far, each with ``code`` and ``text``.
        zero_gradients: starts with a gradient of exactly zero.
        seconds: spent so far, in all processes together.
    """

    robust: Tensor
    attacked: Tensor
    position: int = 0
    batch: int = 0
    finished: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, str]] = field(default_factory=list)
    zero_gradients: int = 0
    seconds: float = 0.0


class AttackProgressFile:
    """Keeps an :class:`AttackState` in a folder, or nowhere when there is none.

    Args:
        task: its ``scratch`` is the folder, made when first needed.
        settings: of the attack, JSON-ready. With the task they make the :func:`fingerprint`: another one, another file.
    """

    def __init__(self, task: EvaluationTask, settings: Mapping[str, Any]) -> None:
        self._digest = "" if task.scratch is None else fingerprint(task, settings)
        self.path = task.scratch and task.scratch / f"autoattack-{self._digest[:_DIGEST_LETTERS]}.json"

    def load(self, clean_correct: Tensor) -> AttackState:
        """The state to continue from; if there is none, a fresh one in which the ``clean_correct`` examples are robust.

        A damaged file is left aside with a line in the log: doing the work again is always right.
        """
        fresh = AttackState(robust=clean_correct.clone(), attacked=clean_correct.clone())
        if self.path is None or not self.path.exists():
            return fresh
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            if content.pop("format") != _FORMAT or content.pop("digest") != self._digest:
                raise ValueError("it is of another format, model, data or setting")
            robust, attacked = (_bits(content.pop(name), clean_correct) for name in ("robust", "attacked"))
            state = AttackState(robust=robust, attacked=attacked, **content)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            log.warning("%s: cannot be used (%s); the attack starts again", self.path, error)
            return fresh
        log.info("%s: continuing after %d sub-attacks and %d batches", self.path, state.position, state.batch)
        return state

    def save(self, state: AttackState) -> None:
        """Write atomically: after a crash there is the old state or the new one, never half of one."""
        if self.path is None:
            return
        content = dict(vars(state))  # dataclasses.asdict would copy tensors only to have them replaced
        for name in ("robust", "attacked"):
            content[name] = "".join("1" if bit else "0" for bit in content[name].tolist())
        text = json.dumps({"format": _FORMAT, "digest": self._digest, **content}, allow_nan=False)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def fingerprint(task: EvaluationTask, settings: Mapping[str, Any]) -> str:
    """A digest of the model, the data and the settings: where one bit differs, no state is shared.

    Args:
        task: its model counts with structure, parameters and all buffers, also those outside the state dict.
        settings: JSON-ready.
    """
    import torch  # here, not above: recipes are checked without torch

    facts = [settings, torch.__version__, task.device.type, task.num_classes, repr(task.model)]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    tensors = {
        **dict(task.model.named_parameters()),
        **dict(task.model.named_buffers()),
        "x/": task.data.x,
        "y/": task.data.y,
        "clean_correct/": task.clean_correct,
    }
    for name, tensor in tensors.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _bits(text: str, like: Tensor) -> Tensor:
    """A text of 0 and 1 as (N,) bool."""
    if len(text) != len(like) or set(text) - {"0", "1"}:
        raise ValueError("it is about other examples")
    return like.new_tensor([letter == "1" for letter in text])

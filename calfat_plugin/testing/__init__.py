"""Checks for the tests of a plugin: one call holds it to everything that its kind must keep.

::

    from calfat_plugin.testing import check_trainer

    def test_it_keeps_the_contract() -> None:
        check_trainer("my-fat")

A check works on tiny images and a tiny model, in seconds, on the CPU and without files of yours. It takes one thread of
torch, and puts the number of threads back afterwards. What breaks the contract raises ``AssertionError`` with what was
expected; what the framework itself refuses raises its own error.
"""

from calfat_plugin.testing.evaluators import check_evaluator
from calfat_plugin.testing.federation import check_aggregator, check_attacker
from calfat_plugin.testing.inner_attacks import check_inner_attack
from calfat_plugin.testing.inputs import check_dataset, check_logger, check_model, check_partition
from calfat_plugin.testing.tiny import TinyModel, builtin_registry, same_bits, tiny_dataset, tiny_images, tiny_task
from calfat_plugin.testing.trainers import check_modifier, check_trainer

__all__ = [
    "TinyModel",
    "builtin_registry",
    "check_aggregator",
    "check_attacker",
    "check_dataset",
    "check_evaluator",
    "check_inner_attack",
    "check_logger",
    "check_model",
    "check_modifier",
    "check_partition",
    "check_trainer",
    "same_bits",
    "tiny_dataset",
    "tiny_images",
    "tiny_task",
]

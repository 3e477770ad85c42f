"""An attacker that trains honestly on wrong labels."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from calfat_plugin.entries import AttackerEntry, Citation
from calfat_plugin.interfaces import Attacker
from calfat_plugin.options import NoOptions

if TYPE_CHECKING:
    from calfat_plugin.datasets import ImageData


class LabelFlip(Attacker):
    """Trains on y <- C - 1 - y (Karimireddy et al. 2021, section 6)."""

    def __init__(self, options: NoOptions) -> None:
        """options: none."""

    def poisoned(self, data: ImageData, num_classes: int) -> ImageData:
        return replace(data, y=num_classes - 1 - data.y)


ENTRY = AttackerEntry(
    "label_flip",
    build=LabelFlip,
    summary="trains on wrong labels",
    formula="y <- C - 1 - y",
    citation=Citation(
        "Tolpegin et al., Data Poisoning Attacks Against Federated Learning Systems, ESORICS 2020",
        """@inproceedings{tolpegin2020data,
  title     = {Data Poisoning Attacks Against Federated Learning Systems},
  author    = {Tolpegin, Vale and Truex, Stacey and Gursoy, Mehmet Emre and Liu, Ling},
  booktitle = {European Symposium on Research in Computer Security},
  year      = {2020}
}""",
    ),
)

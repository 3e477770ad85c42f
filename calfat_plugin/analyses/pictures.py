"""Evidence as PNG files: each clean image, its perturbation and its adversarial image."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from calfat_plugin.disk import TRY_AGAIN, reporting_disk_errors
from calfat_plugin.report.images import perturbation, png

if TYPE_CHECKING:
    from calfat_plugin.analyses.replay import Replay


def write_pictures(replay: Replay, folder: Path) -> int:
    """Write three files for each adversarial image, and say how many of these fall with 8 bits a value, as they are.

    The names say the position in the test split, and of adversarial images the attack and the class the model says.
    """
    import torch

    from calfat_plugin.datasets.data import pixels

    evidence = replay.evidence
    data = replay.data
    still = 0
    with reporting_disk_errors(folder, TRY_AGAIN), torch.no_grad():
        folder.mkdir(parents=True, exist_ok=True)
        for row, at in enumerate(evidence.index.tolist()):
            x = pixels(data.x[at : at + 1]).cpu()
            x_adv = evidence.x_adv[row : row + 1]
            rounded = (x_adv * 255).round() / 255
            still += int(replay.model(rounded.to(data.x.device)).argmax() != evidence.label[at])
            attack = evidence.attacks[int(evidence.by[row])]
            stem = f"{int(replay.positions[at]):05}"
            (folder / f"{stem}-class-{int(evidence.label[at])}.png").write_bytes(png(x[0]))
            change, factor = perturbation(x[0], x_adv[0])
            (folder / f"{stem}-perturbation-x{factor:.3g}.png").write_bytes(png(change))
            name = re.sub(r"[^\w-]", "_", attack)
            (folder / f"{stem}-{name}-says-{int(evidence.prediction[row])}.png").write_bytes(png(x_adv[0]))
    return still

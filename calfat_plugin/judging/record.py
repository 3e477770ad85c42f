"""``trust.json``: the evidence and the verdict, written whole after every check, so that a killed battery continues."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from calfat_plugin.analyses.attack import CHOOSE_OUTPUT
from calfat_plugin.disk import RESTORE, TRY_AGAIN, read_bytes, read_json, refuse_link, refuse_unwritable, write_json
from calfat_plugin.errors import RunError
from calfat_plugin.evaluators.autoattack.autoattack import as_bits, from_bits
from calfat_plugin.judging.findings import Findings
from calfat_plugin.judging.verdict import Verdict
from calfat_plugin.results import EVIDENCE

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 3  # also a part of the digest
_BEGINS = re.compile(r'\{\s*"format"')  # as every version wrote it, also where the end is lost
_BEGINNING = 1000  # bytes that are looked at to tell whose file it is


@dataclass(frozen=True)
class Record:
    """A file with what is known so far."""

    path: Path
    digest: str  # of the question: model, images, budget, seed, other models
    facts: Mapping[str, Any]  # what the file says beside evidence and verdict
    evidence: tuple[Findings, ...] = ()  # of the checks that are done, in order
    robust: Tensor | None = None  # (N,) bool, what no attack has broken yet; None: no check is done
    full: bool = False  # whether all checks were asked for

    @classmethod
    def open(cls, path: Path, digest: str, facts: Mapping[str, Any], examples: int) -> Record:
        """What an earlier process left in the file; nothing where there is none."""
        refuse_unwritable(path.parent, CHOOSE_OUTPUT)
        refuse_link(cls(path, digest, facts).scratch)
        if not path.exists():
            return cls(path, digest, facts)
        content = {}
        if path.is_file() and _BEGINS.match(read_bytes(path, _BEGINNING).decode(errors="replace")):
            content = read_json(path)
        if "verdict" not in content:
            raise RunError(
                f"{path}: is there already, and calfat trust did not write it. It is not overwritten: name another "
                "file with --output."
            )
        if content.get("digest") != digest:
            raise RunError(
                f"{path}: holds the verdict on another model, budget, seed or set of images, or another version's. It "
                "is not overwritten: remove it, or write the new one elsewhere with --output."
            )
        try:
            evidence = tuple(map(Findings.from_json, content["checks"]))
            robust = from_bits(content["robust"], examples)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"{path}: the file is damaged ({type(error).__name__}: {error}). {RESTORE}") from None
        return cls(path, digest, facts, evidence, robust, content.get("full") is True)

    @property
    def scratch(self) -> Path:
        """Where a check that takes long keeps what it needs to continue."""
        return self.path.with_name(f".{self.path.stem}-{self.digest[:16]}-unfinished")

    @property
    def kept(self) -> Path:
        """The file with the adversarial images."""
        return self.path.with_name(f"{self.path.stem}.{EVIDENCE}")

    def save(self, verdict: Verdict, *, finished: bool) -> None:
        """Write the file atomically."""
        content = {
            "format": FORMAT,
            **self.facts,
            "finished": finished,
            "full": self.full,
            "verdict": dataclasses.asdict(verdict),
            "checks": [findings.as_json() for findings in self.evidence],
            "robust": "" if self.robust is None else as_bits(self.robust),
            "digest": self.digest,
        }
        write_json(self.path, content, TRY_AGAIN)

"""FedML's ``defense_args``: a defence of the host's is the aggregator of this package that does the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from calfat_plugin.errors import listed
from calfat_plugin.options import describe, yaml_text
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.sections import section_at

_SECTION, _SWITCH, _TYPE = "defense_args", "enable_defense", "defense_type"
_AGGREGATOR: KeyPath = ("calfat", "aggregator")


@dataclass(frozen=True)
class _Defense:
    """An aggregator in the place of a defence.

    Attributes:
        aggregator: its name.
        options: the host's key to the option that it sets.
        fixed: further options, which give the host's behaviour.
    """

    aggregator: str
    options: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)


_F = {"byzantine_client_num": "f"}
_BY_EXAMPLES = {"weights": "examples"}  # as the host averages what its defence lets through

DEFENSES: Mapping[str, _Defense] = {
    "krum": _Defense("krum", _F),
    "multikrum": _Defense("multi_krum", {**_F, "krum_param_m": "m"}, _BY_EXAMPLES),
    "bulyan": _Defense("bulyan", _F),
    "wise_median": _Defense("median"),
    "trimmed_mean": _Defense("trimmed_mean", _F),
    "rfa": _Defense("geometric_median", {}, _BY_EXAMPLES),
    "cclip": _Defense("centered_clipping", {"tau": "radius"}, _BY_EXAMPLES),
    "norm_diff_clipping": _Defense("norm_clipping", {"norm_bound": "bound"}, _BY_EXAMPLES),
}
"""``defense_args.defense_type`` of FedML 0.9.6 to what does it here."""


def with_defense(document: Document, warnings: list[str]) -> Document:
    """Write ``calfat.aggregator`` as ``defense_args`` ask for it; the host's own defence stays off.

    Args:
        document: the recipe.
        warnings: receives a sentence on the aggregator that is used.

    Raises:
        RecipeError: a type or a parameter that there is not, or two answers to which aggregator it is.
    """
    if document.get((_SECTION,)) is None:
        return document
    section = {key: value for key, value in section_at(document, (_SECTION,)).items() if value is not None}
    if section.pop(_SWITCH, None) is not True:  # the table of the host's keys has the words for the others
        return document
    kind, at = section.pop(_TYPE, None), (_SECTION, _TYPE)
    found = DEFENSES.get(kind.strip()) if isinstance(kind, str) else None
    if found is None:
        raise document.error(at, f"got {describe(kind)}; of FedML's defences there are {listed(DEFENSES)} here.")
    for key in section:
        if key not in found.options:
            known = f"It takes {listed(found.options)}." if found.options else "It takes none."
            raise document.error((_SECTION, key), f"the defence '{kind}' has no such parameter here. {known}")
    if document.get(_AGGREGATOR) is not None:
        raise document.error(
            at,
            f"'{kind}' selects the aggregator {found.aggregator}, and calfat.aggregator in "
            f"{document.place(_AGGREGATOR)} selects one, too; keep one of the two.",
        )
    options = {option: section[key] for key, option in found.options.items() if key in section}
    chosen = {"name": found.aggregator, **options, **found.fixed}
    place = document.place((_SECTION,))
    warnings.append(f"{place}: {_SECTION}: FedML's '{kind}' is calfat.aggregator: {yaml_text(chosen)} here.")
    off = document.with_value((_SECTION,), {_SWITCH: False}, place)
    return off.with_value(_AGGREGATOR, chosen, f"{place}: {_SECTION}")

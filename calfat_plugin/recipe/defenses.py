"""FedML's ``defense_args``: a defence of the host's is the aggregator of this package that does the same."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from calfat_plugin.errors import listed
from calfat_plugin.options import describe, yaml_text
from calfat_plugin.recipe.document import Document, KeyPath
from calfat_plugin.recipe.sections import section_at

_SECTION = "defense_args"
_AGGREGATOR: KeyPath = ("calfat", "aggregator")


@dataclass(frozen=True)
class _Defense:
    """An aggregator in the place of a defence.

    Attributes:
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
        warnings: receives a sentence on the aggregator that is used.

    Raises:
        RecipeError: a type or a parameter that there is not, or two answers to which aggregator it is.
    """
    options = {kind: found.options for kind, found in DEFENSES.items()}
    asked = asked_of_host(document, _SECTION, "defense", options, "defence")
    if asked is None:
        return document
    kind, section = asked
    found = DEFENSES[kind]
    if document.get(_AGGREGATOR) is not None:
        raise document.error(
            (_SECTION, "defense_type"),
            f"'{kind}' selects the aggregator {found.aggregator}, and calfat.aggregator in "
            f"{document.place(_AGGREGATOR)} selects one, too; keep one of the two.",
        )
    given = {option: section[key] for key, option in found.options.items() if key in section}
    chosen = {"name": found.aggregator, **given, **found.fixed}
    place = document.place((_SECTION,))
    warnings.append(f"{place}: {_SECTION}: FedML's '{kind}' is calfat.aggregator: {yaml_text(chosen)} here.")
    off = document.with_value((_SECTION,), {"enable_defense": False}, place)
    return off.with_value(_AGGREGATOR, chosen, f"{place}: {_SECTION}")


def asked_of_host(
    document: Document, name: str, what: str, options: Mapping[str, Collection[str]], word: str
) -> tuple[str, dict[str, Any]] | None:
    """What a section of the host's asks for; None where it is off.

    Args:
        what: ``defense`` of ``enable_defense`` and ``defense_type``.
        options: type to the keys of the section that it takes, of all that there are here.
        word: a defence or an attack in messages.

    Returns:
        (type, key to value of what else the section says).

    Raises:
        RecipeError: a type or a parameter that there is not.
    """
    if document.get((name,)) is None:
        return None
    section = {key: value for key, value in section_at(document, (name,)).items() if value is not None}
    if section.pop(f"enable_{what}", None) is not True:  # the table of the host's keys has the words for the others
        return None
    kind = section.pop(f"{what}_type", None)
    known = options.get(kind.strip()) if isinstance(kind, str) else None
    if known is None:
        text = f"got {describe(kind)}; of FedML's {word}s there are {listed(options)} here."
        raise document.error((name, f"{what}_type"), text)
    for key in section:
        if key not in known:
            takes = f"It takes {listed(known)}." if known else "It takes none."
            raise document.error((name, key), f"the {word} '{kind}' has no such parameter here. {takes}")
    return kind.strip(), section

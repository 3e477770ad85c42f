"""The pages of ``docs/reference`` about Python names, made from signatures and docstrings.

griffe reads the source without importing it. The pages are plain Markdown: they read the same in a clone, on the forge
and on the site. ``python reference_pages.py docs`` writes them; a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import griffe

_ROOT = Path(__file__).resolve().parent
_PACKAGE = "calfat_plugin"
_LINE = 100  # characters of a signature; a longer one has a line for each argument


_LIMITED = re.compile(r"\b(Count|Share|Finite|FiniteOrNan)\b")  # of ``calfat_plugin/typed_json.py``


@dataclass(frozen=True)
class PythonPage:
    """What a page shows.

    Attributes:
        title: its heading.
        intro: the text below it.
        names: heading of a group to the paths of its names below ``calfat_plugin``; an empty heading is left out.
    """

    title: str
    intro: str
    names: Mapping[str, Sequence[str]]


def _in(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}" for name in names]


#: Name of the file, without .md, to its page. A test compares the names with what the package offers.
PAGES: Mapping[str, PythonPage] = {
    "runs": PythonPage(
        "Runs, models and attacks",
        "What programs and notebooks call; [python.md](../python.md) shows how.",
        {
            "": [
                *("run", "load_run", "Run", "load_model", "trust", "Verdict", "replay", "Replay", "export", "Export"),
                *("load_dataset", "evaluate", "attack", "__version__"),
            ]
        },
    ),
    "hooks": PythonPage(
        "Hooks, entries and options",
        "What a plugin implements and offers; [hooks.md](../hooks.md) explains each with an example.",
        {
            "": ["hookimpl"],
            "Hooks that offer something": _in(
                "hookspecs",
                *("calfat_local_trainers", "calfat_loss_modifiers", "calfat_inner_attacks", "calfat_aggregators"),
                *("calfat_evaluators", "calfat_datasets", "calfat_models", "calfat_partitions", "calfat_attackers"),
                "calfat_loggers",
            ),
            "Hooks of a run's life": [
                *_in("hookspecs", "calfat_run_started", "calfat_round_finished"),
                *_in("hookspecs", "calfat_run_finished", "calfat_run_stopped"),
                *("RunInfo", "RoundRecord", "RunResult"),
            ],
            "Entries": [
                *("entries.Entry", "TrainerEntry", "ModifierEntry", "InnerAttackEntry", "AggregatorEntry"),
                *("EvaluatorEntry", "DatasetEntry", "ModelEntry", "PartitionEntry", "AttackerEntry", "LoggerEntry"),
                *("Citation", "Preset"),
            ],
            "Options": ["option", "NoOptions", "Recipe", "Registry"],
        },
    ),
    "training": PythonPage(
        "Local training",
        "The interface of methods, loss modifiers and inner attacks; [beyond_two_losses.md](../beyond_two_losses.md) "
        "builds a method with it.",
        {
            "Methods": [
                *("AdversarialTrainer", "AttackBatch", "TrainBatch", "RoundEnd", "LocalTrainer", "LocalTask"),
                *("TrainSettings", "LocalUpdate"),
            ],
            "Loss modifiers": ["LossModifier", "ClientLoss"],
            "Inner attacks": ["InnerAttack", "InnerTask"],
            "Random numbers": ["derive_seed", "generator"],
        },
    ),
    "aggregation": PythonPage(
        "Aggregation",
        "The interface of aggregators, and their part of local training; and of attackers.",
        {
            "": [
                *("Aggregator", "AggregationTask", "Aggregate", "MonitoredData", "Attacker", "AttackTask"),
                *("LocalCorrection", "ActiveCorrection", "weighted_average"),
            ]
        },
    ),
    "evaluation": PythonPage(
        "Evaluation",
        "The interface of evaluators, and the budget of attacks.",
        {
            "": [
                *("Evaluator", "EvaluationTask", "RoundClients", "SetUpTask", "EvaluationResult", "AttackEvaluator"),
                *("BudgetedAttack", "BudgetOptions", "ThreatModel"),
            ]
        },
    ),
    "inputs": PythonPage(
        "Data and models",
        "What data sets and networks are made of.",
        {"": ["Dataset", "ImageData", "Augmentation", "ImageClassifier"]},
    ),
    "testing": PythonPage(
        "Tests of plugins",
        "`calfat_plugin.testing` has a check for each kind of plugin. One call checks all that the kind must keep "
        "([hooks.md](../hooks.md#tests-of-a-plugin)).",
        {
            "Checks": _in(
                "testing",
                *("check_trainer", "check_modifier", "check_inner_attack", "check_aggregator", "check_attacker"),
                *("check_evaluator", "check_dataset", "check_model", "check_partition", "check_logger"),
            ),
            "Tiny inputs": _in(
                "testing", "builtin_registry", "tiny_dataset", "tiny_images", "TinyModel", "tiny_task", "same_bits"
            ),
        },
    ),
    "errors": PythonPage(
        "Errors",
        "What goes wrong and can be put right. The commands print the text of such an error and end with exit code 2.",
        {
            "": [
                *("CalfatError", "RecipeError", "OptionError", "PluginError", "DataError", "ModelError"),
                *("BudgetError", "UpdateError", "RunError", "HostError"),
            ]
        },
    ),
}


def python_pages() -> Mapping[str, str]:
    """Path in ``docs/`` to content of every page about Python names."""
    return {f"reference/{name}.md": _page(name) for name in PAGES}


@cache
def package() -> griffe.Object | griffe.Alias:
    """The package as its source says."""
    options = {"returns_multiple_items": False, "returns_named_value": False}
    return griffe.load(_PACKAGE, search_paths=[_ROOT], docstring_parser="google", docstring_options=options)


def find(path: str) -> griffe.Object:
    """What a path below ``calfat_plugin`` names, where it is defined."""
    there = package()[path]
    return there.final_target if isinstance(there, griffe.Alias) else there


# --- a page -----------------------------------------------------------------------------------------------------------


def _page(name: str) -> str:
    page = PAGES[name]
    parts = [f"# {page.title}", page.intro, _summary(page)]
    for heading, paths in page.names.items():
        level = 3 if len(page.names) > 1 and heading else 2
        if heading:
            parts.append(f"## {heading}")
        for path in paths:
            parts += _described(path, level)
    return "\n\n".join(parts) + "\n"


def _summary(page: PythonPage) -> str:
    """A table of the names with the first sentence of each, for readers without an outline beside the page."""
    rows = ["| name | what it is |", "| --- | --- |"]
    for paths in page.names.values():
        for path in paths:
            found = find(path)
            text = found.docstring.value if found.docstring else ""
            paragraph = " ".join(text.split("\n\n")[0].split())
            sentence = re.split(r"(?<=\.)\s", paragraph)[0].replace("|", "\\|")
            rows.append(f"| [`{found.name}`](#{anchor_of(path)}) | {sentence} |")
    return "\n".join(rows)


def _heading(found: griffe.Object, of: str = "") -> str:
    """The heading of a name. ``class`` and the parentheses keep ``Run`` and ``run()`` apart for whoever reads."""
    if found.is_class:
        return f"class `{found.name}`"
    return f"`{of}{found.name}()`" if found.is_function else f"`{of}{found.name}`"


def anchor_of(path: str) -> str:
    """The anchor that forges and the site make of a name's heading: small letters, no punctuation, - for a space."""
    return re.sub(r"[^\w\- ]", "", _heading(find(path)).lower()).replace(" ", "-")


def _described(path: str, level: int) -> Iterator[str]:
    """The parts of the section about a name."""
    found = find(path)
    yield f"{'#' * level} {_heading(found)}"
    if isinstance(found, griffe.Class):
        yield from _class(found, level)
    elif isinstance(found, griffe.Function):
        yield from _function(found)
    else:
        yield from _docstring(found)


#: Bases that say nothing to a reader.
_NO_PARENTS = ("ABC", "Generic", "Protocol", "_")


# --- classes and functions --------------------------------------------------------------------------------------------


def _class(found: griffe.Class, level: int) -> Iterator[str]:
    bases = [_link(base) for base in map(str, found.bases) if not base.startswith(_NO_PARENTS)]
    if bases:
        yield f"Derived from {', '.join(bases)}."
    arguments = _arguments(found.parameters)
    if arguments or not found.bases:
        yield _code(found.name, arguments, "")
    yield from _docstring(found)
    attributes = [member for member in _members(found) if member.is_attribute and member.docstring]
    if attributes:
        sections = found.docstring.parsed if found.docstring else []
        has_some = any(section.kind is griffe.DocstringSectionKind.attributes for section in sections)
        yield "Further attributes:" if has_some else "Attributes:"
        yield "\n".join(_item(member.name, member.annotation, member.docstring.value) for member in attributes)
    for member in _members(found):
        if isinstance(member, griffe.Function) and (member.docstring or member.overloads):
            yield f"{'#' * (level + 1)} {_heading(member, f'{found.name}.')}"
            yield from _function(member)


def _members(found: griffe.Class) -> list[Any]:
    """The public ones that the class itself defines, in the order of the source."""
    return [member for name, member in found.members.items() if not name.startswith("_") and not member.is_alias]


def _function(found: griffe.Function) -> Iterator[str]:
    for version in found.overloads or [found]:
        returns = "" if version.returns is None else f" -> {version.returns}"
        yield _code(found.name, _arguments(version.parameters), returns)
    yield from _docstring(found)


def _code(name: str, arguments: Sequence[str], end: str) -> str:
    """A signature as a block of code."""
    text = f"{name}({', '.join(arguments)}){end}"
    if len(text) > _LINE:
        lines = "".join(f"    {argument},\n" for argument in arguments)
        text = f"{name}(\n{lines}){end}"
    return f"```python\n{text}\n```"


def _arguments(parameters: griffe.Parameters) -> list[str]:
    """The arguments of a signature as Python writes them, without self."""
    shown: list[str] = []
    keyword_only = False
    for argument in parameters:
        if argument.name in ("self", "cls"):
            continue
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}
        prefix = stars.get(argument.kind, "") if argument.kind else ""
        if argument.kind is griffe.ParameterKind.keyword_only and not keyword_only:
            shown.append("*")
        keyword_only = keyword_only or prefix == "*" or argument.kind is griffe.ParameterKind.keyword_only
        text = f"{prefix}{argument.name}"
        if argument.annotation is not None:
            text += f": {_plain(argument.annotation)}"
        default = "" if argument.default is None or prefix else _default(argument.default)
        if default:
            text += f" = {default}" if argument.annotation is not None else f"={default}"
        shown.append(text)
    return shown


def _plain(annotation: Any) -> str:
    """An annotation without the limits that a file's number is checked against: ``Share`` is a ``float``."""
    return _LIMITED.sub(lambda name: "int" if name[0] == "Count" else "float", str(annotation))


def _default(default: Any) -> str:
    """The default of an argument; of a field that ``option`` or ``key`` declares, the value alone, or nothing."""
    if not isinstance(default, griffe.ExprCall):
        return str(default)
    function = str(default.function)
    if function == "tagged":  # tags of a declared field
        return _default(default.arguments[1])
    if function in ("option", "no_option"):
        return str(default.arguments[0]) if default.arguments else ""
    return "" if function == "key" else str(default)


def _link(base: str) -> str:
    """A base class, with a link where a page describes it."""
    for file, page in PAGES.items():
        for path in (path for paths in page.names.values() for path in paths):
            if path.rpartition(".")[2] == base:
                return f"[`{base}`]({file}.md#{anchor_of(path)})"
    return f"`{base}`"


# --- docstrings -------------------------------------------------------------------------------------------------------

_TITLES = {
    griffe.DocstringSectionKind.parameters: "Arguments",
    griffe.DocstringSectionKind.attributes: "Attributes",
    griffe.DocstringSectionKind.raises: "Raises",
    griffe.DocstringSectionKind.warns: "Warns",
}


def _docstring(found: griffe.Object) -> Iterator[str]:
    """The parts of a docstring: its text, and a list for each of Google's sections."""
    for section in found.docstring.parsed if found.docstring else ():
        if section.kind is griffe.DocstringSectionKind.text:
            yield section.value
        elif section.kind is griffe.DocstringSectionKind.returns:
            yield f"Returns: {section.value[0].description}"
        else:
            yield f"{_TITLES[section.kind]}:"
            yield "\n".join(_items(section))


def _items(section: griffe.DocstringSection) -> Iterator[str]:
    for item in section.value:
        if section.kind is griffe.DocstringSectionKind.attributes:
            yield _item(item.name, item.annotation, item.description)
        elif section.kind is griffe.DocstringSectionKind.parameters:
            yield _item(item.name, None, item.description)  # its type is in the signature
        else:
            errors = str(item.annotation).strip("()")  # several are a tuple
            yield f"- `{errors}`: {_indented(item.description)}"


def _item(name: str, annotation: Any, text: str) -> str:
    kind = "" if annotation is None else f" (`{_plain(annotation)}`)"
    return f"- `{name}`{kind}: {_indented(text)}"


def _indented(text: str) -> str:
    """A text as the content of a list's item."""
    return text.strip().replace("\n", "\n  ").replace("\n  \n", "\n\n")

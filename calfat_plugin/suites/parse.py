"""Suite file to :class:`Suite`: structure, types and units. Looks no plugin up; ``plan`` does."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from calfat_plugin.errors import RecipeError, did_you_mean, listed
from calfat_plugin.options import describe, parse_options
from calfat_plugin.recipe.document import SUITE, Document, KeyPath, read_document
from calfat_plugin.recipe.plugin_files import PLUGINS, with_plugins
from calfat_plugin.recipe.sections import failing_at, options_at
from calfat_plugin.shipped import shipped_files
from calfat_plugin.suites.choose import parse_choose
from calfat_plugin.suites.parts import check_selector, grid, mapping_at, same_or_below, seeds_at, settings_at
from calfat_plugin.suites.schema import Axes, Compare, Reported, Selector, Setting, Suite, SuiteOptions, slug
from calfat_plugin.threat import parse_number

STRUCTURED_KEYS = ("set", "axes", "seeds", "metrics", "choose", "compare", "reported", "skip")
MOST_RUNS = 10_000  # of a suite; each is planned before the first one starts
_REPORTED_KEYS = ("source", "percent", "tolerance")
_FORBIDDEN_IN_LABELS = "/*?[]"


def load_suite(path: str | Path, plugins: Iterable[Path] = ()) -> Suite:
    """Read a suite file and its base recipe; as :func:`parse_suite`.

    Raises:
        RecipeError: with file, line, key, what was found and what was wanted.
    """
    return parse_suite(read_document(path, SUITE), plugins)


def parse_suite(document: Document, plugins: Iterable[Path] = ()) -> Suite:
    """Check the structure of a whole suite.

    Args:
        document: the suite.
        plugins: files with plugins that its recipes may name, beside those of its base.

    Raises:
        RecipeError: with file, line, key, what was found and what was wanted.
        PluginError: there is no such plugin file.
    """
    plain = {key: value for key, value in document.data.items() if key not in STRUCTURED_KEYS}
    options = parse_options(SuiteOptions, plain, owner="a suite", fail=failing_at(document, ()), also=STRUCTURED_KEYS)
    name = Path(document.file).stem
    beside = Path(os.path.normpath(Path(document.file).parent / options.base))
    base = beside if beside.exists() else shipped_files("recipes").get(options.base, beside)
    try:
        base_document = read_document(base)
    except RecipeError as error:
        raise document.error(("base",), str(error)) from None
    runs = options.runs or name
    if not slug(runs) or "/" in runs or "\\" in runs:
        raise document.error(("runs",), f"got '{runs}', expected the name of a suite, such as table1.")
    seeds = seeds_at(document, ("seeds",))
    axes = _axes(document, len(seeds))
    metrics = _metrics(document)
    names = ["/".join(labels) for labels in grid(axes)]
    settings: list[Setting] = []
    for setting in settings_at(document, ("set",)):
        if same_or_below(PLUGINS, setting.path):  # the registry is made of the base recipe
            base_document = base_document.with_value(setting.path, setting.value, setting.place)
        else:
            settings.append(setting)
    reported, tolerance = _reported(document, names, list(metrics))
    return Suite(
        name=name,
        title=options.title or name,
        document=document,
        base=base,
        base_document=with_plugins(base_document, plugins),
        settings=tuple(settings),
        axes=axes,
        seeds=seeds,
        metrics=metrics,
        choose=parse_choose(document, axes, tuple(settings)),
        compare=_compare(document, axes, list(metrics)),
        reported=reported,
        tolerance=tolerance,
        skip=_skip(document, axes),
        runs=runs,
        seconds_per_round=options.seconds_per_round,
    )


def _axes(document: Document, num_seeds: int) -> Axes:
    example = "{method: {CalFAT: {}, FedPGD: {calfat.trainer: fedpgd}}}"
    axes: dict[str, Mapping[str, tuple[Setting, ...]]] = {}
    for name in mapping_at(document, ("axes",), example):
        _check_label(document, ("axes", name), name)
        written = mapping_at(document, ("axes", name), "{CalFAT: {}, FedPGD: {calfat.trainer: fedpgd}}")
        if not written:
            raise document.error(("axes", name), "the axis has no labels; add at least one, or remove the axis.")
        folders: dict[str, str] = {}
        for label in written:
            path: KeyPath = ("axes", name, label)
            _check_label(document, path, label)
            other = folders.setdefault(slug(label), label)
            if other != label:
                raise document.error(path, f"'{other}' has the same folder name, '{slug(label)}'; rename one.")
        axes[name] = {label: settings_at(document, ("axes", name, label)) for label in written}
    if not axes:
        raise document.error(("axes",), f"there are no axes; expected a mapping such as {example}.")
    cells = math.prod(map(len, axes.values()))
    if cells * num_seeds > MOST_RUNS:
        raise document.error(
            ("axes",),
            f"{' x '.join(str(len(labels)) for labels in axes.values())} labels and {num_seeds} seeds are "
            f"{cells * num_seeds} runs; at most {MOST_RUNS} are allowed. Make several suites of it.",
        )
    _refuse_wiped_out(document, axes)
    return axes


def _check_label(document: Document, path: KeyPath, label: str) -> None:
    bad = [character for character in label if character in _FORBIDDEN_IN_LABELS or not character.isprintable()]
    if bad or not slug(label):
        what = f"holds {bad[0]!r}" if bad else "contains no letter or digit"
        raise document.error(path, f"the label '{label}' {what}; labels name folders and are matched by --only.")


def _refuse_wiped_out(document: Document, axes: Axes) -> None:
    """Later axes are applied later: one that replaces what an earlier one set would make its cells all alike."""
    settings = [(axis, label, each) for axis in axes for label in axes[axis] for each in axes[axis][label]]
    for (early, first, before), (late, second, after) in itertools.combinations(settings, 2):
        if early != late and same_or_below(after.path, before.path):
            raise document.error(
                ("axes", late, second, after.key),
                f"replaces '{before.key}' of axes.{early}.{first}. Two axes must not set the same "
                f"value; if one axis sets a part of the other's value, put it last.",
            )


def _metrics(document: Document) -> dict[str, str]:
    """Evaluator labels with their headings: a list of labels, or a mapping from label to heading."""
    raw = document.get(("metrics",))
    pairs = raw.items() if isinstance(raw, Mapping) else zip(raw, raw, strict=True) if isinstance(raw, list) else ()
    metrics: dict[str, str] = {}
    for index, (label, heading) in enumerate(pairs):
        path: KeyPath = ("metrics", label) if isinstance(raw, Mapping) else ("metrics", index)
        if not isinstance(label, str) or not isinstance(heading, str):
            raise document.error(path, f"got {describe(heading)}, expected a text.")
        if label in metrics:
            raise document.error(path, f"the metric '{label}' is listed twice; keep one.")
        if heading in metrics.values():
            other = next(known for known in metrics if metrics[known] == heading)
            raise document.error(
                path, f"the heading '{heading}' stands over '{other}' already; give each metric one of its own."
            )
        metrics[label] = heading
    if not metrics:
        raise document.error(
            ("metrics",),
            f"got {describe(raw)}, expected labels of evaluators such as [natural, pgd20] or {{pgd20: PGD-20}}.",
        )
    return metrics


def _reported(
    document: Document, names: list[str], metrics: Sequence[str]
) -> tuple[dict[str, Reported], dict[str, float]]:
    """Published numbers by cell name, and what passes unmarked."""
    path: KeyPath = ("reported",)
    section = mapping_at(document, path, "{source: 'arXiv:2205.14926, Table 1', percent: {CalFAT: {natural: 64.69}}}")
    for key in section:
        _check_known(document, (*path, key), _REPORTED_KEYS, "unknown key.")
    source = _text(document, (*path, "source"), "")
    cells = {}
    for name in mapping_at(document, (*path, "percent"), "{CalFAT: {natural: 64.69}}"):
        at: KeyPath = (*path, "percent", name)
        if name not in names:
            hint = did_you_mean(name, names) or f" The first one is '{names[0]}'."
            raise document.error(at, f"there is no cell '{name}'.{hint}")
        written = dict(mapping_at(document, at, "{natural: 64.69, pgd20: 31.12}"))
        written.pop("source", None)
        own = _text(document, (*at, "source"), source)
        if not own:
            raise document.error(
                at, "these numbers have no source; write reported.source, such as 'arXiv:2205.14926, Table 1'."
            )
        numbers = {label: _percent(document, (*at, label), metrics) / 100 for label in written}
        cells[name] = Reported(own, numbers)
    passing = mapping_at(document, (*path, "tolerance"), "{natural: 3, pgd20: 2}")
    return cells, {label: _percent(document, (*path, "tolerance", label), metrics) for label in passing}


def _text(document: Document, path: KeyPath, default: str) -> str:
    value = document.get(path)
    if value is None:
        return default
    if not isinstance(value, str):
        raise document.error(path, f"got {describe(value)}, expected a text.")
    return value


def _check_known(document: Document, path: KeyPath, known: Sequence[str], complaint: str) -> None:
    """Refuse the key at the end of ``path`` unless it is known."""
    key = str(path[-1])
    if key not in known:
        raise document.error(path, complaint + (did_you_mean(key, known) or f" Known: {listed(known)}."))


def _percent(document: Document, path: KeyPath, labels: Sequence[str]) -> float:
    value = document.get(path)
    _check_known(document, path, labels, f"'{path[-1]}' is not among the suite's metrics.")
    number = -1.0
    with suppress(ValueError):
        number = float(parse_number(value))
    if not 0 <= number <= 100:
        raise document.error(path, f"got {describe(value)}, expected percent, 0 <= value <= 100.")
    return number


def _compare(document: Document, axes: Axes, metrics: Sequence[str]) -> Compare | None:
    path: KeyPath = ("compare",)
    if document.get(path) is None:
        return None
    compare = options_at(document, path, Compare)
    labels = next((list(variants) for variants in axes.values() if compare.row in variants), None)
    if labels is None:
        every = [label for variants in axes.values() for label in variants]
        hint = did_you_mean(compare.row, every) or f" Labels: {', '.join(every)}."
        raise document.error((*path, "row"), f"no row has the label '{compare.row}'.{hint}")
    for key in ("exchange", "lead_over"):
        label = getattr(compare, key)
        if label is not None and (label not in labels or label == compare.row):
            others = [other for other in labels if other != compare.row]
            hint = did_you_mean(label, others) or f" Expected one of: {', '.join(others)}."
            raise document.error((*path, key), f"got '{label}', which is no other label of the same axis.{hint}")
    needed = {"metrics": compare.metrics}
    needed |= {"natural": (compare.natural,)} if (compare.exchange or compare.lead_over or compare.collapsed) else {}
    needed |= {"robust": (compare.robust,)} if compare.exchange or compare.level else {}
    for key, named in needed.items():
        for metric in named:
            if metric not in metrics:
                hint = did_you_mean(metric, metrics) or f" Known: {listed(metrics)}."
                raise document.error((*path, key), f"'{metric}' is not among the suite's metrics.{hint}")
    if compare.level is not None and compare.robust not in compare.metrics:
        raise document.error((*path, "level"), f"'{compare.robust}' is not compared; add it to compare.metrics.")
    other_axes = [variants for variants in axes.values() if compare.row not in variants]
    if compare.lead_over is not None and [len(variants) for variants in other_axes] != [2]:
        raise document.error((*path, "lead_over"), "this needs one other axis with two labels.")
    return compare


def _skip(document: Document, axes: Axes) -> dict[Selector, str]:
    skips = {}
    for text in mapping_at(document, ("skip",), "{ImageNet-12/FedRBN: it needs batch normalisation}"):
        selector = Selector(text)
        if problem := check_selector(selector, axes):
            raise document.error(("skip", text), problem)
        reason = document.get(("skip", text))
        if not isinstance(reason, str) or not reason.strip():
            raise document.error(("skip", text), f"got {describe(reason)}, expected the reason as a text.")
        skips[selector] = reason.strip()
    return skips

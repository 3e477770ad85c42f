"""Suite file to :class:`Suite`: structure, types and units. Looks no plugin up; ``plan`` does."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from calfat_plugin.errors import RecipeError, did_you_mean, listed
from calfat_plugin.exact import parse_number
from calfat_plugin.options import describe, parse_options
from calfat_plugin.recipe.document import SUITE, Document, KeyPath, dotted, read_document
from calfat_plugin.recipe.plugin_files import PLUGINS, with_plugins
from calfat_plugin.recipe.sections import failing_at, options_at, section_at
from calfat_plugin.shipped import shipped_files
from calfat_plugin.suites.schema import (
    Axes,
    Choose,
    Compare,
    Grid,
    Reported,
    Selector,
    Setting,
    Suite,
    SuiteOptions,
    slug,
)

STRUCTURED_KEYS = ("set", "axes", "seeds", "metrics", "choose", "compare", "reported", "skip")
MOST_RUNS = 10_000  # of a suite; each is planned before the first one starts
NO_METRIC = "'{}' is not among the suite's metrics."
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
    if "calfat" in document.data and "axes" not in document.data:
        raise document.mistaken_for("recipe", "run")
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
        _check_known(document, (*path, key), key, _REPORTED_KEYS, "unknown key.")
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


def _check_known(document: Document, path: KeyPath, name: str, known: Collection[str], complaint: str) -> None:
    """Refuse a name at ``path`` that is none of the known ones."""
    if name not in known:
        raise document.error(path, complaint + (did_you_mean(name, known) or f" Known: {listed(known)}."))


def _percent(document: Document, path: KeyPath, labels: Sequence[str]) -> float:
    value = document.get(path)
    _check_known(document, path, str(path[-1]), labels, NO_METRIC.format(path[-1]))
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
    every = [label for variants in axes.values() for label in variants]
    if compare.row not in every:
        hint = did_you_mean(compare.row, every) or f" Labels: {', '.join(every)}."
        raise document.error((*path, "row"), f"no row has the label '{compare.row}'.{hint}")
    for metric in compare.metrics:
        _check_known(document, (*path, "metrics"), metric, metrics, NO_METRIC.format(metric))
    if twice := next((metric for metric in compare.metrics if compare.metrics.count(metric) > 1), None):
        raise document.error((*path, "metrics"), f"the metric '{twice}' is listed twice; keep one.")
    if compare.level is not None and compare.robust not in compare.metrics:
        raise document.error((*path, "level"), f"'{compare.robust}' is not compared; add it to compare.metrics.")
    return compare


def _skip(document: Document, axes: Axes) -> dict[Selector, str]:
    skips = {}
    for selector in _selectors(document, ("skip",), axes, "{ImageNet-12/FedRBN: it needs batch normalisation}"):
        reason = document.get(("skip", selector.text))
        if not isinstance(reason, str) or not reason.strip():
            raise document.error(("skip", selector.text), f"got {describe(reason)}, expected the reason as a text.")
        skips[selector] = reason.strip()
    return skips


# --- the section choose -----------------------------------------------------------------------------------------------

CHOOSE: KeyPath = ("choose",)
MOST_TRIES = 100  # of a cell; a product of grids grows fast
CHOOSE_KEYS = ("metric", "by", "set", "seeds", "finalists", "grid", "own", "extend")
LEAST_FACTOR, MOST_FACTOR = 1.1, 100.0  # with two digits, a value times less may be itself
_EXAMPLE = "{train_args.learning_rate: [0.02, 0.05, 0.1]}"
_METRIC = "an evaluator such as pgd20, or several such as mean(natural, pgd20)"
_MEAN = re.compile(r"mean\((.*)\)")
_WHAT_IS_MEASURED: tuple[KeyPath, ...] = (
    ("data_args",),
    *(("calfat", key) for key in ("dataset", "partition", "evaluators", "monitor", "evaluation", "reported")),
    *(("calfat", "threat", key) for key in ("norm", "eps")),
)


def parse_choose(document: Document, axes: Axes, settings: Sequence[Setting]) -> Choose | None:
    """Check the structure of ``choose``; recipes and evaluators are looked up by ``plan``.

    Args:
        document: the suite.
        axes: its grid.
        settings: what its section ``set`` sets.

    Returns:
        None where the suite has no such section.

    Raises:
        RecipeError: with file, line, key, what was found and what was wanted.
    """
    if document.get(CHOOSE) is None:
        return None
    for key in mapping_at(document, CHOOSE, f"{{metric: pgd20, seeds: [100], grid: {_EXAMPLE}}}"):
        _check_known(document, (*CHOOSE, key), key, CHOOSE_KEYS, "unknown key.")
    metric = _metric(document)
    by = document.get((*CHOOSE, "by")) if document.has((*CHOOSE, "by")) else "last"
    if by not in ("last", "best"):
        what = f"got {describe(by)}, expected last (the last round's value) or best (any round's)."
        raise document.error((*CHOOSE, "by"), what)
    seeds, grid_of_all = seeds_at(document, (*CHOOSE, "seeds")), _grid(document, (*CHOOSE, "grid"))
    at: KeyPath = (*CHOOSE, "own")
    selectors = _selectors(document, at, axes, "{CalFAT: {calfat.trainer.prior_weight: [0.1, 1]}}")
    own = {selector: _grid(document, (*at, selector.text)) for selector in selectors}
    finalists, extend = _finalists(document, seeds), _extend(document, (grid_of_all, *own.values()))
    choose = Choose(metric, by, seeds, grid_of_all, own, finalists, extend, _set_in_choice_runs(document))
    in_axes = [(f"axes.{axis}", each) for axis in axes for changes in axes[axis].values() for each in changes]
    given = [("choose.set", each) for each in choose.settings] + [("set", each) for each in settings] + in_axes
    _refuse_set_elsewhere(document, choose, given)
    _check_sizes(document, choose, grid(axes))
    return choose


def _metric(document: Document) -> tuple[str, ...]:
    path = (*CHOOSE, "metric")
    raw = document.get(path)
    mean = _MEAN.fullmatch(raw.strip()) if isinstance(raw, str) else None
    labels = [label.strip() for label in (mean[1].split(",") if mean else [str(raw)])]
    if not isinstance(raw, str) or not all(labels) or len(set(labels)) < len(labels):
        raise document.error(path, f"got {describe(raw)}, expected {_METRIC}.")
    return tuple(labels)


def _set_in_choice_runs(document: Document) -> tuple[Setting, ...]:
    settings = settings_at(document, (*CHOOSE, "set"))
    for setting in settings:
        if any(overlap(setting.path, measured) for measured in _WHAT_IS_MEASURED):
            what = "this key changes what is measured, and what is chosen would be for other runs; set it for all runs."
            raise document.error((*CHOOSE, "set", setting.key), what)
    return settings


def _finalists(document: Document, seeds: Sequence[int]) -> int | None:
    path = (*CHOOSE, "finalists")
    if not document.has(path):
        return None
    number = document.get(path)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise document.error(
            path, f"got {describe(number)}, expected how many values reach the seeds after the first, >= 1."
        )
    if len(seeds) == 1:
        raise document.error(path, "there is one seed only, so there is no final; add seeds, or remove this key.")
    return number


def _grid(document: Document, path: KeyPath) -> Grid:
    """Key to its settings, one a value."""
    found: dict[KeyPath, tuple[Setting, ...]] = {}
    for setting in settings_at(document, path):
        at = (*path, setting.key)
        if any(overlap(setting.path, measured) for measured in _WHAT_IS_MEASURED):
            raise document.error(
                at, "this key changes what is measured, so its values could not be compared; remove it."
            )
        values = setting.value
        if not isinstance(values, list) or not values:
            wanted = "expected a list of the values to try, such as [0.02, 0.05, 0.1]."
            raise document.error(at, f"got {'an empty list' if values == [] else describe(values)}, {wanted}")
        found[setting.path] = tuple(
            Setting(setting.path, value, document.place((*at, index))) for index, value in enumerate(values)
        )
    if not found:
        raise document.error(path, f"there is nothing to try; expected a mapping such as {_EXAMPLE}.")
    return found


def _extend(document: Document, grids: Sequence[Grid]) -> dict[KeyPath, float]:
    path = (*CHOOSE, "extend")
    found: dict[KeyPath, float] = {}
    tried = [settings for grid in grids for settings in grid.values()]
    for setting in settings_at(document, path):
        at = (*path, setting.key)
        values = [each for settings in tried for each in settings if each.path == setting.path]
        if not values:
            known = dict.fromkeys(settings[0].key for settings in tried)
            raise document.error(at, f"no grid has this key.{did_you_mean(setting.key, known)} Known: {listed(known)}.")
        factor = setting.value
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not LEAST_FACTOR <= factor <= MOST_FACTOR:
            wanted = f"expected a factor, {LEAST_FACTOR:g} <= value <= {MOST_FACTOR:g}"
            raise document.error(at, f"got {describe(factor)}, {wanted}: from an end of the grid to the next value.")
        for each in values:
            if isinstance(each.value, bool) or not isinstance(each.value, int | float) or each.value <= 0:
                what = f"the grid tries {describe(each.value)} ({each.place}); only numbers above 0 have a next one."
                raise document.error(at, f"{what} Remove this key, or that value.")
        found[setting.path] = float(factor)
    return found


def _refuse_set_elsewhere(document: Document, choose: Choose, elsewhere: Iterable[tuple[str, Setting]]) -> None:
    """A value is chosen or given, not both; a part of a given value, such as a trainer's constant, may be chosen."""
    grids = [(("grid",), choose.grid), *((("own", selector.text), grid) for selector, grid in choose.own.items())]
    for (place, given), (where, tried) in itertools.product(elsewhere, grids):
        for key in tried:
            if same_or_below(key, given.path):
                what = f"'{given.key}' is set in {place} ({given.place}), too; remove it in one of the two places."
                raise document.error((*CHOOSE, *where, dotted(key)), what)


def _check_sizes(document: Document, choose: Choose, cells: Iterable[tuple[str, ...]]) -> None:
    for labels in cells:
        keys = choose.grid_of(labels)
        for first, second in itertools.combinations(keys, 2):
            if overlap(first, second):
                what = (
                    f"the cell '{'/'.join(labels)}' would try '{dotted(first)}' and '{dotted(second)}', which overlap."
                )
                raise document.error(CHOOSE, f"{what} Remove one of the two.")
        tries = math.prod(map(len, keys.values()))
        if tries > MOST_TRIES:
            what = f"the cell '{'/'.join(labels)}' would make {tries} tries, at most {MOST_TRIES} are allowed."
            raise document.error(CHOOSE, f"{what} Leave out values or keys.")


# --- what several sections are made of --------------------------------------------------------------------------------

SEED_PATH: KeyPath = ("common_args", "random_seed")
MAX_SEED = 2**32 - 1


def grid(axes: Axes) -> list[tuple[str, ...]]:
    """The labels of every cell, the last axis running fastest."""
    return list(itertools.product(*axes.values()))


def check_selector(selector: Selector, axes: Axes) -> str:
    """What is wrong with a selector that matches no cell; empty when it matches one."""
    cells = grid(axes)
    if any(selector.matches(labels) for labels in cells):
        return ""
    parts = selector.text.split("/")
    if len(parts) not in (1, len(axes)):
        return f"'{selector.text}' has {len(parts)} parts, but a cell of this suite has the form {'/'.join(axes)}."
    labels = [label for variants in axes.values() for label in variants]
    names = labels if len(parts) == 1 else ["/".join(cell) for cell in cells]
    hint = did_you_mean(selector.text, names) or f" Labels: {', '.join(dict.fromkeys(labels))}."
    return f"'{selector.text}' matches no cell.{hint}"


def _selectors(document: Document, path: KeyPath, axes: Axes, example: str) -> Iterator[Selector]:
    """The keys of the mapping at ``path``, each of which must match a cell."""
    for text in mapping_at(document, path, example):
        if problem := check_selector(selector := Selector(text), axes):
            raise document.error((*path, text), problem)
        yield selector


def mapping_at(document: Document, path: KeyPath, example: str) -> Mapping[str, Any]:
    """The mapping at ``path``; empty where the suite leaves it out. ``example`` is for the message."""
    return section_at(document, path, f"a mapping such as {example}")


def settings_at(document: Document, path: KeyPath) -> tuple[Setting, ...]:
    """Recipe values to change, written as dotted keys."""
    settings = []
    for key, value in mapping_at(document, path, "{train_args.comm_round: 20}").items():
        steps, at = tuple(key.split(".")), (*path, key)
        if len(steps) < 2 or not all(steps):
            what = "this is not a SECTION.KEY of a recipe, such as train_args.comm_round or calfat.trainer."
            raise document.error(at, what)
        if steps == SEED_PATH:
            raise document.error(at, "the suite's 'seeds' set the seeds; remove this key.")
        if same_or_below(PLUGINS, steps) and path != ("set",):
            raise document.error(at, "plugins are loaded once, for all cells; write this key under 'set'.")
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            what = f"got {describe(value)}, which is not allowed in a recipe; quote it to make it a text."
            raise document.error(at, what) from None
        settings.append(Setting(steps, value, document.place(at)))
    for first, second in itertools.combinations(settings, 2):
        if overlap(first.path, second.path):
            raise document.error(
                (*path, second.key), f"this key overlaps with '{first.key}' in the same mapping; combine the two."
            )
    return tuple(settings)


def same_or_below(above: KeyPath, path: KeyPath) -> bool:
    """Whether ``path`` is ``above`` itself or a part of its value."""
    return path[: len(above)] == above


def overlap(first: KeyPath, second: KeyPath) -> bool:
    """Whether one of two keys is a part of the other's value, or they are the same."""
    return same_or_below(first, second) or same_or_below(second, first)


def seeds_at(document: Document, path: KeyPath) -> tuple[int, ...]:
    """A list of different seeds."""
    raw = document.get(path)
    if not isinstance(raw, list) or not raw:
        found = "an empty list" if raw == [] else describe(raw)
        raise document.error(path, f"got {found}, expected a list of whole numbers such as [0, 1, 2].")
    seeds: list[int] = []
    for index, seed in enumerate(raw):
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise document.error(
                (*path, index), f"got {describe(seed)}, expected a whole number, 0 <= value <= {MAX_SEED}."
            )
        if seed in seeds:
            raise document.error((*path, index), f"the seed {seed} is listed twice; keep one.")
        seeds.append(seed)
    return tuple(seeds)

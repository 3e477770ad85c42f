"""Settings, plugins, problems and measures in words, as pages, tables and the console name them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from calfat_plugin.errors import RecipeError
from calfat_plugin.experiment.compare import PLUGIN_PLACE, comparable
from calfat_plugin.host.runtimes import runtime_of
from calfat_plugin.options import options_to_plain, to_plain
from calfat_plugin.recipe.clients import CHOOSING, TRAINED
from calfat_plugin.recipe.keys import Plugin
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.silo import UNPROTECTED
from calfat_plugin.recipe.training import TrainArgs
from calfat_plugin.report.numbers import counted
from calfat_plugin.report.reading import NATURAL, RunFiles

_SECRET = re.compile(r"(?i)((?:key|token|secret|password|passwd|credential)[\w.-]*=)\S+")


def listing(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def plain(value: Any) -> str:
    """A recipe value as a recipe writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ", ".join(map(pick, value)) or "none"
    if isinstance(value, Mapping):
        return pick(value) if "name" in value else _options(value).strip(" ()")
    return f"{value:g}" if isinstance(value, float) else str(value)


def option_words(name: str, value: str) -> str:
    """An option in a name or a heading: ``ε 0.1``, ``learning rate 0.05``."""
    return f"{'ε' if name == 'eps' else name.replace('_', ' ')} {value}"


def pick(value: Any) -> str:
    """A plugin with its options, as a recipe writes it in full: ``calfat (scale 10, prior counts)``."""
    if not isinstance(value, Mapping):
        return plain(value)
    return str(value.get("name")) + _options({key: value[key] for key in value if key not in ("name", "loss")})


def method(run: RunFiles) -> str:
    """The local trainer with its loss modifier, unless that is the plain one, and what is added: ``fedpgd + awp``."""
    recipe = run.recipe
    loss = [recipe.modifier.name] if recipe.modifier.name != "plain" else []
    return " + ".join([recipe.trainer.name, *loss, *(name.replace("_", " ") for name in recipe.additions.as_run())])


def difference(group: ClientGroup, run: Recipe) -> str:
    """What is different about a group of clients: ``attacker sign_flip (scale 5), ε 4/255``."""
    written, usual = group.as_run(), {**options_to_plain(run.threat), "inner": run.threat.inner.as_run()}
    loss = group.recipe.modifier
    trained = f"{pick(written['trainer'])}{f' + {loss.name}' * (loss.name != 'plain')}" if "trainer" in written else ""
    parts = [
        f"attacker {pick(written['attacker'])}" if "attacker" in written else "",
        f"trainer {trained}" if trained else "",
        *(option_words(key, plain(value)) for key, value in written.get("threat", {}).items() if value != usual[key]),
        *(option_words(key, plain(written[key])) for key in TRAINED if key in written),
    ]
    return ", ".join(filter(None, parts))


def groups(run: Recipe) -> str:
    """The groups of clients: ``liars (share 0.2): attacker sign_flip (scale 5); weak (ids 0, 1): trainer standard``."""
    written = [group.as_run() for group in run.clients]
    who = [next(option_words(key, plain(each[key])) for key in CHOOSING if key in each) for each in written]
    return "; ".join(f"{g.name} ({by}): {difference(g, run)}" for g, by in zip(run.clients, who, strict=True))


def partition(run: RunFiles) -> str:
    """How the data was split: ``dirichlet, β = 0.1``."""
    name = run.recipe.partition.name
    return f"{name}, β = {plain(run.recipe.data.partition_alpha)}" if "dirichlet" in name else name


def headline(run: RunFiles) -> str:
    """The run in a sentence."""
    in_groups = f" ({listing(run.recipe.group_names)})" if run.recipe.clients else ""
    return (
        f"{method(run)} with {run.recipe.aggregator.name} on {run.recipe.dataset.name} ({partition(run)}): "
        f"{counted(run.recipe.num_clients, 'client')}{in_groups}, {counted(run.recipe.num_rounds, 'round')}, "
        f"seed {run.recipe.seed}"
    )


def highlights(run: RunFiles) -> dict[str, str]:
    """What was run: term to value."""
    recipe = run.recipe
    train, threat, per_round = recipe.train, recipe.threat, recipe.clients_per_round
    step = plain(to_plain(threat.step_size)).replace("eps", "ε")
    searched = f"{threat.steps} training steps of {step}" if threat.own_steps is None else "training"
    if threat.inner.name != "pgd":
        searched += f" by {pick(threat.inner.as_run())}"
    work = f"local epochs {train.epochs}" if train.local_steps is None else f"local steps {train.local_steps}"
    found = {
        "Method": pick(recipe.trainer.as_run()),
        "Loss modifier": pick(recipe.modifier.as_run()) if recipe.modifier.name != "plain" else "",
        "Aggregator": pick(recipe.aggregator.as_run()),
        "Moving average": "" if recipe.ema is None else f"of the global models, decay {plain(recipe.ema.decay)}",
        "Data set": recipe.dataset.name,
        "Partition": f"{partition(run)}{_options(recipe.partition.plain_options())}",
        "Model": f"{recipe.model.name}{_options(recipe.model.plain_options())}",
        "Clients": f"{recipe.num_clients}, {'all' if per_round == recipe.num_clients else per_round} in each round",
        "Rounds": f"{recipe.num_rounds}, {work}, batches of {train.batch_size}",
        f"Local {_OPTIMIZERS[train.client_optimizer]}": _optimizer(train),
        "Threat": f"{threat.norm}, ε = {plain(to_plain(threat.eps))}, {searched}"
        f"{', others in groups' * any('threat' in group.changed for group in recipe.clients)}",
        "Groups": groups(recipe),
        "Seed": str(recipe.seed),
        "Security": UNPROTECTED if _is_unprotected(run) else "",
    }
    return {term: value for term, value in found.items() if value}


_OPTIMIZERS = {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}


def _optimizer(train: TrainArgs) -> str:
    """Settings of the local optimiser that are in force."""
    courses = {
        "step": f"times {plain(train.lr_decay_rate)} every {train.lr_step_size} rounds",
        "cosine": f"cosine to {plain(train.learning_rate_min)}",
    }
    course = [
        f"warm-up rounds {train.warmup_rounds}" if train.warmup_rounds else "",
        courses.get(train.lr_schedule, ""),
    ]
    rate = f"learning rate {plain(train.learning_rate)}"
    momentum = f"momentum {plain(train.momentum)}{' (Nesterov)' if train.nesterov else ''}"
    parts = [
        f"{rate} ({', '.join(filter(None, course))})" if any(course) else rate,
        momentum if train.client_optimizer == "sgd" else "",
        f"weight decay {plain(train.weight_decay)}",
        "" if train.max_grad_norm is None else f"gradients clipped to norm {plain(train.max_grad_norm)}",
    ]
    return ", ".join(filter(None, parts))


def _is_unprotected(run: RunFiles) -> bool:
    with suppress(RecipeError):  # of a backend that is not there any more
        return runtime_of(run.recipe).is_unprotected
    return True


def _options(value: Any) -> str:
    shown = [f"{key} {plain(item)}" for key, item in (value or {}).items() if item is not None]
    return f" ({', '.join(shown)})" if shown else ""


def command(run: RunFiles) -> str:
    """The command line, with what may be a secret blotted out."""
    return " ".join(_SECRET.sub(r"\1…", str(word)) for word in run.environment.get("command") or ())


def budget(settings: Mapping[str, Any]) -> str:
    """The ball that an attack kept to: ``linf, ε = 8/255``; empty without one."""
    return f"{settings['norm']}, ε = {plain(settings['eps'])}" if "norm" in settings and "eps" in settings else ""


# --- names of settings and problems -----------------------------------------------------------------------------------


_NOT_A_SETTING = (
    "common_args.random_seed",
    "data_args.data_cache_dir",
    "common_args.host",
    "calfat.dataset.download",
    "calfat.flower.",
    "calfat.loggers",
    "calfat.name",
    "calfat.reported.",
    "calfat.runtime.",
    "device_args.",
    "tracking_args.",
)
# Named only where nothing else differs: what changes no model, which columns name, and the digest of a plugin file.
_NAMED_LAST = ("calfat.evaluators", "calfat.evaluation.", "calfat.monitor.", "calfat.plugins.")
_PROBLEM = (
    "data_args.",
    "model_args.",
    "train_args.client_num_in_total",
    "calfat.dataset.",
    "calfat.model.",
    "calfat.partition.",
    "calfat.threat.",
)
_OF_A_GROUP = ("name", *CHOOSING, "seed", "threat", "attacker")
_FIRST: Mapping[str, Callable[[Any], str]] = {  # said before all others
    "data_args.dataset": plain,
    "data_args.partition_method": plain,
    "data_args.partition_alpha": lambda value: f"β {plain(value)}",
    "train_args.client_num_in_total": lambda value: _several(value, "client"),
    "model_args.model": plain,
    "train_args.comm_round": lambda value: _several(value, "round"),
    "calfat.threat.eps": lambda value: f"ε {plain(value)}",
}
_PARTICIPANTS = ("train_args.client_num_per_round", "train_args.client_num_in_total")
_NAMES = ("calfat.trainer.name", "calfat.aggregator.name", "calfat.trainer.loss.name")
_MOST = 3  # further values in a name; more are listed under "What differs"
MORE = "…"


def settings_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key to value of a recipe as run, for all that parts runs into settings."""
    found = comparable(recipe).items()
    return {key: value for key, value in found if not (key.startswith(_NOT_A_SETTING) or PLUGIN_PLACE.fullmatch(key))}


def problem_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree before accuracies compare, of a recipe as run: data, partition, model, clients and threat.

    Of groups of clients it is who attacks and who has a threat of its own; by what others train is a method.
    """
    found = {key: value for key, value in settings_of(recipe).items() if key.startswith(_PROBLEM)}
    written = recipe.get("calfat", {}).get("clients") or ()
    groups = [{key: value for key, value in group.items() if key in _OF_A_GROUP} for group in written]
    other = [group for group in groups if not {"threat", "attacker"}.isdisjoint(group)]
    return {**found, "calfat.clients": other} if other else found


#: What the metrics of ``results.WORST`` are.
WORST_DEFINED = (
    "Worst class: in each run the class with the lowest accuracy; worst clients: the mean of the worst 10 % of them."
)


def partition_note(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    """Which rows of a table have one partition for all their seeds, in a sentence; empty where none has.

    Args:
        recipes: name to recipe as run, of the rows with several seeds.
    """
    fixed = [name for name, recipe in recipes.items() if recipe["calfat"]["partition"].get("seed", 0) is not None]
    whose = f" ({listing(fixed)})" if len(fixed) < len(recipes) else ""
    return f"One partition, seeds of training alone{whose}: intervals say nothing of other partitions." if fixed else ""


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values are not all equal, those that are known best first."""
    keys = dict.fromkeys((*_FIRST, *(key for values in settings for key in values)))
    return [key for key in keys if len({plain(values.get(key)) for values in settings}) > 1]


def problem_names(problems: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each problem all values in which it is unlike another one; one alone needs no name."""
    keys = differing(problems)
    return [" · ".join(_setting_words(key, values.get(key)) for key in keys) for values in problems]


def setting_names(runs: Sequence[RunFiles]) -> list[str]:
    """A name for each run, unlike all others: method, aggregator, and the values in which the runs differ.

    A name that says less than all differences ends in an ellipsis.
    """
    settings = [settings_of(run.settings) for run in runs]
    methods, aggregators = list(map(method, runs)), [run.recipe.aggregator.name for run in runs]
    keys = [key for key in differing(settings) if not key.startswith(_NAMED_LAST)]
    per_round, total = _PARTICIPANTS
    if all(values.get(per_round) in (None, values.get(total)) for values in settings):  # all take part: it is said
        keys = [key for key in keys if key != per_round]
    first = [key for key in keys if key in _FIRST]
    names = []
    for index, values in enumerate(settings):
        # What only one method or aggregator has is said by its name.
        others = [key for key in keys if key not in _FIRST and key not in _NAMES]
        others = [key for key in others if _differs_within(key, index, settings, methods, aggregators)]
        parts = [methods[index], *([aggregators[index]] if len(set(aggregators)) > 1 else [])]
        parts += [_setting_words(key, values.get(key)) for key in (*first, *others[:_MOST])]
        names.append(" · ".join([*parts, *([MORE] if len(others) > _MOST else [])]))
    return _told_apart(names, runs, settings)


def _differs_within(
    key: str, index: int, settings: Sequence[Mapping[str, Any]], methods: Sequence[str], aggregators: Sequence[str]
) -> bool:
    whose = (
        methods if key.startswith("calfat.trainer.") else aggregators if key.startswith("calfat.aggregator.") else ()
    )
    if not whose:
        return True
    return len({plain(values.get(key)) for of, values in zip(whose, settings, strict=True) if of == whose[index]}) > 1


def _told_apart(names: Sequence[str], runs: Sequence[RunFiles], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The same names, with as many further values as it takes until no two are equal; in the end, with the path."""
    names = list(names)
    for key in dict.fromkeys(key for values in settings for key in values):
        for same in {name for name in names if names.count(name) > 1}:
            members = [index for index, name in enumerate(names) if name == same]
            written = [plain(settings[index].get(key)) for index in members]
            if len(set(written)) > 1:
                for index in members:
                    names[index] += f" · {_setting_words(key, settings[index].get(key))}"
    return [name if names.count(name) == 1 else f"{name} · {run.path}" for name, run in zip(names, runs, strict=True)]


def _setting_words(key: str, value: Any) -> str:
    if value is not None and key in _FIRST:
        return _FIRST[key](value)
    return option_words(key.rpartition(".")[2], plain(value))


def _several(value: Any, one: str) -> str:
    """``5 clients``; a recipe that was edited by hand may say anything."""
    return counted(value, one) if isinstance(value, int) else f"{plain(value)} {one}s"


# --- how an accuracy was measured -------------------------------------------------------------------------------------


_ALL = "all"
_DATA = "data set"
_EXAMPLES = "examples"
_SPLIT, _VALIDATION = "split", "validation split"
_BUDGET = ("norm", "eps")
_NOT_THE_NUMBER = ("label", "max_examples", "batch_size", "seed")  # options that say nothing about the attack


@dataclass(frozen=True)
class Measure:
    """One way to measure accuracy.

    Attributes:
        label: the evaluator's.
        facts: term to value: the data set, the split if it is not the test split, how many of its examples, and the
            attack's options.
    """

    label: str
    facts: tuple[tuple[str, str], ...]

    @property
    def attack(self) -> dict[str, str]:
        """The facts apart from the examples."""
        return {term: value for term, value in self.facts if term not in (_EXAMPLES, _SPLIT)}

    def on_any_data(self) -> Measure:
        """The same for tables, which name the data set elsewhere."""
        return Measure(self.label, tuple(fact for fact in self.facts if fact[0] != _DATA))


def monitored(run: RunFiles, label: str) -> Measure:
    """How a column of ``rounds.csv`` was measured."""
    monitor = run.recipe.monitor
    pick = _pick(monitor.evaluators, label)
    limits = (monitor.max_examples, pick.get("max_examples"))
    examples = plain(min((limit for limit in limits if limit is not None), default=_ALL))
    on_validation = run.recipe.data.monitored_split == "validation"
    return _measure(run, label, pick, examples, split=_VALIDATION if on_validation else None)


def final(run: RunFiles, evaluation: Mapping[str, Any]) -> Measure:
    """How an entry of the final evaluation was measured."""
    label, number = str(evaluation["label"]), evaluation.get("num_examples")
    pick = _pick(run.recipe.evaluators, label)
    limited = number is not None and (number < _most(run) or number == pick.get("max_examples"))
    return _measure(run, label, pick, f"{number:,}" if limited else _ALL)


def on_examples(found: Iterable[tuple[str, Iterable[tuple[RunFiles, Mapping[str, Any]]]]]) -> str:
    """``natural and fgsm on all 359 test examples, pgd20 on 32 of 359 test examples``.

    Args:
        found: heading to (run, entry of its final evaluation) of all that it is about.
    """
    alike: dict[str, list[str]] = {}
    for heading, evaluations in found:
        alike.setdefault(listing(list(dict.fromkeys(_examples(*one) for one in evaluations))), []).append(heading)
    return ", ".join(f"{listing(headings)} on {examples}" for examples, headings in alike.items())


def _examples(run: RunFiles, evaluation: Mapping[str, Any]) -> str:
    number, most = evaluation.get("num_examples") or 0, _most(run)
    return f"{'all' if number == most else f'{number:,} of'} {counted(most, 'test example')}"


def _most(run: RunFiles) -> int:
    """Test examples that at least one evaluator measured; natural accuracy is of all of them."""
    return max((int(other.get("num_examples") or 0) for other in run.evaluations), default=0)


def without_curve(bars: Measure, runs: Iterable[RunFiles], headings: Mapping[str, str]) -> str:
    """Why the curves of a page show another attack than its bars, a sentence; empty where they show the same.

    Args:
        bars: how the bars were measured.
        runs: whose curves are on the page.
        headings: label to what the page calls it, where it is something else.
    """
    curves = [monitored(run, label) for run in runs for label in run.monitored if len(run.curve(label)) > 1]
    attacks = [measure for measure in curves if measure.label != NATURAL]
    same = any(measure.label == bars.label and measure.attack == bars.attack for measure in attacks)
    if bars.label == NATURAL or not curves or same:
        return ""
    named = titles([bars, *attacks], lambda label: headings.get(label, label))
    found = listing([name for measure, name in named.items() if measure != bars]) or "no attack"
    return f" The curves show {found}: calfat.monitor.evaluators says what is measured after a round."


def accuracy_title(label: str, headings: Mapping[str, str]) -> str:
    """``Natural accuracy``, ``Accuracy under PGD-20``."""
    heading = headings.get(label, label)
    return f"{heading[:1].upper()}{heading[1:]} accuracy" if label == NATURAL else f"Accuracy under {heading}"


def titles(measures: Iterable[Measure], title: Callable[[str], str]) -> dict[Measure, str]:
    """Each measure's title, with what sets it apart from others of its label: ``PGD-20 (32 examples)``.

    Args:
        measures: all that a reader sees together.
    """
    found = list(dict.fromkeys(measures))
    return {measure: title(measure.label) + _apart(measure, found) for measure in found}


def with_examples(named: Mapping[Measure, str]) -> dict[Measure, str]:
    """Titles of columns side by side: those that are not of all test examples say of how many, ``(64 examples)``."""
    found = {}
    for measure, title in named.items():
        number = dict(measure.facts).get(_EXAMPLES, _ALL)
        words = _measure_words(_EXAMPLES, number)
        found[measure] = title if number == _ALL or words in title else f"{title} ({words})"
    return found


def _apart(measure: Measure, among: Iterable[Measure]) -> str:
    alike = [dict(other.facts) for other in among if other.label == measure.label]
    own = [term for term, value in measure.facts if any(other.get(term) != value for other in alike)]
    facts = dict(measure.facts)
    return f" ({', '.join(_measure_words(term, facts[term]) for term in own)})" if own else ""


def _measure_words(term: str, value: str) -> str:
    if term == _EXAMPLES:
        return f"{value} test examples" if value == _ALL else f"{value} examples"
    return value if term in (_DATA, _SPLIT, "name") else option_words(term, value)


def _pick(plugins: Iterable[Plugin[Any]], label: str) -> Mapping[str, Any]:
    """An evaluator as the recipe writes it in full; empty where it is none of these."""
    return next((plugin.as_run() for plugin in plugins if plugin.label == label), {})


def _measure(run: RunFiles, label: str, pick: Mapping[str, Any], examples: str, split: str | None = None) -> Measure:
    threat = options_to_plain(run.recipe.threat)
    options = {key: value for key, value in pick.items() if key not in _NOT_THE_NUMBER}
    budget = {} if label == NATURAL else dict.fromkeys(_BUDGET)
    attack = {key: threat.get(key) if value is None else value for key, value in {**budget, **options}.items()}
    known = {_DATA: run.recipe.dataset.name, _SPLIT: split, _EXAMPLES: examples, **attack}
    return Measure(label, tuple((term, plain(value)) for term, value in known.items() if value is not None))

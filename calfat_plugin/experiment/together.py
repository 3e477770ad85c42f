"""What is good by itself in a recipe, and not beside the rest of it: errors."""

from __future__ import annotations

from dataclasses import replace

from calfat_plugin.errors import OptionError, PluginError
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.experiment.groups import members_of, some_choose_by_size
from calfat_plugin.experiment.plugin_class import check_class
from calfat_plugin.recipe.document import KeyPath
from calfat_plugin.recipe.schema import ClientGroup, Recipe
from calfat_plugin.recipe.silo import SILO
from calfat_plugin.results import WORST_CASE
from calfat_plugin.rounds_csv import owner_of

_MONITORED: KeyPath = ("calfat", "monitor", "evaluators")
_PATIENCE: KeyPath = ("train_args", "patience")


def check_together(experiment: Experiment, finished: bool) -> None:
    """Refuse keys that do not go together; of a ``finished`` run only what whoever looks at it needs."""
    try:
        experiment.silo.check_clients(experiment.num_clients)
    except OptionError as error:
        raise experiment.document.error(("calfat", "silo", *error.at), str(error)) from None
    if finished:
        return
    _check_patience(experiment)
    _check_plugins(experiment)
    _check_aggregator(experiment)
    for trained in experiment.everyone:
        trained.check_method(trained.trainer.entry.build)
        _check_clean_rounds(trained)
    _refuse_twin_columns(experiment)
    _check_groups(experiment)


def _check_patience(experiment: Experiment) -> None:
    """Refuse to stop early by accuracies that the run is reported by, or by none at all."""
    patience = experiment.train.patience
    if patience is None:
        return
    if experiment.data.monitored_split != "validation":
        raise experiment.document.error(
            _PATIENCE,
            f"got {patience}, but there is no validation split, and to stop by the test images would make the results "
            "on them too high. Set data_args.validation_share, such as 0.1, or remove the key.",
        )
    if experiment.selecting_label is None:
        raise experiment.document.error(
            _PATIENCE,
            f"got {patience}, but nothing is measured during the run (calfat.monitor.evaluators is empty). Name an "
            "evaluator there, such as pgd20, or remove the key.",
        )


def _check_plugins(experiment: Experiment) -> None:
    """Let each plugin check its options beside the rest of the recipe."""
    for plugin in experiment.picked:
        try:
            with experiment.attribute_errors_to(plugin):
                check_class(plugin.entry.build, plugin.entry)
                plugin.entry.check(plugin.options, experiment)
        except (OptionError, PluginError) as error:
            raise experiment.document.error(plugin.path, str(error)) from None


def _check_aggregator(experiment: Experiment) -> None:
    """Refuse an aggregator and a local trainer, the run's or a group's, of which one says that they do not fit."""
    aggregator = experiment.aggregator.entry
    trainers = [trained.trainer.entry for trained in experiment.everyone]
    # A trainer that the aggregator takes beside others is refused only where no client trains by another one.
    are_alone = all(trainer.name in aggregator.beside_others for trainer in trainers)
    for trainer in trainers:
        reason = trainer.conflicts.get(aggregator.name) or aggregator.conflicts.get(trainer.name)
        if reason is not None and (are_alone or trainer.name not in aggregator.beside_others):
            raise experiment.document.error(
                experiment.aggregator.path,
                f"aggregator '{aggregator.name}' and local trainer '{trainer.name}' cannot work together: {reason}",
            )


def _check_clean_rounds(trained: Experiment) -> None:
    """Refuse clean rounds that leave no round to attack in, or that an aggregator would take for adversarial ones."""
    clean_rounds = trained.additions.clean_rounds
    path = (*trained.trainer.path, "clean_rounds")
    if clean_rounds and clean_rounds >= trained.num_rounds:
        raise trained.document.error(
            path,
            f"got {clean_rounds} of {trained.num_rounds} rounds (train_args.comm_round), which leaves none to train "
            f"adversarially; expected at most {trained.num_rounds - 1}, or more rounds.",
        )
    ranked_from = getattr(trained.aggregator.options, "start_round", clean_rounds + 1)
    if trained.aggregator.entry.name == "sfat" and ranked_from <= clean_rounds:
        raise trained.document.error(
            path,
            f"got {clean_rounds}, and SFAT would rank clients from round {ranked_from} on "
            "(calfat.aggregator.start_round) by an adversarial loss, which clean rounds do not have; expected a "
            f"start_round of at least {clean_rounds + 1}.",
        )


def _refuse_twin_columns(experiment: Experiment) -> None:
    """Refuse two measurements under one name, in ``results.json`` or in ``rounds.csv``."""
    document = experiment.document
    for plugin in experiment.evaluators:
        if plugin.label == WORST_CASE:
            text = f"'{WORST_CASE}' is what all attacks together are called in results; give it another 'label'."
            raise document.error(plugin.path, text)
    monitored = experiment.monitor.evaluators
    labels = [plugin.label for plugin in monitored]
    for plugin in monitored:
        taken = owner_of(plugin.label, labels)
        if taken:
            raise document.error(
                plugin.path,
                f"the label '{plugin.label}' is the name of a column {taken} in rounds.csv; give it another 'label'.",
            )
    columns = ("train", "server", "group", *experiment.metric_columns)
    for label in labels:
        if label in columns:
            raise document.error(
                _MONITORED, f"'{label}' would name two things in rounds.csv; give the evaluator another 'label'."
            )


def _check_groups(experiment: Experiment) -> None:
    """Refuse groups that no run could have."""
    _refuse_shared_clients(experiment)
    for group in experiment.clients:
        _check_group(experiment, group)
    if not some_choose_by_size(experiment):
        members_of(experiment, ())  # for its errors


def _refuse_shared_clients(experiment: Experiment) -> None:
    """Refuse a client that two groups list."""
    group_of: dict[int, str] = {}
    for group in experiment.clients:
        for client in group.ids or ():
            if client in group_of:
                text = f"client {client} is in the group '{group_of[client]}', too."
                raise experiment.document.error((*group.path, "ids"), text)
            group_of[client] = group.name


def _check_group(experiment: Experiment, group: ClientGroup) -> None:
    """Refuse what a group has of its own and the run cannot have."""
    document = experiment.document
    if group.attacker is not None and experiment.common.training_type != "simulation":
        raise document.error(
            (*group.path, "attacker"),
            "attackers exist in simulations only: across silos each party is what it is. Remove the key, or set "
            "common_args.training_type: simulation.",
        )
    if experiment.partition.entry.name == SILO and (group.options.smallest or group.options.largest):
        raise document.error(
            group.path, "with partition_method: silo no party knows how many examples the others have; use ids."
        )
    of_run, of_group = _reshaping(experiment), _reshaping(group.recipe)
    if of_run != of_group:  # one model is averaged
        name = (of_run ^ of_group).pop()
        raise document.error(
            (*group.path, "trainer"),
            f"'{name}' changes the model's tensors, so either all clients train with it or none does.",
        )
    # What a group trains by is checked beside the run's, of which it has its own train_args and threat.
    beside = replace(experiment, train=group.recipe.train, threat=group.recipe.threat)
    for plugin in (group.recipe.trainer, group.recipe.modifier, group.recipe.threat.inner):
        try:
            with experiment.attribute_errors_to(plugin):
                plugin.entry.check(plugin.options, beside)
        except (OptionError, PluginError) as error:
            raise document.error(group.path, str(error)) from None


def _reshaping(recipe: Recipe) -> set[str]:
    """The names of the trainer and the loss modifier, of those that change the model's tensors."""
    return {plugin.entry.name for plugin in (recipe.trainer, recipe.modifier) if plugin.entry.reshapes}

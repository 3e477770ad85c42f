"""Recipe and registry become an experiment: names resolved, options typed, defaults and presets filled in.

``calfat check`` stops here: no data is read and no device touched, and nearly every typo is caught.
"""

from calfat_plugin.experiment.differences import changes, evaluators_of, going_further, same_but_rounds, why_not
from calfat_plugin.experiment.experiment import Experiment
from calfat_plugin.experiment.reading import defined_modifiers
from calfat_plugin.experiment.resolve import assemble

__all__ = [
    "Experiment",
    "assemble",
    "changes",
    "defined_modifiers",
    "evaluators_of",
    "going_further",
    "same_but_rounds",
    "why_not",
]

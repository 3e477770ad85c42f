"""``calfat new-plugin NAME --kind KIND``: a package of one's own to start from, which works as it is written."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
from jinja2 import Environment, PackageLoader, StrictUndefined

from calfat_plugin import entries, registry
from calfat_plugin.disk import write_new_folder
from calfat_plugin.errors import PluginError

_NAME = re.compile(r"[a-z]([a-z0-9_-]*[a-z0-9])?")


@dataclass(frozen=True)
class Kind:
    """What the templates need to know about a kind of plugin."""

    entry: type[entries.Entry]
    does: str  # the template's plugin
    other: str = ""  # an option of it and a value that is not its default, as a call writes them


KINDS = {
    "trainer": Kind(entries.TrainerEntry, "adversarial and clean examples, mixed by one number", "share=0.25"),
    "aggregator": Kind(
        entries.AggregatorEntry,
        "a part of the way from the global model to the clients' mean",
        "step=0.5, unanimous=False",
    ),
    "evaluator": Kind(
        entries.EvaluatorEntry, "accuracy under the worst of several random points of the ball", "draws=2"
    ),
    "dataset": Kind(entries.DatasetEntry, "stripes in four directions, drawn and not read"),
    "model": Kind(entries.ModelEntry, "two layers on the flat image", "width=5"),
    "partition": Kind(entries.PartitionEntry, "clients of unequal size, each r times the next", "ratio=1.0"),
    "modifier": Kind(
        entries.ModifierEntry, "label smoothing that grows with the class's share of the examples", "smoothing=0.3"
    ),
    "inner_attack": Kind(entries.InnerAttackEntry, "projected gradient steps that become shorter", "factor=0.5"),
    "attacker": Kind(entries.AttackerEntry, "sends its update without its largest values", "share=0.5"),
    "logger": Kind(entries.LoggerEntry, "a line for each round, in a text file of the run directory"),
}


@click.command(name="new-plugin")
@click.argument("name", metavar="NAME")
@click.option("--kind", type=click.Choice(list(KINDS)), required=True, help="What it offers.")
@click.option(
    "--into",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="FOLDER",
    help="Where to put it; default: the current folder.",
)
def new_plugin(name: str, kind: str, into: Path) -> None:
    """Write the package of a plugin of your own into a new folder NAME.

    It has a module that works and is to be changed, its tests, a recipe that uses it, and the metadata to install it.
    """
    module = _module_of(name)
    known = registry.Registry.load()
    for each_kind in entries.KINDS:
        for entry, provider in known.offers(each_kind):
            if entry.name == name:
                raise PluginError(f"there is a plugin '{name}' already ({entry.kind}, {provider}); {_another(name)}")
    folder = into / name
    write_new_folder(folder, render(name, kind), "Choose another name, or a folder with --into.")
    click.echo(
        f"{folder}: a package for a plugin ({KINDS[kind].entry.kind}) in {module}.py, which works and is yours to "
        f"change.\n  cd {shlex.quote(str(folder))}\n"
        f"  calfat run {module}.yaml --plugin {module}.py\n"
        "  python -m pytest\n"
        "  pip install --no-build-isolation -e ."
    )


def render(name: str, kind: str) -> dict[str, str]:
    """File name to text of a package."""
    module = _module_of(name)
    environment = Environment(
        loader=PackageLoader("calfat_plugin.cli", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    templates = {
        "pyproject.toml": "pyproject.toml.jinja",
        "README.md": "README.md.jinja",
        f"{module}.py": f"{kind}.py.jinja",
        f"{module}.yaml": "recipe.yaml.jinja",
        f"tests/test_{module}.py": "test.py.jinja",
    }
    title = "".join(word.capitalize() for word in module.split("_"))
    values = {"name": name, "module": module, "title": title, "kind": kind, **vars(KINDS[kind])}
    values["what"] = KINDS[kind].entry.kind
    files = {path: environment.get_template(template).render(values) for path, template in templates.items()}
    if re.search(rf"\bimport\b.*\b{title}(Options|Loss)?\b", files[f"{module}.py"]):
        raise PluginError(f"'{name}' would name a class {title} like one that it imports; {_another(name)}")
    return files


def _module_of(name: str) -> str:
    """The name of a plugin's module; refuses a name that cannot be one, or is taken."""
    module = name.replace("-", "_")
    if not _NAME.fullmatch(name) or keyword.iskeyword(module):
        raise PluginError(
            f"'{name}' cannot be a plugin's name: it must begin with a letter, end with a letter or a digit, and "
            "contain only lower-case letters, digits, '-', '_', such as my-fat."
        )
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.origin is not None:
        raise PluginError(f"there is a module '{module}' already ({spec.origin}); {_another(name)}")
    return module


def _another(name: str) -> str:
    return f"choose another name, such as my-{name}."

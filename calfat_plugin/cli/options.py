"""Arguments that several commands share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any, get_args

import click
from click.shell_completion import CompletionItem

from calfat_plugin.recipe.plugin_files import PluginFile
from calfat_plugin.recipe.schema import HOSTS
from calfat_plugin.shipped import shipped_files
from calfat_plugin.threat import Norm

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def together(*options: Decorator) -> Decorator:
    """Several options as one decorator, in the order in which the help lists them."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def _host_override(ctx: click.Context, param: click.Parameter, host: str | None) -> tuple[str, ...]:
    return () if host is None else (f"common_args.host={host}",)


def complete_shipped(start: str) -> list[CompletionItem]:
    """Shipped names that begin with ``start``."""
    return [CompletionItem(name) for name in shipped_files() if name.startswith(start)]


def complete_recipe(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped names, and whatever files there are."""
    return [*complete_shipped(incomplete), CompletionItem(incomplete, type="file")]


_recipe_argument: Decorator = click.argument("recipe", metavar="RECIPE", shell_complete=complete_recipe)
set_option: Decorator = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="SECTION.KEY=VALUE",
    help="Override a recipe value; repeatable. Example: --set train_args.comm_round=20",
)
_seed_option: Decorator = click.option(
    "--seed", type=click.IntRange(min=0), metavar="N", help="Short for --set common_args.random_seed=N."
)
_host_option: Decorator = click.option(
    "--host",
    "of_host",
    type=click.Choice(tuple(HOSTS)),
    callback=_host_override,
    help="Short for --set common_args.host=HOST: what runs the rounds.",
)
idle_option: Decorator = click.option(
    "--idle", is_flag=True, help="Take only the processor time that nobody else wants. For long trainings."
)
plugin_option: Decorator = click.option(
    "--plugin",
    "plugins",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A Python file with plugins or a network, which need not be installed; repeatable.",
)


#: A recipe, and what is changed in it.
recipe_options = together(_recipe_argument, set_option, _seed_option, _host_option, plugin_option)


# --- a finished model: a checkpoint of a run, or any PyTorch model with its weights -----------------------------------


def _ask(file: PluginFile) -> bool:
    """Ask the user whether a plugin file may be executed; without a terminal the answer is no."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    click.echo(f"This run executes {file.path}\n(SHA-256 {file.sha256}), which you have not run before.", err=True)
    try:
        return click.confirm("It acts with your permissions. Execute it?", err=True)
    except click.Abort as abort:  # click's word for both Ctrl-C and the end of input
        click.echo(err=True)  # the cursor is behind the question
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return False


def _trust_callback(ctx: click.Context, param: click.Parameter, trust_all: bool) -> Callable[[PluginFile], bool]:
    """The flag as a function that says whether a plugin file of the run may be executed."""
    if trust_all:
        return lambda file: True
    return _ask


_trust_option: Decorator = click.option(
    "--trust-plugins",
    "trust",
    is_flag=True,
    callback=_trust_callback,
    help="Execute plugin files of the run that you have not run before.",
)
target_argument: Decorator = click.argument(
    "target", metavar="[CHECKPOINT_OR_RUN_DIR]", required=False, type=click.Path(path_type=Path)
)
targets_argument: Decorator = click.argument(
    "targets", metavar="[CHECKPOINT_OR_RUN_DIR]...", nargs=-1, type=click.Path(path_type=Path)
)
_checkpoint_option: Decorator = click.option(
    "--checkpoint", metavar="NAME", help="Of a run directory: last (default), best-natural or best-robust."
)
_data_dir_option: Decorator = click.option(
    "--data-dir", metavar="DIR", help="Where data sets are. Default: the recipe's data_cache_dir."
)
download_option: Decorator = click.option("--download", is_flag=True, help="Fetch a missing data set.")
#: Which model of a run, on which data.
which_checkpoint = together(_checkpoint_option, _data_dir_option, plugin_option, _trust_option)
#: Likewise, or a model of the user's own.
which_model = together(
    _checkpoint_option,
    click.option(
        "--model",
        metavar="MODULE:FACTORY",
        help="A model of your own, or a built-in name; needs --weights and --dataset.",
    ),
    click.option("--weights", type=click.Path(path_type=Path), help="Its state dict: safetensors, or torch.save's."),
    click.option("--dataset", metavar="NAME", help="The data set it is attacked on."),
    _data_dir_option,
    plugin_option,
    _trust_option,
)
#: Which model, how it is attacked, and where to compute.
model_options = together(
    click.option("--norm", type=click.Choice(get_args(Norm)), help="Default: the recipe's, else linf."),
    click.option(
        "--step-size",
        metavar="SIZE",
        help="Default: the recipe's (a multiple of eps follows --eps); eps/4 in another norm or without a recipe.",
    ),
    which_model,
    download_option,
    click.option(
        "--batch-size", type=click.IntRange(min=1), metavar="B", help="Images at a time. Default: the recipe's."
    ),
    click.option(
        "--device", metavar="cpu|cuda:0", help="Default: as the recipe says; a GPU if there is one for --model."
    ),
    click.option(
        "--seed", type=click.IntRange(min=0), metavar="N", help="Seed of random starts. Default: the recipe's."
    ),
    click.option("--plain", is_flag=True, help="Lines instead of a bar, also on a terminal."),
)


# --- --json -----------------------------------------------------------------------------------------------------------


json_option: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as JSON, for other programs."
)


@contextmanager
def json_output(as_json: bool) -> Iterator[Callable[[Any], None]]:
    """With ``as_json`` standard output is one JSON document; what a command prints while it works goes to stderr.

    Gives a function that prints the result, or does nothing without ``as_json``.
    """
    stdout = sys.stdout

    def show(result: Any) -> None:
        if as_json:
            print(json.dumps(result, indent=2, allow_nan=False), file=stdout)

    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        yield show

"""The registry: which plugins exist, who offers them, and what failed to load.

Built-ins come through the same hooks as anyone's. Third parties are found through the entry-point group
``calfat_plugin``; a plugin that cannot be imported, breaks the contract or misspells a hook is reported and left out,
and so is a damaged distribution. A name offered twice is an error that names both distributions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distribution, distributions
from pathlib import Path
from typing import Any, TypeVar

import pluggy

from calfat_plugin import builtin, entries, hookspecs
from calfat_plugin.errors import PluginError, did_you_mean, listed
from calfat_plugin.peer_text import printable
from calfat_plugin.recipe.document import Document
from calfat_plugin.recipe.plugin_files import PluginFile, plugin_files
from calfat_plugin.version import __version__

GROUP = hookspecs.PROJECT
BLOCK_VARIABLE = "CALFAT_BLOCK_PLUGINS"

_PASSED_IN = "passed in"
_SHA256 = "sha256:"  # begins the version of a plugin that is a single file
_NO_FILES: Mapping[str, PluginFile] = {}
_MAX_DIGITS = 6  # of a number at the end of a name
_MOST_ENTRIES = 1000  # of a kind that a plugin may offer: more come from a loop without an end

E = TypeVar("E", bound=entries.Entry)


@dataclass(frozen=True)
class Provider:
    """Who offers a plugin: distribution, version and entry-point name."""

    distribution: str
    version: str
    plugin: str = ""
    unmet: str = ""  # what it asks of this package and does not get, such as ``calfat-plugin>=99``; empty: nothing

    @property
    def complaint(self) -> str:
        """Why it may not work with this version of the package; an empty text where nothing speaks against it."""
        if not self.unmet:
            return ""
        return (
            f"{self} requires {self.unmet}, and this is calfat-plugin {__version__}: it may fail or measure something "
            "else. Install versions that fit together."
        )

    @property
    def key(self) -> str:
        """What pluggy calls the plugin: unlike entry-point names, distinct between distributions."""
        return f"{self.distribution}:{self.plugin}"

    @property
    def is_file(self) -> bool:
        """Whether the plugin is a single file, whose path then stands for the distribution."""
        return self.version.startswith(_SHA256)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Failure:
    """A plugin that was found and not loaded."""

    provider: Provider
    reason: str

    def __str__(self) -> str:
        return f"{self.provider.plugin} ({self.provider}): {self.reason}"


BUILT_IN = Provider("calfat-plugin", __version__, "built-in")


class Registry:
    """Plugins by kind and name. Build one with ``load``; pass it on; there is no global one.

    A ``kind`` is the class of its entries, such as ``TrainerEntry``.

    Attributes:
        failures: installed plugins that could not be loaded, and damaged distributions, and why.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._providers: dict[str, Provider] = {}
        self._entries: dict[type[entries.Entry], dict[str, tuple[Any, Provider]]] = {kind: {} for kind in entries.KINDS}
        self.failures: list[Failure] = []

    @classmethod
    def load(
        cls, *, entry_points: bool = True, plugins: Iterable[Any] = (), files: Mapping[str, PluginFile] = _NO_FILES
    ) -> Registry:
        """Collect the built-ins, and installed plugins.

        The comma-separated environment variable ``CALFAT_BLOCK_PLUGINS`` leaves distributions or entry points out.

        Args:
            entry_points: whether to discover installed distributions (tests say no).
            plugins: further modules or objects with hooks.
            files: module name to plugin that is a single file (``recipe.plugin_files``); an installed plugin that is a
                module of this name is left out.

        Raises:
            PluginError: when two plugins offer one name of one kind, or one of ``plugins`` or ``files`` breaks the
                contract.
        """
        registry = cls()
        registry._register(builtin, BUILT_IN)
        for plugin in plugins:
            name = getattr(plugin, "__name__", type(plugin).__name__)
            provider = Provider(_PASSED_IN, name, name)
            if provider.key in registry._providers:  # another object of the same class
                provider = Provider(_PASSED_IN, name, f"{name} {len(registry._providers)}")
            registry._add_requested(plugin, provider, name)
        for file in files.values():
            provider = Provider(str(file.path), f"{_SHA256}{file.sha256[:12]}", file.name)
            # A file with a model only has no hooks.
            registry._add_requested(file.load(), provider, str(file.path), needs_hooks=False)
        if entry_points:
            registry._add_installed(files)
        registry._collect_entries()
        return registry

    @classmethod
    def for_recipe(cls, document: Document) -> Registry:
        """Collect the built-ins, installed plugins, and the plugin files of a recipe, ``document``.

        Raises:
            RecipeError, PluginError: as ``load`` and ``plugin_files``.
        """
        return cls.load(files=plugin_files(document))

    # --- lookups ------------------------------------------------------------------------------------------------------

    def names(self, kind: type[E]) -> tuple[str, ...]:
        """All names of a kind, sorted."""
        return tuple(sorted(self._entries[kind]))

    def offers(self, kind: type[E]) -> Iterator[tuple[E, Provider]]:
        """All entries of a kind with their providers, sorted by name."""
        return (self._entries[kind][name] for name in self.names(kind))

    def find(self, kind: type[E], name: str) -> tuple[E, Mapping[str, int]]:
        """Look ``name`` up; ``pgd20`` finds ``pgd`` with ``{"steps": 20}``.

        Returns:
            (entry, options that the name sets).

        Raises:
            PluginError: unknown name; the text says what is known, what is near and what failed to load.
        """
        table = self._entries[kind]
        if name in table:
            return table[name][0], {}
        match = re.fullmatch(rf"(.*?[^0-9])([0-9]{{1,{_MAX_DIGITS}}})", name)
        if match and match[1] in table:
            entry = table[match[1]][0]
            if entry.number_option is not None:
                return entry, {entry.number_option: int(match[2])}
        raise PluginError(self._unknown(kind, name))

    def provider(self, kind: type[E], name: str) -> Provider:
        """Who offers the entry called ``name``."""
        return self._entries[kind][name][1]

    def listeners(self) -> tuple[tuple[Provider, Any], ...]:
        """(who offers it, plugin object) for every plugin that implements hooks of a run's life."""
        listeners = []
        for key, plugin in self._manager.list_name_plugin():
            callers = self._manager.get_hookcallers(plugin) or ()
            if any(caller.name in hookspecs.LIFE for caller in callers):
                listeners.append((self._providers[key], plugin))
        return tuple(listeners)

    def plugins(self) -> tuple[Provider, ...]:
        """Everything that was loaded, built-ins first."""
        return tuple(self._providers.values())

    # --- adding plugins -----------------------------------------------------------------------------------------------

    def _add_requested(self, plugin: Any, provider: Provider, who: str, *, needs_hooks: bool = True) -> None:
        """Add a plugin that somebody asked for: a mistake in it is an error, and not only reported."""
        try:
            self._register(plugin, provider, needs_hooks=needs_hooks)
        except (PluginError, pluggy.PluginValidationError) as error:
            raise PluginError(f"{who}: {' '.join(str(error).split())}") from None

    def _add_installed(self, files: Container[str]) -> None:
        """Add the plugins of installed distributions, but those that are blocked or also a file of the recipe."""
        blocked = {_normal(name) for name in os.environ.get(BLOCK_VARIABLE, "").split(",") if name.strip()}
        installed = sorted(_installed(), key=lambda item: (str(item[0]), item[0].plugin))
        for provider, entry_point in installed:
            if not blocked.isdisjoint({_normal(provider.distribution), _normal(provider.plugin)}):
                continue
            try:
                if isinstance(entry_point, PluginError):
                    raise entry_point
                if entry_point.module in files:
                    continue
                self._register(entry_point.load(), provider)
            except (Exception, SystemExit) as error:  # a third party's import may raise anything
                self._fail(provider, error)

    def _register(self, plugin: Any, provider: Provider, *, needs_hooks: bool = True) -> None:
        self._providers[provider.key] = provider
        self._manager.register(plugin, name=provider.key)
        if isinstance(plugin, type):
            raise PluginError(f"the entry point names the class {plugin.__name__}; name an instance or a module.")
        hookspecs.check_hooks(self._manager, plugin, needs_hooks=needs_hooks)

    def _fail(self, provider: Provider, error: BaseException) -> None:
        """Report a plugin and take all its hooks out again; pluggy keeps those from before the one that failed."""
        reason = _reason(error)
        if provider.complaint:
            reason = f"{reason.rstrip('.')}. {provider.complaint}"
        self.failures.append(Failure(provider, reason))
        self._providers.pop(provider.key, None)
        if self._manager.has_plugin(provider.key):
            self._manager.unregister(name=provider.key)

    # --- collecting their entries -------------------------------------------------------------------------------------

    def _collect_entries(self) -> None:
        """Ask all hooks first, since a plugin of which a later hook fails offers nothing; then fill the tables."""
        offers: list[tuple[type[entries.Entry], entries.Entry, str]] = []
        for kind in entries.KINDS:
            for implementation in list(getattr(self._manager.hook, kind.hook).get_hookimpls()):
                key = implementation.plugin_name
                for entry in self._offered(kind, self._providers[key], implementation.function):
                    offers.append((kind, entry, key))
        for kind, entry, key in offers:
            provider = self._providers.get(key)
            if provider is None:  # a later hook of the same plugin failed
                continue
            table = self._entries[kind]
            if entry.name in table:
                raise PluginError(_clash(kind, entry.name, table[entry.name][1], provider))
            table[entry.name] = (entry, provider)

    def _offered(self, kind: type[entries.Entry], provider: Provider, hook: Callable[[], Any]) -> list[entries.Entry]:
        """What a plugin offers; an installed plugin whose hook breaks is reported and unregistered."""
        try:
            return list(_checked_entries(hook(), kind))
        except (Exception, SystemExit) as error:
            if provider is BUILT_IN:
                raise
            if provider.is_file:
                raise PluginError(f"{provider.distribution}: {_reason(error)}") from error
            if provider.distribution == _PASSED_IN:
                raise PluginError(f"{provider.plugin}: {_reason(error)}") from error
            self._fail(provider, error)
            return []

    # --- messages -----------------------------------------------------------------------------------------------------

    def _unknown(self, kind: type[entries.Entry], name: str) -> str:
        table = self._entries[kind]
        stem = name.rstrip("0123456789")
        number = name.removeprefix(stem)
        if number and stem in table and table[stem][0].number_option:
            return f"no {kind.kind} called '{name}': its number may have {_MAX_DIGITS} digits at most."
        names_of: dict[str, list[str]] = {}  # provider to the names that it offers
        similar = []
        for known, (entry, provider) in table.items():
            names_of.setdefault(str(provider), []).append(entry.shown_name)
            if entry.number_option:
                known += number
            similar.append(known)
        hint = did_you_mean(name, similar) or " Install what offers it, or name its file with --plugin FILE."
        offers = [f"{listed(names)} ({provider})" for provider, names in names_of.items()]
        text = f"no {kind.kind} called '{name}'.{hint} Known: {'; '.join(offers)}."
        if self.failures:
            text += f" Not loaded: {'; '.join(map(str, self.failures)).rstrip('.')}."
        return text


def _reason(error: BaseException) -> str:
    """What went wrong in a plugin, in one line."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, PluginError):
        return text
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def _checked_entries(offered: Any, kind: type[entries.Entry]) -> Iterator[entries.Entry]:
    """Yield what a plugin's hook returned, if all of it is entries of the hook's kind."""
    rule = f"{kind.hook} must yield {kind.__name__} objects"
    if offered is None:
        raise PluginError(f"{rule}, got nothing; is a 'yield' or 'return' missing?")
    if isinstance(offered, entries.Entry) or not isinstance(offered, Iterable):
        raise PluginError(f"{rule}, got one {type(offered).__name__} that is not in a list.")
    for number, entry in enumerate(offered):
        if number == _MOST_ENTRIES:
            raise PluginError(f"{kind.hook} yields more than {_MOST_ENTRIES} entries; has its loop no end?")
        if isinstance(entry, type):
            raise PluginError(f"{rule}, got the class {entry.__name__}.")
        if not isinstance(entry, kind):
            raise PluginError(f"{rule}, got a {type(entry).__name__}.")
        yield entry


def _installed() -> Iterator[tuple[Provider, EntryPoint | PluginError]]:
    """Entry points of our group, each with the distribution that has it; of a damaged distribution what is wrong.

    ``importlib.metadata.entry_points`` fails once the host's importlib-metadata 1.7 is imported.
    """
    names: set[str] = set()
    for candidate in distributions():
        try:
            if not any(point.group == GROUP for point in candidate.entry_points):
                continue
            name = next(iter(candidate.metadata.get_all("Name", [])), "")
            if not name:
                raise PluginError("METADATA has no name")
            if _normal(name) in names:
                continue  # the same distribution twice on the path: the first one wins, as for imports
            first = distribution(name)
            names.add(_normal(name))
            points = [point for point in first.entry_points if point.group == GROUP]
            unmet = _unmet_requirement(first.requires or ())
            version = first.version or "?"
        except Exception as error:  # in another encoding, say, or with the name of another distribution
            folder = Path(str(getattr(candidate, "_path", "unknown")))  # not public, but all that is left of it
            name, _, version = folder.stem.partition("-")
            yield Provider(name, version or "?", name), PluginError(f"{folder} is damaged ({_reason(error)})")
            continue
        for point in points:
            yield Provider(name, version, point.name, unmet), point


def _unmet_requirement(requirements: Iterable[str]) -> str:
    """The version of this package that a distribution requires, if this is another; an empty text otherwise.

    pip checks it when it installs the distribution, but not when it installs another version of this package later.
    """
    for text in requirements:
        if not _normal(text).startswith(BUILT_IN.distribution):
            continue
        from packaging.requirements import InvalidRequirement, Requirement  # here: it costs each start some time

        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if not applies or _normal(requirement.name) != BUILT_IN.distribution:
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            return f"{BUILT_IN.distribution}{requirement.specifier}"
    return ""


def _clash(kind: type[entries.Entry], name: str, first: Provider, second: Provider) -> str:
    """The message for two plugins that offer the same name of a kind."""
    article = "a"
    if kind.kind[0] in "aeiou":
        article = "an"
    offer = f"{article} {kind.kind} called '{name}'"
    if first.key == second.key:
        return f"plugin {first.plugin} ({first}) offers {offer} twice."
    if first.distribution == second.distribution:
        return f"{first} offers {offer} twice, in its plugins {first.plugin} and {second.plugin}."
    if second.is_file:
        return f"{second.distribution} offers {offer}, and so does {first}. Give it another name in the file."
    if first.is_file:
        return f"{first.distribution} offers {offer}, and so does {second}. Give it another name in the file."
    to_block = second
    if second.distribution == BUILT_IN.distribution:
        to_block = first
    return (
        f"two distributions offer {offer}: {first} and {second}. "
        f"Uninstall one of them, or start with {BLOCK_VARIABLE}={to_block.distribution}."
    )


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()

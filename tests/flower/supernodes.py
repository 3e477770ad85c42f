"""Flower's SuperLink and SuperNodes on this machine: TLS, registered keys, a folder for each client."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.cli.runner import ROOT
from tests.flower.federation import write_app
from tests.flower.processes import MARK, TIMEOUT, started_by, wait_for

# Imported by every process of a federation with a liar. Flower gives up one that has not begun within 30 seconds, which
# on a busy machine none has; so our code, which is slow to import, is changed when it is imported anyhow.
CUSTOMIZE = """\
import os
import sys
from importlib.machinery import PathFinder


class Changes:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "flwr.common.constant":
            spec = PathFinder.find_spec(name, path)
            load = spec.loader.exec_module

            def exec_module(module):
                load(module)
                module.HEARTBEAT_DEFAULT_INTERVAL = 300

            spec.loader.exec_module = exec_module
            return spec
        if name == "calfat_plugin.runs.party" and "CALFAT_TEST_LIES" in os.environ:
            sys.meta_path.remove(Changes)
            from tests.silo.silo_party import _lie

            _lie()


sys.meta_path.insert(0, Changes)
"""


class SuperNodes:
    """A SuperLink and a node for each client; use as a context manager, which ends them all.

    Args:
        folder: for all that they write.
        recipe: the app's.
        changes: of the recipe.
        clients: how many.
        liar: the client whose node lies, as that of the tests of silos.
    """

    def __init__(self, folder: Path, recipe: Path, changes: Iterable[str], clients: int, liar: int = -1) -> None:
        self.folder, self._liar, self._nodes = folder, liar, dict[int, subprocess.Popen[str]]()
        write_app(folder / "app", recipe, changes)
        (folder / "sitecustomize").mkdir()
        (folder / "sitecustomize" / "sitecustomize.py").write_text(CUSTOMIZE)
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        mine = authority.issue_cert("127.0.0.1")
        mine.private_key_pem.write_to_path(str(folder / "server.key"))
        mine.cert_chain_pems[0].write_to_path(str(folder / "server.pem"))
        with ExitStack() as stack:
            self._port, *self._ports = (_free_port(stack) for _ in range(clients + 1))
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink.silos]\naddress = "127.0.0.1:{self._port}"\nroot-certificates = "{folder}/ca.pem"\n'
        )
        self._environment = {**os.environ, MARK: str(folder), "FLWR_HOME": str(folder / "home")}
        self._environment |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        if liar >= 0:
            paths = (folder / "sitecustomize", ROOT, ROOT / "tests" / "silo")
            self._environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
        self._environment["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))

    @property
    def run_directory(self) -> Path:
        """The one of the app's only run; a folder that is not there before it has begun."""
        runs = self.folder / "app-runs"
        return next(runs.glob("*"), runs / "none")

    def __enter__(self) -> SuperNodes:
        with ExitStack() as if_it_fails:
            if_it_fails.push(self.__exit__)
            words = ["--ssl-ca-certfile", "ca.pem", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
            more = ["--enable-supernode-auth", "--disable-runtime-dependency-installation", "--port", str(self._port)]
            link = self._start("superlink", "flower-superlink", *words, *more)
            for client in range(len(self._ports)):
                self._make_key(client)
                wait_for(lambda client=client: self._registers(client) or link.poll() is not None)
                assert link.poll() is None, self.said("superlink")
                self.start(client)
            if_it_fails.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        for process in started_by(self.folder):
            with suppress(psutil.Error):
                process.terminate()
        wait_for(lambda: not started_by(self.folder))

    def start(self, client: int) -> None:
        """Start the client's node."""
        config = f'partition-id={client} folder="{self.folder}/silo{client}"'
        words = ["--root-certificates", "ca.pem", "--superlink", f"127.0.0.1:{self._port}", "--node-config", config]
        more = ["--auth-supernode-private-key", f"node{client}", "--port", str(self._ports[client])]
        self._environment.pop("CALFAT_TEST_LIES", None)
        if client == self._liar:
            self._environment["CALFAT_TEST_LIES"] = "1"
        self._nodes[client] = self._start(f"node{client}", "flower-supernode", *words, *more)

    def kill(self, client: int) -> None:
        """``kill -9`` the client's node, and what trains for it."""
        node = psutil.Process(self._nodes[client].pid)
        for process in [node, *node.children(recursive=True)]:
            process.kill()
        self._nodes[client].wait()

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """``flwr run`` of the app."""
        return self._start("run", "flwr", "run", "app", "silos", "--stream", *words)

    def run(self, *words: str) -> str:
        """A whole ``flwr run``; returns what it says."""
        self.begin(*words).wait(TIMEOUT)
        return self.said("run")

    def said(self, name: str) -> str:
        """What a process has printed."""
        return (self.folder / f"{name}.txt").read_text()

    def _start(self, name: str, program: str, *words: str) -> subprocess.Popen[str]:
        with (self.folder / f"{name}.txt").open("a") as out:
            return subprocess.Popen(
                [program, *words],
                **{"cwd": self.folder, "env": self._environment, "stdout": out, "stderr": out, "text": True},
            )

    def _make_key(self, client: int) -> None:
        key = ec.generate_private_key(ec.SECP384R1())
        how = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        (self.folder / f"node{client}").write_bytes(key.private_bytes(*how))
        openssh = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        (self.folder / f"node{client}.pub").write_bytes(key.public_key().public_bytes(*openssh))

    def _registers(self, client: int) -> bool:
        """Tell the SuperLink the node's key; False where it does not answer yet."""
        return self._start("register", "flwr", "supernode", "register", f"node{client}.pub", "silos").wait(TIMEOUT) == 0


def _free_port(stack: ExitStack) -> int:
    each = stack.enter_context(socket.socket())
    each.bind(("127.0.0.1", 0))
    return int(each.getsockname()[1])

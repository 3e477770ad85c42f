"""What Flower starts: server and client of calfat-plugin, with the recipe that lies beside this file."""

from pathlib import Path

from calfat_plugin.cli.flower_app import client_app, server_app

server = server_app(Path(__file__).parent)
client = client_app(Path(__file__).parent)

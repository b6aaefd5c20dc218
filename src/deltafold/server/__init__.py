"""The OpenAI-compatible HTTP server: a client of the package's public surface like any other."""

from deltafold.server.app import create_app
from deltafold.server.run import add_arguments, serve

__all__ = ["add_arguments", "create_app", "serve"]

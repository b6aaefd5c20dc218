"""The OpenAI-compatible HTTP server, a client of the public surface like any other: `app.py` (routes), `run.py`."""

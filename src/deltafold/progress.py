"""A progress bar on stderr while weights load."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def loading_bar(show: bool | None) -> Iterator[Callable[[int, int], None] | None]:
    """Yields `on_progress(done_bytes, total_bytes)`, or None where nothing is shown (`show` None: not a terminal)."""
    if not (sys.stderr.isatty() if show is None else show):
        yield None
        return
    columns = (TextColumn("loading weights"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("weights", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

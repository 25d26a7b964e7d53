"""The progress of an export on the terminal: a line per finished stage, a bar for the running one.

The exporter is known here only by the shape of its events: nothing in the runtime imports it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

from npu_llm.cli import terminal


class Stage(Protocol):
    """A stage that started, got on, or (with ``seconds``) finished."""

    @property
    def stage(self) -> str: ...
    @property
    def seconds(self) -> float | None: ...
    @property
    def fraction(self) -> float | None: ...
    @property
    def detail(self) -> str: ...


@contextlib.contextmanager
def stage_view(console: Console) -> Iterator[Callable[[Stage], None]]:
    """Show stages while the block runs; yields what takes their events."""
    live = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        _KnownShare(BarColumn(bar_width=24)),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim", markup=False),
        console=console,
        transient=True,
    )
    with live, terminal.warnings_to(lambda line: _print(console, Text(line.rstrip()))):
        yield _Stages(live)


class _Stages:
    def __init__(self, live: Progress) -> None:
        self._live = live
        self._stage = ""
        # Importing torch and transformers takes seconds, and no stage has started yet.
        self._task = live.add_task("starting", total=None, detail="")

    def __call__(self, event: Stage) -> None:
        if event.stage != self._stage:
            self._start(event.stage)
        if event.seconds is not None:
            self._finish(event.seconds, event.detail)
            return
        self._live.update(
            self._task,
            total=None if event.fraction is None else 1.0,
            completed=event.fraction or 0.0,
            detail=event.detail,
        )

    def _start(self, stage: str) -> None:
        self._live.update(self._task, visible=False)
        self._stage = stage
        self._task = self._live.add_task(stage, total=None, detail="")

    def _finish(self, seconds: float, detail: str) -> None:
        self._live.update(self._task, visible=False)
        line = Text(f"{self._stage:<12} {seconds:7.1f} s  ").append(detail, style="dim")
        _print(self._live.console, line)
        self._stage = ""


def _print(console: Console, line: Text) -> None:
    """Above the live part; the terminal wraps long lines, so that they can be copied whole."""
    console.print(line, soft_wrap=True)


class _KnownShare(ProgressColumn):
    """A bar for stages that say how far they are, and nothing for the others."""

    def __init__(self, bar: BarColumn) -> None:
        super().__init__()
        self._bar = bar

    def render(self, task: Task) -> object:  # type: ignore[override]
        return self._bar.render(task) if task.total else Text()

"""Writes an artifact: all graphs over one weights file, and a folder that is whole or not there."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import filelock
import msgspec
import openvino as ov

from npu_llm.artifact import MANIFEST, FileInfo, Manifest, sha256
from npu_llm.errors import ExportError
from npu_llm_export.progress import log

_ALIGNMENT = 64  # of each constant in the weights file, for memory-mapped reads


class SharedWeights:
    """One weights file for many graphs: each distinct constant is stored once.

    OpenVINO writes a ``.bin`` for each graph; here every graph's constants are looked up by content
    and its ``.xml`` is pointed at the shared file, so that nothing depends on the files being equal.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._offsets: dict[tuple[int, bytes], int] = {}
        self._stream = file.open("wb")

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def save(self, model: ov.Model, xml: Path) -> None:
        """Write the graph to ``xml``; its constants go to the shared file.

        Raises:
            ExportError: OpenVINO could not write, which it does not always say itself.
        """
        with tempfile.TemporaryDirectory(dir=xml.parent, prefix="graph-") as folder:
            draft = Path(folder) / "graph.xml"
            try:
                ov.save_model(model, draft, compress_to_fp16=False)
                tree: ElementTree.ElementTree[Any] = ElementTree.parse(draft)
            except (RuntimeError, ElementTree.ParseError) as error:
                raise ExportError(f"{xml.name} could not be written ({error}): {_DISK}") from error
            with draft.with_suffix(".bin").open("rb") as constants:
                self._move_constants(tree, constants, xml.name)
        tree.write(xml, encoding="utf-8", xml_declaration=True)
        self._stream.flush()

    def _move_constants(
        self, tree: ElementTree.ElementTree[Any], constants: BinaryIO, name: str
    ) -> None:
        for data in tree.iterfind(".//layer[@type='Const']/data"):
            size = int(data.attrib["size"])
            constants.seek(int(data.attrib["offset"]))
            content = constants.read(size)
            if len(content) != size:
                raise ExportError(f"the weights of {name} could not be written: {_DISK}")
            data.attrib["offset"] = str(self._offset_of(content))

    def _offset_of(self, content: bytes) -> int:
        key = (len(content), hashlib.blake2b(content, digest_size=32).digest())
        if key not in self._offsets:
            self._stream.write(b"\0" * (-self._stream.tell() % _ALIGNMENT))
            self._offsets[key] = self._stream.tell()
            self._stream.write(content)
        return self._offsets[key]


_DISK = "is the disk full?"


def file_infos(folder: Path) -> dict[str, FileInfo]:
    """Sizes and hashes of every file of a folder, for the manifest."""
    files = sorted(file for file in folder.iterdir() if file.is_file())
    return {file.name: FileInfo(file.stat().st_size, sha256(file)) for file in files}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``npu_llm.json``."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


def check_target(out: Path, *, force: bool) -> None:
    """Raise ExportError if ``out`` is taken, or must not be replaced."""
    if not os.path.lexists(out):
        return
    if not force:
        raise ExportError(
            f"{out} exists already: choose another folder, or replace it with --force"
        )
    is_artifact = out.is_dir() and (out / MANIFEST).is_file()
    if not is_artifact and not (out.is_dir() and not any(out.iterdir())):
        raise ExportError(
            f"{out} is not an artifact: --force replaces artifacts only, remove it yourself"
        )


@contextlib.contextmanager
def atomic_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder that becomes ``out`` when the block ends well.

    Whatever goes wrong, ``out`` is untouched and nothing is left beside it. What a killed process
    left is removed by the next export to the same place.

    Raises:
        ExportError: ``out`` is taken or cannot be written, or the disk is full.
    """
    check_target(out, force=force)
    missing = [folder for folder in out.absolute().parents if not folder.exists()]
    try:
        with _workspace(out) as workspace, _full_disk_said(out):
            draft = workspace / _NEW
            draft.mkdir()
            yield draft
            _move_into_place(draft, out, workspace, force=force)
    finally:
        for folder in missing:  # where nothing was written into them
            with contextlib.suppress(OSError):
                folder.rmdir()


# A workspace is a hidden sibling of the folder to write, so on the same disk: a draft becomes that
# folder by a rename. It holds the draft, the artifact that the draft replaces while the two change
# places, and a lock: a workspace whose lock is free was left by a process that was killed.
_NEW, _REPLACED, _LOCK = "new", "replaced", "lock"
_ATTEMPTS = 10


@contextlib.contextmanager
def _workspace(out: Path) -> Iterator[Path]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out)
        folder, lock = _new_workspace(out)
    except OSError as error:
        raise ExportError(
            f"{out} cannot be written ({error.strerror or error}): choose another folder"
        ) from error
    try:
        yield folder
    finally:
        _put_back(folder, out)
        lock.release()
        shutil.rmtree(folder, ignore_errors=True)


def _new_workspace(out: Path) -> tuple[Path, filelock.BaseFileLock]:
    """Make a workspace and lock it; another export may take it for abandoned in between."""
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=_prefix(out)))
        lock = filelock.FileLock(folder / _LOCK)
        lock.acquire()
        if (folder / _LOCK).exists():
            return folder, lock
        lock.release()
    raise ExportError(f"too many exports to {out} at once: choose another folder, or wait")


def _prefix(out: Path) -> str:
    return f".{out.name}.partial-"


def _move_into_place(draft: Path, out: Path, workspace: Path, *, force: bool) -> None:
    check_target(out, force=force)
    try:
        if out.exists():
            out.rename(workspace / _REPLACED)
        draft.rename(out)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
        raise ExportError(
            f"{out} was written by another export in the meantime: choose another folder"
        ) from error


def _put_back(workspace: Path, out: Path) -> None:
    """Undo half a replacement: the old artifact was moved away, and the new one did not come."""
    if (workspace / _REPLACED).exists() and not out.exists():
        (workspace / _REPLACED).rename(out)


def _remove_abandoned(out: Path) -> None:
    for folder in out.parent.iterdir():
        if folder.name.startswith(_prefix(out)) and folder.is_dir():
            with contextlib.suppress(filelock.Timeout, OSError):  # one that is running
                _remove_unlocked(folder, out)


def _remove_unlocked(folder: Path, out: Path) -> None:
    with filelock.FileLock(folder / _LOCK).acquire(blocking=False):
        log.info("removing %s, left by an export that was killed", folder)
        _put_back(folder, out)
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # Windows keeps a file that is open, such as the lock
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _full_disk_said(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise ExportError(
            f"{out} could not be written ({error.strerror}): free some space, or choose a folder on "
            "another disk"
        ) from error

"""Writes an artifact: all graphs over one weights file, and a folder that is whole or not there."""

from __future__ import annotations

import contextlib
import hashlib
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
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != _LOCK)
    return {file.name: FileInfo(file.stat().st_size, sha256(file)) for file in files}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``npu_llm.json``."""
    text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
    (folder / MANIFEST).write_bytes(text + b"\n")


_LOCK = ".exporting"


def check_target(out: Path, *, force: bool) -> None:
    """Raise ExportError if ``out`` is taken, or must not be replaced."""
    if not out.exists() and not out.is_symlink():
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
    """A temporary sibling of ``out`` that becomes ``out`` when the block ends well.

    Whatever goes wrong, ``out`` is untouched and the sibling is removed. A sibling left by a killed
    process is removed by the next export to the same place.

    Raises:
        ExportError: ``out`` is taken.
    """
    check_target(out, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    draft = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.partial-"))
    lock = filelock.FileLock(draft / _LOCK)
    try:
        with lock:
            yield draft
        (draft / _LOCK).unlink(missing_ok=True)
        draft.chmod(0o755)
        _move_into_place(draft, out, force=force)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _move_into_place(draft: Path, out: Path, *, force: bool) -> None:
    check_target(out, force=force)
    if not out.exists():
        draft.rename(out)
        return
    old = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.replaced-"))
    out.rename(old / out.name)
    try:
        draft.rename(out)
    except BaseException:
        (old / out.name).rename(out)
        raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    for folder in out.parent.glob(f".{out.name}.partial-*"):
        lock = filelock.FileLock(folder / _LOCK)
        try:
            with lock.acquire(blocking=False):
                log.info("removing %s, left by an export that was killed", folder)
        except (filelock.Timeout, OSError):
            continue  # another export to the same place is running
        shutil.rmtree(folder, ignore_errors=True)

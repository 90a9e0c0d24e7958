"""`legato pull`: verified downloads from a hub.

`huggingface_hub` speaks to the hub. It keeps nothing of a download that was cut off, so the files
are written here: to a name of their own until size and hash are right, and from where they ended.

Nothing that the hub says is believed: names of files, hashes and commits have the form that they
must have before they become part of a path, and no file gets more bytes than were declared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import hashlib
import io
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import huggingface_hub
import msgspec
from huggingface_hub import constants, file_download
from huggingface_hub import errors as hub_errors
from rich.console import Console

from legato_engine.hub import store
from legato_engine.hub.store import INDEX, MODELS, Published, RepositoryFiles, pull_parser

_COMMIT = _GIT_HASH = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,180}\.safetensors")
_MAX_INDEX_BYTES = 64 * 1024 * 1024
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HTTP_ERROR: type[Exception] = vars(hub_errors)["HTTPError"]
"""Error of the HTTP client that this version of the library uses."""

FAILED, NOT_FOUND, UNREACHABLE, INTERRUPTED = 1, 3, 4, 130
"""Exit codes, the same as those of the command `legato`."""

Say = Callable[[str], None]


class PullFailed(Exception):
    """Failed pull; the message is for the user, and the next pull resumes the download."""

    exit_code = FAILED


class HubUnreachable(PullFailed):
    """The hub does not answer: no network, a wrong endpoint, or HF_HUB_OFFLINE."""

    exit_code = UNREACHABLE


class NotPublished(PullFailed):
    """Repository, revision or file that does not exist or is not accessible to this caller."""

    exit_code = NOT_FOUND


class ContentMismatch(PullFailed):
    """Content whose size or hash differs from the catalog or the hub's record."""


class DiskFull(PullFailed):
    """Disk that is too small or became full."""


class _Index(msgspec.Struct, frozen=True):
    """Index of shards: the file of each tensor."""

    weight_map: dict[str, str]


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteFile:
    """File of a commit; `sha256` is empty if the hub only knows the blob's git hash."""

    repository: str
    commit: str
    name: str
    size: int
    sha256: str
    blob: str

    def part(self, folder: Path) -> Path:
        """Return the path of the partial file; its name identifies the content."""
        return folder / f"{self.name}.{(self.sha256 or self.blob)[:16]}.part"


def pull(model: Published, folder: Path, say: Say) -> store.Manifest:
    """Fetch missing files, check all, and write the manifest.

    Raises:
        PullFailed: a subclass names the cause.
    """
    with _translate_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stored: dict[str, store.StoredFile] = {}
        for source in model.sources:
            for file in _list_files(source, folder, say):
                if file.name not in stored:
                    stored[file.name] = _fetch(file, source.sha256, folder, say)
        manifest = store.Manifest(
            model=model.name,
            licence=model.licence,
            pulled=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=tuple(stored.values()),
        )
        store.write_manifest(folder, manifest)
        return manifest


def _list_files(source: RepositoryFiles, folder: Path, say: Say) -> list[RemoteFile]:
    """Return the files of a source; for a sharded model, those that its index names."""
    remote = _list_remote(source)
    commit = next(iter(remote.values())).commit
    say(f"{source.repository} at {commit}")
    chosen = [_validate(each) for name, each in remote.items() if source.wants(name)]
    if INDEX in remote and source.wants(INDEX) and "model.safetensors" not in remote:
        if remote[INDEX].size > _MAX_INDEX_BYTES:
            problem = f"has {remote[INDEX].size} bytes; an index has at most {_MAX_INDEX_BYTES}"
            raise ContentMismatch(f"{INDEX} of {source.repository} {problem}")
        _fetch(remote[INDEX], source.sha256, folder, lambda _: None)
        names = _list_shards(folder / INDEX)
        if missing := [name for name in names if name not in remote]:
            raise NotPublished(f"{source.repository} lacks {missing[0]}, which its index names")
        chosen += [_validate(remote[name]) for name in names]
    if not chosen:
        raise NotPublished(f"{source.repository} at {commit} has none of {', '.join(source.files)}")
    _check_room(chosen, folder)
    return chosen


def _list_remote(source: RepositoryFiles) -> dict[str, RemoteFile]:
    info = _api().model_info(source.repository, revision=source.revision, files_metadata=True)
    commit = info.sha or ""
    if not _is(_COMMIT, commit) or (
        _COMMIT.fullmatch(source.revision) and commit != source.revision
    ):
        raise ContentMismatch(f"{source.repository}: asked for {source.revision}, got {commit!r}")
    files = {
        each.rfilename: RemoteFile(
            source.repository,
            commit,
            each.rfilename,
            -1 if each.size is None else each.size,
            "" if each.lfs is None else each.lfs.sha256,
            each.blob_id or "",
        )
        for each in info.siblings or ()
        if _is(_NAME, each.rfilename)  # ignore names outside the folder
    }
    if not files:
        raise NotPublished(f"{source.repository} at {commit} has no files")
    return files


def _validate(file: RemoteFile) -> RemoteFile:
    """Check the hub's metadata of a file; return the file."""
    if type(file.size) is not int or file.size < 0:
        raise ContentMismatch(f"{file.repository}: {file.name} has the size {file.size!r}")
    if not (_is(_SHA256, file.sha256) or (file.sha256 == "" and _is(_GIT_HASH, file.blob))):
        problem = f"{file.sha256!r} is no SHA-256, {file.blob!r} no git hash"
        raise ContentMismatch(f"{file.repository}: {file.name}: {problem}")
    return file


def _is(form: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and form.fullmatch(text) is not None


def _api() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(endpoint=constants.ENDPOINT, library_name="legato")


def _list_shards(index: Path) -> list[str]:
    """Return the file names in an index, which must be names of weights."""
    try:
        names = set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        raise ContentMismatch(f"{index} is no index of shards") from None
    if wrong := [name for name in sorted(names) if not _is(_SHARD, name)]:
        raise ContentMismatch(f"{index} names {wrong[0]!r}, which is no file of weights")
    return sorted(names)


def _check_room(files: list[RemoteFile], folder: Path) -> None:
    missing = 0
    for file in files:
        part = file.part(folder)
        if not (folder / file.name).exists():
            missing += file.size - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise DiskFull(
            f"{missing / 1e9:.2f} GB are to be fetched, and {folder} has {free / 1e9:.2f} GB left"
        )


def _fetch(file: RemoteFile, known: Mapping[str, str], folder: Path, say: Say) -> store.StoredFile:
    """Fetch and check a file, unless a valid one exists already."""
    path, part = folder / file.name, file.part(folder)
    if not path.exists():
        if part.exists() and part.stat().st_size > file.size:
            part.unlink()  # useless: longer than its file
        if part.exists():
            say(f"{file.name}: {part.stat().st_size} of {file.size} bytes are here already")
        try:
            _download(file, part)
        except ContentMismatch:
            part.unlink(missing_ok=True)
            raise
        sha256 = _check(file, part, known)
        part.replace(path)
    else:
        say(f"{file.name} is here already")
        sha256 = _check(file, path, known)
    return store.StoredFile(file.name, file.size, sha256, file.repository, file.commit)


def _download(file: RemoteFile, part: Path) -> None:
    url = huggingface_hub.hf_hub_url(
        file.repository, file.name, revision=file.commit, endpoint=constants.ENDPOINT
    )
    headers = _api()._build_hf_headers()
    with part.open("ab") as opened:
        target = _Bounded(opened, file)
        location = huggingface_hub.get_hf_file_metadata(url, endpoint=constants.ENDPOINT).location
        # Do not send the caller's token to another storage host.
        own = location.split("/")[:3] == url.split("/")[:3]
        file_download.http_get(
            location,
            target,  # type: ignore[arg-type]  # has the methods that `http_get` calls
            resume_size=opened.tell(),
            headers=headers if own else {},
            expected_size=file.size,
            displayed_filename=file.name,
        )


class _Bounded:
    """File that accepts no more bytes than its `RemoteFile` has."""

    def __init__(self, target: io.BufferedWriter, file: RemoteFile) -> None:
        self._target = target
        self._file = file
        self.seek, self.tell, self.truncate = target.seek, target.tell, target.truncate

    def write(self, data: bytes) -> int:
        if self._target.tell() + len(data) > self._file.size:
            name, repository = self._file.name, self._file.repository
            raise ContentMismatch(
                f"{name} of {repository} is longer than the {self._file.size} bytes that the hub "
                "declares; what was fetched of it was removed"
            )
        return self._target.write(data)


def _check(file: RemoteFile, path: Path, known: Mapping[str, str]) -> str:
    """Return the SHA-256 of a file; remove a file that does not match."""
    size = path.stat().st_size
    with path.open("rb") as data:
        sha256 = hashlib.file_digest(data, "sha256").hexdigest()
    wanted = known.get(file.name) or file.sha256
    if wanted:
        right = sha256 == wanted
    else:
        blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        with path.open("rb") as data:
            right = hashlib.file_digest(data, lambda: blob).hexdigest() == file.blob
    if size != file.size or not right:
        path.unlink()
        raise ContentMismatch(
            f"{file.name} of {file.repository} has {size} bytes with SHA-256 {sha256}, not "
            f"{file.size} with {wanted or f'the git hash {file.blob}'}; it was removed"
        )
    return sha256


@contextlib.contextmanager
def _translate_errors(folder: Path) -> Iterator[None]:
    """Translate failures of the library and of the disk to `PullFailed`."""
    try:
        yield
    except PullFailed:
        raise
    except hub_errors.GatedRepoError as error:
        raise NotPublished(f"the repository wants an account: set HF_TOKEN ({error})") from None
    except (hub_errors.HfHubHTTPError, hub_errors.HFValidationError) as error:
        raise NotPublished(str(error).partition("\n")[0]) from None
    except hub_errors.OfflineModeIsEnabled:
        raise HubUnreachable("HF_HUB_OFFLINE is set, so nothing is fetched") from None
    except HTTP_ERROR as error:
        reason = str(error) or type(error).__name__
        raise HubUnreachable(
            f"{constants.ENDPOINT} does not answer: {reason}; what is here stays, "
            "and the next pull resumes from there"
        ) from None
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise DiskFull(f"cannot write to {folder}: {error.strerror}") from None
        raise PullFailed(f"{error.strerror or error}; the next pull resumes") from None
    except Exception as error:  # noqa: BLE001 - the library raises whatever an odd answer trips
        problem = f"{constants.ENDPOINT} gives an answer that is not understood"
        raise ContentMismatch(f"{problem}: {type(error).__name__}: {error}") from None


# ---------------------------------------------------------------- pull


def main(argv: Sequence[str] | None = None) -> int:
    arguments = pull_parser().parse_args(argv)
    model = MODELS[arguments.model]
    folder = store.model_folder(arguments.models, model.name)
    out = Console(soft_wrap=True, markup=False, highlight=False)
    err = Console(stderr=True, soft_wrap=True, markup=False, highlight=False)
    out.print(f"licence: {model.licence}")
    try:
        manifest = pull(model, folder, out.print)
    except PullFailed as error:
        err.print(f"legato: error: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    out.print(
        f"{model.name}: {manifest.num_bytes / 1e9:.2f} GB in {folder}, sizes and hashes checked; "
        f"legato serve --model {model.name}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

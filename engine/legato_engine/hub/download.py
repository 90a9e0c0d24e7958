"""Files of a hub on their way to a folder.

`huggingface_hub` speaks to the hub. It keeps nothing of a download that was cut off, so the files
are written here: to a name of their own until size and hash are right, and from where they ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import huggingface_hub
from huggingface_hub import constants, file_download
from huggingface_hub import errors as hub_errors

from legato_engine.hub import store
from legato_engine.hub.catalog import INDEX, Published, Source

_COMMIT = re.compile(r"[0-9a-f]{40}")
_CHUNK = 1024 * 1024
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

HTTP_ERROR: type[Exception] = vars(hub_errors)["HTTPError"]
"""That of the HTTP client which this version of the library uses."""

Say = Callable[[str], None]


class PullFailed(Exception):
    """The message is for the user; what was downloaded stays where a next pull goes on."""


class HubUnreachable(PullFailed):
    """There is no answer: no network, another endpoint, or HF_HUB_OFFLINE."""


class NotPublished(PullFailed):
    """No such repository, revision or file, or not for this caller."""


class WrongContent(PullFailed):
    """Size or hash are others than the catalogue's or the hub's own record says."""


class NoRoom(PullFailed):
    """The disk is too small, or became full."""


@dataclasses.dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a commit; `sha256` is empty where the hub knows the blob's git hash alone."""

    repository: str
    commit: str
    name: str
    size: int
    sha256: str
    blob: str

    def part(self, folder: Path) -> Path:
        """Its first bytes; the name tells of which content."""
        return folder / f"{self.name}.{(self.sha256 or self.blob)[:16]}.part"


def pull(model: Published, folder: Path, say: Say) -> store.Manifest:
    """Fetch what is missing, check all, and write the manifest.

    Raises:
        PullFailed: a subclass says how.
    """
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stored: dict[str, store.StoredFile] = {}
        for source in model.sources:
            for file in _wanted(source, folder, say):
                if file.name not in stored:
                    stored[file.name] = _fetched(file, source.sha256, folder, say)
        manifest = store.Manifest(
            model=model.name,
            licence=model.licence,
            pulled=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            files=tuple(stored.values()),
        )
        store.write_manifest(folder, manifest)
        return manifest


def _wanted(source: Source, folder: Path, say: Say) -> list[RemoteFile]:
    """The files of a source; of a model in shards, those that its index names."""
    remote = _listed(source)
    commit = next(iter(remote.values())).commit
    say(f"{source.repository} at {commit}")
    chosen = [each for name, each in remote.items() if source.wants(name)]
    if INDEX in remote and source.wants(INDEX) and "model.safetensors" not in remote:
        _fetched(remote[INDEX], source.sha256, folder, lambda _: None)
        names = sorted(set(_index(folder / INDEX).values()))
        if missing := [name for name in names if name not in remote]:
            raise NotPublished(f"{source.repository} lacks {missing[0]}, which its index names")
        chosen += [remote[name] for name in names]
    if not chosen:
        raise NotPublished(f"{source.repository} at {commit} has none of {', '.join(source.files)}")
    _check_room(chosen, folder)
    return chosen


def _listed(source: Source) -> dict[str, RemoteFile]:
    info = _api().model_info(source.repository, revision=source.revision, files_metadata=True)
    commit = info.sha or ""
    if _COMMIT.fullmatch(source.revision) and commit != source.revision:
        raise WrongContent(f"{source.repository}: asked for {source.revision}, got {commit!r}")
    files = {
        each.rfilename: RemoteFile(
            source.repository,
            commit,
            each.rfilename,
            each.size or 0,
            "" if each.lfs is None else each.lfs.sha256,
            each.blob_id or "",
        )
        for each in info.siblings or ()
        if Path(each.rfilename).name == each.rfilename  # nothing outside the folder
    }
    if not files:
        raise NotPublished(f"{source.repository} at {commit} has no files")
    return files


def _api() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(endpoint=constants.ENDPOINT, library_name="legato")


def _index(path: Path) -> Mapping[str, str]:
    try:
        shards: dict[str, str] = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise WrongContent(f"{path} is no index of shards") from None
    return shards


def _check_room(files: list[RemoteFile], folder: Path) -> None:
    missing = 0
    for file in files:
        part = file.part(folder)
        if not (folder / file.name).exists():
            missing += file.size - (part.stat().st_size if part.exists() else 0)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise NoRoom(
            f"{missing / 1e9:.2f} GB are to be fetched, and {folder} has {free / 1e9:.2f} GB left"
        )


def _fetched(
    file: RemoteFile, known: Mapping[str, str], folder: Path, say: Say
) -> store.StoredFile:
    """The file, checked; one that is there already is not fetched again if it is right."""
    path, part = folder / file.name, file.part(folder)
    if not path.exists():
        if part.exists():
            say(f"{file.name}: {part.stat().st_size} of {file.size} bytes are here already")
        _download(file, part)
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
    with part.open("ab") as target:
        location = huggingface_hub.get_hf_file_metadata(url, endpoint=constants.ENDPOINT).location
        # A storage elsewhere is not shown the caller's token.
        own = location.split("/")[:3] == url.split("/")[:3]
        file_download.http_get(
            location,
            target,
            resume_size=target.tell(),
            headers=headers if own else {},
            expected_size=file.size,
            displayed_filename=file.name,
        )


def _check(file: RemoteFile, path: Path, known: Mapping[str, str]) -> str:
    """The SHA-256 of a file that is right; one that is not is removed."""
    size = path.stat().st_size
    sha256 = _digest(hashlib.sha256(), path)
    wanted = known.get(file.name) or file.sha256
    if wanted:
        right = sha256 == wanted
    else:
        blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        right = _digest(blob, path) == file.blob
    if size != file.size or not right:
        path.unlink()
        raise WrongContent(
            f"{file.name} of {file.repository} has {size} bytes with SHA-256 {sha256}, not "
            f"{file.size} with {wanted or f'the git hash {file.blob}'}; it was removed"
        )
    return sha256


def _digest(digest: hashlib._Hash, path: Path) -> str:
    with path.open("rb") as data:
        for chunk in iter(functools.partial(data.read, _CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Failures of the library and of the disk as `PullFailed`."""
    try:
        yield
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
            "and the next pull goes on from there"
        ) from None
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise NoRoom(f"cannot write to {folder}: {error.strerror}") from None
        raise PullFailed(f"{error.strerror or error}; the next pull goes on") from None

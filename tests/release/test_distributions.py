"""What the project files of the distributions say."""

from __future__ import annotations

import re
import tomllib

import pytest

from release import build, install, versions
from release.distributions import ALL, CLIENT, ROOT, SERVER, TINY, file_names
from release.process import ReleaseError


def project(distribution):
    path = ROOT / distribution.folder / "pyproject.toml"
    return tomllib.loads(path.read_text())["project"]


@pytest.mark.parametrize("distribution", ALL, ids=lambda each: each.name)
def test_a_distribution_has_its_name_urls_and_licence_texts(distribution):
    """Each text that the licence expression needs is a file of the distribution."""
    declared = project(distribution)
    assert declared["name"] == distribution.name
    assert {"Homepage", "Documentation", "Changelog", "Issues"} <= set(declared["urls"])
    folder = ROOT / distribution.folder
    texts = "".join((folder / name).read_text() for name in declared["license-files"])
    heads = {"Apache-2.0": "Apache License\n", "MIT": "MIT License\n"}
    for licence in declared["license"].split(" AND "):
        assert heads[licence] in texts


def test_the_apache_licence_is_the_same_everywhere():
    """Each distribution has a copy, as none can name a file outside its folder."""
    texts = {(ROOT / each.folder / "LICENSE").read_text() for each in ALL}
    assert len(texts) == 1


def test_the_notice_names_all_art_that_was_trained_on():
    """Each author and licence of the model card's table."""
    card = (ROOT / "engine/tiny/legato_tiny/MODEL_CARD.md").read_text()
    notice = " ".join((ROOT / "engine/tiny/NOTICE").read_text().split())
    rows = re.findall(r"^\| (.+) \| (.+) \| (.+) \| (?:trained on|background)", card, re.MULTILINE)
    assert len(rows) == 8
    for work, author, licence in rows:
        plain = [re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text) for text in (work, author, licence)]
        first_word = re.split(r"[\s,:]", plain[0])[0].lower().replace("_", " ").split()[0]
        assert first_word in notice.lower(), work
        assert plain[1].split(" (")[0] in notice, author
        assert plain[2] in notice, licence
    for url in re.findall(r"https://creativecommons.org/licenses/by/\d\.\d/", card):
        assert url in notice


def test_the_server_has_the_dependencies_of_the_command_line():
    """`legato demo` draws: what `legato[cli]` brings, `legato[engine]` brings."""

    def names(requirements):
        return {re.split(r"[^\w-]", text)[0] for text in requirements}

    cli = project(CLIENT)["optional-dependencies"]["cli"]
    assert names(cli) <= names(project(SERVER)["dependencies"])


def test_a_build_that_differs_is_found(tmp_path):
    """A changed byte and a missing file."""
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        for name in ("a.whl", "b.whl"):
            (folder / name).write_text(name)
    assert build.differences(one, other) == []
    (one / "a.whl").write_text("changed")
    (other / "c.whl").write_text("only here")
    assert build.differences(one, other) == ["a.whl", "c.whl"]


def test_the_sums_are_of_the_files(tmp_path):
    """A distribution that was changed after it was built is refused, and another version."""
    names = file_names("1.2.3")
    assert len(names) == 2 * len(ALL)
    for name in names:
        (tmp_path / name).write_text(name)
    (tmp_path / build.SUMS).write_text(build.sums(tmp_path, names))
    build.check_sums(tmp_path, "1.2.3")
    with pytest.raises(ReleaseError, match=r"lacks legato-1\.2\.4"):
        build.check_sums(tmp_path, "1.2.4")
    (tmp_path / TINY.wheel("1.2.3")).write_text("changed")
    with pytest.raises(ReleaseError, match="is of other files"):
        build.check_sums(tmp_path, "1.2.3")


def test_weights_in_another_wheel_are_found(tmp_path, wheel):
    """Only the model's wheel has weights."""
    for distribution, names in install.CONTENTS.items():
        wheel(distribution.name, "1.2.3", files=list(names))
    install.check_contents(tmp_path, "1.2.3")
    wheel("legato", "1.2.3", files=[*install.CONTENTS[CLIENT], "legato/v1/model.safetensors"])
    with pytest.raises(ReleaseError, match="carries weights"):
        install.check_contents(tmp_path, "1.2.3")
    wheel("legato", "1.2.3", files=install.CONTENTS[CLIENT][1:])
    with pytest.raises(ReleaseError, match=r"lacks legato/v1/descriptor\.binpb"):
        install.check_contents(tmp_path, "1.2.3")


def test_versions_and_revisions_agree_in_this_tree():
    """The places that a release writes."""
    versions.parse(versions.version(ROOT))
    assert versions.revision(ROOT) >= 1

"""Other sites get nothing, and the page may load nothing of others."""

from __future__ import annotations

import httpx
import pytest
from legato_client.web.playground.routes import CONTENT_SECURITY_POLICY
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Origin

from tests.clients.python.playground.conftest import serving

NOWHERE = "127.0.0.1:9"
"""A server that is never asked."""

POSTS = ("/playground/generate", "/timeline/depth", "/v1/query")


@pytest.fixture(scope="module")
def site():
    with serving(NOWHERE) as address:
        yield address


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://elsewhere.example"},
        {"origin": "null"},
        {"origin": "http://["},
        {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_requests_of_other_sites_are_refused(site, path, headers):
    """Whatever they ask for."""
    response = httpx.post(f"http://{site}{path}", headers=headers, content=b"{}")
    assert response.status_code == 403
    assert response.json()["error"]["message"] == "requests of other sites are refused"


def test_sessions_of_other_sites_are_refused(site):
    """A websocket is not bound by the browser's rules of origin."""
    address = f"ws://{site}/playground/session"
    with pytest.raises(InvalidStatus) as refused:
        connect(address, origin=Origin("https://elsewhere.example"))
    assert refused.value.response.status_code == 403


def test_a_name_that_was_pointed_here_is_refused(site):
    """DNS rebinding: the host is another's, so the origin agrees with it."""
    own = {"host": "rebound.example", "origin": "http://rebound.example"}
    reply = httpx.get(f"http://{site}/", headers=own)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "wrong_host")


def test_the_page_may_be_opened_by_a_link_elsewhere(site):
    """But not be a part of another page, nor be asked by its scripts."""
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(f"http://{site}/", headers=link).status_code == 200
    for path in ("/", "/static/app.js", "/playground/server", "/timeline/events"):
        part = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert httpx.get(f"http://{site}{path}", headers=part).status_code == 403


@pytest.mark.parametrize("path", ["/", "/static/app.js", "/healthz", "/nowhere"])
def test_every_answer_has_the_policies(site, path):
    """Errors and files too."""
    headers = httpx.get(f"http://{site}{path}", timeout=100).headers
    assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"

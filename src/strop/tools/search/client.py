"""What agents call: `search` and `access`, bound to a server that answers as Search-R1's does.

    tools = Search("http://127.0.0.1:8000")
    print(tools.search("who directed Ed Wood?"))
    print(tools.access("Ed Wood"))

They take and return text. Whatever goes wrong is their result as well, in one sentence that a model can read: an agent
does not fail because a server has.

Left out: an async form (frameworks run such tools in threads), and connections that are kept between calls.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from strop.net.client import parse_url
from strop.tools.search.corpus import split_title
from strop.tools.search.documents import Page

PAUSE = 0.2
"""Seconds before the first repetition; twice as long before each one after it."""
SHOWN = 200
"""Letters of a reason."""
AGAIN = (429, 502, 503, 504)
T = TypeVar("T")


class _Document(Struct):
    """Search-R1's own server knows more fields; this one is always there."""

    contents: str


class _Scored(Struct):
    document: _Document


class _Retrieved(Struct):
    result: list[list[_Scored]]


class _Accessed(Struct):
    result: list[Page | None]


class _Failed(Exception):
    """Nothing came of a request, for a reason that fits into a sentence."""


class Search:
    """Two tools over one server. `topk` passages come of a search; passages and pages longer than `longest` letters are
    cut; a request is given `timeout` seconds and sent again `retries` times if the server does not answer."""

    def __init__(
        self, url: str, *, topk: int = 3, longest: int = 10_000, timeout: float = 10.0, retries: int = 2
    ) -> None:
        parse_url(url)
        self._url, self._topk, self._longest = url.rstrip("/"), topk, longest
        self._timeout, self._retries = timeout, retries

    def search(self, query: str) -> str:
        """Search for passages that may help to answer a question.

        Args:
            query: what to look for, as a question or as keywords
        """
        body = {"queries": [_sendable(query)], "topk": self._topk, "return_scores": True}
        try:
            found = self._post("/retrieve", body, _Retrieved).result
        except _Failed as why:
            return str(why)
        if not found or not found[0]:
            return "Nothing was found: search for other words."
        return "\n".join(self._format(number, one.document) for number, one in enumerate(found[0], 1))

    def access(self, title_or_id: str) -> str:
        """Read the whole page of a title that a search has found.

        Args:
            title_or_id: the page's title, or the id of one of its passages
        """
        try:
            for kind in ("titles", "ids"):
                found = self._post("/access", {kind: [_sendable(title_or_id)]}, _Accessed).result
                if found and (page := found[0]) is not None:
                    return f"(Title: {page.title}) {self._cut(page.text)}" if page.title else self._cut(page.text)
        except _Failed as why:
            return str(why)
        return f"There is no page {title_or_id!r}: search first, and take a title from what is found."

    def _format(self, number: int, document: _Document) -> str:
        title, text = split_title(document.contents)
        return f"Doc {number} (Title: {title}) {self._cut(text)}" if title else f"Doc {number} {self._cut(text)}"

    def _cut(self, text: str) -> str:
        return text if len(text) <= self._longest else f"{text[: self._longest]} ..."

    def _post(self, path: str, body: dict[str, Any], kind: type[T]) -> T:
        request = urllib.request.Request(
            self._url + path, msgspec.json.encode(body), {"content-type": "application/json"}
        )
        why = ""
        for again in range(self._retries + 1):
            if again:
                time.sleep(PAUSE * 2 ** (again - 1))
            try:
                with _opener.open(request, timeout=self._timeout) as answer:
                    return msgspec.json.decode(answer.read(), type=kind)
            except urllib.error.HTTPError as error:
                why = _refusal_of(error)
                if error.code not in AGAIN:
                    break
            except msgspec.MsgspecError:
                raise _Failed("The search server gave an answer that cannot be read.") from None
            except TimeoutError:
                why = f"no answer within {self._timeout:g} s"
            except (OSError, http.client.HTTPException) as error:
                why = _reason(error)
        why = " ".join(why.split())[:SHOWN]
        raise _Failed(f"The search server cannot be used now ({why}): go on without it, or try again later.")


# Never through a proxy: they do not know what is here.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _sendable(text: str) -> str:
    """Models write halves of letters as well, which cannot be sent.

    >>> _sendable("Ulm \\ud83d")
    'Ulm ?'
    """
    return text.encode(errors="replace").decode()


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", error)
    if isinstance(inner, TimeoutError):
        return "no answer in time"
    return str(getattr(inner, "strerror", None) or inner or type(inner).__name__)


def _refusal_of(error: urllib.error.HTTPError) -> str:
    """The sentence of a refusal, or its number."""
    try:
        return str(msgspec.json.decode(error.read())["error"]["message"])
    except (OSError, http.client.HTTPException, msgspec.MsgspecError, KeyError, TypeError):
        return f"it answered {error.code}"

"""Puts `***` in the place of passwords before a text is shown or stored. Keeps none and looks for none elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

MASK = "***"
SECRET_PARAMETERS = ("password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key")
SHORTEST = 6  # characters; to hide a shorter password wherever its letters stand would tear every text apart

# A URL's `user:password@`, the last `@` before the path ends it; and `password=...` as libpq, shells, Python, YAML and
# JSON, also inside of JSON, write it. Without quotes it ends before a space or a `&`, brackets and commas there aside.
# Of a text that can be read in two ways too much is hidden rather than too little.
_IN_URL = re.compile(r"(://[^\s:/@]*:)[^\s/]*@")
_NAMED = re.compile(
    r"""(?ix) ((?:password|passwd|(?:auth|access|refresh|session|security)[_-]?token|api[_-]?key|client[_-]?secret
    |secret[_-]?key|access[_-]?key|scram_(?:client|server)_key)
    \\* ["']? \s* [=:] \s*)
    (?: [bru]{0,2} (?: '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.)*" ) | (\\+["']) .*? (?<!\\)\2 | [^\s&]*[^\s&"')}\],;] )"""
)


def mask(text: str) -> str:
    """The text without what looks like a password, whoever's it is."""
    if "://" in text:
        text = _IN_URL.sub(rf"\1{MASK}@", text)
    return _NAMED.sub(rf"\1{MASK}", text)


def hide(text: str, secrets: Iterable[str]) -> str:
    """The text without these secrets, however a URL, libpq or Python spells them."""
    known = {spelling for secret in secrets if len(secret) >= SHORTEST for spelling in _spellings(secret)}
    for spelling in sorted(known, key=len, reverse=True):
        text = text.replace(spelling, MASK)
    return text


def _spellings(secret: str) -> set[str]:
    in_libpq = secret.replace("\\", "\\\\").replace("'", "\\'")
    return {secret, quote(secret), quote(secret, safe=""), quote_plus(secret), in_libpq, repr(secret)[1:-1]}

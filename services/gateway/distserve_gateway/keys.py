"""Who asks: the API key of an Authorization header."""

import hmac
from collections.abc import Iterable

from distserve.api_keys import PRIORITIES, ApiKey, hashed
from distserve.errors import Unauthorized

OPEN = ApiKey(name="", sha256="", priorities=PRIORITIES)
"""Everybody, where there are no keys: no tenant, no limits, every priority."""


class Keys:
    """Falsy without keys: then everybody may ask."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    def __bool__(self) -> bool:
        return bool(self._keys)

    def of(self, authorization: str) -> ApiKey:
        """The key that `Bearer <key>` names; OPEN if there are none. Raises Unauthorized, which never repeats it.

        Every entry is compared, in constant time each, so that the time tells nothing about which is close or where.
        """
        if not self._keys:
            return OPEN
        scheme, _, given = authorization.strip().partition(" ")
        if not scheme:
            raise Unauthorized("no API key: send the header 'Authorization: Bearer <key>'")
        if scheme.lower() != "bearer" or not given.strip():
            raise Unauthorized("the header Authorization must be 'Bearer <key>'")
        digest = hashed(given.strip())
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.sha256, digest):
                found = key
        if found is None:
            raise Unauthorized("the API key is not one of this service")
        return found

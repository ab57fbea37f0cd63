"""Whose request it is, and which conversation it goes on with: the fields that say so, checked.

They are the user's own words. A cache salt is a secret: it stands in no message and no log.
"""

from distserve.api_keys import ApiKey, tenant_salt
from distserve.errors import InvalidRequest
from distserve_gateway.schema import SampledBody

MAX_CHARACTERS = 256
SESSION_HEADER = "x-session-id"


def cache_salt(body: SampledBody, key: ApiKey) -> str:
    """That of the key's tenant and the user's own words; none of either: empty, and the prefix cache is shared with
    everybody who gives none."""
    if body.cache_salt is not None:
        _check("cache_salt", body.cache_salt, secret=True)
    return tenant_salt(key.name, body.cache_salt or "")


def conversation(body: SampledBody, header: str = "") -> str:
    """What the user calls it: `session_id`, else the header X-Session-Id, else `user`; empty if none is given.
    An empty `user` or header is an absent one."""
    for name, value in (("session_id", body.session_id), (SESSION_HEADER, header or None), ("user", body.user or None)):
        if value is not None:
            _check(name, value)
            return value
    return ""


def _check(param: str, value: str, *, secret: bool = False) -> None:
    expected = f"1 to {MAX_CHARACTERS} printable characters"
    if not 1 <= len(value) <= MAX_CHARACTERS:
        problem = f"has {len(value)} characters"
    elif not value.isprintable():  # names go to logs and consoles; a lone surrogate could not even be encoded
        at = next(i for i, c in enumerate(value) if not c.isprintable())
        problem = f"has {'an unprintable character' if secret else ascii(value[at])} at {at}"
    else:
        return
    raise InvalidRequest(f"{param} {problem}, must have {expected}", param=param, expected=expected)

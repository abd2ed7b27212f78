"""Which bucket, and below which prefix, as one URL says it: s3://bucket or s3://bucket/prefix."""

import re
from dataclasses import dataclass

PREFIX = "kvtide"
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}")
_PREFIX = re.compile(r"(?!\.)[A-Za-z0-9_.-]{1,64}")
"""One step of a path that no server takes for another one."""
_ENDPOINT = re.compile(r"(?P<scheme>https?)://(?P<host>[^/?#@\s]+)/?")


@dataclass(frozen=True, slots=True)
class Address:
    """A part of a bucket: all names begin with `prefix/`."""

    bucket: str
    prefix: str = PREFIX

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


def parse_address(raw: object) -> Address:
    """The bucket and prefix that a URL names; raises ValueError where it names none."""
    scheme, mark, rest = raw.partition("://") if isinstance(raw, str) else ("", "", "")
    bucket, _, prefix = rest.partition("/")
    prefix = prefix.rstrip("/") or PREFIX
    if not mark or scheme != "s3" or not _BUCKET.fullmatch(bucket):
        raise ValueError("not a URL such as s3://bucket or s3://bucket/prefix")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("a prefix is one word of letters, digits, `_`, `.` and `-`")
    return Address(bucket, prefix)


def parse_endpoint(raw: object) -> str:
    """A server's own URL; raises ValueError."""
    match = _ENDPOINT.fullmatch(raw) if isinstance(raw, str) else None
    if match is None:
        raise ValueError("not https://host:port or http://host:port")
    return f"{match['scheme']}://{match['host']}"

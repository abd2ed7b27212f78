"""Options of the tiers that come with kvtide: what an entry of `tiers` of each type may say.

A type is a row in `BUILT_IN` here, and one in `kvtide.tiers.registry`, which says where it is.
"""

import json
import re
from functools import partial
from pathlib import Path
from typing import Literal

from kvtide import s3_address, server_address, tier_entries
from kvtide.redis_address import parse_address
from kvtide.tier_entries import Option, TierEntry
from kvtide.units import MiB, parse_bytes
from kvtide.values import WronglySet, one_of, show_bytes

BYTES_MIN = 64 * MiB  # a few chunks of a small model

PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
"""Without what separates the parts of a key, or makes a server look at a part alone."""
METADATA = re.compile(r"[a-z0-9+]+://[^\s]+")
DISK_SYNC = ("none", "sealed", "each")


def parse_path(raw: object) -> Path:
    """An absolute path."""
    if isinstance(raw, str) and "://" in raw:
        raise ValueError("a URL, not a path")
    if not isinstance(raw, str) or not Path(raw).is_absolute():
        raise ValueError("not an absolute path")
    if "\0" in raw:
        raise ValueError("a NUL, which no path has")
    return Path(raw)


def parse_bytes_max(raw: object) -> int:
    """A size that is of use."""
    size = parse_bytes(raw)
    if size < BYTES_MIN:
        raise ValueError(f"{size} bytes is too little to be of use, at least 64MiB is wanted")
    return size


def parse_prefix(raw: object) -> str:
    """What keys of a server begin with."""
    if not isinstance(raw, str) or not PREFIX.fullmatch(raw):
        raise ValueError("not such a word")
    return raw


def parse_metadata(raw: object) -> str:
    """What a store's clients are told of its metadata."""
    if raw == "P2PHANDSHAKE" or (isinstance(raw, str) and METADATA.fullmatch(raw)):
        return str(raw)
    raise ValueError("neither P2PHANDSHAKE nor a URL")


def parse_port(raw: object) -> int:
    """A port, as a number."""
    if not isinstance(raw, int) or isinstance(raw, bool) or not 0 < raw < 65536:
        raise ValueError("not a port")
    return raw


def parse_disk_bytes(raw: object) -> int | Literal["auto"]:
    """A size, or `auto`."""
    return "auto" if raw == "auto" else parse_bytes_max(raw)


SERVER_PREFIX = Option(
    "prefix",
    parse=parse_prefix,
    accepts="letters, digits, `_`, `.`, `-`",
    doc="What all keys begin with. Nodes of one prefix share records.",
    default="kvtide",
)

DISK = (
    Option(
        "path",
        parse=parse_path,
        accepts="an absolute path",
        doc="As `disk_path`.",
    ),
    Option(
        "bytes_max",
        parse=parse_disk_bytes,
        accepts="a size such as 2TiB, or `auto`",
        doc="As `disk_bytes_max`.",
        show=show_bytes,
    ),
    Option(
        "sync",
        parse=one_of(*DISK_SYNC),
        accepts="`none`, `sealed` or `each`",
        doc="As `disk_sync`.",
        default="sealed",
    ),
)

SHARED_DIR = (
    Option(
        "path",
        parse=parse_path,
        accepts="an absolute path",
        doc="Directory that several machines mount, each as the same user; made if need be.",
    ),
    Option(
        "bytes_max",
        parse=parse_bytes_max,
        accepts="a size such as 2TiB",
        doc="Most bytes of the files that this node keeps there; others have caps of their own.",
        show=show_bytes,
    ),
)

REDIS = (
    Option(
        "url",
        parse=parse_address,
        accepts="`redis://user:password@host:port/0`, `rediss://…` with TLS, or `unix:///path`",
        doc="A server, any of a cluster's servers (`host,host`), or the Sentinels and what they"
        " call it (`redis://host:26379,host:26379/name`). The password is never shown.",
        show=str,
        secret=True,
    ),
    Option(
        "bytes_max",
        parse=parse_bytes_max,
        accepts="a size such as 2TiB",
        doc="Most bytes of memory that records take there, of all nodes together. Give all the"
        " same; the server's own `maxmemory` should be a tenth above.",
        show=show_bytes,
    ),
    SERVER_PREFIX,
    Option(
        "password_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="A file whose first line is the password, in place of one in the URL.",
        default=None,
    ),
    Option(
        "ca_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="For TLS: the certificates that are trusted, in place of the system's.",
        default=None,
    ),
    Option(
        "cert_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="For TLS: this node's certificate, where the server wants one.",
        default=None,
    ),
    Option(
        "key_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="For TLS: the key of `cert_file`, if that does not hold it too.",
        default=None,
    ),
)

S3 = (
    Option(
        "url",
        parse=s3_address.parse_address,
        accepts="`s3://bucket` or `s3://bucket/prefix`",
        doc="A bucket that is there, and what all names begin with (`kvtide`). Nodes of one bucket"
        " and prefix share records.",
        show=str,
    ),
    Option(
        "bytes_max",
        parse=parse_bytes_max,
        accepts="a size such as 2TiB",
        doc="Most bytes of objects that records take there, of all nodes together. Give all the"
        " same.",
        show=show_bytes,
    ),
    Option(
        "endpoint",
        parse=s3_address.parse_endpoint,
        accepts="`https://host:port` or `http://host:port`",
        doc="The server. Without it: `AWS_ENDPOINT_URL_S3`, then `AWS_ENDPOINT_URL` of the"
        " environment, else Amazon's of the region.",
        default=None,
    ),
    Option(
        "region",
        parse=parse_prefix,
        accepts="a word",
        doc="Without it: `AWS_REGION`, then `AWS_DEFAULT_REGION` of the environment, else"
        " `us-east-1`.",
        default=None,
    ),
    Option(
        "style",
        parse=one_of("auto", "path", "host"),
        accepts="`auto`, `path` or `host`",
        doc="Where requests name the bucket. `auto`: in the path where an endpoint is given, here"
        " or in the environment, in the host's name at Amazon's.",
        default="auto",
    ),
    Option(
        "credentials_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="Keys as in `~/.aws/credentials`, read again each minute. Without it: the environment,"
        " then that file, then the roles of a container, a pod or a machine.",
        default=None,
    ),
    Option(
        "ca_file",
        parse=parse_path,
        accepts="an absolute path",
        doc="For TLS: certificates that are trusted besides the usual ones.",
        default=None,
    ),
)

MOONCAKE = (
    Option(
        "url",
        parse=partial(server_address.parse_address, "mooncake"),
        accepts="`mooncake://host:port`",
        doc="The master of a store. How much there is to use is what its owners give.",
        show=str,
    ),
    SERVER_PREFIX,
    Option(
        "metadata",
        parse=parse_metadata,
        accepts="`P2PHANDSHAKE`, or a URL",
        doc="As the store's owners are told: its server of metadata, or that there is none.",
        default="P2PHANDSHAKE",
    ),
    Option(
        "protocol",
        parse=one_of("tcp", "rdma"),
        accepts="`tcp` or `rdma`",
        doc="How bytes travel, as the store's owners are told.",
        default="tcp",
    ),
    Option(
        "metrics_port",
        parse=parse_port,
        accepts="a port",
        doc="Where the master answers by HTTP how much there is; without an answer, status does"
        " not know it, and nothing else is lost.",
        default=9003,
    ),
)

INFINISTORE = (
    Option(
        "url",
        parse=partial(server_address.parse_address, "infinistore"),
        accepts="`infinistore://host:port`",
        doc="A server, which is asked over TCP. How much there is to use is what it was given.",
        show=str,
    ),
    SERVER_PREFIX,
)

BUILT_IN: dict[str, tuple[Option, ...]] = {
    "disk": DISK,
    "shared_dir": SHARED_DIR,
    "redis": REDIS,
    "s3": S3,
    "mooncake": MOONCAKE,
    "infinistore": INFINISTORE,
}
"""Types of ours, in the order of docs/configuration.md, and what each may be told."""


def parse_tiers(raw: object) -> tuple[TierEntry, ...]:
    """A list of tiers, in YAML, or as JSON text."""
    if isinstance(raw, str):
        try:
            raw = json.loads(raw)
        except ValueError:
            raise ValueError("neither a list in YAML nor one in JSON") from None
    if not isinstance(raw, list):
        raise ValueError("not a list")  # noqa: TRY004 - as of all parsers
    entries = [_entry(number, one) for number, one in enumerate(raw, 1)]
    try:
        return tier_entries.checked_together(entries)
    except ValueError as error:
        raise WronglySet(str(error)) from None


def _entry(number: int, raw: object) -> TierEntry:
    try:
        return tier_entries.parse(raw, BUILT_IN, tier_entries.installed)
    except ValueError as error:
        raise WronglySet(f"entry {number}: {error}") from None


def disk_entry(path: Path, bytes_max: int | str, write: str, sync: str) -> TierEntry:
    """What `disk_path` and its like say in short."""
    raw = {"path": str(path), "bytes_max": bytes_max, "write": write, "sync": sync}
    return tier_entries.parse({"type": "disk", **raw}, BUILT_IN, tuple)

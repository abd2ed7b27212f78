"""Settings: one table of keys, read once, handed on as frozen dataclasses.

    YAML file  <  environment KVTIDE_<NAME>  <  the connector's extra config kvtide.<name>

Later places win. Each key has an owner: a running node keeps its own settings whatever an engine
asks for, and an engine's settings never reach the node. An unknown name stops the start and names
the nearest known one: a setting that is misspelt must not be a setting that is ignored. Nothing
else in kvtide reads the environment or the file.

Rejected: several tables merged at import (then names depend on what was imported); a catch-all.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvtide.errors import ConfigError, reason_of
from kvtide.settings import (
    DISK_KEYS,
    ENVIRONMENT_PREFIX,
    KEYS,
    EngineConfig,
    Key,
    NodeConfig,
    Owner,
)
from kvtide.values import WronglySet, in_short

CONFIG_FILE = "KVTIDE_CONFIG_FILE"
RUNTIME_DIR = "KVTIDE_RUNTIME_DIR"
OTHER_VARIABLES = {
    CONFIG_FILE: "Path of the YAML file. Without it: `kvtide.yaml` in `$XDG_CONFIG_HOME`, else in"
    " `~/.config`, where there is one.",
    RUNTIME_DIR: "Absolute path of the directory of the node's socket, lock and log. Without it:"
    " `$XDG_RUNTIME_DIR/kvtide` where `$XDG_RUNTIME_DIR` is a directory, else `kvtide-<uid>` in"
    " `$TMPDIR` or `/tmp`. Engines meet in a node by having the same one.",
    "KVTIDE_SALT": "Only for `kvtide clear`: the salt whose entries it takes away; it may not be"
    " empty. A node that is started does not inherit it.",
    "KVTIDE_TORCH_ARGS": "Only for `scripts/setup`: arguments for pip when it installs torch.",
}
"""Variables named KVTIDE_* that are not keys, and what they do."""

_SERVICE_LINK = re.compile(
    r"KVTIDE_([A-Z0-9_]+_)?("
    r"SERVICE_HOST=[0-9a-fA-F.:]+|SERVICE_PORT(_[A-Z0-9_]+)?=\d+"
    r"|PORT(_\d+_(TCP|UDP|SCTP))?=(tcp|udp|sctp)://.+"
    r"|PORT_\d+_(TCP|UDP|SCTP)_(PROTO=(tcp|udp|sctp)|PORT=\d+|ADDR=[0-9a-fA-F.:]+))"
)
"""What Kubernetes tells every container of a namespace about its services named kvtide…: names and
values of exactly this kind are nobody's settings, nor misspelt ones."""

EXTRA_PREFIX = "kvtide."
_OTHER_PLACES = re.compile(r"^kvtide[._-]*")
"""What a name begins with that is written as in another place, once it is in small letters."""


@dataclass(frozen=True, slots=True)
class Effective:
    """One key as it came out, in words that may be shown: a secret's value is not in it."""

    name: str
    value: str
    owner: Owner
    source: str
    default: str


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of this process."""

    node: NodeConfig
    engine: EngineConfig
    runtime_dir: Path
    cache_dir: Path
    effective: tuple[Effective, ...]
    """Every key with its value, in the order of the table, for `kvtide config show`."""
    node_environment: dict[str, str] = field(default_factory=dict, repr=False)
    """The node's settings from the extra config, as variables for a node that is started."""


_BY_NAME = {key.name: key for key in KEYS}


@dataclass(frozen=True, slots=True)
class _Given:
    """A raw value, and the place that it was found in."""

    key: Key
    raw: object
    source: str


def _refuse(fault: ConfigError) -> None:
    raise fault


def read(
    extra: Mapping[str, object] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    on_fault: Callable[[ConfigError], None] = _refuse,
) -> Config:
    """Read all places once.

    Args:
        extra: the connector's extra config; names that do not begin with kvtide are not ours.
        environ: the environment, unless a test says otherwise.
        on_fault: gets each of the errors below, by default to raise it. Where it returns, what is
            wrong is left out: such settings are for people to see, and for nothing to run by.

    Raises:
        ConfigError: a name is unknown, a value is unusable, or two settings contradict each other.
    """
    last, values = _last_values(extra or {}, environ, on_fault)
    return Config(
        node=NodeConfig(**_owned(values, "node")),
        engine=EngineConfig(**_owned(values, "engine")),
        runtime_dir=runtime_dir(environ),
        cache_dir=_users_dir(environ, "XDG_CACHE_HOME", ".cache") / "kvtide",
        effective=tuple(
            Effective(
                name=key.name,
                value=key.show(values[key.name]),
                owner=key.owner,
                source=last[key.name].source if key.name in last else "default",
                default=key.show(key.default),
            )
            for key in KEYS
        ),
        node_environment={
            given.key.variable: _as_text(given.raw)
            for given in _from_extra(extra or {})
            if isinstance(given, _Given) and given.key.owner == "node"
        },
    )


def _last_values(
    extra: Mapping[str, object],
    environ: Mapping[str, str],
    on_fault: Callable[[ConfigError], None],
) -> tuple[dict[str, _Given], dict[str, object]]:
    """What each key that was given comes from, and the value of every key."""
    last: dict[str, _Given] = {}
    values = {key.name: key.default for key in KEYS}
    faults: list[ConfigError] = []
    for given in (*_from_file(environ), *_from_environment(environ), *_from_extra(extra)):
        if isinstance(given, ConfigError):
            faults.append(given)
        else:
            last[given.key.name] = given
    for name, given in list(last.items()):
        try:
            values[name] = _value(given)
        except ConfigError as error:
            del last[name]
            faults.append(error)
    if not faults:  # else what seems to be missing may be what is wrong
        try:
            _check_together(values, last)
        except ConfigError as error:
            faults.append(error)
    for fault in faults:
        on_fault(fault)
    return last, values


def _check_together(values: Mapping[str, object], last: Mapping[str, _Given]) -> None:
    """Refuse settings that contradict each other, or need another one."""
    if values["http_token"] is not None and values["http_address"] is None:
        raise ConfigError(
            f"{last['http_token'].source} sets http_token, but http_address is not set, so"
            " nothing would ask for it; set http_address too, or neither"
        )
    in_short = [name for name in DISK_KEYS if name in last]
    if "tiers" in last and in_short:
        name = in_short[0]
        raise ConfigError(
            f"{last['tiers'].source} sets tiers, and {last[name].source} {name}, which is short"
            f" for {name.removeprefix('disk_')} of an entry there; give one of the two"
        )
    for name in DISK_KEYS[:2]:
        if in_short and name not in last:
            raise ConfigError(
                f"{last[in_short[0]].source} sets {in_short[0]}, but {name} is not set; a disk"
                " needs disk_path and disk_bytes_max"
            )


def _as_text(raw: object) -> str:
    """As it would stand in a variable, where lists are JSON."""
    return json.dumps(raw) if isinstance(raw, list | dict) else str(raw)


def _owned(values: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
    return {key.name: values[key.name] for key in KEYS if key.owner == owner}


def _value(given: _Given) -> object:
    try:
        return given.key.parse(given.raw)
    except WronglySet as error:
        raise ConfigError(f"{given.source} sets {given.key.name} wrongly: {error}") from None
    except ValueError as error:
        # What is wrong with a secret may be told, what it is may not.
        raw = "a value" if given.key.secret else in_short(given.raw)
        raise ConfigError(
            f"{given.source} sets {given.key.name} to {raw}: {error}; give {given.key.accepts}"
        ) from None


def _given(
    name: str, raw: object, *, of: str, source: str, written: Callable[[Key], str]
) -> _Given | ConfigError:
    """The key of this name with its value; `of` is what to call a name that nobody knows,
    `written` says how a key is written in that source."""
    if name in _BY_NAME:
        return _Given(_BY_NAME[name], raw, source)
    return ConfigError(f"{of} is not a setting; {_nearest(name, written)}")


def _nearest(name: str, written: Callable[[Key], str]) -> str:
    near = difflib.get_close_matches(_OTHER_PLACES.sub("", name.lower()), _BY_NAME, n=1)
    if near:
        return f"did you mean {written(_BY_NAME[near[0]])}?"
    return "known are " + ", ".join(written(key) for key in KEYS)


def _from_file(environ: Mapping[str, str]) -> Iterator[_Given | ConfigError]:
    try:
        path = _config_file(environ)
        items = [] if path is None else _yaml_items(path)
    except ConfigError as error:
        yield error
        return
    seen: set[str] = set()
    for name, raw, line in items:
        source = f"{path}, line {line}"
        of = f"{in_short(name)} ({source})"
        given = _given(name, raw, of=of, source=source, written=lambda key: key.name)
        if name in seen:
            yield ConfigError(f"{source} sets {name} a second time; keep one of the two lines")
        elif raw is None and isinstance(given, _Given):
            accepts = given.key.accepts
            yield ConfigError(f"{source} names {name} without a value; give {accepts}")
        else:
            seen.add(name)
            yield given


def _config_file(environ: Mapping[str, str]) -> Path | None:
    """The file to read: one that was asked for must exist, the user's own need not."""
    asked = environ.get(CONFIG_FILE)
    if asked is not None:
        path = Path(asked)
        if not os.path.isfile(path):
            raise ConfigError(
                f"{CONFIG_FILE} names {asked!r}, which is not a file, or not for this user to see;"
                " correct it"
            )
        return path
    path = _users_dir(environ, "XDG_CONFIG_HOME", ".config") / "kvtide.yaml"
    # Unlike Path's, this one is False where we may not look: HOME may be somebody else's.
    return path if os.path.isfile(path) else None


def _users_dir(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    """A directory of the user, by the desktop rules."""
    directory = Path(environ.get(variable, ""))
    if directory.is_absolute():
        return directory
    return Path(environ.get("HOME", "/")) / below_home  # unset, or to be ignored: not absolute


def _yaml_items(path: Path) -> list[tuple[str, object, int]]:
    """Name, value and line of each setting in the file, by the safe loader."""
    hint = "write one `name: value` a line"
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return []
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path} does not hold settings; {hint}")
        return [
            (
                name.value if isinstance(name, yaml.ScalarNode) else in_short(name.tag),
                loader.construct_object(value, deep=True),
                name.start_mark.line + 1,
            )
            for name, value in root.value
        ]
    except yaml.MarkedYAMLError as error:  # its text would quote the line, which may hold a secret
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(
            f"{path}{line} is not YAML: {error.problem}; {hint}, with quotes around a value with"
            ' brackets, such as "[::1]:9470"'
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{path} cannot be read: {reason}; correct or remove it") from None
    except (ValueError, TypeError, RecursionError):  # a date of month 13, thousands of brackets
        raise ConfigError(f"{path} holds a value that cannot be read; {hint}") from None


def _from_environment(environ: Mapping[str, str]) -> Iterator[_Given | ConfigError]:
    by_variable = {key.variable: key for key in KEYS}
    for variable, raw in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable in OTHER_VARIABLES:
            continue
        if _SERVICE_LINK.fullmatch(f"{variable}={raw}"):
            continue
        if variable not in by_variable:
            known = [*by_variable, *OTHER_VARIABLES]
            near = difflib.get_close_matches(variable, known, n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "known are " + ", ".join(known)
            yield ConfigError(f"the environment's {variable} is not a setting; {hint}")
        else:
            yield _Given(by_variable[variable], raw, f"environment {variable}")


def _from_extra(extra: Mapping[str, object]) -> Iterator[_Given | ConfigError]:
    """The connector's extra config also carries other people's names: those are left alone."""
    for name, raw in extra.items():
        source = f"extra config {name}"
        if name in _BY_NAME:
            yield ConfigError(f"{source} is not a setting; did you mean {EXTRA_PREFIX}{name}?")
        elif _OTHER_PLACES.match(name.lower()):  # ours, though it may be written wrongly
            yield _given(
                name.removeprefix(EXTRA_PREFIX),
                raw,
                of=source,
                source=source,
                written=lambda key: EXTRA_PREFIX + key.name,
            )


def runtime_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the node's socket lives; made and checked by whoever uses it.

    Besides `read`, for commands that need nothing else and shall work whatever the settings are.
    """
    if RUNTIME_DIR in environ:
        path = Path(environ[RUNTIME_DIR])
        if not path.is_absolute():
            raise ConfigError(
                f"{RUNTIME_DIR} is {environ[RUNTIME_DIR]!r}; give an absolute path, since engines"
                " and node start in different directories"
            )
        return path
    users = Path(environ.get("XDG_RUNTIME_DIR", ""))
    if users.is_absolute() and os.path.isdir(users):
        return users / "kvtide"
    temporary = Path(environ.get("TMPDIR", ""))
    if not (temporary.is_absolute() and os.path.isdir(temporary)):
        temporary = Path("/tmp")
    return temporary / f"kvtide-{os.getuid()}"

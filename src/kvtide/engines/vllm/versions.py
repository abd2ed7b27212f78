"""The versions of vLLM that this release of kvtide was tested with: the one list of them."""

import re

SUPPORTED_VERSIONS = ((0, 32),)
"""Major and minor; any released patch of them, of any build (`0.32.1`, `0.32.0+cpu`)."""

TESTED = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_VERSIONS)

_RELEASE = re.compile(r"(\d+)\.(\d+)\.\d+(?:\.post\d+)?(?:\+.*)?")


def is_tested(version: str) -> bool:
    """Whether a version string of vLLM names a release of a tested version."""
    release = _RELEASE.fullmatch(version)
    return release is not None and (int(release[1]), int(release[2])) in SUPPORTED_VERSIONS

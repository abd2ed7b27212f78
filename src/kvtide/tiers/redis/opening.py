"""A server as an entry of `tiers` asks for it."""

import ssl
from pathlib import Path

from kvtide.errors import ConfigError


def tls_context(
    ca_file: Path | None, cert_file: Path | None, key_file: Path | None
) -> ssl.SSLContext:
    """What is trusted, and who we are; certificates are verified, whatever is given.

    Raises:
        ConfigError: a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"a file for TLS cannot be used: {error}") from error
    return context

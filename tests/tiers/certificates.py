"""Certificates for servers of tests."""

import functools
import subprocess
from pathlib import Path


def made_certificates(directory: Path, name: str) -> None:
    """A CA, and a certificate for 127.0.0.1 that it signed, with its key."""
    run = functools.partial(subprocess.run, check=True, cwd=directory, capture_output=True)
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = ["-keyout", f"{name}-ca.key", "-out", f"{name}-ca.crt", "-subj", f"/CN={name} CA"]
    run(["openssl", "req", "-x509", *key, *ca, "-days", "30"])
    request = ["-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"]
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    run(["openssl", "req", *key, *request, *names])
    signed = ["-CA", f"{name}-ca.crt", "-CAkey", f"{name}-ca.key", "-CAcreateserial"]
    more = ["-copy_extensions", "copy", "-days", "30", "-out", f"{name}.crt"]
    run(["openssl", "x509", "-req", "-in", f"{name}.csr", *signed, *more])

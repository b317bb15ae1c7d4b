"""Certificates in files."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pingpong_bus.chain import MAX_CHAIN_BYTES
from pingpong_bus.errors import DataError
from pingpong_client.certificate import CERTIFICATE_VERSION, Certificate
from pingpong_client.chain_file import read_file
from pingpong_client.output_file import write_file

_HINT = "Name a file that `verify -o FILE` or `verify --json` has written."


class _Form(msgspec.Struct, frozen=True):
    """What tells a certificate from other JSON."""

    certificate: int


def read_certificate(path: Path) -> Certificate:
    """A certificate that was written before.

    Raises:
        DataError: the file cannot be read, is no certificate, is broken, or of a form that is not known here.
    """
    data = read_file(path, limit=MAX_CHAIN_BYTES, what="the certificate")
    if len(data) > MAX_CHAIN_BYTES:
        raise DataError(f"{path} is larger than {MAX_CHAIN_BYTES} bytes, so it is no certificate.", hint=_HINT)
    try:
        form = msgspec.json.decode(data, type=_Form).certificate
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path} is no certificate: {error}.", hint=_HINT) from None
    if form != CERTIFICATE_VERSION:
        raise DataError(
            f"{path} is a certificate of form {form}, and this client reads form {CERTIFICATE_VERSION}.",
            hint="Make it anew, or read it with the client that made it.",
        )
    try:
        certificate = msgspec.json.decode(data, type=Certificate)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is a broken certificate: {error}.", hint="Make it anew.") from None
    if certificate.pairs != len(certificate.runs):
        raise DataError(
            f"{path} is a broken certificate: it tells of {certificate.pairs} pairs and holds {len(certificate.runs)}.",
            hint="Make it anew.",
        )
    return certificate


def write_certificate(path: Path, certificate: Certificate) -> None:
    """Write a certificate; a file of that name is replaced as a whole, and what is no file (a pipe) is written to.

    Raises:
        UsageError: no file can be made there.
        OSError: the disk is full, or fails.
    """
    write_file(path, msgspec.json.format(msgspec.json.encode(certificate), indent=2) + b"\n")

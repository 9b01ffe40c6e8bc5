"""Throw-away certificates for tests."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Authority:
    """A certificate authority; `cert_file` is for clients to trust."""

    cert: x509.Certificate
    key: ec.EllipticCurvePrivateKey
    cert_file: Path


@dataclass(frozen=True)
class Issued:
    cert_file: Path
    key_file: Path


def make_ca(folder: Path, cn: str = "test authority") -> Authority:
    """A new authority; its PEM is written to `<folder>/<cn with dashes>.pem`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, cn)])
    cert = (
        _builder(name, name, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                key_cert_sign=True,
                crl_sign=True,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    path = Path(folder) / f"{cn.replace(' ', '-')}.pem"
    path.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    return Authority(cert, key, path)


def issue(
    folder: Path,
    ca: Authority,
    cn: str,
    sans: list[str],
    *,
    expired: bool = False,
    common_name: str = "",
) -> Issued:
    """A certificate for servers and clients.

    Args:
        folder: where `<cn>.pem` and `<cn>.key` are written.
        ca: signs it.
        cn: common name.
        sans: names and addresses it is valid for; may be empty for a client.
        expired: it was valid until an hour ago.
        common_name: another one than the files are named after.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name or cn)])
    builder = _builder(subject, ca.cert.subject, key, expired=expired).add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False
    )
    if sans:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general(san) for san in sans]), critical=False
        )
    cert = builder.sign(ca.key, hashes.SHA256())
    stem = cn.replace(" ", "-")
    issued = Issued(Path(folder) / f"{stem}.pem", Path(folder) / f"{stem}.key")
    issued.cert_file.write_bytes(cert.public_bytes(serialization.Encoding.PEM))
    issued.key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    issued.key_file.chmod(0o600)
    return issued


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    expired: bool = False,
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc) - dt.timedelta(hours=25 if expired else 0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=1))
    )


def _general(san: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(san))
    except ValueError:
        return x509.DNSName(san)

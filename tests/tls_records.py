"""A client of TLS 1.3 that makes its records itself, after the handshake: of any length, of any kind, as many as it likes."""

from __future__ import annotations

import hashlib
import hmac
import socket
import ssl
import struct
import subprocess
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

__all__ = ["ALERT", "DATA", "HANDSHAKE", "NEW_KEYS", "Speaker", "certified", "insecure"]

ALERT, HANDSHAKE, DATA = 21, 22, 23
NEW_KEYS = b"\x18\x00\x00\x01\x00"  # KeyUpdate, that asks for none in return (RFC 8446, 4.6.3)


def certified(folder: Path) -> tuple[Path, Path]:
    """A server's certificate and key, made by openssl."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "1", "-subj", "/CN=localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def insecure() -> ssl.SSLContext:
    """A client's context that takes every certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Speaker:
    """Greets over a connected socket that blocks, and makes records from there on.

    Args:
        connection: to a server.
        keys: a file that does not exist yet, for what OpenSSL tells of the keys.
    """

    def __init__(self, connection: socket.socket, keys: Path) -> None:
        context = insecure()
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.keylog_filename = str(keys)
        come, goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = context.wrap_bio(come, goes)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(goes.read())
                come.write(connection.recv(65536))
        connection.sendall(goes.read())
        told = client.cipher()
        assert told is not None
        assert "GCM" in told[0], "records are made with AES-GCM alone"
        self._hash, self._key_bytes = ("sha384", 32) if told[0].endswith("384") else ("sha256", 16)
        told_keys = dict(line.split(" ", 1) for line in keys.read_text().splitlines())
        self._secret = bytes.fromhex(told_keys["CLIENT_TRAFFIC_SECRET_0"].split()[1])
        self._begin()

    def record(self, content: bytes, kind: int = DATA) -> bytes:
        """One, as it goes over the wire."""
        nonce = self._iv ^ self._count
        self._count += 1
        head = struct.pack("!BHH", DATA, 0x0303, len(content) + 17)
        return head + self._cipher.encrypt(nonce.to_bytes(12, "big"), content + bytes([kind]), head)

    def new_keys(self) -> bytes:
        """A record that says that others follow, which `record` uses from now on."""
        said = self.record(NEW_KEYS, HANDSHAKE)
        self._secret = self._expand("traffic upd", len(self._secret))
        self._begin()
        return said

    def _begin(self) -> None:
        self._cipher, self._count = AESGCM(self._expand("key", self._key_bytes)), 0
        self._iv = int.from_bytes(self._expand("iv", 12), "big")

    def _expand(self, label: str, length: int) -> bytes:
        """HKDF-Expand-Label, of one block (RFC 8446, 7.1)."""
        name = b"tls13 " + label.encode()
        told = struct.pack("!HB", length, len(name)) + name + b"\x00"
        return hmac.new(self._secret, told + b"\x01", getattr(hashlib, self._hash)).digest()[:length]

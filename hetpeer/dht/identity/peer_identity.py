"""A peer's identity: one RSA key that gives its peer id, signs its records and proves its streams.

The key file is libp2p's `PrivateKey` protobuf
(https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md), which p2pd reads with `-id`. A peer id is
base58 of the SHA-256 multihash of the `PublicKey` protobuf, so every signature can be tied to the id that the
transport authenticates. Both protobufs are six fixed bytes and a length; writing them by hand keeps torch and
hivemind out of the command line.

One process at a time uses an identity: `hold` locks a file beside the key, since the key file may be
replaced. The lock file has the owner's process id; the kernel drops the lock at exit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from hetpeer.dht.base.errors import ExitCode, LocalError
from hetpeer.dht.base.untrusted import varint

KEY_BITS = 2048
MAX_KEY_BITS = 4096
MAX_PUBLIC_BYTES = 1024
MAX_FILE_BYTES = 8192
_KEY_TYPE_RSA_THEN_DATA = b"\x08\x00\x12"  # field 1 (varint) = RSA; field 2 (bytes) follows
_SHA2_256_MULTIHASH = b"\x12\x20"
_MAX_PID_BYTES = 20


@dataclass(frozen=True, slots=True)
class Identity:
    """A peer's key pair and the file it lives in. `public_bytes` is DER SubjectPublicKeyInfo.

    identity = Identity.load_or_create(Path("key"))
    assert verify(identity.public_bytes, b"data", identity.sign(b"data"))
    """

    path: Path
    peer_id: str
    public_bytes: bytes
    _private_key: rsa.RSAPrivateKey

    @classmethod
    def create(cls, path: Path) -> Identity:
        """Make a new key at `path`, mode 0600, complete or not at all. Raises `LocalError` HP-ID-001."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
        der = key.private_bytes(
            serialization.Encoding.DER,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        try:
            _write_new(path, _key_message(der))
        except FileExistsError as error:
            raise _unusable(
                path, "a file is already there", "choose another path, or use the identity that is there"
            ) from error
        except OSError as error:
            raise _unusable(
                path, error.strerror or str(error), "choose a folder that you can write to"
            ) from error
        return cls._from_key(path, key)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a key file. Raises `LocalError` HP-ID-001 if it is missing, damaged or readable by others."""
        identity, shared = cls.load_copy(path)
        if shared:
            raise _unusable(path, "other users of this machine can read it", f"chmod 600 {path}")
        return identity

    @classmethod
    def load_copy(cls, path: Path) -> tuple[Identity, bool]:
        """(identity, whether others can read the file: some disks know no rights). Raises HP-ID-001."""
        try:
            with path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise _unusable(
                path, error.strerror or str(error), "check the path, or make a new identity"
            ) from error
        return cls._from_key(path, _parse_private_key(path, content)), bool(mode & 0o077)

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """The identity at `path`, created by one process if there is none. Raises `LocalError` HP-ID-001."""
        if not os.path.lexists(path):
            try:
                return cls.create(path)
            except LocalError:
                if not os.path.lexists(path):
                    raise
        return cls.load(path)

    @classmethod
    def _from_key(cls, path: Path, key: rsa.RSAPrivateKey) -> Identity:
        public_bytes = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        return cls(path, peer_id_of(public_bytes), public_bytes, key)

    def sign(self, data: bytes) -> bytes:
        """RSA PKCS#1 v1.5 over SHA-256, as libp2p signs: 256 bytes, equal for equal data."""
        return self._private_key.sign(data, padding.PKCS1v15(), hashes.SHA256())

    def __repr__(self) -> str:
        return f"<Identity {self.peer_id} in {self.path}>"


def peer_id_of(public_bytes: bytes) -> str:
    """The peer id of a public key (DER SubjectPublicKeyInfo)."""
    digest = hashlib.sha256(_key_message(public_bytes)).digest()
    return base58.b58encode(_SHA2_256_MULTIHASH + digest).decode()


def verify(public_bytes: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is that key's over `data`. False for any malformed bytes."""
    if len(public_bytes) > MAX_PUBLIC_BYTES:
        return False
    try:
        key = serialization.load_der_public_key(public_bytes)
    except (ValueError, UnsupportedAlgorithm):
        return False
    if not isinstance(key, rsa.RSAPublicKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        return False
    try:
        key.verify(signature, data, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        return False
    return True


def _key_message(der: bytes) -> bytes:
    """libp2p's PublicKey or PrivateKey protobuf around a DER key."""
    return _KEY_TYPE_RSA_THEN_DATA + varint(len(der)) + der


def _parse_private_key(path: Path, content: bytes) -> rsa.RSAPrivateKey:
    """The RSA key in a libp2p key file. Raises `LocalError` HP-ID-* if it is damaged."""
    damaged = _unusable(
        path, "it is damaged or not a libp2p RSA key", "restore it from a copy, or make a new identity"
    )
    der = content[len(_KEY_TYPE_RSA_THEN_DATA) + 2 :]  # an RSA key of these sizes has a two-byte length
    if content != _key_message(der):
        raise damaged
    try:
        key = serialization.load_der_private_key(der, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise damaged from error
    if not isinstance(key, rsa.RSAPrivateKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        raise damaged
    return key


def _write_new(path: Path, content: bytes) -> None:
    """Create `path` with mode 0600, complete or not at all; an existing one stays. Raises FileExistsError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)  # unlike rename, link never replaces an existing file
    finally:
        draft.unlink()
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _unusable(path: Path, why: str, fix: str) -> LocalError:
    return LocalError(
        "HP-ID-001", f"cannot use the identity file {path}", why=why, fix=fix, exit_code=ExitCode.IDENTITY
    )


def hold(key: Path) -> int:
    """Lock the identity in the file `key`; it is held until the returned descriptor is closed.

    Raises `LocalError` HP-ID-002 with the other process's id, HP-ID-001 where no lock can be made.
    """
    path = lock_of(key)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(descriptor)
            raise
    except BlockingIOError as error:
        raise in_use(key, path) from error
    except OSError as error:
        raise LocalError(
            "HP-ID-001",
            f"cannot lock the identity file {key}",
            why=f"{path}: {error.strerror}",
            fix="choose a folder that you can write to, on a disk that knows locks",
            exit_code=ExitCode.IDENTITY,
        ) from error
    with suppress(OSError):  # a full disk: the lock holds, only the process id is missing
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def lock_of(key: Path) -> Path:
    """The lock file of `key`."""
    return key.with_name(f"{key.name}.lock")


def in_use(key: Path, lock: Path) -> LocalError:
    """HP-ID-002: another process, which has locked `lock`, runs with the identity in `key`."""
    return LocalError(
        "HP-ID-002",
        f"another process{_holder(lock_of(key))} runs with the identity {key}",
        why=f"it has locked {lock}",
        fix="end the other one, or give this one a home of its own (--home)",
        exit_code=ExitCode.IDENTITY,
    )


def _holder(path: Path) -> str:
    """` (pid 4711)`; empty if the file names no living process: not written yet, or left by a killed one."""
    with suppress(OSError, OverflowError):
        with path.open("rb") as file:
            text = file.read(_MAX_PID_BYTES).strip()
        if text.isdigit() and _is_there(int(text)):
            return f" (pid {int(text)})"
    return ""


def _is_there(pid: int) -> bool:
    """Whether a process with this id exists. Raises `OSError`."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return pid > 0

"""A thousand identities for the price of one: an attacker need not make a new modulus for each of its
keys.
"""

import math
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import rsa

from hetpeer.dht.identity.peer_identity import KEY_BITS, Identity


def cheap_identities() -> Iterator[Identity]:
    """Keys of one modulus with one public exponent after the other, in no file."""
    numbers = rsa.generate_private_key(65537, KEY_BITS).private_numbers()
    phi = (numbers.p - 1) * (numbers.q - 1)
    for exponent in count(65539, 2):
        if math.gcd(exponent, phi) == 1:
            d = pow(exponent, -1, phi)
            private = rsa.RSAPrivateNumbers(
                numbers.p,
                numbers.q,
                d,
                rsa.rsa_crt_dmp1(d, numbers.p),
                rsa.rsa_crt_dmq1(d, numbers.q),
                numbers.iqmp,
                rsa.RSAPublicNumbers(exponent, numbers.public_numbers.n),
            )
            key = private.private_key(unsafe_skip_rsa_key_validation=True)
            yield Identity._from_key(Path("nowhere"), key)


def identities(count: int, fits: Callable[[str], bool] = lambda _peer_id: True) -> list[Identity]:
    """So many whose ids `fits` likes."""
    return list(islice((one for one in cheap_identities() if fits(one.peer_id)), count))

"""What a peer says about itself in the DHT. Everything in an advert is a claim: it guides, and decides nothing.

Checked and made harmless where it comes in: numbers are bounded, text is cut to printable ASCII, so that no name can
carry markup or terminal codes any further. Unknown fields are ignored: a newer version may add some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong

ADVERT_VERSION = 1
LEFT = "left"
"""The state of who is gone and says so."""
MAX_NAME = 32
MAX_LINKS = 4
"""Of one advert: a record of the DHT is small."""


def printable(text: object) -> object:
    """Text without anything but printable ASCII and without the characters of markup, at most MAX_NAME long."""
    if not isinstance(text, str):
        return text
    return "".join(c for c in text if " " <= c <= "~" and c not in "<>&\"'`\\")[:MAX_NAME]


Label = Annotated[str, BeforeValidator(printable)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Bounded, so that sums over a swarm are numbers, whatever its peers claim."""
Share = Annotated[float, Field(ge=0, le=1)]
AddressText = Annotated[str, Field(max_length=256, pattern=r"^/[!-~]+$")]


class LinkNote(BaseModel):
    """One outgoing link, for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    to: Label
    """The end of the peer's id."""
    rate: Amount = 0.0
    """Bytes/s at which bytes arrive there; 0: not known."""
    trip_s: Amount = 0.0
    """There and back, at best."""
    activation_bytes: Count = 0
    """Of the last bundle sent there, as it was written; 0: none was."""
    gradient_bytes: Count = 0
    """Of the last bundle's gradient, likewise."""
    ratio: Amount = 1.0
    """How many times smaller what was sent is than it was in memory."""
    saved_bytes: Count = 0
    path: Label = ""
    """direct, or `through` the end of a relay's id."""


class Advert(BaseModel):
    """One peer's state, published again every few seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Count = ADVERT_VERSION
    """Of this schema; raised only when an old reader would misunderstand a field."""
    name: Label = ""
    """Chosen by its owner, for people."""
    addresses: Annotated[tuple[AddressText, ...], Field(max_length=8, strict=False)] = ()
    role: Label = ""
    """volunteer or coordinator."""
    state: Label = ""
    """joining, working, draining and so on, for people."""
    block_begin: Count = 0
    block_end: Count = 0
    """Blocks held: [block_begin, block_end)."""
    step: Count = 0
    loss: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Of the last committed step."""
    tokens_per_second: Amount = 0.0
    forward_s: Amount = 0.0
    """Of one microbatch over its blocks; 0: not known."""
    backward_s: Amount = 0.0
    varies: Amount = 0.0
    """How far single ones are from these means: standard deviation over mean, of forwards and backwards."""
    encode_s: Amount = 0.0
    """Of one bundle, as it was last written; 0: nothing is."""
    decode_s: Amount = 0.0
    between_s: Amount = 0.0
    """Between its last work of a step and that step's update; 0: not known."""
    update_s: Amount = 0.0
    """That its worker spends on a step's sums and update; 0: not known."""
    computes: Share = 0.0
    """Of its time lately, that its worker computed; it waited for data, for room and, the rest, for a step to begin."""
    waits_data: Share = 0.0
    waits_room: Share = 0.0
    uplink: Amount = 0.0
    """Bytes/s that leave while several links are busy; 0: not known."""
    flops_per_second: Amount = 0.0
    """That its worker reaches on its blocks; a guess before it has tried."""
    product_flops: Amount = 0.0
    """FLOP/s that its worker reaches in a product of large matrices; 0: not known."""
    memory_bytes: Count = 0
    """Offered for blocks."""
    device: Label = ""
    reach: Label = ""
    """public: takes connections; private: takes none; unknown."""
    reach_peers: Count = 0
    """How many peers tried, with this result."""
    relays: Annotated[tuple[Label, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """The ends of the ids of those through whom it is reached."""
    links: Annotated[tuple[LinkNote, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """The slowest first."""

    def to_map(self) -> dict[str, Any]:
        """As it goes into the DHT; fields at their defaults are left out. No tuples: hivemind writes them in its own way."""
        return self.model_dump(mode="json", exclude_defaults=True) | {"version": self.version}

    @classmethod
    def from_map(cls, value: Mapping[str, Any], *, peer: str) -> Advert:
        """The advert in a DHT value of `peer`. Raises `ProtocolError`."""
        try:
            advert = cls.model_validate(dict(value))
        except ValidationError as error:
            field, why = first_wrong(error)
            raise ProtocolError(f"an advert whose {field} is wrong", peer=peer, why=why) from error
        if advert.version > ADVERT_VERSION:
            raise ProtocolError(f"an advert of version {advert.version}", peer=peer)
        return advert

"""Adverts: what a peer says about itself in the DHT. They are claims: they guide, and decide nothing.

Adverts are checked where they come in: numbers are bounded, text is cut to printable ASCII, so that no name
carries markup or terminal codes. Unknown fields are ignored, since a newer version may add some.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from hetpeer.dht.base.errors import ProtocolError
from hetpeer.dht.base.untrusted import first_wrong

ADVERT_VERSION = 1
LEFT = "left"
"""The state of a peer that has left and said so."""
MAX_NAME = 32
MAX_LINKS = 4
"""Links in one advert: a DHT record is small."""


def printable(text: object) -> object:
    """`text` reduced to printable ASCII without markup characters, at most MAX_NAME long; other types
    unchanged.
    """
    if not isinstance(text, str):
        return text
    return "".join(c for c in text if " " <= c <= "~" and c not in "<>&\"'`\\")[:MAX_NAME]


Label = Annotated[str, BeforeValidator(printable)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]
"""Bounded, so that sums over a swarm stay finite whatever its peers claim."""
Share = Annotated[float, Field(ge=0, le=1)]
AddressText = Annotated[str, Field(max_length=256, pattern=r"^/[!-~]+$")]


class LinkNote(BaseModel):
    """One outgoing link, for people."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    to: Label
    """The end of the peer's id."""
    rate: Amount = 0.0
    """Bytes/s that arrive there; 0: unknown."""
    trip_s: Amount = 0.0
    """Best round trip in seconds."""
    activation_bytes: Count = 0
    """Encoded bytes of the last bundle sent there; 0: none yet."""
    gradient_bytes: Count = 0
    """Encoded bytes of the last bundle's gradient; 0: none yet."""
    ratio: Amount = 1.0
    """Bytes in memory over bytes sent."""
    saved_bytes: Count = 0
    path: Label = ""
    """`direct`, or `through` and the end of a relay's id."""


class Advert(BaseModel):
    """One peer's state, published again every few seconds.

    advert = Advert(name="ada", role="volunteer", state="working", block_begin=0, block_end=4)
    await Roster(node, run_id).publish(advert)
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    version: Count = ADVERT_VERSION
    """Schema version; raised only when an old reader would misunderstand a field."""
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
    """Loss of the last committed step."""
    tokens_per_second: Amount = 0.0
    forward_s: Amount = 0.0
    """Seconds of one microbatch's forward over its blocks; 0: unknown."""
    backward_s: Amount = 0.0
    varies: Amount = 0.0
    """Standard deviation over mean of single forwards and backwards."""
    encode_s: Amount = 0.0
    """Seconds to encode one bundle, as last measured; 0: not encoded."""
    decode_s: Amount = 0.0
    between_s: Amount = 0.0
    """Seconds between its last work of a step and that step's update; 0: unknown."""
    update_s: Amount = 0.0
    """Seconds that its worker spends on a step's reduce and update; 0: unknown."""
    computes: Share = 0.0
    """Fraction of recent time in which its worker computed. It waited for data, for room or, the rest, for a
    step.
    """
    waits_data: Share = 0.0
    waits_room: Share = 0.0
    uplink: Amount = 0.0
    """Bytes/s sent while several links are busy; 0: unknown."""
    flops_per_second: Amount = 0.0
    """FLOP/s that its worker reaches on its blocks; a guess before it has tried."""
    product_flops: Amount = 0.0
    """FLOP/s that its worker reaches in a product of large matrices; 0: unknown."""
    memory_bytes: Count = 0
    """Memory offered for blocks."""
    device: Label = ""
    reach: Label = ""
    """public: takes connections; private: takes none; unknown."""
    reach_peers: Count = 0
    """How many peers tried, with this result."""
    relays: Annotated[tuple[Label, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """Ends of the ids of the relays through which it is reached."""
    links: Annotated[tuple[LinkNote, ...], Field(max_length=MAX_LINKS, strict=False)] = ()
    """The slowest first."""

    def to_map(self) -> dict[str, Any]:
        """The map for the DHT, without fields at their defaults. No tuples: hivemind writes them in its own
        way.
        """
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

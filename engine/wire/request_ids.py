"""Compact request ids for the wire: 16 bytes instead of the text that clients see.

    "chatcmpl-" + 32 hexadecimal digits + ".0"  <-->  kind and digits, 16 bytes; 2 bytes more for further prompts

The digits begin with unix milliseconds, so their first bits are 0 until the year 2109, and the kind is stored there.
So the first byte is below 16, and no text begins with such a byte.  An id of any other form is sent as its text.  Both
are MessagePack strings, because Lua's library has no binary type.  `text_id` in `redis/shared/log.lua` equals `unpack`.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

KINDS = ("chatcmpl-", "cmpl-", "msg_", "resp_")  # prefixes of ids; only append, 4 at most
KNOWN = 65_536  # size of the caches of converted ids
_STRING = 0xA0  # MessagePack's code of a string of up to 31 bytes; its length is added

_TEXT = re.compile(rf"({'|'.join(KINDS)})(0[0-3][0-9a-f]{{30}})\.(0|[1-9][0-9]{{0,4}})")
_decode_text = msgspec.msgpack.Decoder(str).decode


@lru_cache(KNOWN)
def pack(request_id: str) -> msgspec.Raw:
    """Return the compact form of an id, as a MessagePack string."""
    found = _TEXT.fullmatch(request_id)
    if found is None or (prompt := int(found[3])) >= 2**16:
        return msgspec.Raw(msgspec.msgpack.encode(request_id))
    digits = bytes.fromhex(found[2])
    packed = bytes([KINDS.index(found[1]) << 2 | digits[0]]) + digits[1:]
    if prompt:
        packed += prompt.to_bytes(2, "big")
    return msgspec.Raw(bytes([_STRING | len(packed)]) + packed)


@lru_cache(KNOWN)
def unpack(packed: bytes) -> str:
    """Return the text of a packed id.  Raises msgspec.MsgspecError or UnicodeDecodeError for invalid bytes."""
    if packed[0] not in (_STRING | 16, _STRING | 18) or packed[1] >= 16:
        return _decode_text(packed)
    digits = bytes([packed[1] & 3]) + packed[2:17]
    return f"{KINDS[packed[1] >> 2]}{digits.hex()}.{int.from_bytes(packed[17:], 'big')}"

"""What a cubin says of its entries: registers and stack frame, read from the ELF file itself.

ptxas prints the same numbers, but NVRTC hands them over in the program log, and the log of a process that compiles in
several threads was seen empty. The binary cannot be mistaken for another's.
"""

from __future__ import annotations

import struct
from typing import Iterator

REGISTER_COUNT, FRAME_SIZE = 0x2F, 0x11  # attributes of section .nv.info
WITH_PAYLOAD = 4


def whole(image: bytes) -> bytes:
    """`image` with its last byte back. CuPy's getCUBIN takes that for a trailing zero and drops it: the driver does not
    mind, every tool does. An ELF file ends with its section or program header table, whichever is later."""
    sections = int.from_bytes(image[0x28:0x30], "little") + image[0x3A] * int.from_bytes(image[0x3C:0x3E], "little")
    segments = int.from_bytes(image[0x20:0x28], "little") + image[0x36] * int.from_bytes(image[0x38:0x3A], "little")
    return image + b"\0" if len(image) == max(sections, segments) - 1 else image


def entry_resources(image: bytes) -> dict[str, tuple[int, int]]:
    """Entry name -> (registers a thread, bytes of stack frame a thread). Raises `ValueError` for anything but a cubin."""
    try:
        return dict(_entries(image))
    except (struct.error, IndexError, KeyError) as error:
        raise ValueError(f"not a whole cubin: {error!r}") from None


def count(image: bytes, opcode: int) -> int:
    """How many instructions have the `opcode`, the lower 12 of the 128 bits that they have from sm_70 on."""
    code = [image[offset:offset + size] for name, (_, offset, size, _) in _sections(image).items() if name.startswith(".text.")]
    return sum(int.from_bytes(body[at:at + 2], "little") & 0xFFF == opcode for body in code for at in range(0, len(body), 16))


def _entries(image: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    sections = _sections(image)
    _, symbols, _, link = sections[".symtab"]
    names = [offset for _, offset, _, _ in sections.values()][link]
    attributes: dict[int, dict[int, int]] = {REGISTER_COUNT: {}, FRAME_SIZE: {}}
    _, position, size, _ = sections[".nv.info"]
    end = position + size
    while position < end:
        form, attribute, length = struct.unpack_from("<BBH", image, position)
        position += 4
        if form == WITH_PAYLOAD:
            if attribute in attributes:
                symbol, value = struct.unpack_from("<II", image, position)
                attributes[attribute][symbol] = value
            position += length
    for symbol, registers in attributes[REGISTER_COUNT].items():
        name = _string(image, names + struct.unpack_from("<I", image, symbols + 24 * symbol)[0])
        yield name, (registers, attributes[FRAME_SIZE].get(symbol, 0))


def _sections(image: bytes) -> dict[str, tuple[int, int, int, int]]:
    """Section name -> (type, offset, size, link), in file order."""
    if image[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    table, = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQII", image, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    return {_string(image, names + name): (kind, offset, size, link) for name, kind, _, _, offset, size, link, _ in headers}


def _string(image: bytes, offset: int) -> str:
    return image[offset:image.index(b"\0", offset)].decode()

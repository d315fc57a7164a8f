#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Reads the registers and the stack of each kernel out of libepx and holds them against limits.

ptxas decides how many registers a thread has. Once it gave the movements 64 instead of 128, for the sake of a second block on
each SM; they spilled 2 KB, and combine took 2.5 times as long. Without GPUs only the machine code shows that.

kernel_registers.py LIBEPX
"""
import re
import struct
import sys

FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
KIND_ELF = 2
MACHINE_CUDA = 190
ATTRIBUTE_FRAME_SIZE, ATTRIBUTE_REGISTERS = 0x11, 0x2F  # of .nv.info: format 4, a symbol and a value
SIZED_FORMAT = 0x04

# The kernels that are checked: at least so many registers, and at most so many bytes of stack, which has arrays and spills.
# The first pattern that matches counts.
LIMITS = [
    # The kernel that takes batches has 384 threads, which may have 168 registers, and spills nothing.
    (re.compile(r"batch_gather_kernel"), 136, 128),
    # Those that read rows by lists were made because the sums of the others spill.
    (re.compile(r"13gather_kernelI(6__half|13__nv_bfloat16)Lb1E"), 96, 128),
    # prepare with one block of 512 threads on each SM may have 128 registers, and spills nothing.
    (re.compile(r"14prepare_kernelILi1E"), 96, 128),
    # Low-latency dispatch by rank: an object in local memory instead of registers made it take 16 us instead of 11.
    (re.compile(r"20ll_rank_major_kernelINS0_11PlainChunks"), 96, 256),
    # The other movements have one such block, too.
    (re.compile(r"gather_kernel|scatter_kernel|rank_major_kernel|prepare_dispatch_kernel"), 96, 1024),
    # Those that take rows to and from the rails have such blocks, but not all of them need so many registers.
    (re.compile(r"(pack|forward|sum)_rows_kernel"), 0, 1024),
]


def images(data):
    """Yields the machine code images of all fat binaries in a file's bytes."""
    for match in re.finditer(re.escape(FATBIN_MAGIC), data):
        header_bytes, total = struct.unpack_from("<HQ", data, match.start() + 6)
        at, end = match.start() + header_bytes, match.start() + header_bytes + total
        while at < end:
            kind, _, entry_header, entry_bytes = struct.unpack_from("<HHIQ", data, at)
            if kind == KIND_ELF:
                image = data[at + entry_header:at + entry_header + entry_bytes]
                if image[:4] != b"\x7fELF":
                    sys.exit("kernel_registers.py: the machine code is compressed, and this test cannot read that")
                yield image
            at += entry_header + entry_bytes


def sections(image):
    """Returns name, type, link, and content of each section of an ELF image."""
    machine = struct.unpack_from("<H", image, 18)[0]
    if machine != MACHINE_CUDA:
        sys.exit(f"kernel_registers.py: an image is for ELF machine {machine}, not {MACHINE_CUDA}")
    table, = struct.unpack_from("<Q", image, 40)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQII", image, table + i * entry_bytes) for i in range(count)]
    names = headers[names_index][4]
    return [(image[names + header[0]:image.index(b"\0", names + header[0])].decode(), header[6],
             image[header[4]:header[4] + header[5]]) for header in headers]


def kernels(image):
    """Returns the registers and the stack bytes of each kernel of an image, by its mangled name."""
    parts = sections(image)
    symbols, strings = next((content, parts[link][2]) for name, link, content in parts if name == ".symtab")
    info = next((content for name, _, content in parts if name == ".nv.info"), b"")
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        if form != SIZED_FORMAT:
            at += 4
            continue
        if attribute in (ATTRIBUTE_FRAME_SIZE, ATTRIBUTE_REGISTERS):
            symbol, value = struct.unpack_from("<II", info, at + 4)
            name_at, = struct.unpack_from("<I", symbols, symbol * 24)
            name = strings[name_at:strings.index(b"\0", name_at)].decode()
            found.setdefault(name, {})[attribute] = value & 0xFFFF if attribute == ATTRIBUTE_REGISTERS else value
        at += 4 + size
    # Functions that a kernel calls have no number of registers of their own.
    return {name: (values[ATTRIBUTE_REGISTERS], values.get(ATTRIBUTE_FRAME_SIZE, 0)) for name, values in found.items()
            if ATTRIBUTE_REGISTERS in values}


def main():
    with open(sys.argv[1], "rb") as file:
        data = file.read()
    found, failed = set(), 0
    for image in images(data):
        for name, (registers, stack_bytes) in sorted(kernels(image).items()):
            limits = next((limits for limits in LIMITS if limits[0].search(name)), None)
            if limits is None:
                continue
            found.add(limits)
            _, min_registers, max_stack_bytes = limits
            print(f"{registers:4} registers, {stack_bytes:5} bytes of stack: {name}")
            if registers < min_registers or stack_bytes > max_stack_bytes:
                failed += 1
                print(f"    it must have at least {min_registers} registers and at most {max_stack_bytes} bytes of stack")
    for limits in LIMITS:
        if limits not in found:
            sys.exit(f"kernel_registers.py: the library has no kernel that matches {limits[0].pattern}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

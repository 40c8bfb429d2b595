"""Lets binaries that were linked with GCC 12's libstdc++ run with GCC 11's, the newest that manylinux_2_34 allows.

usage: wheel_symbols.py SOURCE DESTINATION      copies the file; exit 1 where it needs more than can be given

libstdc++ 3.4.30 has one function that 3.4.29 lacks among those used here: std::condition_variable::wait, in a form that
may throw when its thread is cancelled, which no thread here is. The form of 3.4.11 does the same otherwise, is in every
libstdc++ since, and takes the same arguments. So the version that the file asks for is renamed: both names are of equal
length, and nothing moves. Run by an interpreter that has pyelftools.
"""

import shutil
import struct
import sys

from elftools.elf.elffile import ELFFile

NEWER = b"GLIBCXX_3.4.30"
OLDER = b"GLIBCXX_3.4.11"
WAIT = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
# Elf64_Vernaux: vna_hash, vna_flags, vna_other, vna_name, vna_next.
VERNAUX = struct.Struct("<IHHII")
# Elf64_Verneed: vn_version, vn_cnt, vn_file, vn_aux, vn_next.
VERNEED = struct.Struct("<HHIII")


def elf_hash(name):
    """The System V hash of a symbol's or version's name."""
    value = 0
    for byte in name:
        value = (value << 4) + byte
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high
    return value & 0xFFFFFFFF


def symbols_of_version(elf, index):
    versions = elf.get_section_by_name(".gnu.version")
    names = elf.get_section_by_name(".dynsym")
    return {
        names.get_symbol(number).name
        for number in range(versions.num_symbols())
        if versions.get_symbol(number)["ndx"] == index
    }


def needed_versions(file, section):
    """(offset in the file, hash, flags, index, offset of the name) of each version that the file asks for."""
    need = section["sh_offset"]
    for _ in range(section["sh_info"]):
        file.seek(need)
        _, count, _, first, next_need = VERNEED.unpack(file.read(VERNEED.size))
        aux = need + first
        for _ in range(count):
            file.seek(aux)
            digest, flags, index, name, next_aux = VERNAUX.unpack(file.read(VERNAUX.size))
            yield aux, digest, flags, index & 0x7FFF, name
            aux += next_aux
        need += next_need


def rename(path):
    with open(path, "r+b") as file:
        elf = ELFFile(file)
        section = elf.get_section_by_name(".gnu.version_r")
        strings = elf.get_section_by_name(".dynstr")["sh_offset"]
        for aux, digest, _, index, name in list(needed_versions(file, section)):
            if digest != elf_hash(NEWER):
                continue
            symbols = symbols_of_version(elf, index)
            if symbols != {WAIT}:
                sys.exit("%s needs more of %s: %s" % (path, NEWER.decode(), ", ".join(sorted(symbols - {WAIT}))))
            file.seek(strings + name)
            if file.read(len(NEWER) + 1) != NEWER + b"\0":
                sys.exit("%s: a version's name is not where its hash says" % path)
            file.seek(strings + name)
            file.write(OLDER)
            file.seek(aux)
            file.write(struct.pack("<I", elf_hash(OLDER)))


def main(source, destination):
    shutil.copyfile(source, destination)
    shutil.copymode(source, destination)
    rename(destination)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2])
